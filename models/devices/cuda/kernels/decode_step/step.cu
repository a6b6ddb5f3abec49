// A whole decode step in one kernel: embedding, layers, final norm and, with HEAD, the logits.
//
// There is one block on each multiprocessor, and all are resident at the same time. A producer
// thread copies the block's tiles of weights through a ring in shared memory. It waits only for
// room (and for the choice of experts), so loads run ahead across phases. Eight consumer warps do
// everything else. table.py defines the phases and their matrices, in the order that both sides
// follow. The residual stays in float32, in the shared memory of the block that computes its
// outputs.

struct Shared {
  u64 full[SLOTS], empty[SLOTS];
  int chunks[SLOTS];
  float squares[ROWS * WARPS];
  alignas(16) float residual[HIDDEN_TILES * ROWS * 8];
  alignas(16) Plan plan;
  bool last;
  alignas(16) Attention attention;
  alignas(16) Choice choice;
  float scores[EXPERTS ? ROWS * WARPS * SCORED : 1];
  alignas(16) float box_scales[PACKED ? SLOTS * UNITS : 4];
  float input_scales[PACKED ? ALL_SCALES + UNITS : 1];  // and room to read past the last unit
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "table.py reserves too little");
static_assert(GROUP_HEADS <= WARPS && HEAD_DIM % 64 == 0 && HIDDEN % 256 == 0 && BLOCK_SIZE % 16 == 0, "");
static_assert(2 * GROUP_FLOATS * 4 <= WORK_BYTES, "table.py reserves too little");
static_assert(WARPS * GROUP_HEADS * HEAD_DIM * 4 <= (FLAGGED ? WORK_BYTES : XS_BYTES), "table.py reserves too little");
static_assert(WORK_BYTES % 1024 == 0 && XS_BYTES % 1024 == 0, "swizzled inputs would not be aligned");

// -- phases -----------------------------------------------------------------------------------

DEVICE Source source_of(const u32* words, u32 flag) { return Source{words, flag}; }

// A block without outputs of a phase reads nothing, but it must not arrive again before all others
// have arrived, because the counter does not distinguish the arrivals of different blocks. With
// flagged words, this wait is not needed. Instead, a barrier keeps the block's warps within one
// phase of each other, as receiving a source does, so that all of them have read the shared memory
// that is written next.
DEVICE void skip_source(const Consumer& k, int phase, u32 target) {
  if (FLAGGED)
    sync_consumers<THREADS>();
  else
    await_arrivals(k.a, target, k.where(phase));
}

// Runs the norm and the projections to queries, keys and values of all rows, and hands the results
// to the blocks that compute attention.
DEVICE void run_qkv(Consumer& k) {
  const LayerArgs& layer = k.a.layers[k.layer];
  const int tiles = tiles_of(PRODUCTS[PROJECT].tiles, block_index());
  if (tiles == 0) {
    if (k.layer) skip_source(k, PROJECT, k.target);
    return;
  }
  if (k.layer)
    receive<PROJECT, true>(k, source_of(k.a.x1, k.flag), 0, k.target, layer.norm1);
  else
    receive<PROJECT, true>(k, Embedding{k.a.embed}, 0, 0, layer.norm1);
  multiply<PROJECT>(k, 0, tiles, [&](int tile, int i, int row, int pair, float* sums) {
    const float scale = scale_of(k, row);
    const int at = output_of(tile) + 2 * pair;
    float2 y = total(sums, i, row, pair);
    y.x *= scale;
    y.y *= scale;
    if (QKV_BIAS) {
      y.x += widen(layer.bias[at]);
      y.y += widen(layer.bias[at + 1]);
    }
    put_pair(k.a.queries + (row * QKV + at) / 2, bits_of(y.x), bits_of(y.y), k.flag + QUERIES);
  });
}

// Adds the outputs of `o` or `down` to the residual, and hands over the rounded sums.
template <int P>
DEVICE void run_residual(Consumer& k, Shared& m, const u32* source, u32 source_flag, u32 target, u32* sink, u32 flag) {
  constexpr Product p = PRODUCTS[P];
  const int tiles = tiles_of(p.tiles, block_index());
  if (tiles == 0) {
    skip_source(k, P, target);
    return;
  }
#pragma unroll 1
  for (int piece = 0; piece < p.pieces; ++piece) {
    receive<P, false>(k, source_of(source, source_flag), piece, target, nullptr);
    multiply<P>(k, piece, tiles, [&](int tile, int i, int row, int pair, float* sums) {
      float2* residual = (float2*)(m.residual + (tile * ROWS + row) * 8 + 2 * pair);
      const float2 y = total(sums, i, row, pair);
      const float2 x = {residual->x + y.x, residual->y + y.y};
      *residual = x;
      publish(sink, (row * HIDDEN + output_of(tile)) / 2 + pair, pack(x.x, x.y), flag);
    });
  }
}

// Runs the norm, the gate and up projections, and SwiGLU.
DEVICE void run_gate_up(Consumer& k) {
  const u32 target = k.target + ARRIVED_X2 * BLOCKS;
  const int tiles = tiles_of(PRODUCTS[GATE_UP].tiles, block_index());
  if (tiles == 0) {
    skip_source(k, GATE_UP, target);
    return;
  }
  receive<GATE_UP, true>(k, source_of(k.a.x2, k.flag + X2), 0, target, k.a.layers[k.layer].norm2);
  multiply<GATE_UP>(k, 0, tiles, [&](int tile, int i, int row, int pair, float* sums) {
    const float scale = scale_of(k, row);
    const float2 gate = total(sums, 2 * i, row, pair), up = total(sums, 2 * i + 1, row, pair);
    const float first = silu(scale * gate.x) * (scale * up.x), second = silu(scale * gate.y) * (scale * up.y);
    publish(k.a.activated, (row * INTER + output_of(tile)) / 2 + pair, pack(first, second), k.flag + ACTIVATED);
  });
}

// Runs the phases of a layer in the table's order.
template <int P>
DEVICE void run_layer(Consumer& k, Shared& m) {
  if constexpr (P < LAYER_PHASES) {
    if constexpr (P == PROJECT) run_qkv(k);
    if constexpr (P == ATTENTION) attend(k, m.attention, m.plan);
    if constexpr (P == COMBINE) arrive(k.a);  // attend() has combined the parts
    if constexpr (P == OUTPUT) {
      run_residual<P>(k, m, k.a.attended, k.flag + ATTENDED, k.target + ARRIVED_ATTENDED * BLOCKS, k.a.x2, k.flag + X2);
      arrive(k.a);
    }
    if constexpr (P == GATE_UP) {
      if constexpr (EXPERTS > 0)
        run_experts<P>(k);
      else
        run_gate_up(k);
      arrive(k.a);
    }
    if constexpr (P == DOWN) {
      run_residual<P>(k, m, k.a.activated, k.flag + ACTIVATED, k.target + ARRIVED_ACTIVATED * BLOCKS, k.a.x1, k.flag + X1);
      arrive(k.a);
    }
    if (P != ATTENTION && P != ROUTE) mark(k.a, k.layer, P, 1);
    run_layer<P + 1>(k, m);
  }
}

// -- begin and end ----------------------------------------------------------------------------

DEVICE void begin_residual(const Args& a, Shared& m) {
  const int tiles = tiles_of(PRODUCTS[OUTPUT].tiles, block_index());
  for (int i = thread_index(); i < tiles * ROWS * 8; i += THREADS) {
    const int tile = i / (8 * ROWS), row = i / 8 % ROWS;
    m.residual[i] = widen(a.embed[(u64)a.tokens[row] * HIDDEN + output_of(tile) + i % 8]);
  }
}

// Writes this block's columns of the hidden states after the final norm.
DEVICE void write_hidden(const Consumer& k, const Shared& m) {
  const int tiles = tiles_of(PRODUCTS[OUTPUT].tiles, block_index());
  for (int i = thread_index(); i < tiles * ROWS * 4; i += THREADS) {
    const int tile = i / (4 * ROWS), row = i / 4 % ROWS, at = output_of(tile) + i % 4 * 2;
    const float scale = scale_of(k, row);
    const float first = m.residual[i * 2] * scale * widen(k.a.norm[at]);
    const float second = m.residual[i * 2 + 1] * scale * widen(k.a.norm[at + 1]);
    *(u32*)(k.a.hidden + row * HIDDEN + at) = pack(first, second);
  }
}

DEVICE void write_logits(const Consumer& k, int row, int at, float2 y) {
  if (HEAD == HEAD_FLOAT) {
    float* to = (float*)k.a.logits + (u64)row * VOCAB + at;
    if (at < VOCAB) to[0] = y.x;
    if (at + 1 < VOCAB) to[1] = y.y;
  } else {
    u16* to = (u16*)k.a.logits + (u64)row * VOCAB + at;
    if (at < VOCAB) to[0] = (u16)pack(y.x, 0);
    if (at + 1 < VOCAB) to[1] = (u16)pack(y.y, 0);
  }
}

// Multiplies the chunks of the head that the producer has claimed.
DEVICE void run_head(Consumer& k) {
  constexpr int TILES = GROUP < HEAD_TILES ? GROUP : HEAD_TILES;
  while (true) {
    k.ring.wait_full(k.a, k.ring.at, place(LAYERS, LOGITS));
    // Read by the lane that frees the slot.
    const u32 chunk = shuffle(k.lane == 0 ? get_shared4(k.ring.chunks + k.ring.at.slot) : 0, 0);
    if (chunk == END_OF_HEAD) return;
#pragma unroll 1
    for (int first = 0; first < HEAD_TILES; first += TILES) {
      float* sums = k.work + k.flip * GROUP_FLOATS;
      take_group<LOGITS>(k, TILES, 0, sums);
      sync_consumers<THREADS>();
      for_outputs(TILES, [&](int i, int row, int pair) {
        const float scale = scale_of(k, row);
        const float2 y = total(sums, i, row, pair);
        write_logits(k, row, (chunk * HEAD_TILES + first + i) * 8 + 2 * pair, float2{scale * y.x, scale * y.y});
      });
      k.flip ^= 1;
    }
  }
}

// Prepares the next step, in the last block to end. All other blocks have already read what is
// overwritten.
DEVICE void end_step(const Args& a, Shared& m) {
  sync_consumers<THREADS>();
  if (thread_index() == 0) m.last = add_acquire_release(&a.control->done, 1) == BLOCKS - 1;
  sync_consumers<THREADS>();
  if (!m.last) return;
  const u32 next = a.control->step + 1;
  const bool wrap = next >= 0xffffffffu / STEP_FLAGS - 1;
  // Flags start again from the beginning, so no word may still have an old flag.
  if (wrap)
    for (u64 i = thread_index(); i < a.scratch_words; i += THREADS) a.scratch[i] = uint4{0, 0, 0, 0};
  sync_consumers<THREADS>();
  if (thread_index() == 0) {
    a.control->arrivals = 0;
    a.control->ticket = 0;
    a.control->done = 0;
    a.control->step = wrap ? 1 : next;
  }
}

DEVICE void consume(const Args& a, Shared& m, Ring ring, float* work, float* inputs) {
  const int thread = thread_index();
  const u32 step = a.control->step;
  // With flagged words, a warp may store rows while others still read the partial results.
  float* partials = FLAGGED ? work : inputs;
  Consumer k{a, ring, address_of(inputs), work, partials, m.squares, m.input_scales, m.scores, &m.choice, step * STEP_FLAGS, 0, 0, thread / 32, thread % 32};
  for (int i = thread; i < 8 * QUERY_PITCH; i += THREADS) m.attention.queries[i] = 0;
  if (k.warp == 0) {
    make_plan(a, m.plan, k.lane);
    sync_warp();
    if (k.lane == 0) find_first(m.plan);
  }
  begin_residual(a, m);
  sync_consumers<THREADS>();
#pragma unroll 1
  for (k.layer = 0; k.layer < LAYERS; ++k.layer) {
    if (m.plan.begin < m.plan.end) prefetch_segment(a, m.plan.first, k.layer);
    if (EXPERTS > 0) prefetch_router(a, k.layer);
    run_layer<0>(k, m);
    k.flag += LAYER_FLAGS;
    k.target += LAYER_ARRIVALS * BLOCKS;
  }
  receive<LOGITS, true>(k, source_of(a.x1, k.flag), 0, k.target, a.norm);
  write_hidden(k, m);
  if (HEAD) run_head(k);
  mark(a, LAYERS, LOGITS, 1);
  end_step(a, m);
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) decode_step(const __grid_constant__ Args a) {
  u8* memory = dynamic_shared();
  memory += (1024 - (address_of(memory) & 1023)) & 1023;  // as the swizzling of chunks requires
  Shared& m = *(Shared*)(memory + SLOTS * SLOT + WORK_BYTES + XS_BYTES);
  const int thread = thread_index();
  if (POISON)
    for (int i = thread * 4; i < SLOTS * SLOT + WORK_BYTES + XS_BYTES + SHARED_BYTES; i += (THREADS + 128) * 4)
      *(u32*)(memory + i) = 0x7fc07fc1;  // NaN
  if (POISON) fence_copies();
  sync_block();
  Ring ring{address_of(memory), address_of(m.full), address_of(m.empty), m.chunks, m.box_scales, Cursor{}};
  if (thread == 0) make_ring(ring, m.choice);
  sync_block();
  if (thread >= THREADS) {  // a whole warp group, because registers are set per group; one thread works
    if (!FIXED_REGISTERS) fewer_registers<40>();
    if (thread == THREADS) produce(a, ring, m.choice);
    return;
  }
  if (!FIXED_REGISTERS) more_registers<232>();
  consume(a, m, ring, (float*)(memory + SLOTS * SLOT), (float*)(memory + SLOTS * SLOT + WORK_BYTES));
}
