// How blocks hand over activations to each other.
//
// *Flagged words* are 4 bytes of data and 4 bytes of flag in one access of 8 or 16 bytes, which the
// memory system does not tear. Readers poll the data itself until the flag is the number of this
// hand-over, so neither a barrier nor a fence is needed (NCCL's LL protocol). A number is used only
// once in a step and differs from step to step. A word is overwritten one layer later. By then, the
// writing block has received a phase to which every reader of the old word contributed after
// reading it: a block reads a source only if it has outputs of the phase, and all outputs are
// waited for, directly or through the phases in between. Therefore no word is overwritten before it
// is read.
//
// *Arrivals* are counted. Blocks write plain words; then each block synchronizes its threads and
// adds one to a counter (release). Readers wait until the counter includes every block's arrival
// (acquire). All blocks arrive, with or without outputs. Words that a phase overwrites were read
// before their readers' next arrival.
//
// Queries, keys, values and the parts of a split attention go to few blocks and are always flagged
// words. So are the scores of experts, which are few and for which all blocks wait. Words that all
// blocks read are flagged only if there is one row, where latency matters most (FLAGGED). With more
// rows, flags would double the bytes that every block reads, and polling would read them
// repeatedly.

// -- bounded waiting --------------------------------------------------------------------------

enum Wait { WAIT_WORDS = 1, WAIT_ARRIVALS = 2, WAIT_TILE = 3, WAIT_ROOM = 4, WAIT_FLIGHT = 5, WAIT_CHOICE = 6 };

// Counts polls, reads the clock every 2^16 polls, and stops the kernel when the time is up. The
// first reading starts the timer, so short waits do not read the clock. Producers wait twice as
// long as consumers: they wait for room in every hang, whereas consumers know what is missing.
struct Patience {
  u32 polls = 0;
  u64 since = 0;

  DEVICE void poll(const Args& a, Wait kind, int where) {
    if ((++polls & 0xffff) == 0) check(a, kind, where);
  }

  DEVICE void check(const Args& a, Wait kind, int where) {
    const u64 now = nanoseconds();
    if (since == 0)
      since = now;
    else if (now - since > (kind >= WAIT_ROOM ? 2 * a.patience : a.patience))
      stop(a.status, 0x80000000u | kind << 24 | where, block_index());
  }
};

// Returns the position of a step as reported in `status`, from the layer and the phase in the
// table.
DEVICE int place(int layer, int phase) { return layer * 16 + phase; }

// Delays blocks at random at every hand-over, in tests.
DEVICE void perhaps_delay() {
  if (DELAYS) {
    const u32 dice = ((u32)cycles() + block_index() * 2654435761u) * 2246822519u >> 16;
    if (dice % 4 == 0) sleep(dice % 4096);
  }
}

// Records block 0's clock when a phase has received its inputs (`done` 0) or has ended (1).
DEVICE void mark(const Args& a, int layer, int phase, int done) {
  if (TRACE && block_index() == 0 && thread_index() == 0) a.trace[layer * 16 + phase * 2 + done] = cycles();
}

// -- flagged words ----------------------------------------------------------------------------

// The data of two words that have the same flag. With both flags, these are 16 bytes.
struct Pair { u32 first, second; };

DEVICE void put_pair(uint4* to, u32 first, u32 second, u32 flag) {
  put16(to, uint4{first, flag, second, flag});
}

DEVICE bool is_there(uint4 words, u32 flag) { return words.y == flag && words.w == flag; }

DEVICE Pair receive_pair(const Args& a, const uint4* from, u32 flag, int where) {
  Patience patience;
  uint4 words = get16(from);
  while (!is_there(words, flag)) {
    patience.poll(a, WAIT_WORDS, where);
    words = get16(from);
  }
  return Pair{words.x, words.z};
}

// -- words that all blocks read: rows of bf16, two numbers in a word --------------------------

// Hands over a word. `index` counts words across all rows.
DEVICE void publish(u32* words, int index, u32 value, u32 flag) {
  if (FLAGGED)
    put8((uint2*)words + index, uint2{value, flag});
  else
    put4(words + index, value);
}

// Counts this block's arrival. Called after a block's last word of a phase.
DEVICE void arrive(const Args& a) {
  perhaps_delay();
  if (!FLAGGED) {
    sync_consumers<THREADS>();  // all words of the block are written before thread 0 releases them
    if (thread_index() == 0) add_release(&a.control->arrivals, 1);
  }
}

// Waits until the counter reaches `target`. Called before a block reads the first word of a source.
// No consumer thread returns before all others have left the previous phase.
DEVICE void await_arrivals(const Args& a, u32 target, int where) {
  if (!FLAGGED) {
    if (thread_index() == 0) {
      Patience patience;
      while ((int)(get4_acquire(&a.control->arrivals) - target) < 0) patience.poll(a, WAIT_ARRIVALS, where);
    }
    sync_consumers<THREADS>();
  }
}

// Receives eight columns of a row. `at` is the first of them.
DEVICE uint4 receive_columns(const Args& a, const u32* words, int at, u32 flag, int where) {
  if (!FLAGGED) return get16(words + at / 2);
  const uint4* from = (const uint4*)words + at / 4;
  uint4 low = get16(from), high = get16(from + 1);
  Patience patience;
  while (!is_there(low, flag) || !is_there(high, flag)) {
    patience.poll(a, WAIT_WORDS, where);
    low = get16(from);
    high = get16(from + 1);
  }
  return uint4{low.x, low.z, high.x, high.z};
}
