// Tiles, the ring in shared memory, and stores, which the product kernels in CUDA C++ share
// (fp8_products/product.cu, expert_products/product.cu).
//
// A *tile* is OUTPUTS outputs of TOKENS rows. Its inputs are divided into *stages* (blocks) of BLOCK bytes per row,
// which are copied into a ring in shared memory. Groups of 128 threads multiply them. Each group has 64 rows; the two
// groups of a tile of 64 rows have half of its outputs each.
//
// Blocks run until no tile is left (tile i of a block is tile `block + i * blocks`), so the next
// tile's stages are copied while results are stored.

constexpr int BLOCK = 128;         // bytes of a row, or of an output's weights, in a stage
constexpr int HALF = 128 * BLOCK;  // bytes of 128 outputs in a stage

// The epilogue, which turns a tile's sums into results.
enum Epilogue {
  LINEAR,    // y (rows, outputs) in bf16, plus a bias
  SWIGLU,    // silu(gate) * up, as the next product's rows; the matrix has gates, then ups
  GATHERED,  // the same for experts, whose rows are gathered from those of tokens
  WEIGHTED,  // bf16, times the row's share, stored at the place of its pair
};

constexpr bool is_swiglu(int epilogue) { return epilogue == SWIGLU || epilogue == GATHERED; }

struct Args {
  TensorMap weight;        // rows of 128 bytes in boxes of 128 rows
  const float* scales;     // of e4m3 weights, (experts, groups, blocks)
  const u8* rows;          // (blocks, slots, 128), with 16-byte chunks swizzled by slot; or (tokens, blocks, 128)
  const float* row_scales; // of e4m3 rows, (blocks, slots); or (blocks, tokens)
  const u16* bias;         // bias of LINEAR, or null
  void* y;
  float* y_scales;         // scales of y, with SwiGLU of e4m3
  const int* owners;       // expert of each tile of rows; null if there is one matrix
  const int* used;         // number of tiles of rows, with `owners`
  const int* pairs;        // token-expert pair of each slot, with GATHERED or WEIGHTED
  const float* shares;     // share of each pair, with WEIGHTED
  int slots;               // number of rows, including those that pad the last tile; of `y`, with GATHERED
  int count;               // number of rows that are stored, or of pairs if `pairs` is used
  int outputs;             // outputs of a matrix
  int group;               // number of outputs that share a scale
  int blocks;              // blocks of inputs
  int row_tiles, output_tiles;
  int cluster;             // number of blocks that share a tile
  int band;                // number of tiles of rows whose outputs are all computed before those of the next ones
  int chosen;              // experts of a token, with GATHERED
};

// -- a block's work -----------------------------------------------------------------------------
// Tile i of a block is tile `block + i * blocks`. If the blocks of a cluster share a tile, each of them has a part of its
// stages, and they have no other tile. Tiles of the same outputs are consecutive within a band of rows, so that weights
// are read from memory once.

struct Tile {
  int rows, outputs;  // first slot and first output
  int begin, end;     // blocks of inputs
  int expert;
};

// The index of the block in its cluster.
DEVICE int rank_of(const Args& a) { return block_index() % a.cluster; }

struct TileScheduler {
  int number, count, row_tiles;

  DEVICE explicit TileScheduler(const Args& a) {
    row_tiles = a.used ? *a.used : a.row_tiles;
    count = row_tiles * a.output_tiles;
    number = block_index() / a.cluster;
  }

  // Returns false if no tile is left.
  template <int TOKENS, int OUTPUTS> DEVICE bool next(const Args& a, Tile& tile) {
    if (number >= count) return false;
    const int size = a.band * a.output_tiles, band = number / size, first = band * a.band;
    const int rows = row_tiles - first < a.band ? row_tiles - first : a.band, at = number - band * size;
    const int row_tile = first + at % rows, rank = rank_of(a);
    tile.rows = row_tile * TOKENS;
    tile.outputs = at / rows * OUTPUTS;
    tile.begin = a.blocks * rank / a.cluster;
    tile.end = a.blocks * (rank + 1) / a.cluster;
    tile.expert = a.owners ? a.owners[row_tile] : 0;
    number += block_count() / a.cluster;
    return true;
  }
};

// The outputs of a tile, after the epilogue.
constexpr int outputs_of(int halves, int epilogue) { return is_swiglu(epilogue) ? 128 : 128 * halves; }

// Returns the first row of half `m` of a tile, within the expert's matrix.
template <int EPILOGUE> DEVICE int half_of(const Args& a, const Tile& tile, int m) {
  return is_swiglu(EPILOGUE) ? m * (a.outputs / 2) + tile.outputs : tile.outputs + 128 * m;
}

// -- the ring -----------------------------------------------------------------------------------

// The groups of threads that multiply, and the outputs of one group's product.
template <int TOKENS> struct Groups {
  static constexpr int COUNT = TOKENS == 64 ? 2 : TOKENS / 64, THREADS = 128 * COUNT, WARPS = 4 * COUNT;
  static constexpr int OUTPUTS = TOKENS == 64 ? 64 : 128;

  // The thread's group, and the first output and the first row of the group within a tile.
  DEVICE static int index() { return thread_index() / 128 - 1; }
  DEVICE static int first_output() { return TOKENS == 64 ? 64 * index() : 0; }
  DEVICE static int first_row() { return TOKENS == 64 ? 0 : 64 * index(); }
  // The first of the two rows of the thread's sums; the second is the eighth after it.
  DEVICE static int row() { return first_row() + thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4; }
};

template <int TOKENS, int HALVES, int STAGES> struct Ring {
  static constexpr bool SCALED = false;  // rows have scales
  static constexpr int ROWS = HALVES * HALF, STAGE = ROWS + TOKENS * BLOCK;
  u32 stages, full, empty;  // shared addresses
  int at = 0;
  u32 parity = 0;

  // Initializes the barriers. A stage is full after `arrivals` threads have arrived, and the copies have ended that
  // they expect.
  DEVICE void initialize(int arrivals) const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, arrivals);
      barrier_init(empty + 8 * i, Groups<TOKENS>::WARPS);
    }
    barriers_are_ready();
  }
  DEVICE void next() {
    if (++at == STAGES) {
      at = 0;
      parity ^= 1;
    }
  }
  DEVICE void wait_full() {
    while (!barrier_passed(full + 8 * at, parity)) {}
  }
  DEVICE void wait_empty() {
    while (!barrier_passed(empty + 8 * at, parity ^ 1)) {}
  }
  // Called by all threads that multiply, when a warp does not need the stage any more.
  DEVICE void release() const {
    sync_warp();
    if (thread_index() % 32 == 0) barrier_arrive(empty + 8 * at);
  }
  DEVICE u32 weights_at(int m, int output) const { return stages + at * STAGE + m * HALF + output * BLOCK; }
  DEVICE u32 rows_at(int row) const { return stages + at * STAGE + ROWS + row * BLOCK; }
};

// Copies the weights of a stage.
template <int EPILOGUE, int TOKENS, int HALVES, int STAGES>
DEVICE void copy_weights(const Args& a, const Ring<TOKENS, HALVES, STAGES>& ring, const Tile& tile, int b) {
#pragma unroll
  for (int m = 0; m < HALVES; ++m)
    copy_rows(ring.weights_at(m, 0), &a.weight, tile.expert * a.outputs + half_of<EPILOGUE>(a, tile, m), b,
              ring.full + 8 * ring.at);
}

// The threads that copy the stages of experts' first products (GATHERED): thread 0 copies weights, and each of them a
// 16-byte chunk of every 16th row.
template <int TOKENS, int HALVES, int STAGES, template <int, int, int> class RING> struct Gatherer {
  static constexpr int THREADS = 128, ARRIVALS = THREADS + 1;  // thread 0 also arrives when it expects weights
  static constexpr int CHUNKS = BLOCK / 16, STRIDE = THREADS / CHUNKS, COUNT = TOKENS / STRIDE;
  const Args& a;

  // Returns the token of a slot. Slots without a pair have the first token, and their results are not used.
  DEVICE int token_of(int slot) const {
    const int pair = a.pairs[slot];
    return pair < a.count ? pair / a.chosen : 0;
  }

  DEVICE void run(RING<TOKENS, HALVES, STAGES> ring) const {
    const int row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
    TileScheduler scheduler(a);
    Tile tile;
    while (scheduler.template next<TOKENS, 128>(a, tile)) {
      u32 sources[COUNT];  // chunks of `a.rows`
#pragma unroll
      for (int n = 0; n < COUNT; ++n) sources[n] = token_of(tile.rows + row + n * STRIDE) * (a.blocks * CHUNKS) + chunk;
      const int token = ring.SCALED && thread_index() < TOKENS ? token_of(tile.rows + thread_index()) : 0;
#pragma unroll 1
      for (int b = tile.begin; b < tile.end; ++b, ring.next()) {
        const u32 bar = ring.full + 8 * ring.at;
        ring.wait_empty();
        if (thread_index() == 0) {
          barrier_expect(bar, ring.ROWS);
          copy_weights<GATHERED>(a, ring, tile, b);
        }
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
          copy_chunk(ring.rows_at(row + n * STRIDE) + (chunk ^ row % 8) * 16,
                     a.rows + ((long)sources[n] + b * CHUNKS) * 16);
        if constexpr (RING<TOKENS, HALVES, STAGES>::SCALED)
          if (thread_index() < TOKENS)
            copy_word(ring.scales_at() + 4 * thread_index(), a.row_scales + (long)b * (a.count / a.chosen) + token);
        arrive_after_chunks(bar);
      }
    }
  }
};

// Returns true if the thread's group has no pair of an expert. A tile's pairs come first.
template <int TOKENS> DEVICE bool group_is_empty(const Args& a, const Tile& tile) {
  return a.pairs[tile.rows + Groups<TOKENS>::first_row()] >= a.count;
}

// Releases the tile's stages without multiplying them, so that the other group has the tensor cores for itself.
template <class RING> DEVICE void skip_tile(const Tile& tile, RING& ring) {
#pragma unroll 1
  for (int b = tile.begin; b < tile.end; ++b, ring.next()) {
    ring.wait_full();
    ring.release();
  }
}

// -- stores ------------------------------------------------------------------------------------

// Of two words of two neighboring lanes, gives the first words of both to the even lane, and the second words to
// the odd one.
DEVICE uint2 exchange(u32 first, u32 second) {
  const bool odd = thread_index() % 2;
  const u32 other = shuffle_xor(odd ? first : second, 1);
  return odd ? uint2{other, second} : uint2{first, other};
}

// Of 16 outputs, the first of the four that a lane stores after an exchange.
DEVICE int exchanged_output() { return thread_index() % 2 * 8 + thread_index() % 4 / 2 * 4; }

// The two rows of a thread's sums, and their shares (routing weights).
struct Places {
  int rows[2];
  float shares[2];
};

template <int TOKENS, int EPILOGUE> DEVICE Places find_places(const Args& a, const Tile& tile) {
  Places places;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    places.rows[h] = tile.rows + Groups<TOKENS>::row() + 8 * h;
    if (EPILOGUE == WEIGHTED) places.rows[h] = a.pairs[places.rows[h]];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    places.shares[h] = EPILOGUE == WEIGHTED && places.rows[h] < a.count ? a.shares[places.rows[h]] : 1.f;
  return places;
}
