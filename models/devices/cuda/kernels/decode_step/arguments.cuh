// What the host passes: launch.py has the same, field by field.

struct LayerArgs {
  const u16 *norm1, *norm2;    // [HIDDEN]
  const u16 *q_norm, *k_norm;  // [HEAD_DIM], with QK_NORM
  const u16* bias;             // [QKV], with QKV_BIAS
  u16 *keys, *values;          // [blocks][BLOCK_SIZE][KV_HEADS][HEAD_DIM]
  const float* scales;         // with PACKED: of each matrix in turn, [tiles][boxes][UNITS]
  const float* router;         // with EXPERTS: [EXPERTS][HIDDEN]
};

// A line of 128 bytes for each word that blocks count with.
struct Control {
  u32 step, pad0[31];      // from 1: makes the flags of steps differ
  u32 arrivals, pad1[31];  // of this step
  u32 ticket, pad2[31];    // chunks of the head that are dealt out
  u32 done, pad3[31];      // blocks that have ended
};

struct Args {
  TensorMap maps[LAYERS * MAPS + 1];  // of each layer's matrices in the table's order; the head
  LayerArgs layers[LAYERS];
  const u16 *embed, *norm;    // [VOCAB][HIDDEN], [HIDDEN]
  const u16 *cos, *sin;       // [positions][HEAD_DIM / 2]
  const int *tokens, *positions, *contexts, *slots;  // [ROWS]
  const long long* places;    // [ROWS]: of the new token in the cache
  const int* tables;          // [slots][table_stride]
  Control* control;
  u32 *x1, *x2, *attended, *activated;  // rows (with EXPERTS pairs) of bf16, two in a word; with FLAGGED flagged
  uint4 *queries;             // [ROWS][QKV / 2]: flagged floats, two each
  uint4 *parts;               // [2 * BLOCKS][PAIR_WORDS]: likewise
  uint4 *weights;             // [2 * BLOCKS][GROUP_HEADS]: flagged maximum and sum
  uint2* scores;              // [ROWS][EXPERTS]: flagged floats
  uint4* scratch;             // begin of all these, ...
  u64 scratch_words;          // ... in 16 bytes
  u16* hidden;                // [ROWS][HIDDEN]: behind the final norm
  void* logits;               // [ROWS][VOCAB], with HEAD
  u32* status;                // of the host: where a step has stopped
  u64* trace;                 // [LAYERS + 1][16] cycles of block 0, with TRACE
  u64 patience;               // nanoseconds
  int table_stride;
  float eps, scale;           // of the norms; of the scores, times log2(e)
};
