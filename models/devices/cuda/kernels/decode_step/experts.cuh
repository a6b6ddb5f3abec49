// A mixture of experts: router scores, the choice of experts, and products with the experts'
// matrices.
//
// Scores are products of the normalized rows and the router's weights in float32. Each block
// computes the scores of some experts while it receives the rows, and hands them to all blocks as
// flagged words. A row's experts are the CHOSEN most likely ones; of equal scores, the lower id
// wins. The experts' matrices are read once for all rows, and outputs that no row needs are
// dropped. Shares (routing weights) are multiplied into the activated values, so that the down
// projections of a row's experts can simply be added.

// -- scores -----------------------------------------------------------------------------------

// Prefetches the router's weights for this block's experts into L2 before the rows arrive.
DEVICE void prefetch_router(const Args& a, int layer) {
  constexpr int LINES = HIDDEN / 32;  // of 128 bytes
  for (int i = thread_index(); i < SCORED * LINES; i += THREADS) {
    const int expert = block_index() + i / LINES * BLOCKS;
    if (expert < EXPERTS) prefetch(a.layers[layer].router + (u64)expert * HIDDEN + i % LINES * 32);
  }
}

// Hands over the scores that the warps of each row added up while they received it.
DEVICE void publish_scores(const Consumer& k) {
  for (int i = thread_index(); i < ROWS * SCORED; i += THREADS) {
    const int row = i / SCORED, n = i % SCORED, expert = block_index() + n * BLOCKS;
    if (expert >= EXPERTS) continue;
    float sum = 0;
    for (int w = 0; w < WARPS_OF_ROW; ++w) sum += k.scores[(row * WARPS + w) * SCORED + n];
    put8(k.a.scores + row * EXPERTS + expert, uint2{bits_of(sum * scale_of(k, row)), k.flag + SCORES});
  }
}

// -- the choice -------------------------------------------------------------------------------

constexpr int EXPERTS_OF_LANE = (EXPERTS + 31) / 32;  // lane, lane + 32, ...
constexpr float LOG2E = 1.4426950408889634f;

// Maps scores to integers from 1 on with the same order. 0 is less than every score.
DEVICE u32 key_of(float score) {
  const u32 bits = bits_of(score), key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return key ? key : 1;
}
DEVICE float score_of(u32 key) { return from_bits(key >> 31 ? key & 0x7fffffffu : ~key); }

DEVICE void receive_scores(const Consumer& k, u32 (&keys)[EXPERTS_OF_LANE + 1], int row) {
  const uint2* from = k.a.scores + row * EXPERTS + k.lane;
  const u32 flag = k.flag + SCORES;
  Patience patience;
  while (true) {
    bool good = true;
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i)
      if (EXPERTS % 32 == 0 || k.lane + 32 * i < EXPERTS) {
        const uint2 word = get8(from + 32 * i);
        keys[i] = key_of(from_bits(word.x));
        good = good && word.y == flag;
      } else {
        keys[i] = 0;
      }
    if (good) return;
    patience.poll(k.a, WAIT_WORDS, k.where(GATE_UP));
  }
}

// Chooses a row's experts and computes their shares, with one warp.
DEVICE void choose_experts(const Consumer& k, Choice& choice, int row) {
  u32 keys[EXPERTS_OF_LANE + 1];
  receive_scores(k, keys, row);
  float all = 0, best = 0, share = 0, sum = 0;
  int expert = 0;
#pragma unroll 1
  for (int n = 0; n < CHOSEN; ++n) {
    u32 mine = 0;
    int which = EXPERTS;
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i)
      if (keys[i] > mine) {
        mine = keys[i];
        which = k.lane + 32 * i;
      }
    const u32 most = greatest_of_lanes(mine);
    const int taken = (int)least_of_lanes(mine == most ? (u32)which : (u32)EXPERTS);
    if (n == 0) {
      best = score_of(most);
      if (!NORMALIZES) {
#pragma unroll
        for (int i = 0; i < EXPERTS_OF_LANE; ++i)
          if (k.lane + 32 * i < EXPERTS) all += exp2_of((score_of(keys[i]) - best) * LOG2E);
#pragma unroll
        for (int i = 16; i; i >>= 1) all += shuffle_xor(all, i);
      }
    }
    const float weight = exp2_of((score_of(most) - best) * LOG2E);
    sum += weight;
    if (k.lane == n) {
      expert = taken;
      share = weight;
    }
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i)
      if (k.lane + 32 * i == taken) keys[i] = 0;
  }
  if (k.lane < CHOSEN) {
    const int pair = row * CHOSEN + k.lane;
    choice.chosen[pair] = expert;
    choice.shares[pair] = widen((u16)pack(share / (NORMALIZES ? sum : all), 0));
    or_shared(address_of(&choice.set[expert / 32]), 1u << expert % 32);
  }
}

// Returns the number of experts below `expert` that any row has chosen.
DEVICE int rank_of(const Choice& choice, int expert) {
  int rank = count_bits(choice.set[expert / 32] & ((1u << expert % 32) - 1));
  for (int i = 0; i < expert / 32; ++i) rank += count_bits(choice.set[i]);
  return rank;
}

// Clears the previous layer's choice. Called before a barrier that precedes the next choice.
DEVICE void clear_choice(Choice& choice) {
  for (int i = thread_index(); i < MOST_LISTED * 8; i += THREADS) choice.pairs[i] = NO_PAIR;
  if (thread_index() <= EXPERTS / 32) choice.set[thread_index()] = 0;
  if (thread_index() < 2) choice.part_pairs[thread_index()] = 0;
}

// Lists the experts that any row has chosen.
DEVICE void list_experts(Choice& choice) {
  for (int expert = thread_index(); expert < EXPERTS; expert += THREADS)
    if (choice.set[expert / 32] >> expert % 32 & 1) choice.experts[rank_of(choice, expert)] = expert;
  for (int pair = thread_index(); pair < PAIRS; pair += THREADS) {
    const int rank = rank_of(choice, choice.chosen[pair]);
    choice.ranks[pair] = rank;
    choice.pairs[rank * 8 + pair / CHOSEN] = pair;
  }
  if (thread_index() == 0) choice.count = rank_of(choice, EXPERTS);
}

// Orders the pairs for FP8 down projections.
DEVICE void order_pairs(Choice& choice) {
  constexpr int GROUPS = PRODUCTS[DOWN].doubled ? 2 : 1;
  // Several threads compare each pair with the others, because one takes too long. Whole warps take part, as shuffling
  // requires.
  constexpr int EACH = 4, ALL = (PAIRS * EACH + 31) / 32 * 32;
  for (int i = thread_index(); i < ALL; i += THREADS) {
    const int pair = i / EACH < PAIRS ? i / EACH : PAIRS - 1;
    const int rank = choice.ranks[pair], group = rank % GROUPS;
    int before = 0, all = 0;
    for (int other = i % EACH; other < PAIRS; other += EACH) {
      const int theirs = choice.ranks[other];
      if (theirs % GROUPS != group) continue;
      all += 1;
      before += theirs < rank || (theirs == rank && other < pair);
    }
#pragma unroll
    for (int lanes = 1; lanes < EACH; lanes *= 2) {
      before += shuffle_xor(before, lanes);
      all += shuffle_xor(all, lanes);
    }
    choice.parts[group][before] = rank << 8 | pair;
    choice.part_pairs[group] = all;
  }
}

// Chooses the experts of all rows. Afterwards, the producer continues.
DEVICE void choose(const Consumer& k, Choice& choice) {
  perhaps_delay();
  for (int row = k.warp; row < ROWS; row += WARPS) choose_experts(k, choice, row);
  sync_consumers<THREADS>();
  list_experts(choice);
  sync_consumers<THREADS>();
  if (thread_index() == 0) barrier_arrive(address_of(&choice.listed));
  if (PRODUCTS[DOWN].packed && ROWS > 1) order_pairs(choice);  // read behind several barriers
}

// -- products ---------------------------------------------------------------------------------

// Multiplies one tile of each listed expert by the inputs of that expert's pairs, and adds up the
// products.
template <int P>
DEVICE void take_experts(Consumer& k, float* sums) {
  constexpr Product p = PRODUCTS[P];
  Sums c[1] = {};
  const int count = k.choice->count, g = k.lane / 4;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const Where from = line_of<P>(k, k.choice->pairs[n * 8 + g]);
#pragma unroll 1
    for (int box = 0; box < p.boxes; ++box) take_box<P>(k, c, box, box * p.box, from);
  }
  keep_sums(k, c[0], sums, false);
}

// Runs the norm and the router, the choice of experts, their gate and up projections, and SwiGLU,
// times the shares.
template <int P>
DEVICE void run_experts(Consumer& k) {
  constexpr Product p = PRODUCTS[P];
  const u32 target = k.target + ARRIVED_X2 * BLOCKS;
  clear_choice(*k.choice);
  receive<P, true>(k, Source{k.a.x2, k.flag + X2}, 0, target, k.a.layers[k.layer].norm2);
  mark(k.a, k.layer, ROUTE, 0);
  publish_scores(k);
  choose(k, *k.choice);
  mark(k.a, k.layer, ROUTE, 1);
  const int tiles = tiles_of(p.tiles * k.choice->count, block_index());
  if (TRACE && tiles > 0) {
    k.ring.wait_full(k.a, k.ring.at, k.where(P));
    mark(k.a, k.layer, P, 0);
  }
  multiply<P>(k, 0, tiles, [&](int tile, int i, int row, int pair, float* sums) {
    const int number = block_index() + tile * BLOCKS, line = k.choice->pairs[number / p.tiles * 8 + row];
    if (line == NO_PAIR) return;
    const float scale = scale_of(k, row), share = k.choice->shares[line];
    const float2 gate = total(sums, 2 * i, row, pair), up = total(sums, 2 * i + 1, row, pair);
    const float first = silu(scale * gate.x) * (scale * up.x), second = silu(scale * gate.y) * (scale * up.y);
    const int at = line * INTER + number % p.tiles * 8;
    publish(k.a.activated, at / 2 + pair, pack(first * share, second * share), k.flag + ACTIVATED);
  });
}
