// Products of each expert's bf16 matrix with the rows of its token-expert pairs.
//
// A stage has 64 inputs. In the first product (GATHERED), rows are those of tokens; its results are the rows of the
// second one (WEIGHTED), in the order of slots. Sums stay in the registers that the tensor cores write.

// The thread of the second product that copies.
template <int TOKENS, int HALVES, int STAGES> struct Producer {
  static constexpr int ARRIVALS = 1;
  const Args& a;

  DEVICE void run(Ring<TOKENS, HALVES, STAGES> ring) {
    if (thread_index() > 0) return;
    TileScheduler scheduler(a);
    Tile tile;
    while (scheduler.template next<TOKENS, 128 * HALVES>(a, tile))
      for (int b = tile.begin; b < tile.end; ++b, ring.next()) {
        const u32 bar = ring.full + 8 * ring.at;
        ring.wait_empty();
        barrier_expect(bar, ring.STAGE);
        copy_weights<WEIGHTED>(a, ring, tile, b);
        copy_line(ring.rows_at(0), a.rows + ((long)b * a.slots + tile.rows) * BLOCK, TOKENS * BLOCK, bar);
      }
  }
};

// Adds up the products of the tile's stages. While a stage is multiplied, the products of the next one are started.
template <int TOKENS, int HALVES, int STAGES, int EPILOGUE>
DEVICE void add_up(const Tile& tile, Ring<TOKENS, HALVES, STAGES>& ring,
                   float (&sums)[HALVES][Groups<TOKENS>::OUTPUTS / 2]) {
  using Group = Groups<TOKENS>;
#pragma unroll
  for (int m = 0; m < HALVES; ++m) {
#pragma unroll
    for (int i = 0; i < Group::OUTPUTS / 2; ++i) sums[m][i] = 0.f;
    pin(sums[m]);
  }
  Ring<TOKENS, HALVES, STAGES> previous = ring;
#pragma unroll 1
  for (int b = tile.begin; b < tile.end; ++b) {
    ring.wait_full();
    if (EPILOGUE == GATHERED) fence_copies();  // threads have written the rows
    begin_products();
    const u64 rows = operand_at(ring.rows_at(Group::first_row()));
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < HALVES; ++m)
        multiply_bf16(sums[m], rows + 2 * k, operand_at(ring.weights_at(m, Group::first_output())) + 2 * k, 1);
    commit_products();
    if (b > tile.begin) {
      await_products<1>();
      previous.release();
    }
    previous = ring;
    ring.next();
  }
  await_products<0>();
  previous.release();
#pragma unroll
  for (int m = 0; m < HALVES; ++m) pin(sums[m]);
}

// Stores a tile's outputs as rows of the second product, (blocks of 64, slots, 64), with swizzled chunks. The number of
// outputs is a multiple of 64.
template <int TOKENS, int COUNT>
DEVICE void store_swiglu(const Args& a, const Tile& tile, const float (&gate)[COUNT], const float (&up)[COUNT]) {
  using Group = Groups<TOKENS>;
  const int slot = tile.rows + Group::row();
#pragma unroll
  for (int i = 0; i < COUNT / 4; i += 2) {
    const int output = tile.outputs + Group::first_output() + 8 * i + exchanged_output();
    const int chunk = output % 64 / 8 ^ slot % 8;
    u8* at = (u8*)a.y + ((long)(output / 64) * a.slots + slot) * BLOCK + chunk * 16 + output % 8 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 two[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float of[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float g = gate[4 * (i + n) + 2 * h + e];
          of[e] = g * inverse_of(1.f + exp2_of(-1.44269504f * g)) * up[4 * (i + n) + 2 * h + e];
        }
        two[n] = pack(of[0], of[1]);
      }
      const uint2 four = exchange(two[0], two[1]);
      if (output < a.outputs / 2) put8(at + h * 8 * BLOCK, four);
    }
  }
}

// Stores a thread's weighted sums of the outputs from `first` on, in the rows of their pairs. The number of outputs is a
// multiple of 64.
template <int COUNT>
DEVICE void store_weighted(const Args& a, const Places& places, int first, const float (&sums)[COUNT]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float share = places.shares[h];
    u16* y = (u16*)a.y + (long)places.rows[h] * a.outputs + first + exchanged_output();
#pragma unroll
    for (int i = 0; i < COUNT / 4; i += 2) {
      u32 two[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* of = sums + 4 * (i + n) + 2 * h;
        two[n] = pack(of[0] * share, of[1] * share);
      }
      const uint2 four = exchange(two[0], two[1]);
      if (places.rows[h] < a.count && first + 8 * i < a.outputs) put8(y + 8 * i, four);
    }
  }
}

template <int TOKENS, int HALVES, int STAGES, int EPILOGUE>
DEVICE void consume(const Args& a, Ring<TOKENS, HALVES, STAGES> ring) {
  using Group = Groups<TOKENS>;
  float sums[HALVES][Group::OUTPUTS / 2];
  TileScheduler scheduler(a);
  Tile tile;
#pragma unroll 1
  while (scheduler.template next<TOKENS, outputs_of(HALVES, EPILOGUE)>(a, tile)) {
    if (group_is_empty<TOKENS>(a, tile)) {
      skip_tile(tile, ring);
      continue;
    }
    add_up<TOKENS, HALVES, STAGES, EPILOGUE>(tile, ring, sums);
    if constexpr (EPILOGUE == GATHERED) {
      store_swiglu<TOKENS>(a, tile, sums[0], sums[HALVES - 1]);
    } else {
      const Places places = find_places<TOKENS, EPILOGUE>(a, tile);
#pragma unroll
      for (int m = 0; m < HALVES; ++m)
        store_weighted(a, places, half_of<EPILOGUE>(a, tile, m) + Group::first_output(), sums[m]);
    }
  }
}

// Divides shared memory from a multiple of 1,024 on into stages and barriers; then runs a producer or a consumer.
template <int TOKENS, int HALVES, int STAGES, int EPILOGUE> DEVICE void run(const Args& a) {
  u8* memory = dynamic_shared();
  Ring<TOKENS, HALVES, STAGES> ring;
  ring.stages = address_of(memory) + (1024 - address_of(memory) % 1024) % 1024;
  ring.full = ring.stages + STAGES * ring.STAGE;
  ring.empty = ring.full + 8 * STAGES;
  const auto run_producer = [&](auto producer) {
    if (thread_index() == 0) {
      prefetch_map(&a.weight);
      ring.initialize(producer.ARRIVALS);
    }
    // All threads wait, because they read `used`, `owners` and `pairs`, which the previous kernel may have written.
    await_previous();
    allow_next();
    sync_block();
    if (thread_index() < 128) {
      fewer_registers<56>();
      producer.run(ring);
    } else {
      more_registers<TOKENS == 128 ? 224 : 152>();
      consume<TOKENS, HALVES, STAGES, EPILOGUE>(a, ring);
    }
  };
  if constexpr (EPILOGUE == GATHERED)
    run_producer(Gatherer<TOKENS, HALVES, STAGES, Ring>{a});
  else
    run_producer(Producer<TOKENS, HALVES, STAGES>{a});
}
