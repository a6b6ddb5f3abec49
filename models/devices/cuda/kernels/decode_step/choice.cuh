// The experts that the rows have chosen, in a block's shared memory. Every block derives them from
// the same scores (experts.cuh). Its producer waits for the choice before it copies the experts'
// matrices.
//
// In this file, a *pair* is a row and an expert that the row has chosen: pair `row * CHOSEN + n` is
// the row's n-th choice.

constexpr int MOST_LISTED = EXPERTS == 0 || PAIRS < EXPERTS ? PAIRS : EXPERTS;
static_assert(PAIRS < 255, "pairs are bytes");
constexpr u8 NO_PAIR = PAIRS;  // its line of inputs is zero

struct Choice {
  alignas(8) u64 listed;          // mbarrier that completes once per layer, when the list is ready
  u32 set[EXPERTS / 32 + 1];      // a bit for each expert that any row has chosen
  int count;                      // number of experts that any row has chosen
  int experts[MOST_LISTED];       // the experts that any row has chosen, in ascending order
  alignas(8) u8 pairs[MOST_LISTED * 8];      // pair of each listed expert and row; NO_PAIR if the row has not chosen it
  int chosen[PAIRS];              // the expert of each pair
  float shares[PAIRS];
  u8 ranks[PAIRS];                // the index of each pair's expert in the list
  // The pairs that each warp group multiplies in FP8 down projections, in the order of experts:
  // the expert's index in the list, times 256, plus the pair.
  int part_pairs[2];              // how many there are
  u16 parts[2][PAIRS];
};
