// Runs the threads of KERNEL in turn: BLOCKS blocks of ALL_THREADS. Blocks rest at random, so that they are
// out of step. After MOST_ROUNDS turns of all threads they hang.

#include <csetjmp>

static const Args* arguments;
template <class T> auto cluster_of(const T& a, int) -> decltype(a.cluster) { return a.cluster; }
template <class T> int cluster_of(const T&, long) { return 1; }
static int cluster_blocks() { return cluster_of(*arguments, 0); }
static std::jmp_buf outside;
static void give_up(u32, u32) { std::longjmp(outside, 1); }

static void begin_fiber() {
  KERNEL(*arguments);
  now->done = true;
  while (true) yield();
}

static void make_fiber(Fiber& f, size_t bytes) {
  f.memory = malloc(bytes);
  void** top = (void**)(((u64)f.memory + bytes) & ~63ull);
  *--top = nullptr;
  *--top = (void*)begin_fiber;
  top -= 6;
  f.stack = top;
}

static void run_copies() {
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].due > rounds) {
      ++i;
      continue;
    }
    auto run = copies[i].run;
    copies[i] = copies.back();
    copies.pop_back();
    run();
  }
}

extern "C" int args_bytes() { return sizeof(Args); }

// 0: done; 1: it has stopped, status says where.
extern "C" int run_step(const Args* args, u32 seed) {
  arguments = args;
  dice.seed(seed);
  rounds = 0;
  copies.clear();
  const int threads = ALL_THREADS;
  blocks_in_all = BLOCKS;
  std::vector<Block> blocks(BLOCKS);
  std::vector<Fiber> fibers(BLOCKS * threads);
  for (int b = 0; b < BLOCKS; ++b) {
    blocks[b].shared = (u8*)aligned_alloc(1024, 233472);
    memset(blocks[b].shared, 0xff, 233472);
    if (UNROUNDED) blocks[b].unrounded.resize(233472);
    blocks[b].warps.resize(threads / 32);
    blocks[b].threads = threads;
    for (int t = 0; t < threads; ++t) {
      Fiber& f = fibers[b * threads + t];
      f.block = &blocks[b];
      f.block_index = b;
      f.thread = t;
      make_fiber(f, sizeof(Args) + 65536);
    }
  }
  const int failed = setjmp(outside);
  std::vector<int> rest(BLOCKS, 0), left(BLOCKS, threads);
  int running = failed ? 0 : BLOCKS;
  while (running && rounds < MOST_ROUNDS) {
    ++rounds;
    run_copies();
    for (int i = 0, b = dice() % BLOCKS; i < BLOCKS; ++i, b = (b + 1) % BLOCKS) {
      if (rest[b] > 0) --rest[b];
      if (rest[b] || !left[b]) continue;
      if (dice() % 200 == 0) rest[b] = dice() % 300;
      for (int t = 0; t < threads; ++t) {
        Fiber& f = fibers[b * threads + t];
        if (f.done) continue;
        now = &f;
        change_stack(&home, f.stack);
        if (f.done && --left[b] == 0) {
          --running;
          memset(blocks[b].shared, 0xff, 233472);  // another block may have it
        }
      }
    }
  }
  for (auto& f : fibers) free(f.memory);
  for (auto& b : blocks) free(b.shared);
  return failed || running;
}
