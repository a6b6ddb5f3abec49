// Products with FP8 matrices.
//
// One instruction of a warp group multiplies 64 lines of weights by the inputs (wgmma). The 64 lines
// are 8 units of a tile: 8 outputs and 8 groups of 128 inputs. Its columns are the same 8 units of
// each row of inputs. Only products of a unit with the same unit of the inputs are needed, which is
// one eighth. The rest is computed and discarded, because the tensor cores are not the bottleneck:
// the instruction reads weights and inputs from shared memory, whereas a smaller one would need them
// in registers, converted to fp16. The sums of a unit are scaled before they are added.
//
// If a box has more than 8 units, each of the two warp groups multiplies half of it. Otherwise they
// take turns; if the box belongs to an expert's down projection, a slot of the ring has the boxes of
// two experts, one for each warp group. Units past the end of a matrix, and rows that do not exist,
// have undefined products, which are not added.

constexpr int UNITS_AT_ONCE = 8;
// Whether every product has all of its 8 units, so that none must be checked.
constexpr bool all_units(const Product& p) { return p.columns == p.boxes * p.box * p.unit && p.box % UNITS_AT_ONCE == 0; }
// Rows of the inputs that a thread has sums of, for `lines` rows of inputs.
constexpr int sums_of(int lines) { return lines == 1 ? 1 : lines == 16 ? 4 : 2; }

// Returns the operand `n` chunks after another one. Only the lower half of the number changes.
DEVICE u64 operand_after(u64 operand, int n) { return (operand & ~0xffffffffull) | (u32)(operand + n); }

// Queues the products of 8 units of a tile and the same units of the inputs.
template <int COUNT>
DEVICE void multiply_units(float (&c)[COUNT], u32 weights, u32 inputs) {
  const u64 a = operand_at(weights), b = operand_at(inputs);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply(c, operand_after(a, 2 * k), operand_after(b, 2 * k), k > 0);
}

// Returns the column of the products, 8 i + 2 t + e, of a thread's value e of rows q, for the first
// (half 0) or second unit of its warp.
template <int LINES>
DEVICE int column_of(int warp, int t, int half, int q, int e) {
  return 8 * ((2 * warp + half) * LINES / 8 + q) + 2 * t + e;
}

// Scales of the inputs that a thread's products belong to, for the two of the 8 units that its warp adds up.
template <int LINES>
struct InputScales {
  static constexpr int Q = LINES == 16 ? 2 : 1;
  float of[2][Q][2];

  // `scales` begins at the first of the 8 units. Those of units that do not exist are read, too, but not used.
  DEVICE void load(const Consumer& k, const float* scales, int pitch) {
    const int warp = k.warp % 4, t = k.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int q = 0; q < Q; ++q)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (LINES == 1 && e != half) continue;
          const int row = column_of<LINES>(warp, t, half, q, e) % LINES;
          of[half][q][e] = scales[(LINES == ROWS || row < ROWS ? row : ROWS - 1) * pitch + 2 * warp + half];
        }
  }
};

// Adds a thread's part of the products of units with themselves. `scales` begins at the first of the 8 units, of which
// `units` exist; with ALL, all of them do.
template <int LINES, bool ALL>
DEVICE void add_products(const Consumer& k, float (&sums)[sums_of(LINES)], const float (&c)[4 * LINES], const float* scales,
                         const InputScales<LINES>& inputs, int units) {
  const int warp = k.warp % 4, t = k.lane % 4;
  const float2 both = *(const float2*)(scales + 2 * warp);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int unit = 2 * warp + half;
    const float scale = half ? both.y : both.x;
#pragma unroll
    for (int q = 0; q < inputs.Q; ++q)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (LINES == 1 && e != half) continue;
        float product = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (warp == w) product = c[4 * ((2 * w + half) * LINES / 8 + q) + 2 * half + e];
        // With at least 8 lines, these columns always belong to the unit.
        const bool mine = LINES >= 8 || column_of<LINES>(warp, t, half, q, e) / LINES == unit;
        if (mine && (ALL || unit < units)) sums[LINES == 1 ? 0 : 2 * q + e] += product * (scale * inputs.of[half][q][e]);
      }
  }
}

// Stores this warp's sums of a tile. With `add`, they are added to those of earlier pieces.
DEVICE void keep_packed_sums(const Consumer& k, float (&own)[sums_of(PACKED_ROWS)], float* sums, bool add) {
  constexpr int LINES = PACKED_ROWS;
  const int warp = k.warp % 4, t = k.lane % 4;
  // With 2 or 4 rows, the warp's two units have their sums in different lanes.
  if (LINES == 2 || LINES == 4)
#pragma unroll
    for (int i = 0; i < sums_of(LINES); ++i) own[i] += shuffle_xor(own[i], LINES / 2);
  if (column_of<LINES>(warp, t, 0, 0, 0) / LINES != 2 * warp) return;
#pragma unroll
  for (int i = 0; i < sums_of(LINES); ++i) {
    const int row = column_of<LINES>(warp, t, 0, i / 2, i % 2) % LINES;
    if (row >= ROWS) continue;
    float* to = sums + (k.warp * ROWS + row) * 8 + k.lane / 4;
    *to = add ? *to + own[i] : own[i];
  }
}

// Waits for N boxes and stores their slots.
template <int P, int N>
DEVICE void await_boxes(Consumer& k, int (&slots)[N]) {
  Cursor ahead = k.ring.at;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    k.ring.wait_full(k.a, ahead, k.where(P));
    slots[j] = ahead.slot;
    ahead.next();
  }
}

// Multiplies N tiles of one box each at the same time.
template <int P, int N>
DEVICE void take_packed_tiles(Consumer& k, float* sums) {
  constexpr Product p = PRODUCTS[P];
  constexpr bool HALVES = p.box > UNITS_AT_ONCE;
  constexpr int MINE = HALVES ? N : (N + 1) / 2;
  const int group = k.warp / 4, first = HALVES ? group * UNITS_AT_ONCE : 0;
  int slots[N];
  float c[MINE][4 * PACKED_ROWS];
  InputScales<PACKED_ROWS> inputs;
  inputs.load(k, k.scales + first, XS_SCALES);
  await_boxes<P>(k, slots);
#pragma unroll
  for (int m = 0; m < MINE; ++m) pin(c[m]);
  begin_products();
#pragma unroll
  for (int m = 0; m < MINE; ++m) {
    const int slot = HALVES ? slots[m] : group ? slots[(2 * m + 1) % N] : slots[2 * m];
    multiply_units(c[m], k.ring.data + slot * SLOT + first * TILE_UNIT, k.xs + first * PACKED_ROWS * 128);
  }
  commit_products();
  await_products<0>();
#pragma unroll
  for (int m = 0; m < MINE; ++m) pin(c[m]);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float own[sums_of(PACKED_ROWS)] = {};
    if (HALVES || j % 2 == group)
      add_products<PACKED_ROWS, all_units(p)>(k, own, c[HALVES ? j : j / 2], k.ring.scales + slots[j] * UNITS + first, inputs,
                                              p.columns / p.unit - first);
    keep_packed_sums(k, own, sums + j * TILE_FLOATS, false);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) free_slot(k);
}

// Multiplies the boxes of one tile in a piece. Each warp group multiplies half of each box.
template <int P>
DEVICE void take_packed_boxes(Consumer& k, int piece, float* sums) {
  constexpr Product p = PRODUCTS[P];
  constexpr bool EVEN = p.boxes % 2 == 0 && p.piece_boxes % 2 == 0;
  constexpr int N = EVEN && PACKED_ROWS <= 8 ? 2 : 1;
  const int half = k.warp / 4 * UNITS_AT_ONCE, first = piece * p.piece_boxes;
  const int end = p.pieces == 1 || first + p.piece_boxes > p.boxes ? p.boxes : first + p.piece_boxes;
  float own[sums_of(PACKED_ROWS)] = {};
#pragma unroll 1
  for (int box = first; box < end; box += N) {
    int slots[N];
    float c[N][4 * PACKED_ROWS];
    await_boxes<P>(k, slots);
#pragma unroll
    for (int j = 0; j < N; ++j) pin(c[j]);
    begin_products();
#pragma unroll
    for (int j = 0; j < N; ++j)
      multiply_units(c[j], k.ring.data + slots[j] * SLOT + half * TILE_UNIT,
                     k.xs + ((box + j - first) * p.box + half) * PACKED_ROWS * 128);
    commit_products();
    await_products<0>();
#pragma unroll
    for (int j = 0; j < N; ++j) pin(c[j]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      InputScales<PACKED_ROWS> inputs;
      inputs.load(k, k.scales + (box + j - first) * p.box + half, XS_SCALES);
      add_products<PACKED_ROWS, all_units(p)>(k, own, c[j], k.ring.scales + slots[j] * UNITS + half, inputs,
                                              p.columns / p.unit - (box + j) * p.box - half);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) free_slot(k);
  }
  keep_packed_sums(k, own, sums, piece > 0);
}

// Whether stream_packed_boxes() multiplies the tiles of a phase. With 16 rows there are too few registers for it. Fewer
// rows than 5 were not tried.
constexpr bool is_streamed(const Product& p) {
  return PACKED_ROWS == 8 && all_units(p) && p.box > UNITS_AT_ONCE && p.piece_boxes <= 3 && p.boxes % p.piece_boxes == 0;
}

// Waits for all but the last `left` of the started products, where `left` is at most MOST.
template <int MOST>
DEVICE void await_all_but(int left) {
  if (left == MOST) return await_products<MOST>();
  if constexpr (MOST > 0) await_all_but<MOST - 1>(left);
}

// Multiplies the boxes of N tiles in a piece. Each warp group multiplies half of each box. While the products of a box are
// added up, those of the following boxes are computed.
template <int P, int N>
DEVICE void stream_packed_tiles(Consumer& k, const InputScales<PACKED_ROWS>* inputs, int piece, float* sums) {
  constexpr Product p = PRODUCTS[P];
  constexpr int LINES = PACKED_ROWS, BOXES = p.piece_boxes, ALL = N * BOXES;
  static_assert(ALL <= SLOTS, "all boxes are in the ring at the same time");
  const int half = k.warp / 4 * UNITS_AT_ONCE;
  int slots[ALL];
  float c[ALL][4 * LINES];
  await_boxes<P>(k, slots);
#pragma unroll
  for (int j = 0; j < ALL; ++j) pin(c[j]);
  begin_products();
#pragma unroll
  for (int j = 0; j < ALL; ++j) {
    multiply_units(c[j], k.ring.data + slots[j] * SLOT + half * TILE_UNIT, k.xs + (j % BOXES * p.box + half) * LINES * 128);
    commit_products();
  }
  float own[sums_of(LINES)];
#pragma unroll
  for (int j = 0; j < ALL; ++j) {
    await_all_but<ALL - 1>(ALL - 1 - j);
    pin(c[j]);
    if (j % BOXES == 0)
#pragma unroll
      for (int i = 0; i < sums_of(LINES); ++i) own[i] = 0;
    add_products<LINES, true>(k, own, c[j], k.ring.scales + slots[j] * UNITS + half, inputs[j % BOXES], p.box);
    free_slot(k);
    if (j % BOXES == BOXES - 1) keep_packed_sums(k, own, sums + j / BOXES * TILE_FLOATS, piece > 0);
  }
}

// Multiplies the boxes of `count` tiles in a piece.
template <int P>
DEVICE void stream_packed_boxes(Consumer& k, int count, int piece, float* sums) {
  constexpr Product p = PRODUCTS[P];
  constexpr int MOST = p.piece_boxes == 1 ? 2 : 1;  // as registers allow
  InputScales<PACKED_ROWS> inputs[p.piece_boxes];  // the same for all tiles
#pragma unroll
  for (int box = 0; box < p.piece_boxes; ++box)
    inputs[box].load(k, k.scales + box * p.box + k.warp / 4 * UNITS_AT_ONCE, XS_SCALES);
  int i = 0;
#pragma unroll 1
  for (; i + MOST <= count; i += MOST) stream_packed_tiles<P, MOST>(k, inputs, piece, sums + i * TILE_FLOATS);
  if (MOST > 1)
#pragma unroll 1
    for (; i < count; ++i) stream_packed_tiles<P, 1>(k, inputs, piece, sums + i * TILE_FLOATS);
}

// The pairs that a warp group multiplies in one tile of each listed expert, in the order of experts.
template <int P>
struct Parts {
  static constexpr bool TWO = PRODUCTS[P].doubled;  // experts in a slot
  const Choice& choice;
  int group;

  DEVICE int count() const {
    if (ROWS == 1) return TWO ? (CHOSEN + 1 - group) / 2 : CHOSEN;
    return choice.part_pairs[group];
  }
  DEVICE int slots() const { return TWO ? (choice.count + 1) / 2 : choice.count; }
  // The index of a pair's expert in the list, times 256, plus the pair.
  DEVICE int at(int i) const {
    if (ROWS > 1) return choice.parts[group][i];
    const int expert = TWO ? 2 * i + group : i;
    return expert << 8 | choice.pairs[expert * 8];
  }
  DEVICE int slot(int part) const { return (part >> 8) / (1 + TWO); }
};

DEVICE void add_to_row(float (&own)[ROWS], float value, int row) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (r == row) own[r] += value;
}

// Multiplies one tile of each listed expert by the inputs of that expert's pairs, and adds up the
// products. Pairs are multiplied N at a time, whatever experts they have chosen.
template <int P>
DEVICE void take_packed_experts(Consumer& k, float* sums) {
  constexpr Product p = PRODUCTS[P];
  constexpr int N = ROWS == 1 || PACKED_ROWS == 8 ? 4 : 2;  // as registers allow
  static_assert(p.boxes == 1 && N <= SLOTS, "");
  const int group = k.warp / 4, half = group * UNITS_AT_ONCE, input = p.doubled ? 0 : half, where = k.where(P);
  const Parts<P> parts{*k.choice, p.doubled ? group : 0};
  const int count = parts.count(), slots = parts.slots();
  float own[ROWS] = {};
  int freed = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += N) {
    int lines[N], at[N];
    float c[N][4];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int part = parts.at(first + j < count ? first + j : count - 1);
      lines[j] = part & 0xff;
      // Every expert has a pair, so the slot is less than N slots ahead.
      const Cursor cursor = k.ring.at.later(parts.slot(part) - freed);
      k.ring.wait_full(k.a, cursor, where);
      at[j] = cursor.slot;
      pin(c[j]);
    }
    begin_products();
#pragma unroll
    for (int j = 0; j < N; ++j)
      multiply_units(c[j], k.ring.data + at[j] * SLOT + half * TILE_UNIT, k.xs + lines[j] * PAIR_BYTES + input * 128);
    commit_products();
    await_products<0>();
#pragma unroll
    for (int j = 0; j < N; ++j) pin(c[j]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float sum[1] = {};
      InputScales<1> inputs;
      inputs.load(k, k.scales + lines[j] * Lines<P>::SCALES + input, 0);
      add_products<1, all_units(p)>(k, sum, c[j], k.ring.scales + at[j] * UNITS + half, inputs, p.columns / p.unit - input);
      if (first + j < count) add_to_row(own, sum[0], lines[j] / CHOSEN);
    }
    const int next = first + N < count ? parts.slot(parts.at(first + N)) : slots;
#pragma unroll 1
    for (; freed < next; ++freed) {
      k.ring.wait_full(k.a, k.ring.at, where);
      free_slot(k);
    }
  }
#pragma unroll 1
  for (; freed < slots; ++freed) {  // a warp group without pairs still frees every slot
    k.ring.wait_full(k.a, k.ring.at, where);
    free_slot(k);
  }
  if (k.lane % 4 != k.warp % 4) return;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) sums[(k.warp * ROWS + row) * 8 + k.lane / 4] = own[row];
}

// Multiplies `count` tiles of a group, as take_group() does.
template <int P>
DEVICE void take_packed_group(Consumer& k, int count, int piece, float* sums) {
  constexpr Product p = PRODUCTS[P];
  int i = 0;
  if constexpr (Lines<P>::OF_PAIRS) {
#pragma unroll 1
    for (; i < count; ++i) take_packed_experts<P>(k, sums + i * TILE_FLOATS);
  } else if constexpr (is_streamed(p)) {
    stream_packed_boxes<P>(k, count, piece, sums);
  } else if constexpr (p.boxes == 1) {
    constexpr int MOST = PACKED_ROWS <= 4 ? 4 : PACKED_ROWS == 8 ? 2 : 1;  // as registers allow
    if (MOST == 4)
#pragma unroll 1
      for (; i + 4 <= count; i += 4) take_packed_tiles<P, 4>(k, sums + i * TILE_FLOATS);
    if (MOST >= 2 || p.box <= UNITS_AT_ONCE)
#pragma unroll 1
      for (; i + 2 <= count; i += 2) take_packed_tiles<P, 2>(k, sums + i * TILE_FLOATS);
#pragma unroll 1
    for (; i < count; ++i) take_packed_tiles<P, 1>(k, sums + i * TILE_FLOATS);
  } else {
#pragma unroll 1
    for (; i < count; ++i) take_packed_boxes<P>(k, piece, sums + i * TILE_FLOATS);
  }
}
