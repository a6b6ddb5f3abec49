// The matrix product of a phase: receive the source's rows into shared memory, multiply this
// block's tiles by them, add the sums of the warps, and pass the outputs to the epilogue.
//
// In bfloat16, activations are the 16 rows of a product (8 of them are zero if a step has up to 8
// rows). A tile's outputs are its 8 columns. Units are assigned to the warps in turn. Thread (g, t)
// reads the 16-byte chunks t and t + 4 of weights, and the activations of the same columns: the
// order of inputs in a product is arbitrary.
//
// In FP8, rows are rounded to e4m3 as they are received, with a scale for each row and unit
// (arXiv:2412.19437, section 3.3.2). packed.cuh multiplies them.

struct Consumer {
  const Args& a;
  Ring ring;
  u32 xs;         // shared address of the rows: ROWS rows of PITCH columns of bf16
  float* work;    // two groups of sums
  float* partials;  // attention's partial results: in `work` with FLAGGED, else in the memory of the rows
  float* squares; // [ROWS][WARPS]: sums of squares by the warps of a row
  float* scales;  // [ROWS][XS_SCALES]: scales of the rows' units, with PACKED
  float* scores;  // [ROWS][WARPS][SCORED]: scores of this block's experts by the warps of a row
  Choice* choice;
  u32 flag;       // number of this layer's first hand-over
  u32 target;     // number of arrivals when all blocks have begun this layer
  int layer;
  int warp, lane;
  int flip = 0;   // which group of sums is written next

  DEVICE int where(int phase) const { return place(layer, phase); }
};

constexpr int TILE_FLOATS = WARPS * ROWS * 8;
constexpr int GROUP_FLOATS = GROUP * TILE_FLOATS;
constexpr int warps_of_line(int lines) { return lines == 1 ? 8 : lines == 2 ? 4 : lines <= 4 ? 2 : 1; }
constexpr int WARPS_OF_ROW = warps_of_line(ROWS);

// A phase's inputs in shared memory. There is one line for each row; or one line for each pair of a
// row and an expert that it has chosen, followed in bf16 by a line of zeros for rows that have not
// chosen an expert.
template <int P>
struct Lines {
  static constexpr bool OF_PAIRS = EXPERTS > 0 && P == DOWN;
  static constexpr int COUNT = OF_PAIRS ? PAIRS : ROWS;
  static constexpr int PITCH = (OF_PAIRS ? INTER : XS_COLUMNS) + 32;  // columns
  static constexpr int SCALES = OF_PAIRS ? INTER / 128 + 1 : XS_SCALES;
  static constexpr int WARPS_OF = warps_of_line(COUNT), AT_ONCE = WARPS / WARPS_OF;
};

// -- receive ----------------------------------------------------------------------------------

DEVICE float low_of(u32 v) { return from_bits(v << 16); }
DEVICE float high_of(u32 v) { return from_bits(v & 0xffff0000u); }
DEVICE float widen(u16 v) { return from_bits((u32)v << 16); }

// Multiplies two values by two weights, and adds to the sum of squares.
DEVICE u32 weigh(u32 x, u32 weight, float& squares) {
  const float low = low_of(x), high = high_of(x);
  squares += low * low + high * high;
  return pack(low * low_of(weight), high * high_of(weight));
}

// Source of rows: the words of a hand-over.
struct Source {
  const u32* words;
  u32 flag;
};
// Source of rows: the embeddings of the tokens.
struct Embedding { const u16* rows; };

// Loads N blocks of 256 columns of a row, every STRIDE-th one, before any of them is used.
template <int N, int COLUMNS, int STRIDE>
DEVICE void receive_blocks(const Consumer& k, uint4 (&v)[N], const Embedding& from, int row, int first, int count, int) {
  const u16* at = from.rows + (u64)k.a.tokens[row] * COLUMNS + first * 256 + k.lane * 8;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) v[i] = load16(at + i * STRIDE * 256);
}

template <int N, int COLUMNS, int STRIDE>
DEVICE void receive_blocks(const Consumer& k, uint4 (&v)[N], const Source& from, int row, int first, int count, int where) {
  const int at = first * 256 + k.lane * 8;
  if (!FLAGGED) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < count) v[i] = get16(from.words + (row * COLUMNS + at + i * STRIDE * 256) / 2);
    return;
  }
  const uint4* words = (const uint4*)from.words + (row * COLUMNS + at) / 4;
  Patience patience;
  while (true) {
    bool good = true;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < count) {
        const uint4 low = get16(words + i * STRIDE * 64), high = get16(words + i * STRIDE * 64 + 1);
        v[i] = uint4{low.x, low.z, high.x, high.z};
        good = good && is_there(low, from.flag) && is_there(high, from.flag);
      }
    if (good) return;
    patience.poll(k.a, WAIT_WORDS, where);
  }
}

// Returns the address of a 16-byte chunk of a unit of a line in e4m3, in the layout that packed.cuh
// multiplies.
template <int P>
DEVICE u32 packed_at(const Consumer& k, int line, int unit, int chunk) {
  const int n = Lines<P>::OF_PAIRS ? unit : unit * PACKED_ROWS + line;
  return k.xs + (Lines<P>::OF_PAIRS ? line * PAIR_BYTES : 0) + n * 128 + (chunk ^ n % 8) * 16;
}

DEVICE float2 both_of(u32 v) { return float2{low_of(v), high_of(v)}; }
// Like weigh(), without rounding.
DEVICE float2 weigh_exactly(u32 x, u32 weight, float& squares) {
  const float low = low_of(x), high = high_of(x);
  squares += low * low + high * high;
  return float2{low * low_of(weight), high * high_of(weight)};
}

// Stores eight columns of each of N blocks, rounded to e4m3 by the largest number of the unit,
// which is spread over 16 lanes. Only `count` of the blocks exist. Every operation runs for all
// blocks before the next operation, to hide its latency.
template <int P, int N>
DEVICE void keep_rounded(const Consumer& k, const float2 (&v)[N][4], int row, int first, int count) {
  float largest[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    largest[i] = greater(
        greater(greater_size(v[i][0].x, v[i][0].y), greater_size(v[i][1].x, v[i][1].y)),
        greater(greater_size(v[i][2].x, v[i][2].y), greater_size(v[i][3].x, v[i][3].y)));
#pragma unroll
  for (int lanes = 8; lanes; lanes >>= 1)
#pragma unroll
    for (int i = 0; i < N; ++i) largest[i] = greater(largest[i], shuffle_xor(largest[i], lanes));
  const int part = k.lane % 16;  // a unit is half of a block of 256 columns
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) {
      const int unit = (first + i * Lines<P>::WARPS_OF) * 2 + k.lane / 16;
      const float scale = greater(largest[i] * (1.f / 448.f), 1e-14f);
      put_rounded(packed_at<P>(k, row, unit, part / 2) + part % 2 * 8, v[i], inverse_of(scale));
      if (part == 0) k.scales[row * Lines<P>::SCALES + unit] = scale;
    }
}

// Stores the inputs, in bf16, of rows that have not chosen an expert.
template <int P>
DEVICE void keep_zeros(const Consumer& k) {
  using Of = Lines<P>;
  for (int i = thread_index(); i < (Of::PITCH - 32) / 8; i += THREADS)
    put_shared16(k.xs + Of::COUNT * Of::PITCH * 2 + i * 16, uint4{0, 0, 0, 0});
}

// Loads the router's weights for this block's experts into the L1 cache, where all warps find them.
DEVICE void touch_router(const Consumer& k) {
  constexpr int SECTORS = HIDDEN / 8;  // of 32 bytes, by which the cache is filled
  for (int i = thread_index(); i < SCORED * SECTORS; i += THREADS) {
    const int expert = block_index() + i / SECTORS * BLOCKS;
    if (expert < EXPERTS) load16_cached(k.a.layers[k.layer].router + (u64)expert * HIDDEN + i % SECTORS * 8);
  }
}

// Adds the products of eight columns of a row and the router's weights for this block's experts to
// `scores`.
DEVICE void add_scores(const Consumer& k, float (&scores)[SCORED], const float2 (&x)[4], int column) {
#pragma unroll
  for (int n = 0; n < SCORED; ++n) {
    const int expert = block_index() + n * BLOCKS;
    if (expert >= EXPERTS) continue;
    const float* at = k.a.layers[k.layer].router + (u64)expert * HIDDEN + column;
    const uint4 low = load16_cached(at), high = load16_cached(at + 4);
    scores[n] += x[0].x * from_bits(low.x) + x[0].y * from_bits(low.y) + x[1].x * from_bits(low.z) +
                 x[1].y * from_bits(low.w) + x[2].x * from_bits(high.x) + x[2].y * from_bits(high.y) +
                 x[3].x * from_bits(high.z) + x[3].y * from_bits(high.w);
  }
}

// Receives a piece of the rows into shared memory. With NORM, columns are multiplied by the weights
// `norm`, and sums of squares are stored; the epilogue applies the scale that follows from them. A
// block receives rows again only after a barrier, so that no warp multiplies by rows that are being
// overwritten.
template <int P, bool NORM, class From>
DEVICE void receive(Consumer& k, const From& from, int piece, u32 target, const u16* norm) {
  constexpr Product p = PRODUCTS[P];
  constexpr int MOST = p.piece_boxes * p.box * p.unit < p.columns ? p.piece_boxes * p.box * p.unit : p.columns;
  using Of = Lines<P>;
  constexpr bool SCORES_TOO = EXPERTS > 0 && P == GATE_UP;
  constexpr int EACH = (MOST / 256 + Of::WARPS_OF - 1) / Of::WARPS_OF;  // blocks of 256 columns per warp
  constexpr int MOST_AT_ONCE = ROWS <= 2 ? 2 : PACKED ? 8 : 4;  // as registers allow
  constexpr int N = EACH < MOST_AT_ONCE ? EACH : MOST_AT_ONCE;
  const int first = piece * (MOST / 256);
  const int blocks = p.pieces == 1 ? MOST / 256 : (p.columns / 256 - first < MOST / 256 ? p.columns / 256 - first : MOST / 256);
  const int mine = k.warp % Of::WARPS_OF, where = k.where(P);
  uint4 weight[N];
  if (NORM && EACH == N) {  // loaded before the wait
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (mine + i * Of::WARPS_OF < blocks) weight[i] = load16(norm + (mine + i * Of::WARPS_OF) * 256 + k.lane * 8);
  }
  if (SCORES_TOO) touch_router(k);
  perhaps_delay();
  if (piece > 0)
    sync_consumers<THREADS>();
  else if (target)  // no block arrives for the embedding
    await_arrivals(k.a, target, where);
#pragma unroll 1
  for (int row = k.warp / Of::WARPS_OF; row < Of::COUNT; row += Of::AT_ONCE) {
    float squares = 0, scores[SCORED] = {};
#pragma unroll 1
    for (int b = mine; b < blocks; b += N * Of::WARPS_OF) {
      const int count = (blocks - b + Of::WARPS_OF - 1) / Of::WARPS_OF;
      uint4 v[N];
      if (NORM && EACH > N) {
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (i < count) weight[i] = load16(norm + (b + i * Of::WARPS_OF) * 256 + k.lane * 8);
      }
      receive_blocks<N, p.columns, Of::WARPS_OF>(k, v, from, row, first + b, count, where);
      if constexpr (p.packed || SCORES_TOO) {
        float2 wide[N][4];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (i >= count) v[i] = uint4{0, 0, 0, 0};
          wide[i][0] = NORM ? weigh_exactly(v[i].x, weight[i].x, squares) : both_of(v[i].x);
          wide[i][1] = NORM ? weigh_exactly(v[i].y, weight[i].y, squares) : both_of(v[i].y);
          wide[i][2] = NORM ? weigh_exactly(v[i].z, weight[i].z, squares) : both_of(v[i].z);
          wide[i][3] = NORM ? weigh_exactly(v[i].w, weight[i].w, squares) : both_of(v[i].w);
        }
        if constexpr (SCORES_TOO) {
#pragma unroll
          for (int i = 0; i < N; ++i)
            if (i < count) add_scores(k, scores, wide[i], (b + i * Of::WARPS_OF) * 256 + k.lane * 8);
        }
        if constexpr (p.packed) keep_rounded<P>(k, wide, row, b, count);
        if constexpr (!p.packed) {
#pragma unroll
          for (int i = 0; i < N; ++i)
            if (i < count)
              put_shared16(k.xs + (row * Of::PITCH + (b + i * Of::WARPS_OF) * 256 + k.lane * 8) * 2,
                           uint4{pack(wide[i][0].x, wide[i][0].y), pack(wide[i][1].x, wide[i][1].y),
                                 pack(wide[i][2].x, wide[i][2].y), pack(wide[i][3].x, wide[i][3].y)});
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < count) {
          const int column = (b + i * Of::WARPS_OF) * 256 + k.lane * 8;
          if (NORM) {
            v[i].x = weigh(v[i].x, weight[i].x, squares);
            v[i].y = weigh(v[i].y, weight[i].y, squares);
            v[i].z = weigh(v[i].z, weight[i].z, squares);
            v[i].w = weigh(v[i].w, weight[i].w, squares);
          }
          put_shared16(k.xs + (row * Of::PITCH + column) * 2, v[i]);
        }
    }
    if (NORM) {
#pragma unroll
      for (int i = 16; i; i >>= 1) squares += shuffle_xor(squares, i);
      if (k.lane == 0) k.squares[row * WARPS + mine] = squares;
    }
    if constexpr (SCORES_TOO)
#pragma unroll
      for (int n = 0; n < SCORED; ++n) {
#pragma unroll
        for (int i = 16; i; i >>= 1) scores[n] += shuffle_xor(scores[n], i);
        if (k.lane == 0) k.scores[(row * WARPS + mine) * SCORED + n] = scores[n];
      }
  }
  if constexpr (Of::OF_PAIRS && !p.packed) keep_zeros<P>(k);
  if constexpr (p.packed) fence_copies();  // tensor cores read shared memory as the copy engine does
  sync_consumers<THREADS>();
  mark(k.a, k.layer, P, 0);
}

// Returns the norm's scale of a row.
DEVICE float scale_of(const Consumer& k, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS_OF_ROW; ++i) sum += k.squares[row * WARPS + i];
  return rsqrt_of(sum / HIDDEN + k.a.eps);
}

DEVICE float silu(float x) { return x / (1.f + exp2_of(-1.4426950408889634f * x)); }

// -- multiply ---------------------------------------------------------------------------------

// A thread's activations of 64 columns: chunks t and t + 4 of rows g and g + 8.
struct Inputs { uint4 upper[2], lower[2]; };
// A tile's sums, separate for both chunks, so that the two products need not wait for each other.
struct Sums { float near[4], far[4]; };

// Location of a thread's inputs: the lines of rows g and g + 8, at its first chunk.
struct Where { u32 upper, lower; };

template <int P>
DEVICE Where line_of(const Consumer& k, int upper, int lower = 0) {
  using Of = Lines<P>;
  const u32 chunk = k.lane % 4 * 16;
  return Where{k.xs + upper * Of::PITCH * 2 + chunk, k.xs + lower * Of::PITCH * 2 + chunk};
}

// Returns the location of the rows. Rows that do not exist may have any line.
template <int P>
DEVICE Where rows_of(const Consumer& k) {
  const int g = k.lane / 4;
  return line_of<P>(k, g < ROWS ? g : ROWS - 1, g + 8 < ROWS ? g + 8 : ROWS - 1);
}

DEVICE Inputs load_inputs(const Where& from, int unit) {
  Inputs x;
  x.upper[0] = get_shared16(from.upper + unit * 128);
  x.upper[1] = get_shared16(from.upper + unit * 128 + 64);
  if (ROWS > 8) {
    x.lower[0] = get_shared16(from.lower + unit * 128);
    x.lower[1] = get_shared16(from.lower + unit * 128 + 64);
  }
  return x;
}

DEVICE void multiply_add(float (&c)[4], const uint4& x, const uint4& below, const uint4& w) {
  if (ROWS > 8) {
    mma(c, x.x, below.x, x.y, below.y, w.x, w.y);
    mma(c, x.z, below.z, x.w, below.w, w.z, w.w);
  } else {
    mma_upper(c[0], c[1], x.x, x.y, w.x, w.y);
    mma_upper(c[0], c[1], x.z, x.w, w.z, w.w);
  }
}

// Returns the row of a tile that threads with this g read. Bits 0 and 2 are swapped, so that the
// eight threads of two values of g, whose accesses are combined, find their chunks (chunk ^ row) in
// different banks.
DEVICE int tile_row(int g) { return (g & 2) | (g & 1) << 2 | g >> 2; }

DEVICE void multiply_unit(const Consumer& k, Sums& c, const Inputs& x, u32 unit) {
  const int row = tile_row(k.lane / 4);
  const u32 at = unit + row * 128 + ((k.lane % 4) ^ row) * 16;
  const uint4 near = get_shared16(at), far = get_shared16(at ^ 64);
  multiply_add(c.near, x.upper[0], x.lower[0], near);
  multiply_add(c.far, x.upper[1], x.lower[1], far);
}

// Multiplies unit `unit` of the boxes in `slots` by unit `input` of the input lines.
template <int N>
DEVICE void multiply_tiles(const Consumer& k, Sums (&c)[N], const int (&slots)[N], int unit, int input, const Where& from) {
  const Inputs x = load_inputs(from, input);
#pragma unroll
  for (int j = 0; j < N; ++j) multiply_unit(k, c[j], x, k.ring.data + slots[j] * SLOT + unit * TILE_UNIT);
}

// Stores this warp's sums of a tile. With `add`, they are added to those of earlier pieces.
DEVICE void keep_sums(const Consumer& k, const Sums& c, float* sums, bool add) {
  const int g = k.lane / 4, row = tile_row(k.lane % 4 * 2);
#pragma unroll
  for (int half = 0; half < (ROWS > 8 ? 2 : 1); ++half)
    if (g + half * 8 < ROWS) {
      float* to = sums + (k.warp * ROWS + g + half * 8) * 8 + row;
      const float first = c.near[half * 2] + c.far[half * 2], second = c.near[half * 2 + 1] + c.far[half * 2 + 1];
      to[0] = add ? to[0] + first : first;
      to[4] = add ? to[4] + second : second;
    }
}

DEVICE void free_slot(Consumer& k) {
  sync_warp();  // all lanes have read
  if (k.lane == 0) barrier_arrive(k.ring.empty + 8 * k.ring.at.slot);
  k.ring.at.next();
}

// Multiplies N tiles of one box each at the same time: inputs are read once, and the tiles'
// products overlap.
template <int P, int N>
DEVICE void take_tiles(Consumer& k, float* sums) {
  constexpr Product p = PRODUCTS[P];
  Sums c[N] = {};
  int slots[N];
  Cursor ahead = k.ring.at;
  const Where from = rows_of<P>(k);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    k.ring.wait_full(k.a, ahead, k.where(P));
    slots[j] = ahead.slot;
    ahead.next();
  }
#pragma unroll
  for (int i = 0; i < (p.box + WARPS - 1) / WARPS; ++i) {
    const int unit = k.warp + i * WARPS;
    if (p.box % WARPS == 0 || unit < p.box) multiply_tiles(k, c, slots, unit, unit, from);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) free_slot(k);
#pragma unroll
  for (int j = 0; j < N; ++j) keep_sums(k, c[j], sums + j * TILE_FLOATS, false);
}

// Multiplies one box of a tile by the inputs from unit `input` on.
template <int P>
DEVICE void take_box(Consumer& k, Sums (&c)[1], int box, int input, const Where& from) {
  constexpr Product p = PRODUCTS[P];
  k.ring.wait_full(k.a, k.ring.at, k.where(P));
  const int slots[1] = {k.ring.at.slot};
  // The last box may extend past the matrix: its units there are zero and have no inputs.
  const int units = p.columns / p.unit - box * p.box;
#pragma unroll
  for (int i = 0; i < (p.box + WARPS - 1) / WARPS; ++i) {
    const int unit = k.warp + i * WARPS;
    if (unit < p.box && unit < units) multiply_tiles(k, c, slots, unit, input + unit, from);
  }
  free_slot(k);
}

// Multiplies the boxes of one tile in a piece.
template <int P>
DEVICE void take_boxes(Consumer& k, int piece, float* sums) {
  constexpr Product p = PRODUCTS[P];
  Sums c[1] = {};
  const Where from = rows_of<P>(k);
  const int first = piece * p.piece_boxes;
  const int end = p.pieces == 1 || first + p.piece_boxes > p.boxes ? p.boxes : first + p.piece_boxes;
#pragma unroll 1
  for (int box = first; box < end; ++box) take_box<P>(k, c, box, (box - first) * p.box, from);
  keep_sums(k, c[0], sums, piece > 0);
}

template <int P>
DEVICE void take_experts(Consumer& k, float* sums);
template <int P>
DEVICE void take_packed_group(Consumer& k, int count, int piece, float* sums);

// Multiplies `count` tiles of a group. Gate and up tiles are counted separately.
template <int P>
DEVICE void take_group(Consumer& k, int count, int piece, float* sums) {
  constexpr Product p = PRODUCTS[P];
  int i = 0;
  if constexpr (p.packed) {
    take_packed_group<P>(k, count, piece, sums);
  } else if constexpr (Lines<P>::OF_PAIRS) {
#pragma unroll 1
    for (; i < count; ++i) take_experts<P>(k, sums + i * TILE_FLOATS);
  } else if (p.boxes == 1) {
    if (TOGETHER >= 4)
#pragma unroll 1
      for (; i + 4 <= count; i += 4) take_tiles<P, 4>(k, sums + i * TILE_FLOATS);
#pragma unroll 1
    for (; i + 2 <= count; i += 2) take_tiles<P, 2>(k, sums + i * TILE_FLOATS);
    if (i < count) take_tiles<P, 1>(k, sums + i * TILE_FLOATS);
  } else {
#pragma unroll 1
    for (; i < count; ++i) take_boxes<P>(k, piece, sums + i * TILE_FLOATS);
  }
}

// Returns outputs 2 `pair` and 2 `pair` + 1 of a row in tile i of a group: the total of the warps'
// sums.
DEVICE float2 total(const float* sums, int i, int row, int pair) {
  float2 sum = {0, 0};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float2 part = *(const float2*)(sums + i * TILE_FLOATS + (w * ROWS + row) * 8 + pair * 2);
    sum.x += part.x;
    sum.y += part.y;
  }
  return sum;
}

// Calls `finish(i, row, pair)`, which adds up the warps' sums, for each pair of a group's outputs.
template <class Finish>
DEVICE void for_outputs(int tiles, Finish finish) {
  for (int e = thread_index(); e < tiles * ROWS * 4; e += THREADS) finish(e / (4 * ROWS), e / 4 % ROWS, e % 4);
}

// Multiplies this block's `tiles` of a phase by one piece of the rows. After the last piece, calls
// `finish(tile, i, row, pair, sums)` for the outputs, where `tile` is an index into the block's
// tiles and `i` one into the group.
template <int P, class Finish>
DEVICE void multiply(Consumer& k, int piece, int tiles, Finish finish) {
  constexpr Product p = PRODUCTS[P];
  constexpr int EACH = (p.pieces > 1 ? 2 * GROUP : GROUP) / p.stacked;  // tiles of a group
  static_assert(p.pieces == 1 || (p.tiles + BLOCKS - 1) / BLOCKS <= EACH, "sums of all tiles stay between pieces");
#pragma unroll 1
  for (int first = 0; first < tiles; first += EACH) {
    const int count = tiles - first < EACH ? tiles - first : EACH;
    float* sums = k.work + (p.pieces > 1 ? 0 : k.flip * GROUP_FLOATS);
    take_group<P>(k, count * p.stacked, piece, sums);
    if (piece + 1 < p.pieces) continue;
    // The next group's sums go to the other buffer; the group after that waits at the next barrier.
    sync_consumers<THREADS>();
    for_outputs(count, [&](int i, int row, int pair) { finish(first + i, i, row, pair, sums); });
    k.flip ^= 1;
  }
}

// Returns the first output of one of this block's tiles.
DEVICE int output_of(int tile) { return (block_index() + tile * BLOCKS) * 8; }
