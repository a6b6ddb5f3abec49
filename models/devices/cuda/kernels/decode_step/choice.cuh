// Which experts the rows have chosen, in a block's shared memory. Every block finds out for itself, from
// the same scores (experts.cuh); its producer waits for it before it streams their matrices.
//
// A *pair* of this file is a row and an expert that it has chosen: pair `row * CHOSEN + n` is the row's
// n-th choice.

constexpr int MOST_LISTED = EXPERTS == 0 || PAIRS < EXPERTS ? PAIRS : EXPERTS;
constexpr u8 NO_PAIR = PAIRS;  // its line of inputs is zero

struct Choice {
  alignas(8) u64 listed;          // completes once a layer, when the list is made
  u32 set[EXPERTS / 32 + 1];      // a bit for each expert that any row has chosen
  int count;                      // of experts that any row has chosen
  int experts[MOST_LISTED];       // these
  u8 pairs[MOST_LISTED * 8];      // of each of these and each row; NO_PAIR where the row has not chosen it
  int chosen[PAIRS];              // the expert of each pair
  float shares[PAIRS];
};
