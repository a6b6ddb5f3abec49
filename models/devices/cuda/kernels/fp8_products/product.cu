// Products of e4m3 matrices with e4m3 rows, for a single matrix or one matrix per expert.
//
// A *tile* is OUTPUTS outputs of TOKENS rows. Its inputs are divided into *stages* of 128 inputs,
// which share a scale. One thread copies stages into a ring in shared memory, and two groups of 128
// threads multiply. Each group has 64 outputs of a matrix, or twice 64. A stage's product is scaled
// in float32 when it is added.
//
// Blocks run until no tile is left (tile i of a block is tile `block + i * blocks`), so the next
// tile's stages are copied while results are stored.

// variants.py prepends BLOCK (inputs that share a scale, and bytes of a row in a stage), AT_ONCE (blocks of inputs
// that a warp rounds) and ROUNDING_WARPS to the source.
constexpr int MULTIPLIERS = 256, MULTIPLIER_WARPS = 8;
constexpr int HALF = 128 * BLOCK;  // bytes of 128 outputs in a stage
constexpr float LARGEST = 448.f, LEAST = 1e-12f;

// The epilogue, which turns a tile's sums into results.
enum Epilogue {
  LINEAR,  // y (rows, outputs) in bf16, plus a bias
  SWIGLU,   // silu(gate) * up in e4m3 with scales, as the next product's rows; the matrix has gates, then ups
  WEIGHTED,  // bf16, times the row's share, stored at the place of its pair
};

struct Args {
  TensorMap weight;        // rows of 128 bytes in boxes of 128 rows
  const float* scales;     // (experts, groups, blocks)
  const u8* rows;          // (blocks, slots, 128), with 16-byte chunks swizzled by slot
  const float* row_scales; // (blocks, slots)
  const u16* bias;         // bias of LINEAR, or null
  void* y;
  float* y_scales;         // scales of y, with SWIGLU
  const int* owners;       // expert of each tile of rows; null if there is one matrix
  const int* used;         // number of tiles of rows, with `owners`
  const int* pairs;        // token-expert pair of each slot, with WEIGHTED
  const float* shares;     // share of each pair, with WEIGHTED
  uint4* parts;            // sums of tiles that several blocks compute, two parts per block
  u32* arrivals;           // number of blocks that have stored their part of each such tile; zero between products
  int slots;               // number of rows, including those that pad the last tile
  int count;               // number of rows that are stored, or of pairs with WEIGHTED
  int outputs;             // outputs of a matrix
  int group;               // number of outputs that share a scale
  int blocks;              // blocks of inputs
  int row_tiles, output_tiles;
  int units;               // number of stages of a block, or 0 for whole tiles in turn
};

// -- a block's work -----------------------------------------------------------------------------
// With `units` (stream-K), all stages of all tiles are divided evenly: a block has the stages from `block * units`
// on, and may begin or end inside a tile. Otherwise, tile i of a block is tile `block + i * blocks`. Tiles of the
// same outputs are consecutive, so that weights are read from memory once.

struct Tile {
  int number, rows, outputs;  // index, first slot and first output
  int begin, end;             // blocks of inputs
  int expert;
};

struct TileScheduler {
  int at, stop, row_tiles, step;

  DEVICE explicit TileScheduler(const Args& a) {
    row_tiles = a.used ? *a.used : a.row_tiles;
    step = block_count() * a.blocks;
    const int all = row_tiles * a.output_tiles * a.blocks;
    at = block_index() * (a.units ? a.units : a.blocks);
    stop = a.units && at + a.units < all ? at + a.units : all;
  }

  // Returns false if no tile is left.
  template <int TOKENS, int OUTPUTS> DEVICE bool next(const Args& a, Tile& tile) {
    if (at >= stop) return false;
    tile.number = at / a.blocks;
    tile.begin = at - tile.number * a.blocks;
    tile.end = tile.begin + stop - at < a.blocks ? tile.begin + stop - at : a.blocks;
    at += a.units ? tile.end - tile.begin : step;
    const int row_tile = tile.number % row_tiles;
    tile.rows = row_tile * TOKENS;
    tile.outputs = tile.number / row_tiles * OUTPUTS;
    tile.expert = a.owners ? a.owners[row_tile] : 0;
    return true;
  }
};

// Returns the first row of half `m` of a tile, within the expert's matrix.
template <int EPILOGUE> DEVICE int half_of(const Args& a, const Tile& tile, int m) {
  return EPILOGUE == SWIGLU ? m * (a.outputs / 2) + tile.outputs : tile.outputs + 128 * m;
}

// -- the ring -----------------------------------------------------------------------------------

template <int TOKENS, int HALVES, int STAGES> struct Ring {
  static constexpr int ROWS = HALVES * HALF, STAGE = ROWS + TOKENS * BLOCK;
  u32 stages, scales, full, empty;  // shared addresses
  int at = 0;
  u32 parity = 0;

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
  DEVICE u32 weights_at(int m, int group) const { return stages + at * STAGE + m * HALF + group * HALF / 2; }
  DEVICE u32 rows_at() const { return stages + at * STAGE + ROWS; }
  DEVICE u32 scales_at() const { return scales + at * TOKENS * 4; }
};

template <int TOKENS, int HALVES, int STAGES, int EPILOGUE> struct Producer {
  static constexpr int OUTPUTS = EPILOGUE == SWIGLU ? 128 : 128 * HALVES;
  const Args& a;

  DEVICE void copy_weights(const Ring<TOKENS, HALVES, STAGES>& ring, const Tile& tile, int b) {
    const u32 bar = ring.full + 8 * ring.at;
    // All bytes of a box are counted, although parts outside the matrix are not read but set to zero.
    barrier_expect(bar, ring.STAGE + TOKENS * 4);
#pragma unroll
    for (int m = 0; m < HALVES; ++m)
      copy_rows(ring.weights_at(m, 0), &a.weight, tile.expert * a.outputs + half_of<EPILOGUE>(a, tile, m), b, bar);
  }

  DEVICE void copy_activations(const Ring<TOKENS, HALVES, STAGES>& ring, const Tile& tile, int b) {
    const u32 bar = ring.full + 8 * ring.at;
    const long first = (long)b * a.slots + tile.rows;
    copy_line(ring.rows_at(), a.rows + first * BLOCK, TOKENS * BLOCK, bar);
    copy_line(ring.scales_at(), a.row_scales + first, TOKENS * 4, bar);
  }

  // Copies all stages. Fills the ring with weights while the previous kernel is still rounding
  // activations.
  DEVICE void run(Ring<TOKENS, HALVES, STAGES> ring) {
    prefetch_map(&a.weight);
    TileScheduler scheduler(a);
    Tile tile;
    if (!scheduler.template next<TOKENS, OUTPUTS>(a, tile)) return await_previous();
    Ring<TOKENS, HALVES, STAGES> early = ring;
    const int filled = tile.end - tile.begin < STAGES ? tile.end : tile.begin + STAGES;
    for (int b = tile.begin; b < filled; ++b, early.next()) copy_weights(early, tile, b);
    await_previous();
    for (int b = tile.begin; b < filled; ++b, ring.next()) copy_activations(ring, tile, b);
    int begin = filled;  // of the first tile; -1 for the others
    do {
      for (int b = begin < 0 ? tile.begin : begin; b < tile.end; ++b, ring.next()) {
        ring.wait_empty();
        copy_weights(ring, tile, b);
        copy_activations(ring, tile, b);
      }
      begin = -1;
    } while (scheduler.template next<TOKENS, OUTPUTS>(a, tile));
  }
};

// -- sums ---------------------------------------------------------------------------------------

// Returns the scale of a warp's 16 outputs in 32 blocks of inputs, one block in each lane.
template <int EPILOGUE> DEVICE float scales_of(const Args& a, const Tile& tile, int m, int warp, int b) {
  const int lane = thread_index() % 32;
  int output = half_of<EPILOGUE>(a, tile, m) + 16 * warp;
  if (output >= a.outputs) output = a.outputs - 1;
  const int groups = (a.outputs + a.group - 1) / a.group;
  const long at = ((long)tile.expert * groups + output / a.group) * a.blocks + b + lane;
  return b + lane < tile.end ? a.scales[at] : 0.f;
}

// Adds up the products of the tile's stages. `warp` counts the warps of both groups.
template <int TOKENS, int HALVES, int STAGES, int EPILOGUE>
DEVICE void add_up(const Args& a, const Tile& tile, Ring<TOKENS, HALVES, STAGES>& ring, int warp,
                   float (&sums)[HALVES][TOKENS / 2]) {
  const int lane = thread_index() % 32;
  float held[HALVES], product[TOKENS / 2];
#pragma unroll
  for (int m = 0; m < HALVES; ++m)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[m][i] = 0.f;
#pragma unroll 1
  for (int b = tile.begin; b < tile.end; ++b) {
    const int turn = (b - tile.begin) % 32;
    if (turn == 0)
#pragma unroll
      for (int m = 0; m < HALVES; ++m) held[m] = scales_of<EPILOGUE>(a, tile, m, warp, b);
    ring.wait_full();
    const u32 scales = ring.scales_at() + lane % 4 * 8;
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
      const u64 weights = operand_at(ring.weights_at(m, warp / 4)), rows = operand_at(ring.rows_at());
      pin(product);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply(product, weights + 2 * k, rows + 2 * k, k > 0);
      await_products();
      pin(product);
      const float scale = shuffle(held[m], turn);
#pragma unroll
      for (int i = 0; i < TOKENS / 8; ++i) {
        const float2 by = get_shared8(scales + 32 * i);
        const float first = scale * by.x, second = scale * by.y;
        sums[m][4 * i] += product[4 * i] * first;
        sums[m][4 * i + 1] += product[4 * i + 1] * second;
        sums[m][4 * i + 2] += product[4 * i + 2] * first;
        sums[m][4 * i + 3] += product[4 * i + 3] * second;
      }
    }
    sync_warp();
    if (lane == 0) barrier_arrive(ring.empty + 8 * ring.at);
    ring.next();
  }
}

// -- tiles that several blocks compute ------------------------------------------------------------

// Returns a block's part of a tile. A block may have two: one that begins with its tile, and one
// that does not.
template <int TOKENS, int HALVES> DEVICE uint4* part_of(const Args& a, int block, bool whole_beginning) {
  return a.parts + (long)(2 * block + whole_beginning) * HALVES * (TOKENS / 8) * MULTIPLIERS + thread_index() - 128;
}

// Stores this block's part of a tile. The last block to do so adds all parts, in order, and returns
// true.
template <int TOKENS, int HALVES> DEVICE bool reduce_parts(const Args& a, const Tile& tile, u32 shared_word, float (&sums)[HALVES][TOKENS / 2]) {
  uint4* mine = part_of<TOKENS, HALVES>(a, block_index(), tile.begin == 0);
#pragma unroll
  for (int m = 0; m < HALVES; ++m)
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
      const float* four = sums[m] + 4 * i;
      put16(mine + (m * (TOKENS / 8) + i) * MULTIPLIERS, uint4{bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])});
    }
  const int begin = tile.number * a.blocks, first = begin / a.units, last = (begin + a.blocks - 1) / a.units;
  int* word = (int*)(dynamic_shared() + shared_word);
  sync_consumers<MULTIPLIERS>();
  if (thread_index() == 128) {
    const int before = add_acquire_release(a.arrivals + tile.number, 1);
    put_shared4(word, before == last - first);
    if (before == last - first) a.arrivals[tile.number] = 0;
  }
  sync_consumers<MULTIPLIERS>();
  if (!get_shared4(word)) return false;
#pragma unroll
  for (int m = 0; m < HALVES; ++m)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[m][i] = 0.f;
#pragma unroll 1
  for (int block = first; block <= last; ++block) {
    const uint4* part = part_of<TOKENS, HALVES>(a, block, block * a.units <= begin);
#pragma unroll
    for (int m = 0; m < HALVES; ++m)
#pragma unroll
      for (int i = 0; i < TOKENS / 8; ++i) {
        const uint4 four = get16(part + (m * (TOKENS / 8) + i) * MULTIPLIERS);
        sums[m][4 * i] += from_bits(four.x);
        sums[m][4 * i + 1] += from_bits(four.y);
        sums[m][4 * i + 2] += from_bits(four.z);
        sums[m][4 * i + 3] += from_bits(four.w);
      }
  }
  return true;
}

// -- epilogues ----------------------------------------------------------------------------------

// Stores two outputs of one row if they are inside the matrix.
DEVICE void store_two(u16* y, u32 two, int output, int outputs) {
  if (output + 1 < outputs && ((long)y & 3) == 0)
    put4(y, two);
  else {
    if (output < outputs) y[0] = (u16)two;
    if (output + 1 < outputs) y[1] = (u16)(two >> 16);
  }
}

// The rows that a lane stores, and their shares (routing weights). All are read at the same time,
// because each would wait for memory if they were read one after the other.
template <int TOKENS> struct Places {
  int rows[TOKENS / 8];
  float shares[TOKENS / 8];
};

template <int TOKENS, int EPILOGUE> DEVICE void find_places(const Args& a, const Tile& tile, Places<TOKENS>& places) {
  const int g = thread_index() % 32 / 4;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
    places.rows[i] = tile.rows + 8 * i + g;
    if (EPILOGUE == WEIGHTED) places.rows[i] = a.pairs[places.rows[i]];
  }
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i)
    places.shares[i] = EPILOGUE == WEIGHTED && places.rows[i] < a.count ? a.shares[places.rows[i]] : 0.f;
}

// Stores bf16 (rows, outputs), in the row of each slot, or of its pair.
template <int TOKENS, int EPILOGUE>
DEVICE void store_rows(const Args& a, const Places<TOKENS>& places, int first, const float (&sums)[TOKENS / 2]) {
  const int t = thread_index() % 4, g = thread_index() % 32 / 4;
  float bias[2] = {0.f, 0.f};
  if (EPILOGUE == LINEAR && a.bias)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first + g + 8 * h < a.outputs) bias[h] = from_bits((u32)a.bias[first + g + 8 * h] << 16);
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
    const int row = places.rows[i];
    // A lane holds the share of the row that it stores after the transpose; its sums still belong to others.
    const float low_share = EPILOGUE == WEIGHTED ? shuffle(places.shares[i], 8 * t) : 1.f;
    const float high_share = EPILOGUE == WEIGHTED ? shuffle(places.shares[i], 8 * t + 4) : 1.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = sums[4 * i + 2 * h] * low_share + bias[h], high = sums[4 * i + 2 * h + 1] * high_share + bias[h];
      const u32 two = transpose(pack(low, high));
      const int output = first + 8 * h + 2 * t;
      if (row < a.count) store_two((u16*)a.y + (long)row * a.outputs + output, two, output, a.outputs);
    }
  }
}

// Returns the scale by which the largest number of a block becomes the largest e4m3 number.
DEVICE float scale_of(float largest) { return greater(largest, LEAST) * (1.f / LARGEST); }
DEVICE float rounded_to_bf16(float x) { return from_bits(pack(0.f, x)); }

// Stores e4m3 (blocks, slots, 128) and a scale for each slot and block. This tile's outputs are one
// block.
template <int TOKENS>
DEVICE void store_swiglu(const Args& a, const Tile& tile, int warp, float (&gate)[TOKENS / 2], const float (&up)[TOKENS / 2], u32 greatest) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4, block = tile.outputs / BLOCK;
  for (int i = thread_index() - 128; i < TOKENS; i += MULTIPLIERS) put_shared4((int*)(dynamic_shared() + greatest) + i, 0);
  sync_consumers<MULTIPLIERS>();
  const u32 sizes = address_of(dynamic_shared() + greatest);
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i)
    gate[i] = rounded_to_bf16(gate[i] * inverse_of(1.f + exp2_of(-1.44269504f * gate[i])) * up[i]);
#pragma unroll
  for (int i = 0; i < TOKENS / 4; ++i) {
    const int at = i / 2 * 4 + i % 2;
    float size = greater_size(gate[at], gate[at + 2]);
    size = greater(size, shuffle_xor(size, 4));
    size = greater(size, shuffle_xor(size, 8));
    size = greater(size, shuffle_xor(size, 16));
    if (g == 0) max_shared(sizes + (i / 2 * 8 + 2 * t + i % 2) * 4, bits_of(size));
  }
  sync_consumers<MULTIPLIERS>();
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
    const float2 size = get_shared8(sizes + 32 * i + 8 * t);
    const float first = scale_of(size.x), second = scale_of(size.y);
    const float low_by = inverse_of(first), high_by = inverse_of(second);
    // Outputs g and g + 8 of one row form a 16-bit number; after the transpose, lanes have 2t, 2t + 8, ...
    const u32 low = round_to_bytes(gate[4 * i] * low_by, gate[4 * i + 2] * low_by);
    const u32 high = round_to_bytes(gate[4 * i + 1] * high_by, gate[4 * i + 3] * high_by);
    const u32 four = transpose(low | high << 16);
    const int slot = tile.rows + 8 * i + g;
    u8* chunk = (u8*)a.y + ((long)block * a.slots + slot) * BLOCK + (warp ^ g) * 16;
    const u32 ordered = bytes_of<0x3120>(four, 0);
    *(u16*)(chunk + 2 * t) = (u16)ordered;
    *(u16*)(chunk + 8 + 2 * t) = (u16)(ordered >> 16);
    if (warp == 0 && g == 0) {
      a.y_scales[(long)block * a.slots + tile.rows + 8 * i + 2 * t] = first;
      a.y_scales[(long)block * a.slots + tile.rows + 8 * i + 2 * t + 1] = second;
    }
  }
}

template <int TOKENS, int HALVES, int STAGES, int EPILOGUE>
DEVICE void consume(const Args& a, Ring<TOKENS, HALVES, STAGES> ring, u32 greatest, u32 word) {
  constexpr int OUTPUTS = EPILOGUE == SWIGLU ? 128 : 128 * HALVES;
  const int warp = thread_index() / 32 - 4;
  float sums[HALVES][TOKENS / 2];
  TileScheduler scheduler(a);
  Tile tile;
#pragma unroll 1
  while (scheduler.template next<TOKENS, OUTPUTS>(a, tile)) {
    add_up<TOKENS, HALVES, STAGES, EPILOGUE>(a, tile, ring, warp, sums);
    if (EPILOGUE == LINEAR && tile.end - tile.begin < a.blocks && !reduce_parts<TOKENS, HALVES>(a, tile, word, sums)) continue;
    if constexpr (EPILOGUE == SWIGLU) {
      store_swiglu<TOKENS>(a, tile, warp, sums[0], sums[HALVES - 1], greatest);
    } else {
      Places<TOKENS> places;
      find_places<TOKENS, EPILOGUE>(a, tile, places);
      store_rows<TOKENS, EPILOGUE>(a, places, half_of<EPILOGUE>(a, tile, 0) + 16 * warp, sums[0]);
      if constexpr (HALVES == 2)
        store_rows<TOKENS, EPILOGUE>(a, places, half_of<EPILOGUE>(a, tile, 1) + 16 * warp, sums[1]);
    }
  }
}

// Divides shared memory from `base`, a multiple of 1,024, into stages, scales of rows, largest
// magnitudes, barriers, and a word; then runs the producer or a consumer.
template <int TOKENS, int HALVES, int STAGES, int EPILOGUE> DEVICE void run(const Args& a) {
  u8* memory = dynamic_shared();
  const u32 shift = (1024 - address_of(memory) % 1024) % 1024, base = address_of(memory) + shift;
  Ring<TOKENS, HALVES, STAGES> ring;
  ring.stages = base;
  ring.scales = base + STAGES * ring.STAGE;
  const u32 greatest = shift + STAGES * (ring.STAGE + TOKENS * 4);  // offset from `memory`
  ring.full = address_of(memory) + greatest + TOKENS * 4;
  ring.empty = ring.full + 8 * STAGES;
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, MULTIPLIER_WARPS);
    }
    barriers_are_ready();
  }
  sync_block();
  // Tiles of 128 rows need all registers. Blocks of smaller tiles fit next to those of the previous kernel.
  if (thread_index() < 128) {
    if (TOKENS == 128) fewer_registers<40>();
    if (thread_index() == 0) Producer<TOKENS, HALVES, STAGES, EPILOGUE>{a}.run(ring);
  } else {
    if (TOKENS == 128) more_registers<232>();
    consume<TOKENS, HALVES, STAGES, EPILOGUE>(a, ring, greatest, greatest + TOKENS * 4 + 16 * STAGES);
  }
}

// -- rows of e4m3 -------------------------------------------------------------------------------

struct RoundArgs {
  const u16* x;       // bf16 (tokens, inputs)
  u8* rows;           // as in Args
  float* scales;
  const int* pairs;   // as in Args; null if each slot has the row of the same index
  const int* used;
  int inputs, offset; // `offset` zeros precede the first input
  int count;          // number of rows, or of pairs
  int slots, chosen, tokens, blocks;
};

// Returns the row of a slot, or -1 if it has none.
DEVICE int row_of(const RoundArgs& a, int slot) {
  const int pair = a.pairs ? a.pairs[slot] : slot;
  return pair < a.count ? pair / a.chosen : -1;
}

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
DEVICE u32 rounded_by(u32 two, float by) { return round_to_bytes(low_of(two) * by, high_of(two) * by); }

// Rounds blocks of a slot. Half a warp rounds a block, with eight inputs in each lane.
DEVICE void round_slot(const RoundArgs& a, int slot, int first) {
  const int lane = thread_index() % 16, row = row_of(a, slot);
  if (row < 0) return;
  first += thread_index() / 16 % 2;
  uint4 found[AT_ONCE / 2];
#pragma unroll
  for (int n = 0; n < AT_ONCE / 2; ++n) {
    found[n] = uint4{0, 0, 0, 0};
    if (first + 2 * n < a.blocks) found[n] = eight_of(a, row, (first + 2 * n) * BLOCK + 8 * lane - a.offset);
  }
#pragma unroll
  for (int n = 0; n < AT_ONCE / 2; ++n) {
    const uint4 v = found[n];
    float size = greater(greater(largest_of(v.x), largest_of(v.y)), greater(largest_of(v.z), largest_of(v.w)));
#pragma unroll
    for (int mask = 8; mask; mask /= 2) size = greater(size, shuffle_xor(size, mask));
    const float scale = scale_of(size), by = inverse_of(scale);
    if (first + 2 * n >= a.blocks) continue;
    const long at = (long)(first + 2 * n) * a.slots + slot;
    const uint2 eight{rounded_by(v.x, by) | rounded_by(v.y, by) << 16, rounded_by(v.z, by) | rounded_by(v.w, by) << 16};
    *(uint2*)(a.rows + at * BLOCK + (lane / 2 ^ slot % 8) * 16 + lane % 2 * 8) = eight;
    if (lane == 0) a.scales[at] = scale;
  }
}

// Rounds all slots; one warp rounds AT_ONCE blocks of a slot. Slots without a row are not written.
DEVICE void round_all(const RoundArgs& a) {
  // In this order: the product, which starts next, reads results of earlier kernels before it waits.
  await_previous();
  allow_next();
  const int each = (a.blocks + AT_ONCE - 1) / AT_ONCE, warps = block_count() * ROUNDING_WARPS;
  const int slots = a.used ? *a.used * a.tokens : a.slots;
  for (int at = block_index() * ROUNDING_WARPS + thread_index() / 32; at < slots * each; at += warps)
    round_slot(a, at / each, at % each * AT_ONCE);
}
