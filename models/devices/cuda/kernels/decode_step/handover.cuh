// How blocks hand activations to each other.
//
// *Flagged words*: 4 bytes of data and 4 of flag in one access of 8 or 16 bytes, which the memory
// system does not tear. Whoever reads polls the data itself until the flag is this hand-over's number,
// so that there is neither barrier nor fence (NCCL's LL protocol). A number is used once in a step and
// differs from step to step. A word is written again a layer later, by a block which has then received
// a phase to which every reader of the old word has contributed after reading it: a block reads a
// source only where it has outputs of the phase, and all outputs are waited for, directly or through
// the phases between. So no word is overwritten unread.
//
// *Arrivals*: plain words, then each block adds one to a counter (release) behind a barrier of its
// threads; readers wait until the counter has every block's arrival (acquire). All blocks arrive, with
// or without outputs. What a phase overwrites was read before its readers' next arrival.
//
// Queries, keys, values and the parts of a split attention go to few blocks: always flagged words. So are
// scores of experts, which are few and for which all blocks wait. What
// all blocks read is flagged with one row, where latency decides (FLAGGED); with more rows flags would
// double what every block reads, and polling reads it again.

// -- bounded waiting --------------------------------------------------------------------------

enum Wait { WAIT_WORDS = 1, WAIT_ARRIVALS = 2, WAIT_TILE = 3, WAIT_ROOM = 4, WAIT_FLIGHT = 5, WAIT_CHOICE = 6 };

// Counts polls; reads the clock every 2^16 of them, and stops the kernel when time is up. The first
// reading starts the time, so that a wait that is short reads no clock. Producers, who wait for room in
// every hang, are twice as patient as those who know what is missing.
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

// Where a step stands, as `status` tells it: the layer and the phase of the table.
DEVICE int place(int layer, int phase) { return layer * 16 + phase; }

// Tests delay blocks at random at every hand-over.
DEVICE void perhaps_delay() {
  if (DELAYS) {
    const u32 dice = ((u32)cycles() + block_index() * 2654435761u) * 2246822519u >> 16;
    if (dice % 4 == 0) sleep(dice % 4096);
  }
}

// What a phase has reached, by block 0's clock: its inputs (`done` 0) or its end (1).
DEVICE void mark(const Args& a, int layer, int phase, int done) {
  if (TRACE && block_index() == 0 && thread_index() == 0) a.trace[layer * 16 + phase * 2 + done] = cycles();
}

// -- flagged words ----------------------------------------------------------------------------

// Two words, that is 16 bytes, of one flag.
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

// -- what all blocks read: rows of bf16, two in a word ----------------------------------------

// `index` counts words of all rows.
DEVICE void publish(u32* words, int index, u32 value, u32 flag) {
  if (FLAGGED)
    put8((uint2*)words + index, uint2{value, flag});
  else
    put4(words + index, value);
}

// Behind a block's last word of a phase.
DEVICE void arrive(const Args& a) {
  perhaps_delay();
  if (!FLAGGED) {
    sync_consumers<THREADS>();  // all of the block's words, before thread 0 releases them
    if (thread_index() == 0) add_release(&a.control->arrivals, 1);
  }
}

// Before a block's first word of a source; `target` is what the counter must reach. Every consumer
// thread returns after the others have left the phase before.
DEVICE void await_arrivals(const Args& a, u32 target, int where) {
  if (!FLAGGED) {
    if (thread_index() == 0) {
      Patience patience;
      while ((int)(get4_acquire(&a.control->arrivals) - target) < 0) patience.poll(a, WAIT_ARRIVALS, where);
    }
    sync_consumers<THREADS>();
  }
}

// Eight columns of a row, `at` the first.
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
