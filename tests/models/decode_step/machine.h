// What machine.cuh offers, on a CPU: each thread of the GPU is a fiber, and fibers change wherever
// threads wait for each other or read what others write. Copies arrive late, in any order. Memory is
// sequentially consistent, so that what is tested is who waits for whom, and every index; no fence.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct TensorMap { alignas(64) u64 opaque[16]; };  // address, rows, columns of 64, columns of a box

// -- fibers -----------------------------------------------------------------------------------

struct Warp {
  u32 words[4][32][6];
  int count[4] = {};
};
struct Meeting { int count = 0, round = 0; };
struct Block {
  u8* shared;
  std::vector<float> unrounded;
  std::vector<Warp> warps;
  Meeting whole, consumers, cluster;
  int threads;
};
struct Fiber {
  void* stack;
  void* memory;
  Block* block;
  int thread, block_index, phase = 0;
  bool done = false;
};
struct Copy { u64 due; std::function<void()> run; };

static Fiber* now;
static void* home;
static std::vector<Copy> copies;
static std::mt19937 dice;
static u64 rounds;

extern "C" void change_stack(void** from, void* to);
asm(R"(
.text
.globl change_stack
change_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
static void yield() { change_stack(&now->stack, home); }

DEVICE int thread_index() { return now->thread; }
DEVICE int block_index() { return now->block_index; }
static int blocks_in_all;
static int cluster_blocks();
DEVICE int block_count() { return blocks_in_all; }
static void meet(Meeting& m, int threads) {
  const int round = m.round;
  if (++m.count == threads) {
    m.count = 0;
    ++m.round;
  }
  while (m.round == round) yield();
}
DEVICE void sync_block() { meet(now->block->whole, now->block->threads); }
template <int THREADS> DEVICE void sync_consumers() { meet(now->block->consumers, THREADS); }
// Clusters are consecutive blocks.
static Block* block_of_cluster(int block) { return now->block - now->block_index % cluster_blocks() + block; }
template <int THREADS> DEVICE void sync_cluster(int blocks) {
  if (blocks != cluster_blocks()) abort();
  meet(block_of_cluster(0)->cluster, blocks * THREADS);
}
template <int COUNT> DEVICE void more_registers() {}
template <int COUNT> DEVICE void fewer_registers() {}

// All lanes bring words; afterwards each may look at all.
static u32 (*exchange(const u32* mine, int count))[6] {
  Warp& w = now->block->warps[now->thread / 32];
  const int phase = now->phase++ & 3;
  memcpy(w.words[phase][now->thread & 31], mine, count * 4);
  if (++w.count[phase] == 32) w.count[(phase + 2) & 3] = 0;
  while (w.count[phase] != 32) yield();
  return w.words[phase];
}
DEVICE void sync_warp() {
  const u32 none = 0;
  exchange(&none, 1);
}
template <class T> DEVICE T shuffle(T value, int lane) {
  u32 bits;
  memcpy(&bits, &value, 4);
  bits = exchange(&bits, 1)[lane & 31][0];
  memcpy(&value, &bits, 4);
  return value;
}
template <class Join> static u32 of_lanes(u32 value, Join join) {
  const u32(*all)[6] = exchange(&value, 1);
  u32 joined = all[0][0];
  for (int lane = 1; lane < 32; ++lane) joined = join(joined, all[lane][0]);
  return joined;
}
DEVICE u32 greatest_of_lanes(u32 value) { return of_lanes(value, [](u32 a, u32 b) { return a > b ? a : b; }); }
DEVICE u32 least_of_lanes(u32 value) { return of_lanes(value, [](u32 a, u32 b) { return a < b ? a : b; }); }
DEVICE int count_bits(u32 bits) { return __builtin_popcount(bits); }
template <class T> DEVICE T shuffle_xor(T value, int mask) { return shuffle(value, (now->thread & 31) ^ mask); }

DEVICE void allow_next() {}
DEVICE void await_previous() { yield(); }

// -- global memory ----------------------------------------------------------------------------

template <class T> static T get(const void* p) {
  yield();
  T v;
  memcpy(&v, p, sizeof(T));
  return v;
}
DEVICE uint4 get16(const void* p) { return get<uint4>(p); }
DEVICE uint2 get8(const void* p) { return get<uint2>(p); }
DEVICE void put16(void* p, uint4 v) { memcpy(p, &v, 16); }
DEVICE void put8(void* p, uint2 v) { memcpy(p, &v, 8); }
DEVICE void put4(void* p, u32 v) { memcpy(p, &v, 4); }
DEVICE u32 get4_acquire(const u32* p) { return get<u32>(p); }
DEVICE void add_release(u32* p, u32 v) { *p += v; }
DEVICE u32 add_acquire_release(u32* p, u32 v) {
  *p += v;
  return *p - v;
}
DEVICE u32 add_relaxed(u32* p, u32 v) { return add_acquire_release(p, v); }
DEVICE uint4 load16(const void* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
DEVICE uint4 load16_cached(const void* p) { return load16(p); }
DEVICE void prefetch(const void*) {}
DEVICE void prefetch_map(const TensorMap*) {}

// -- shared memory ----------------------------------------------------------------------------

DEVICE u8* dynamic_shared() { return now->block->shared; }
DEVICE u32 address_of(const void* p) { return (const u8*)p - now->block->shared; }
DEVICE uint4 get_shared16(u32 at) { return load16(now->block->shared + at); }
DEVICE float get_shared_float(u32 at) {
  float v;
  memcpy(&v, now->block->shared + at, 4);
  return v;
}
DEVICE void put_shared16(u32 at, uint4 v) { memcpy(now->block->shared + at, &v, 16); }
DEVICE uint4 get_cluster16(u32 at, int block) {
  yield();
  return load16(block_of_cluster(block)->shared + at);
}
DEVICE int get_shared4(const int* p) { return *p; }
DEVICE void put_shared4(int* p, int v) { *p = v; }

struct Mbarrier { short expected, pending; int bytes : 31; u32 parity : 1; };
static_assert(sizeof(Mbarrier) == 8, "");
static Mbarrier& barrier_at(Block* block, u32 bar) { return *(Mbarrier*)(block->shared + bar); }
static void settle(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.expected;
  b.parity ^= 1;
}
DEVICE void barrier_init(u32 bar, u32 arrivals) { barrier_at(now->block, bar) = {(short)arrivals, (short)arrivals, 0, 0}; }
DEVICE void barriers_are_ready() {}
DEVICE void fence_copies() {}
DEVICE void barrier_arrive(u32 bar) {
  Mbarrier& b = barrier_at(now->block, bar);
  --b.pending;
  settle(b);
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  Mbarrier& b = barrier_at(now->block, bar);
  --b.pending;
  b.bytes += bytes;
}
DEVICE bool barrier_passed(u32 bar, u32 parity) {
  yield();
  return barrier_at(now->block, bar).parity != parity;
}
DEVICE void copy_box(u32 to, const TensorMap* map, int row, int column, u32 bar) {
  Block* block = now->block;
  const TensorMap m = *map;
  copies.push_back({rounds + dice() % 40, [=] {
    const u8* matrix = (const u8*)m.opaque[0];
    const long rows = m.opaque[1], columns = m.opaque[2], box = m.opaque[3];
    for (long c = 0; c < box; ++c)
      for (long r = 0; r < 8; ++r)
        for (long chunk = 0; chunk < 8; ++chunk) {
          u8* at = block->shared + to + c * 1024 + r * 128 + (chunk ^ r) * 16;
          if (row + r < rows && column + c < columns)
            memcpy(at, matrix + ((row + r) * columns + column + c) * 128 + chunk * 16, 16);
          else
            memset(at, 0, 16);
        }
    Mbarrier& b = barrier_at(block, bar);
    b.bytes -= box * 1024;
    settle(b);
  }});
}
DEVICE void copy_rows(u32 to, const TensorMap* map, int row, int column, u32 bar) {
  Block* block = now->block;
  const TensorMap m = *map;
  if (to % 1024) abort();
  copies.push_back({rounds + dice() % 40, [=] {
    const u8* matrix = (const u8*)m.opaque[0];
    const long rows = m.opaque[1], columns = m.opaque[2], box = m.opaque[3];
    for (long r = 0; r < box; ++r)
      for (long chunk = 0; chunk < 8; ++chunk) {
        u8* at = block->shared + to + r * 128 + (chunk ^ r % 8) * 16;
        if (row + r < rows && column < columns)
          memcpy(at, matrix + ((row + r) * columns + column) * 128 + chunk * 16, 16);
        else
          memset(at, 0, 16);
      }
    Mbarrier& b = barrier_at(block, bar);
    b.bytes -= box * 128;
    settle(b);
  }});
}
DEVICE void copy_line(u32 to, const void* from, u32 bytes, u32 bar) {
  Block* block = now->block;
  copies.push_back({rounds + dice() % 40, [=] {
    if (to % 16 || (u64)from % 16 || bytes % 16) abort();
    memcpy(block->shared + to, from, bytes);
    Mbarrier& b = barrier_at(block, bar);
    b.bytes -= bytes;
    settle(b);
  }});
}

static std::vector<std::function<void()>> chunks_of_thread;  // of the present fiber, between two yields
static void copy_bytes(u32 to, const void* from, int bytes) {
  Block* block = now->block;
  if (to % bytes || (u64)from % bytes) abort();
  chunks_of_thread.push_back([=] { memcpy(block->shared + to, from, bytes); });
}
DEVICE void copy_chunk(u32 to, const void* from) { copy_bytes(to, from, 16); }
DEVICE void copy_word(u32 to, const void* from) { copy_bytes(to, from, 4); }
DEVICE void arrive_after_chunks(u32 bar) {
  Block* block = now->block;
  copies.push_back({rounds + dice() % 40, [block, bar, chunks = std::move(chunks_of_thread)] {
    for (const auto& chunk : chunks) chunk();
    Mbarrier& b = barrier_at(block, bar);
    --b.pending;
    settle(b);
  }});
  chunks_of_thread.clear();
}

// -- arithmetic -------------------------------------------------------------------------------

DEVICE float from_bits(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
DEVICE u32 bits_of(float v) {
  u32 b;
  memcpy(&b, &v, 4);
  return b;
}
static u32 rounded(float v) {
  if (v != v) return 0x7fff;
  const u32 b = bits_of(v);
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float rsqrt_of(float x) { return 1 / sqrtf(x); }
DEVICE float greater(float a, float b) { return fmaxf(a, b); }
DEVICE float greater_size(float a, float b) { return fmaxf(fabsf(a), fabsf(b)); }
DEVICE float inverse_of(float x) { return 1 / x; }
DEVICE float quotient_of(float a, float b) { return a / b; }
DEVICE u32 bytes_of(u32 a, u32 b, u32 select) {
  const u64 both = a | (u64)b << 32;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(both >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
template <u32 SELECT> DEVICE u32 bytes_of(u32 a, u32 b) { return bytes_of(a, b, SELECT); }
static float half_of(u32 word, int which) { return from_bits(which ? word & 0xffff0000u : word << 16); }
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  const u32(*all)[6] = exchange(mine, 6);
  const int lane = now->thread & 31, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const int of = k % 8 / 2, far = k / 8, column = 2 * t + i % 2;
      c[i] += half_of(all[g * 4 + of][far * 2 + i / 2], k % 2) * half_of(all[column * 4 + of][4 + far], k % 2);
    }
}
DEVICE void mma_upper(float& c0, float& c1, u32 a0, u32 a2, u32 b0, u32 b1) {
  float c[4] = {c0, c1, 0, 0};
  mma(c, a0, 0, a2, 0, b0, b1);
  c0 = c[0];
  c1 = c[1];
}
static float round_to_e4m3(float v) {
  if (v != v) return v;
  const float size = std::fmin(std::fabs(v), 448.f);
  const int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
  const float step = std::ldexp(1.f, exponent - 3);
  return std::copysign(std::nearbyint(size / step) * step, v);
}
static u32 e4m3_of(float v) {
  const u32 sign = std::signbit(v) ? 0x80 : 0;
  if (v != v) return 0x7f;
  const float size = std::fabs(round_to_e4m3(v));
  if (size < 0x1p-6f) return sign | (u32)std::ldexp(size, 9);
  const int exponent = std::ilogb(size);
  return sign | (exponent + 7) << 3 | (u32)(std::ldexp(size, 3 - exponent) - 8);
}
DEVICE u32 round_to_bytes(float low, float high) { return e4m3_of(low) | e4m3_of(high) << 8; }
// With UNROUNDED, products read what was given to be rounded.
constexpr bool UNROUNDED = false;
DEVICE void put_rounded(u32 at, const float2 (&v)[4], float factor) {
  for (int i = 0; i < 8; ++i) {
    const float value = (i % 2 ? v[i / 2].y : v[i / 2].x) * factor;
    now->block->shared[at + i] = e4m3_of(value);
    if (UNROUNDED) now->block->unrounded[at + i] = value;
  }
}
DEVICE void max_shared(u32 at, u32 value) {
  u32* held = (u32*)(now->block->shared + at);
  if (value > *held) *held = value;
}
static float number_of_e4m3(u32 bits) {
  if ((bits & 0x7f) == 0x7f) return NAN;
  const float size = bits & 0x78 ? std::ldexp(8.f + (bits & 7), (int)(bits >> 3 & 15) - 10) : std::ldexp(bits & 7, -9);
  return bits & 0x80 ? -size : size;
}
DEVICE void or_shared(u32 at, u32 value) { *(u32*)(now->block->shared + at) |= value; }
DEVICE u64 operand_at(u32 at) { return at / 16; }
template <int COUNT> DEVICE void pin(float (&)[COUNT]) {}
DEVICE void begin_products() {}
DEVICE void commit_products() {}
template <int LEFT> DEVICE void await_products() { yield(); }
static float operand(u64 of, int row, int k, bool unrounded = false) {
  static float numbers[256];
  static bool known = false;
  for (int i = 0; !known && i < 256; ++i) numbers[i] = number_of_e4m3(i);
  known = true;
  u32 at = of * 16 + row * 128 + k;
  at ^= (at >> 7 & 7) << 4;
  return unrounded ? now->block->unrounded[at] : numbers[now->block->shared[at]];
}
template <int COUNT> DEVICE void multiply(float (&c)[COUNT], u64 a, u64 b, int adds) {
  const int lane = now->thread & 31, g = lane / 4, t = lane % 4, warp = now->thread / 32 % 4;
  for (int i = 0; i < COUNT; ++i) {
    const int row = 16 * warp + g + i / 2 % 2 * 8, column = 8 * (i / 4) + 2 * t + i % 2;
    if (!adds) c[i] = 0;
    for (int k = 0; k < 32; ++k) c[i] += operand(a, row, k) * operand(b, column, k, UNROUNDED);
  }
}
static float bf16_operand(u64 of, int row, int k) {
  u32 at = of * 16 + row * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  u16 bits;
  memcpy(&bits, now->block->shared + at, 2);
  return from_bits((u32)bits << 16);
}
template <int COUNT> DEVICE void multiply_bf16(float (&c)[COUNT], u64 a, u64 b, int adds) {
  const int lane = now->thread & 31, g = lane / 4, t = lane % 4, warp = now->thread / 32 % 4;
  for (int i = 0; i < COUNT; ++i) {
    const int row = 16 * warp + g + i / 2 % 2 * 8, column = 8 * (i / 4) + 2 * t + i % 2;
    if (!adds) c[i] = 0;
    for (int k = 0; k < 16; ++k) c[i] += bf16_operand(a, row, k) * bf16_operand(b, column, k);
  }
}

// -- time and failure -------------------------------------------------------------------------

DEVICE u64 nanoseconds() { return rounds; }
DEVICE u64 cycles() { return rounds * 7 + now->thread; }
DEVICE void sleep(u32 nanoseconds) {
  for (u32 i = 0; i < nanoseconds / 50; ++i) yield();
}
static void give_up(u32 first, u32 second);
DEVICE void stop(u32* word, u32 first, u32 second) {
  if (word[0]) return;
  word[0] = first;
  word[1] = second;
  give_up(first, second);
}
