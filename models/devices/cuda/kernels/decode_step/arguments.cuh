// Parameters of the kernel. arguments.py declares the same fields in the same order.

struct LayerArgs {
  const u16 *norm1, *norm2;    // [HIDDEN]
  const u16 *q_norm, *k_norm;  // [HEAD_DIM], with QK_NORM
  const u16* bias;             // [QKV], with QKV_BIAS
  u16 *keys, *values;          // [blocks][BLOCK_SIZE][KV_HEADS][HEAD_DIM]
  const float* scales;         // with PACKED: scales of each matrix in turn, [tiles][boxes][UNITS]
  const float* router;         // with EXPERTS: [EXPERTS][HIDDEN]
};

// Counters in global memory. Each has a line of 128 bytes to itself.
struct Control {
  u32 step, pad0[31];      // number of the step, from 1: makes the flags of steps differ
  u32 arrivals, pad1[31];  // number of arrivals in this step
  u32 ticket, pad2[31];    // number of chunks of the head that blocks have claimed
  u32 done, pad3[31];      // number of blocks that have ended
};

struct Args {
  TensorMap maps[LAYERS * MAPS + 1];  // of each layer's matrices in the table's order, then of the head
  LayerArgs layers[LAYERS];
  const u16 *embed, *norm;    // [VOCAB][HIDDEN], [HIDDEN]
  const u16 *cos, *sin;       // [positions][HEAD_DIM / 2]
  const int *tokens, *positions, *contexts, *slots;  // [ROWS]
  const long long* places;    // [ROWS]: position of the new token in the cache
  const int* tables;          // [slots][table_stride]
  Control* control;
  u32 *x1, *x2, *attended, *activated;  // rows (pairs, with EXPERTS) of bf16, two in a word; with FLAGGED, flagged
  uint4 *queries;             // [ROWS][QKV / 2]: two flagged floats each
  uint4 *parts;               // [2 * BLOCKS][PAIR_WORDS]: likewise
  uint4 *weights;             // [2 * BLOCKS][GROUP_HEADS]: flagged maximum and sum
  uint2* scores;              // [ROWS][EXPERTS]: flagged floats
  uint4* scratch;             // start of all these buffers
  u64 scratch_words;          // their size in words of 16 bytes
  u16* hidden;                // [ROWS][HIDDEN]: after the final norm
  void* logits;               // [ROWS][VOCAB], with HEAD
  u32* status;                // in host memory: where a step has stopped
  u64* trace;                 // [LAYERS + 1][16] cycles of block 0, with TRACE
  u64 patience;               // nanoseconds
  int table_stride;
  float eps, scale;           // epsilon of the norms; scale of the scores times log2(e)
};
