// Attention over the paged cache, for any mix of context lengths.
//
// A *pair* is a row and a key-value head, whose group of query heads share keys and values. All pairs form
// a line, in which the length of a pair is its context in units of UNIT tokens. Every block gets the same
// number of units of the line: its *segments*, each a part of one pair's context. If padding pairs to a
// multiple of this number costs little, they are padded, so that no block has more than one segment. Every
// block computes its own segments.
//
// A pair that lies in one block is finished there. Otherwise, each block that has a part of the pair writes
// its unnormalized outputs, maximum and sum as flagged words, and combines all parts for its own share of
// the dimensions.

constexpr int GROUP_HEADS = HEADS / KV_HEADS;
constexpr int EACH = HEAD_DIM / 32;    // dimensions of a head per lane: lane + 32 i
constexpr int HALVES = HEAD_DIM / 64;  // halves of a head, 64 dimensions each
constexpr int QUERY_PITCH = HEAD_DIM + 32;
constexpr int UNIT = 64;               // tokens
constexpr int TURN = WARPS * 16;       // tokens that a block's warps process at a time
constexpr int PAIR_WORDS = GROUP_HEADS * HEAD_DIM / 2;  // outputs of a pair, two in a word
constexpr float NOTHING = -1e30f;      // the maximum of no scores

// -- division among blocks --------------------------------------------------------------------

struct Segment {
  int row, kv_head;
  int begin, end;          // tokens of the cache
  bool has_new;            // whether it includes the token of this step
  int first_block, parts;  // first block with a part of the pair, and number of parts
  int next;                // position in the line of the next segment
};

// In shared memory; computed once per step.
struct Plan {
  int share;               // units of a block
  int past[ROWS];          // tokens of each row in the cache
  int units[ROWS];         // units of a pair of each row
  int padded[ROWS];        // the same with padding, as in the line
  int starts[ROWS + 1];    // position in the line of each row's first pair
  int begin, end;          // this block's part of the line, which may be empty
  Segment first;           // its first segment, if it is not empty
};

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE int sum_of_lanes(int v) {
#pragma unroll
  for (int i = 16; i; i >>= 1) v += shuffle_xor(v, i);
  return v;
}

// Run by one warp, whose lane r handles row r.
DEVICE void make_plan(const Args& a, Plan& plan, int lane) {
  const bool there = lane < ROWS;
  const int past = there && a.contexts[lane] > 1 ? a.contexts[lane] - 1 : 0;
  const int units = !there ? 0 : past > UNIT ? ceil_div(past, UNIT) : 1;
  const int total = KV_HEADS * sum_of_lanes(units);
  const int even = ceil_div(total, BLOCKS);
  // The smallest share with which no block has parts of two pairs, if one not much larger exists.
  int low = even, high = even + even / 4 + 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (KV_HEADS * sum_of_lanes(ceil_div(units, middle)) <= BLOCKS)
      high = middle;
    else
      low = middle + 1;
  }
  const bool own = KV_HEADS * sum_of_lanes(ceil_div(units, low)) <= BLOCKS;
  const int share = own ? low : even;
  const int padded = own ? ceil_div(units, share) * share : units;
  int end = KV_HEADS * padded;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int before = shuffle(end, lane >= i ? lane - i : lane);
    if (lane >= i) end += before;
  }
  if (there) {
    plan.past[lane] = past;
    plan.units[lane] = units;
    plan.padded[lane] = padded;
    plan.starts[lane + 1] = end;
  }
  if (lane == 0) {
    plan.starts[0] = 0;
    plan.share = share;
  }
}

// Returns the segment of this block's share that begins at position `at` of the line. `at` must be
// before the share's end.
DEVICE Segment segment_at(const Plan& plan, int at) {
  int row = 0;
  while (row + 1 < ROWS && plan.starts[row + 1] <= at) ++row;
  const int padded = plan.padded[row], units = plan.units[row], past = plan.past[row], share = plan.share;
  const int kv_head = (at - plan.starts[row]) / padded, pair = plan.starts[row] + kv_head * padded;
  const int limit = (block_index() + 1) * share, pair_end = pair + units;
  const int from = at - pair, to = (limit < pair_end ? limit : pair_end) - pair;
  Segment s;
  s.row = row;
  s.kv_head = kv_head;
  s.begin = from * UNIT;
  s.end = to * UNIT < past ? to * UNIT : past;
  s.has_new = from < to && to == units;
  s.first_block = pair / share;
  s.parts = (pair_end - 1) / share - s.first_block + 1;
  s.next = pair + padded < limit ? pair + padded : limit;
  return s;
}

// Run by one thread, after make_plan().
DEVICE void find_first(Plan& plan) {
  const int begin = block_index() * plan.share, line = plan.starts[ROWS];
  plan.begin = begin;
  plan.end = begin + plan.share < line ? begin + plan.share : line;
  if (begin < line) plan.first = segment_at(plan, begin);
}

// Returns the index of a block's part of a pair. A block has at most one part of a pair that begins
// before its share, and at most one part of a pair that begins in its share and continues after it.
DEVICE int part_of(const Segment& s, int block) { return block * 2 + (block == s.first_block); }

// -- loads ------------------------------------------------------------------------------------
// A warp processes 16 tokens at a time. For scores, a product's rows are keys, and its columns are the heads
// of the group. For values, its rows are the heads. Tokens and dimensions are mapped to the product so that
// thread (g, t) reads 16 bytes of each of tokens 2t, 2t + 1, 2t + 8, 2t + 9: dimensions 64 half + 8 g.

struct Keys { uint4 near[EACH], far[EACH]; };  // of tokens g and g + 8
struct Values { uint4 v[HALVES][4]; };

// Missing tokens become zero and are not read, because memory past the end of a context may contain
// anything.
DEVICE uint4 load_if(bool there, const u16* p) { return there ? load16(p) : uint4{0, 0, 0, 0}; }

DEVICE void load_keys(Keys& k, const u16* keys, u64 token, int kv_head, int left, int lane) {
  const u16* p = keys + ((token + lane / 4) * KV_HEADS + kv_head) * HEAD_DIM + lane % 4 * 8;
#pragma unroll
  for (int c = 0; c < EACH; ++c) {
    k.near[c] = load_if(lane / 4 < left, p + c * 32);
    k.far[c] = load_if(lane / 4 + 8 < left, p + 8 * KV_HEADS * HEAD_DIM + c * 32);
  }
}

DEVICE void load_values(Values& v, const u16* values, u64 token, int kv_head, int left, int lane) {
  const int first = lane % 4 * 2;
  const u16* p = values + ((token + first) * KV_HEADS + kv_head) * HEAD_DIM + lane / 4 * 8;
#pragma unroll
  for (int h = 0; h < HALVES; ++h)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int other = i % 2 + i / 2 * 8;
      v.v[h][i] = load_if(first + other < left, p + other * KV_HEADS * HEAD_DIM + h * 64);
    }
}

// -- a warp's softmax -------------------------------------------------------------------------

struct Softmax {
  float top[2] = {NOTHING, NOTHING}, sum[2] = {};  // of heads 2t, 2t + 1
  float out[HALVES][4][2][2] = {};                 // of head g: half, word, parity, which of two dimensions
};

DEVICE void scores(float (&s)[4], const Keys& k, u32 queries) {
  float more[4] = {0, 0, 0, 0};
#pragma unroll
  for (int c = 0; c < EACH; ++c) {
    const uint4 q = get_shared16(queries + c * 64);
    mma(s, k.near[c].x, k.far[c].x, k.near[c].y, k.far[c].y, q.x, q.y);
    mma(more, k.near[c].z, k.far[c].z, k.near[c].w, k.far[c].w, q.z, q.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] += more[i];
}

// Converts the scores of tokens g (s[0], s[1]) and g + 8 (s[2], s[3]) with heads 2t, 2t + 1 to
// softmax weights, of which `left` tokens exist. Scales `f.out` to the new maximum. Returns the
// weights in the layout of the next product: head g, tokens 2t, 2t + 1 in a0 and 2t + 8, 2t + 9 in
// a2.
DEVICE void soften(Softmax& f, float (&s)[4], int left, u32& a0, u32& a2, int lane) {
  const int g = lane >> 2;
  const bool near = g < left, far = g + 8 < left;
  float fade[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = greater(near ? s[h] : NOTHING, far ? s[h + 2] : NOTHING);
#pragma unroll
    for (int i = 4; i < 32; i *= 2) top = greater(top, shuffle_xor(top, i));
    top = greater(top, f.top[h]);
    fade[h] = exp2_of(f.top[h] - top);
    f.top[h] = top;
    s[h] = near ? exp2_of(s[h] - top) : 0.f;
    s[h + 2] = far ? exp2_of(s[h + 2] - top) : 0.f;
    f.sum[h] = f.sum[h] * fade[h] + s[h] + s[h + 2];
  }
  const u32 first = pack(s[0], s[1]), second = pack(s[2], s[3]);
  const int from = (lane & 3) * 8 + (g >> 1);
  const u32 select = g & 1 ? 0x7632 : 0x5410;
  a0 = bytes_of(shuffle(first, from), shuffle(first, from + 4), select);
  a2 = bytes_of(shuffle(second, from), shuffle(second, from + 4), select);
  const float even = shuffle(fade[0], g >> 1), odd = shuffle(fade[1], g >> 1);
  const float mine = g & 1 ? odd : even;
#pragma unroll
  for (int h = 0; h < HALVES; ++h)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        f.out[h][i][p][0] *= mine;
        f.out[h][i][p][1] *= mine;
      }
}

DEVICE void add_two(float (&out)[2][2], u32 w0, u32 w1, u32 w2, u32 w3, u32 a0, u32 a2) {
  mma_upper(out[0][0], out[0][1], a0, a2, bytes_of<0x5410>(w0, w1), bytes_of<0x5410>(w2, w3));
  mma_upper(out[1][0], out[1][1], a0, a2, bytes_of<0x7632>(w0, w1), bytes_of<0x7632>(w2, w3));
}

DEVICE void add_values(Softmax& f, const Values& v, u32 a0, u32 a2) {
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    add_two(f.out[h][0], v.v[h][0].x, v.v[h][1].x, v.v[h][2].x, v.v[h][3].x, a0, a2);
    add_two(f.out[h][1], v.v[h][0].y, v.v[h][1].y, v.v[h][2].y, v.v[h][3].y, a0, a2);
    add_two(f.out[h][2], v.v[h][0].z, v.v[h][1].z, v.v[h][2].z, v.v[h][3].z, a0, a2);
    add_two(f.out[h][3], v.v[h][0].w, v.v[h][1].w, v.v[h][2].w, v.v[h][3].w, a0, a2);
  }
}

// -- a block's segment ------------------------------------------------------------------------

struct Attention {
  u16 queries[8 * QUERY_PITCH];  // of the group's heads, scaled; the other rows stay zero
  float fresh[2][HEAD_DIM];      // key and value of the new token
  float tops[WARPS + 1][8], sums[WARPS + 1][8];  // maxima and sums of each warp, and of the new token
};

struct Paged {
  const u16 *keys, *values;  // the layer's cache
  const int* table;          // the row's block table
  DEVICE u64 place_of(int token) const {
    return (u64)table[token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE;
  }
};

DEVICE Paged paged(const Args& a, int layer, int row) {
  return Paged{a.layers[layer].keys, a.layers[layer].values, a.tables + (u64)a.slots[row] * a.table_stride};
}

// Prefetches the beginning of the first segment into L2 before the queries arrive.
DEVICE void prefetch_segment(const Args& a, const Segment& s, int layer) {
  const Paged cache = paged(a, layer, s.row);
  constexpr int LINES = HEAD_DIM / 64, TOKENS = THREADS / LINES;  // of 128 bytes
  const int thread = thread_index();
#pragma unroll 1
  for (int turn = 0; turn < 4; ++turn) {
    const int token = s.begin + turn * TOKENS + thread / LINES;
    if (token < s.end) {
      const u64 at = (cache.place_of(token) * KV_HEADS + s.kv_head) * HEAD_DIM + thread % LINES * 64;
      prefetch(cache.keys + at);
      prefetch(cache.values + at);
    }
  }
}

// Receives a head that another block has handed over, with one warp.
DEVICE void receive_head(const Consumer& k, float (&v)[EACH], const uint4* words, int where) {
  // A pair of words holds two adjacent dimensions, but a lane needs every 32nd dimension.
  const uint2* from = (const uint2*)words + k.lane;
  const u32 flag = k.flag + QUERIES;
  Patience patience;
  while (true) {
    bool good = true;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const uint2 word = get8(from + 32 * i);
      v[i] = from_bits(word.x);
      good = good && word.y == flag;
    }
    if (good) return;
    patience.poll(k.a, WAIT_WORDS, where);
  }
}

DEVICE void norm_head(const Consumer& k, float (&v)[EACH], const float (&weight)[EACH]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum += v[i] * v[i];
#pragma unroll
  for (int i = 16; i; i >>= 1) sum += shuffle_xor(sum, i);
  const float scale = rsqrt_of(sum / HEAD_DIM + k.a.eps);
#pragma unroll
  for (int i = 0; i < EACH; ++i) v[i] *= scale * weight[i];
}

DEVICE void rotate_head(float (&v)[EACH], const float (&co)[EACH / 2], const float (&si)[EACH / 2]) {
#pragma unroll
  for (int i = 0; i < EACH / 2; ++i) {
    const float a = v[i], b = v[i + EACH / 2];
    v[i] = a * co[i] - b * si[i];
    v[i + EACH / 2] = b * co[i] + a * si[i];
  }
}

// Non-finite numbers are stored as 0, because attention of other requests may read whole cache
// blocks.
DEVICE u16 finite_bf16(float v) {
  const u32 bits = pack(v, 0) & 0xffff;
  return (bits & 0x7f80) == 0x7f80 ? 0 : bits;
}

// Receives the group's queries (the first roles) and the new token's key and value (the last two
// roles).
DEVICE void receive_queries(const Consumer& k, Attention& m, const Segment& s) {
  const LayerArgs& layer = k.a.layers[k.layer];
  const int roles = GROUP_HEADS + (s.has_new ? 2 : 0);
#pragma unroll 1
  for (int role = k.warp; role < roles; role += WARPS) {
    const bool is_query = role < GROUP_HEADS, is_value = role == GROUP_HEADS + 1;
    const int head = is_query ? s.kv_head * GROUP_HEADS + role : is_value ? HEADS + KV_HEADS + s.kv_head : HEADS + s.kv_head;
    const u16* norm = is_query ? layer.q_norm : layer.k_norm;
    const u64 angle = (u64)k.a.positions[s.row] * (HEAD_DIM / 2) + k.lane;
    float v[EACH], weight[EACH], co[EACH / 2], si[EACH / 2];
#pragma unroll
    for (int i = 0; i < EACH; ++i) weight[i] = QK_NORM ? widen(norm[k.lane + 32 * i]) : 1.f;
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) {
      co[i] = widen(k.a.cos[angle + 32 * i]);
      si[i] = widen(k.a.sin[angle + 32 * i]);
    }
    receive_head(k, v, k.a.queries + (s.row * QKV + head * HEAD_DIM) / 2, k.where(ATTENTION));
    if (!is_value) {
      if (QK_NORM) norm_head(k, v, weight);
      rotate_head(v, co, si);
    }
    u16* to = (is_value ? layer.values : layer.keys) + ((u64)k.a.places[s.row] * KV_HEADS + s.kv_head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int dim = k.lane + 32 * i;
      if (is_query) {
        m.queries[role * QUERY_PITCH + dim] = (u16)pack(v[i] * k.a.scale, 0);
      } else {
        const u16 bits = finite_bf16(v[i]);
        to[dim] = bits;
        m.fresh[is_value][dim] = widen(bits);
      }
    }
  }
}

// Whether the first tokens of the cache are loaded before the queries arrive. Measured on an H200,
// this is faster for one row of a mixture of experts, but not for dense models.
constexpr bool LOADS_EARLY = EXPERTS > 0 && ROWS == 1;

// Keys and values of 16 tokens of a warp.
struct Tokens {
  Keys keys;
  Values values;
};

// Loads this warp's first tokens of a segment, if it has any.
DEVICE void load_first(const Consumer& k, const Segment& s, Tokens& t) {
  const int token = s.begin + k.warp * 16;
  if (token >= s.end) return;
  const Paged cache = paged(k.a, k.layer, s.row);
  const u64 at = cache.place_of(token);
  load_keys(t.keys, cache.keys, at, s.kv_head, s.end - token, k.lane);
  load_values(t.values, cache.values, at, s.kv_head, s.end - token, k.lane);
}

// Computes the attention of this warp's tokens of a segment: 16 of every TURN tokens.
DEVICE void attend_cache(const Consumer& k, const Attention& m, const Segment& s, Tokens& t, Softmax& f) {
  const Paged cache = paged(k.a, k.layer, s.row);
  const u32 queries = address_of(m.queries) + (k.lane / 4 * QUERY_PITCH + k.lane % 4 * 8) * 2;
  int token = s.begin + k.warp * 16;
  if (token >= s.end) return;
  if (!LOADS_EARLY) load_first(k, s, t);
  u64 at = 0;
#pragma unroll 1
  for (; token < s.end; token += TURN) {
    const int left = s.end - token, more = left - TURN;
    float score[4] = {0, 0, 0, 0};
    u32 a0, a2;
    if (more > 0) at = cache.place_of(token + TURN);
    scores(score, t.keys, queries);
    if (more > 0) load_keys(t.keys, cache.keys, at, s.kv_head, more, k.lane);
    soften(f, score, left, a0, a2, k.lane);
    add_values(f, t.values, a0, a2);
    if (more > 0) load_values(t.values, cache.values, at, s.kv_head, more, k.lane);
  }
}

// Writes a warp's results to shared memory, where the results of all warps are combined.
DEVICE void keep_softmax(const Consumer& k, Attention& m, Softmax& f) {
  const int g = k.lane / 4, t = k.lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) f.sum[h] += shuffle_xor(f.sum[h], i);
    if (g == 0) {
      m.tops[k.warp][2 * t + h] = f.top[h];
      m.sums[k.warp][2 * t + h] = f.sum[h];
    }
  }
  if (g < GROUP_HEADS)
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float4* to = (float4*)(k.partials + (k.warp * GROUP_HEADS + g) * HEAD_DIM + h * 64 + (2 * t + n) * 8);
        to[0] = float4{f.out[h][0][0][n], f.out[h][0][1][n], f.out[h][1][0][n], f.out[h][1][1][n]};
        to[1] = float4{f.out[h][2][0][n], f.out[h][2][1][n], f.out[h][3][0][n], f.out[h][3][1][n]};
      }
}

// Computes the new token's score with a head. In combine_warps(), the token's weight is 1.
DEVICE void attend_new(const Consumer& k, Attention& m, const Segment& s) {
  const int head = WARPS - 1 - k.warp;  // in short contexts, only lower warps have tokens
  if (head >= GROUP_HEADS) return;
  float score = 0;
  if (s.has_new)
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      score += widen(m.queries[head * QUERY_PITCH + k.lane + 32 * i]) * m.fresh[0][k.lane + 32 * i];
#pragma unroll
  for (int i = 16; i; i >>= 1) score += shuffle_xor(score, i);
  if (k.lane == 0) {
    m.tops[WARPS][head] = s.has_new ? score : NOTHING;
    m.sums[WARPS][head] = s.has_new ? 1.f : 0.f;
  }
}

struct Part { float first, second, top, sum; };

// Combines two dimensions of a head over all warps and the new token.
DEVICE Part combine_warps(const Consumer& k, const Attention& m, const Segment& s, int head, int dim) {
  Part part = {0, 0, NOTHING, 0};
#pragma unroll
  for (int w = 0; w <= WARPS; ++w) part.top = greater(part.top, m.tops[w][head]);
#pragma unroll
  for (int w = 0; w <= WARPS; ++w) {
    if (w == WARPS && !s.has_new) break;
    const float* from = w < WARPS ? k.partials + (w * GROUP_HEADS + head) * HEAD_DIM + dim : m.fresh[1] + dim;
    const float fade = exp2_of(m.tops[w][head] - part.top);
    part.sum += fade * m.sums[w][head];
    part.first += fade * from[0];
    part.second += fade * from[1];
  }
  return part;
}

DEVICE void publish_attended(const Consumer& k, const Segment& s, int word, float first, float second, float sum) {
  const int index = (s.row * WIDTH + s.kv_head * GROUP_HEADS * HEAD_DIM) / 2 + word;
  publish(k.a.attended, index, pack(first / sum, second / sum), k.flag + ATTENDED);
}

// Hands over the block's result: the output of a pair, or a part of it.
DEVICE void finish_segment(const Consumer& k, const Attention& m, const Segment& s) {
  const int part = part_of(s, block_index());
  for (int word = thread_index(); word < PAIR_WORDS; word += THREADS) {
    const int head = word * 2 / HEAD_DIM, dim = word * 2 % HEAD_DIM;
    const Part p = combine_warps(k, m, s, head, dim);
    if (s.parts == 1) {
      publish_attended(k, s, word, p.first, p.second, p.sum);
      continue;
    }
    put_pair(k.a.parts + part * PAIR_WORDS + word, bits_of(p.first), bits_of(p.second), k.flag + PARTS);
    if (dim == 0) put_pair(k.a.weights + part * GROUP_HEADS + head, bits_of(p.top), bits_of(p.sum), k.flag + PARTS);
  }
}

DEVICE void attend_segment(const Consumer& k, Attention& m, const Segment& s) {
  Tokens tokens;
  if (LOADS_EARLY) load_first(k, s, tokens);
  perhaps_delay();
  receive_queries(k, m, s);
  sync_consumers<THREADS>();  // queries and the new token are in shared memory
  mark(k.a, k.layer, ATTENTION, 0);
  Softmax f;
  attend_cache(k, m, s, tokens, f);
  keep_softmax(k, m, f);
  attend_new(k, m, s);
  sync_consumers<THREADS>();  // the warps' results are in shared memory
  finish_segment(k, m, s);
}

// -- parts of a pair --------------------------------------------------------------------------

constexpr int PARTS_AT_ONCE = 4;  // parts of a word that a lane receives at a time

// Receives one word of up to PARTS_AT_ONCE parts, every `stride`-th from part `number` on, with the
// maxima and sums of its head. Parts that do not exist are neutral.
DEVICE void receive_parts(const Consumer& k, const Segment& s, Part (&p)[PARTS_AT_ONCE], int number, int stride, int word) {
  const u32 flag = k.flag + PARTS;
  Patience patience;
  while (true) {
    bool good = true;
#pragma unroll
    for (int n = 0; n < PARTS_AT_ONCE; ++n) {
      const int at = number + n * stride, part = part_of(s, s.first_block + at);
      p[n] = Part{0, 0, NOTHING, 0};
      if (at >= s.parts) continue;
      const uint4 out = get16(k.a.parts + part * PAIR_WORDS + word);
      const uint4 weight = get16(k.a.weights + part * GROUP_HEADS + word * 2 / HEAD_DIM);
      p[n] = Part{from_bits(out.x), from_bits(out.z), from_bits(weight.x), from_bits(weight.z)};
      good = good && is_there(out, flag) && is_there(weight, flag);
    }
    if (good) return;
    patience.poll(k.a, WAIT_WORDS, k.where(COMBINE));
  }
}

DEVICE void join(Part& p, const Part& q) {
  const float top = greater(p.top, q.top), mine = exp2_of(p.top - top), its = exp2_of(q.top - top);
  p.first = p.first * mine + q.first * its;
  p.second = p.second * mine + q.second * its;
  p.sum = p.sum * mine + q.sum * its;
  p.top = top;
}

// Combines all parts of this block's share of a pair's words. As many lanes share a word as there
// are threads for, so that all words are received at the same time.
DEVICE void combine_parts(const Consumer& k, const Segment& s) {
  const int number = block_index() - s.first_block;
  const int begin = PAIR_WORDS * number / s.parts, end = PAIR_WORDS * (number + 1) / s.parts;
  int lanes = 1;  // number of lanes that share a word
  while (lanes < 32 && lanes < s.parts && 2 * lanes * (end - begin) <= THREADS) lanes *= 2;
  const int at_once = THREADS / lanes, lane = thread_index() % lanes;
#pragma unroll 1
  for (int first = begin; first < end; first += at_once) {  // the same in all threads, because they shuffle
    const int word = first + thread_index() / lanes;
    Part all = {0, 0, NOTHING, 0};
    if (word < end)
#pragma unroll 1
      for (int i = lane; i < s.parts; i += PARTS_AT_ONCE * lanes) {
        Part p[PARTS_AT_ONCE];
        receive_parts(k, s, p, i, lanes, word);
#pragma unroll
        for (int n = 0; n < PARTS_AT_ONCE; ++n) join(all, p[n]);
      }
    for (int i = 1; i < lanes; i *= 2)
      join(all, Part{shuffle_xor(all.first, i), shuffle_xor(all.second, i), shuffle_xor(all.top, i), shuffle_xor(all.sum, i)});
    if (word < end && lane == 0) publish_attended(k, s, word, all.first, all.second, all.sum);
  }
}

// -- the phase --------------------------------------------------------------------------------

// Computes the attention of all segments of the block, then combines pairs of which other blocks
// have parts. In this order, no block waits for one that is waiting. The first segment stays in
// shared memory, because registers are scarce.
DEVICE void attend(const Consumer& k, Attention& m, const Plan& plan) {
#pragma unroll 1
  for (int at = plan.begin; at < plan.end;) {
    const Segment s = at == plan.begin ? plan.first : segment_at(plan, at);
    if (at != plan.begin) sync_consumers<THREADS>();  // the previous segment has been combined
    attend_segment(k, m, s);
    at = s.next;
  }
  mark(k.a, k.layer, ATTENTION, 1);
#pragma unroll 1
  for (int at = plan.begin; at < plan.end;) {
    const Segment s = at == plan.begin ? plan.first : segment_at(plan, at);
    if (s.parts > 1) combine_parts(k, s);
    at = s.next;
  }
}
