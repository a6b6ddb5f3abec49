// Products of e4m3 matrices with e4m3 rows, for a single matrix or one matrix per expert.
//
// A stage has 128 inputs, which share a scale. One thread copies stages, except the rows of experts' first products. A
// stage's product is scaled in float32 when it is added. A thread's sums belong to two rows, so it reads only two of their scales from shared memory, whose bandwidth
// the products need.

// variants.py prepends AT_ONCE (blocks of inputs that a warp rounds) and ROUNDING_WARPS to the source.
constexpr float LARGEST = 448.f, LEAST = 1e-12f;

template <int TOKENS, int HALVES, int STAGES> struct ScaledRing : Ring<TOKENS, HALVES, STAGES> {
  static constexpr bool SCALED = true;
  u32 scales;  // shared address

  DEVICE u32 scales_at() const { return scales + this->at * TOKENS * 4; }
  // The scales of the two rows of the thread's sums.
  DEVICE float2 row_scales() const {
    const u32 first = scales_at() + 4 * Groups<TOKENS>::row();
    return float2{get_shared_float(first), get_shared_float(first + 32)};
  }
};

template <int TOKENS, int HALVES, int STAGES, int EPILOGUE> struct Producer {
  static constexpr int OUTPUTS = outputs_of(HALVES, EPILOGUE);
  // Stages whose weights are copied early. With more, the last accesses of the previous kernel would wait longer.
  static constexpr int EARLY = STAGES < 4 ? STAGES : 4;
  const Args& a;

  DEVICE void begin_stage(const ScaledRing<TOKENS, HALVES, STAGES>& ring, const Tile& tile, int b) {
    // All bytes of a box are counted, although parts outside the matrix are not read but set to zero.
    barrier_expect(ring.full + 8 * ring.at, ring.STAGE + TOKENS * 4);
    copy_weights<EPILOGUE>(a, ring, tile, b);
  }

  DEVICE void copy_activations(const ScaledRing<TOKENS, HALVES, STAGES>& ring, const Tile& tile, int b) {
    const u32 bar = ring.full + 8 * ring.at;
    const long first = (long)b * a.slots + tile.rows;
    copy_line(ring.rows_at(0), a.rows + first * BLOCK, TOKENS * BLOCK, bar);
    copy_line(ring.scales_at(), a.row_scales + first, TOKENS * 4, bar);
  }

  // Copies all stages. Copies the first weights while the previous kernel is still rounding
  // activations.
  DEVICE void run(ScaledRing<TOKENS, HALVES, STAGES> ring) {
    prefetch_map(&a.weight);
    TileScheduler scheduler(a);
    Tile tile;
    if (!scheduler.template next<TOKENS, OUTPUTS>(a, tile)) return await_previous();
    ScaledRing<TOKENS, HALVES, STAGES> early = ring;
    const int filled = tile.end - tile.begin < EARLY ? tile.end : tile.begin + EARLY;
    for (int b = tile.begin; b < filled; ++b, early.next()) begin_stage(early, tile, b);
    await_previous();
    if (a.cluster == 1) allow_next();
    for (int b = tile.begin; b < filled; ++b, ring.next()) copy_activations(ring, tile, b);
    int begin = filled;  // of the first tile; -1 for the others
    do {
      for (int b = begin < 0 ? tile.begin : begin; b < tile.end; ++b, ring.next()) {
        ring.wait_empty();
        begin_stage(ring, tile, b);
        copy_activations(ring, tile, b);
      }
      begin = -1;
    } while (scheduler.template next<TOKENS, OUTPUTS>(a, tile));
    if (a.cluster > 1) allow_next();  // which would compete for memory before
  }
};

// -- sums ---------------------------------------------------------------------------------------

// Returns the scale of 64 outputs from `first` on, which is within half `m` of a tile, in 32 blocks of inputs, one
// block in each lane.
template <int EPILOGUE> DEVICE float scales_of(const Args& a, const Tile& tile, int m, int first, int b) {
  const int lane = thread_index() % 32;
  int output = half_of<EPILOGUE>(a, tile, m) + first;
  if (output >= a.outputs) output = a.outputs - 1;
  const int groups = (a.outputs + a.group - 1) / a.group;
  const long at = ((long)tile.expert * groups + output / a.group) * a.blocks + b + lane;
  return b + lane < tile.end ? a.scales[at] : 0.f;
}

// Starts the product of this group's rows and outputs of half `m` in the ring's present stage.
template <int TOKENS, int HALVES, int STAGES>
DEVICE void start_product(const ScaledRing<TOKENS, HALVES, STAGES>& ring, int m, float (&product)[Groups<TOKENS>::OUTPUTS / 2]) {
  using Group = Groups<TOKENS>;
  const u64 rows = operand_at(ring.rows_at(Group::first_row()));
  const u64 weights = operand_at(ring.weights_at(m, Group::first_output()));
  pin(product);
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply(product, rows + 2 * k, weights + 2 * k, k > 0);
  commit_products();
}

// Scales a product and adds it to the sums. `held` has the scales of each 64 outputs, one stage in each lane.
template <int COUNT> DEVICE void add_product(float (&sums)[COUNT], float (&product)[COUNT], const float* held, int turn, float2 row_scales) {
  pin(product);
#pragma unroll
  for (int p = 0; p < COUNT / 32; ++p) {
    const float scale = shuffle(held[p], turn), first = scale * row_scales.x, second = scale * row_scales.y;
#pragma unroll
    for (int i = 32 * p; i < 32 * (p + 1); i += 4) {
      sums[i] += product[i] * first;
      sums[i + 1] += product[i + 1] * first;
      sums[i + 2] += product[i + 2] * second;
      sums[i + 3] += product[i + 3] * second;
    }
  }
}

// Adds up the products of the tile's stages. Two products of 64 rows are computed at a time, because the latency of
// one is longer than the time in which its weights arrive. There are not enough registers for two products of more.
template <int TOKENS, int HALVES, int STAGES, int EPILOGUE>
DEVICE void add_up(const Args& a, const Tile& tile, ScaledRing<TOKENS, HALVES, STAGES>& ring,
                   float (&sums)[HALVES][Groups<TOKENS>::OUTPUTS / 2]) {
  using Group = Groups<TOKENS>;
  constexpr int PIECES = Group::OUTPUTS / 64;  // pieces of 64 outputs that share a scale
  constexpr int AT_ONCE = TOKENS == 64 ? 2 : 1, STEP = AT_ONCE > HALVES ? AT_ONCE : 1;  // products, and stages
  float held[HALVES][PIECES], products[AT_ONCE][Group::OUTPUTS / 2];
#pragma unroll
  for (int m = 0; m < HALVES; ++m)
#pragma unroll
    for (int i = 0; i < Group::OUTPUTS / 2; ++i) sums[m][i] = 0.f;
  int b = tile.begin;
  const auto hold_scales = [&](int turn) {
    if (turn == 0)
#pragma unroll
      for (int m = 0; m < HALVES; ++m)
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
          held[m][p] = scales_of<EPILOGUE>(a, tile, m, Group::first_output() + 64 * p, b);
  };
  const auto release = [&] {
    ring.release();
    ring.next();
  };
  if (STEP == 2) {
#pragma unroll 1
    for (; b + 1 < tile.end; b += 2) {
      const int turn = (b - tile.begin) % 32;
      hold_scales(turn);
      ring.wait_full();
      const float2 scales = ring.row_scales();
      start_product(ring, 0, products[0]);
      ScaledRing<TOKENS, HALVES, STAGES> following = ring;
      following.next();
      following.wait_full();
      const float2 following_scales = following.row_scales();
      start_product(following, 0, products[AT_ONCE - 1]);
      await_products<1>();
      add_product(sums[0], products[0], held[0], turn, scales);
      release();
      await_products<0>();
      add_product(sums[0], products[AT_ONCE - 1], held[0], turn + 1, following_scales);
      release();
    }
  }
#pragma unroll 1
  for (; b < tile.end; ++b) {
    const int turn = (b - tile.begin) % 32;
    hold_scales(turn);
    ring.wait_full();
    if (EPILOGUE == GATHERED) fence_copies();  // threads have written the rows
    const float2 scales = ring.row_scales();
#pragma unroll
    for (int m = 0; m < HALVES; m += AT_ONCE) {
      start_product(ring, m, products[0]);
      if (AT_ONCE == 2 && HALVES == 2) start_product(ring, 1, products[AT_ONCE - 1]);
      if (AT_ONCE == 2 && HALVES == 2) {
        await_products<1>();
        add_product(sums[0], products[0], held[0], turn, scales);
        await_products<0>();
        add_product(sums[HALVES - 1], products[AT_ONCE - 1], held[HALVES - 1], turn, scales);
      } else {
        await_products<0>();
        add_product(sums[m], products[0], held[m], turn, scales);
      }
    }
    release();
  }
}

// -- epilogues ----------------------------------------------------------------------------------

// Stores four outputs of one row if they are inside the matrix.
DEVICE void store_four(u16* y, uint2 four, int output, int outputs) {
  if (output + 3 < outputs && ((long)y & 7) == 0)
    put8(y, four);
  else
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (output + n < outputs) y[n] = (u16)((n < 2 ? four.x : four.y) >> n % 2 * 16);
}

// Returns an output's bias, or 0.
template <int EPILOGUE> DEVICE float bias_of(const Args& a, int output) {
  return EPILOGUE == LINEAR && a.bias && output < a.outputs ? from_bits((u32)a.bias[output] << 16) : 0.f;
}

// Stores bf16 (rows, outputs), in the row of each slot, or of its pair: a thread's sums of the 16 outputs from `first`
// on.
template <int EPILOGUE> DEVICE void store_sixteen(const Args& a, const Places& places, int first, const float* sums) {
  const int t = thread_index() % 4, output = first + exchanged_output();
  float biases[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) biases[n] = bias_of<EPILOGUE>(a, first + 8 * (n / 2) + 2 * t + n % 2);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 two[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* of = sums + 4 * n + 2 * h;
      two[n] = pack(of[0] * places.shares[h] + biases[2 * n], of[1] * places.shares[h] + biases[2 * n + 1]);
    }
    const uint2 four = exchange(two[0], two[1]);
    if (places.rows[h] < a.count)
      store_four((u16*)a.y + (long)places.rows[h] * a.outputs + output, four, output, a.outputs);
  }
}

// -- tiles that a cluster of blocks computes -------------------------------------------------------
// Each block stores its sums in its shared memory, and then adds up a part of the outputs from the memory of all
// blocks, in their order. Blocks of a cluster run at the same time, so they may wait for each other.

// Stores two neighboring outputs of one row if they are inside the matrix.
DEVICE void store_two(u16* y, u32 two, int output, int outputs) {
  if (output + 1 < outputs && ((long)y & 3) == 0)
    *(u32*)y = two;
  else
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (output + n < outputs) y[n] = (u16)(two >> n * 16);
}

// Stores a part of the cluster's tile. `memory` is the shared address of this block's ring, which is not used any more.
template <int TOKENS, int HALVES>
DEVICE void reduce_and_store(const Args& a, const Tile& tile, u32 memory, const float (&sums)[HALVES][Groups<TOKENS>::OUTPUTS / 2]) {
  using Group = Groups<TOKENS>;
  constexpr int THREADS = Group::THREADS, FOURS = Group::OUTPUTS / 8, MOST = 8;
  const int rank = rank_of(a);
  const u32 mine = memory + (thread_index() - 128) * 16;
  sync_consumers<THREADS>();  // other groups may still read the last stage
#pragma unroll
  for (int n = 0; n < HALVES * FOURS; ++n) {
    const float* four = sums[n / FOURS] + n % FOURS * 4;
    put_shared16(mine + n * THREADS * 16, uint4{bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])});
  }
  sync_cluster<THREADS>(a.cluster);
#pragma unroll 1
  for (int n = HALVES * FOURS * rank / a.cluster; n < HALVES * FOURS * (rank + 1) / a.cluster; ++n) {
    uint4 parts[MOST];
#pragma unroll
    for (int block = 0; block < MOST; ++block)
      if (block < a.cluster) parts[block] = get_cluster16(mine + n * THREADS * 16, block);
    float four[4]{0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int block = 0; block < MOST; ++block)
      if (block < a.cluster) {
        four[0] += from_bits(parts[block].x);
        four[1] += from_bits(parts[block].y);
        four[2] += from_bits(parts[block].z);
        four[3] += from_bits(parts[block].w);
      }
    const int first = half_of<LINEAR>(a, tile, n / FOURS) + Group::first_output();
    const int output = first + n % FOURS * 8 + thread_index() % 4 * 2;
    const float low = bias_of<LINEAR>(a, output), high = bias_of<LINEAR>(a, output + 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.rows + Group::row() + 8 * h;
      if (row < a.count) store_two((u16*)a.y + (long)row * a.outputs + output, pack(four[2 * h] + low, four[2 * h + 1] + high), output, a.outputs);
    }
  }
  sync_cluster<THREADS>(a.cluster);  // other blocks may still read this block's memory
}

// Returns the scale by which the largest number of a block becomes the largest e4m3 number.
DEVICE float scale_of(float largest) { return quotient_of(greater(largest, LEAST), LARGEST); }
DEVICE float rounded_to_bf16(float x) { return from_bits(pack(0.f, x)); }

// Returns the larger of each row's numbers and those of the other group, which has the other half of the outputs.
// `sizes` is the offset of a float for each row in shared memory.
template <int TOKENS> DEVICE float2 larger_of_groups(float2 size, u32 sizes) {
  constexpr int THREADS = Groups<TOKENS>::THREADS;
  float* shared = (float*)(dynamic_shared() + sizes);
  const int row = Groups<TOKENS>::row();
  sync_consumers<THREADS>();  // the other group may still read the previous tile's numbers
  for (int i = thread_index() - 128; i < TOKENS; i += THREADS) put_shared4((int*)shared + i, 0);
  sync_consumers<THREADS>();
  if (thread_index() % 4 == 0) {
    max_shared(address_of(shared + row), bits_of(size.x));
    max_shared(address_of(shared + row + 8), bits_of(size.y));
  }
  sync_consumers<THREADS>();
  return float2{get_shared_float(address_of(shared + row)), get_shared_float(address_of(shared + row + 8))};
}

// Stores e4m3 (blocks, slots, 128) and a scale for each slot and block. This tile's outputs are one
// block. `sizes` is the offset of a float for each row in shared memory.
template <int TOKENS, int COUNT>
DEVICE void store_swiglu(const Args& a, const Tile& tile, float (&gate)[COUNT], const float (&up)[COUNT], u32 sizes) {
  using Group = Groups<TOKENS>;
  const int block = tile.outputs / BLOCK, slot = tile.rows + Group::row();
  float2 size{0.f, 0.f};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    gate[i] = rounded_to_bf16(gate[i] * inverse_of(1.f + exp2_of(-1.44269504f * gate[i])) * up[i]);
    (i % 4 < 2 ? size.x : size.y) = greater_size(i % 4 < 2 ? size.x : size.y, gate[i]);
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    size.x = greater(size.x, shuffle_xor(size.x, mask));
    size.y = greater(size.y, shuffle_xor(size.y, mask));
  }
  if (TOKENS == 64) size = larger_of_groups<TOKENS>(size, sizes);
  const float first = scale_of(size.x), second = scale_of(size.y);
  const float first_by = inverse_of(first), second_by = inverse_of(second);
  u8* y = (u8*)a.y + ((long)block * a.slots + slot) * BLOCK;
#pragma unroll
  for (int i = 0; i < COUNT / 4; i += 2) {
    // Two bytes of the first row, then two of the second.
    u32 both[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* four = gate + 4 * (i + n);
      both[n] = round_to_bytes(four[0] * first_by, four[1] * first_by) | round_to_bytes(four[2] * second_by, four[3] * second_by) << 16;
    }
    const uint2 found = exchange(both[0], both[1]);
    const int output = Group::first_output() + 8 * i + exchanged_output();
    u8* at = y + (output / 16 ^ slot % 8) * 16 + output % 16;
    *(u32*)at = bytes_of<0x5410>(found.x, found.y);
    *(u32*)(at + 8 * BLOCK) = bytes_of<0x7632>(found.x, found.y);
  }
  if (Group::first_output() == 0 && thread_index() % 4 == 0) {
    a.y_scales[(long)block * a.slots + slot] = first;
    a.y_scales[(long)block * a.slots + slot + 8] = second;
  }
}

template <int TOKENS, int HALVES, int STAGES, int EPILOGUE>
DEVICE void consume(const Args& a, ScaledRing<TOKENS, HALVES, STAGES> ring, u32 sizes) {
  using Group = Groups<TOKENS>;
  constexpr int OUTPUTS = outputs_of(HALVES, EPILOGUE);
  float sums[HALVES][Group::OUTPUTS / 2];
  TileScheduler scheduler(a);
  Tile tile;
#pragma unroll 1
  while (scheduler.template next<TOKENS, OUTPUTS>(a, tile)) {
    if ((EPILOGUE == GATHERED || EPILOGUE == WEIGHTED) && group_is_empty<TOKENS>(a, tile)) {
      skip_tile(tile, ring);
      continue;
    }
    add_up<TOKENS, HALVES, STAGES, EPILOGUE>(a, tile, ring, sums);
    if (EPILOGUE == LINEAR && a.cluster > 1) return reduce_and_store<TOKENS, HALVES>(a, tile, ring.stages, sums);
    if constexpr (is_swiglu(EPILOGUE)) {
      store_swiglu<TOKENS>(a, tile, sums[0], sums[HALVES - 1], sizes);
    } else {
      const Places places = find_places<TOKENS, EPILOGUE>(a, tile);
#pragma unroll
      for (int m = 0; m < HALVES; ++m)
#pragma unroll
        for (int i = 0; i < Group::OUTPUTS; i += 16)
          store_sixteen<EPILOGUE>(a, places, half_of<EPILOGUE>(a, tile, m) + Group::first_output() + i, sums[m] + i / 2);
    }
  }
}

// Divides shared memory from `base`, a multiple of 1,024, into stages, scales of rows, largest
// magnitudes, and barriers; then runs the producer or a consumer.
template <int TOKENS, int HALVES, int STAGES, int EPILOGUE> DEVICE void run(const Args& a) {
  u8* memory = dynamic_shared();
  const u32 shift = (1024 - address_of(memory) % 1024) % 1024, base = address_of(memory) + shift;
  ScaledRing<TOKENS, HALVES, STAGES> ring;
  ring.stages = base;
  ring.scales = base + STAGES * ring.STAGE;
  const u32 sizes = shift + STAGES * (ring.STAGE + TOKENS * 4);  // offset from `memory`
  ring.full = address_of(memory) + sizes + TOKENS * 4;
  ring.empty = ring.full + 8 * STAGES;
  const Gatherer<TOKENS, HALVES, STAGES, ScaledRing> gatherer{a};
  if (thread_index() == 0) ring.initialize(EPILOGUE == GATHERED ? gatherer.ARRIVALS : 1);
  if (EPILOGUE == GATHERED) {
    if (thread_index() == 0) prefetch_map(&a.weight);
    // All threads wait, because they read `used`, `owners` and `pairs`, which the previous kernel may have written. The
    // next kernel reads them before it waits, so it must not start earlier.
    await_previous();
    allow_next();
  }
  sync_block();
  if (thread_index() < 128) {
    fewer_registers<TOKENS == 192 ? 24 : 40>();
    if constexpr (EPILOGUE == GATHERED)
      gatherer.run(ring);
    else if (thread_index() == 0)
      Producer<TOKENS, HALVES, STAGES, EPILOGUE>{a}.run(ring);
  } else {
    more_registers<TOKENS == 128 ? 232 : 160>();
    consume<TOKENS, HALVES, STAGES, EPILOGUE>(a, ring, sizes);
  }
}

// -- rows of e4m3 -------------------------------------------------------------------------------

struct RoundArgs {
  const u16* x;       // bf16 (count, inputs)
  u8* rows;           // as in Args
  float* scales;
  int inputs, offset; // `offset` zeros precede the first input
  int count;          // number of rows
  int slots, blocks;
};

// Returns eight inputs from input `i` on, with zeros outside the row.
DEVICE uint4 eight_of(const RoundArgs& a, int row, int i) {
  const u16* from = a.x + (long)row * a.inputs + i;
  if (i >= 0 && i + 8 <= a.inputs && ((long)from & 15) == 0) return *(const uint4*)from;
  u32 found[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) found[n] = i + n >= 0 && i + n < a.inputs ? from[n] : 0;
  return uint4{found[0] | found[1] << 16, found[2] | found[3] << 16, found[4] | found[5] << 16, found[6] | found[7] << 16};
}

DEVICE float low_of(u32 two) { return from_bits(two << 16); }
DEVICE float high_of(u32 two) { return from_bits(two & 0xffff0000u); }
DEVICE float largest_of(u32 two) { return greater_size(low_of(two), high_of(two)); }
DEVICE u32 rounded_two(u32 two, float scale) { return round_to_bytes(quotient_of(low_of(two), scale), quotient_of(high_of(two), scale)); }

// Rounds blocks of a slot, exactly as the Triton kernels do (rounding.py). Half a warp rounds a block, with eight
// inputs in each lane.
DEVICE void round_slot(const RoundArgs& a, int slot, int first) {
  const int lane = thread_index() % 16;
  first += thread_index() / 16 % 2;
  uint4 found[AT_ONCE / 2];
#pragma unroll
  for (int n = 0; n < AT_ONCE / 2; ++n) {
    found[n] = uint4{0, 0, 0, 0};
    if (first + 2 * n < a.blocks) found[n] = eight_of(a, slot, (first + 2 * n) * BLOCK + 8 * lane - a.offset);
  }
#pragma unroll
  for (int n = 0; n < AT_ONCE / 2; ++n) {
    const uint4 v = found[n];
    float size = greater(greater(largest_of(v.x), largest_of(v.y)), greater(largest_of(v.z), largest_of(v.w)));
#pragma unroll
    for (int mask = 8; mask; mask /= 2) size = greater(size, shuffle_xor(size, mask));
    const float scale = scale_of(size);
    if (first + 2 * n >= a.blocks) continue;
    const long at = (long)(first + 2 * n) * a.slots + slot;
    const uint2 eight{rounded_two(v.x, scale) | rounded_two(v.y, scale) << 16, rounded_two(v.z, scale) | rounded_two(v.w, scale) << 16};
    *(uint2*)(a.rows + at * BLOCK + (lane / 2 ^ slot % 8) * 16 + lane % 2 * 8) = eight;
    if (lane == 0) a.scales[at] = scale;
  }
}

// Rounds all rows; one warp rounds AT_ONCE blocks of a row. Slots without a row are not written.
DEVICE void round_all(const RoundArgs& a) {
  await_previous();
  allow_next();
  const int each = (a.blocks + AT_ONCE - 1) / AT_ONCE, warps = block_count() * ROUNDING_WARPS;
  for (int at = block_index() * ROUNDING_WARPS + thread_index() / 32; at < a.count * each; at += warps)
    round_slot(a, at / each, at % each * AT_ONCE);
}
