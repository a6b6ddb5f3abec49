// Wrappers for the sm_90a instructions that our CUDA C++ kernels use; no other source has inline assembly.
// Tests have a second version of this file, in plain C++, to run the kernels on a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap { u64 opaque[16]; };

// -- threads ----------------------------------------------------------------------------------

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_count() { return gridDim.x; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// Named barrier 1, for the consumer warps only.
template <int THREADS> DEVICE void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
// Waits for the consumer warps of all blocks of the cluster, whose other threads end by themselves.
template <int THREADS> DEVICE void sync_cluster(int blocks) {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int COUNT> DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <class T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
template <class T> DEVICE T shuffle(T value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE u32 greatest_of_lanes(u32 value) { return __reduce_max_sync(~0u, value); }
DEVICE u32 least_of_lanes(u32 value) { return __reduce_min_sync(~0u, value); }
DEVICE int count_bits(u32 bits) { return __popc(bits); }

// Programmatic dependent launch: a kernel starts before the previous one has ended. The previous
// kernel allows it. The next kernel waits until the previous one has ended and its results can be
// read.
DEVICE void allow_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// -- global memory shared by blocks -----------------------------------------------------------
// .relaxed.gpu makes one access, which L2 answers; `volatile` would have system scope.

DEVICE uint4 get16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint2 get8(const void* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE void put16(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void put8(void* p, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void put4(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u32 get4_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u32 add_acquire_release(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
DEVICE u32 add_relaxed(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// -- global memory that is not written meanwhile ----------------------------------------------
// volatile keeps loads at their place in the source, before the wait that hides their latency.

DEVICE uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// The same for data that several warps read.
DEVICE uint4 load16_cached(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// -- shared memory, by its 32-bit address -----------------------------------------------------

DEVICE u8* dynamic_shared() {
  extern __shared__ u8 memory[];
  return memory;
}
DEVICE u32 address_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 get_shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
DEVICE float get_shared_float(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
  return v;
}
DEVICE void put_shared16(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Reads the shared memory of a block of the cluster.
DEVICE uint4 get_cluster16(u32 at, int block) {
  uint4 v;
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [a]; }"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at), "r"(block) : "memory");
  return v;
}
DEVICE int get_shared4(const int* p) { return *(const volatile int*)p; }
DEVICE void put_shared4(int* p, int v) { *(volatile int*)p = v; }

DEVICE void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
DEVICE void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders ordinary writes to shared memory before copies into it, and before products that read it.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE bool barrier_passed(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred P; mbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2; selp.u32 %0, 1, 0, P; }"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// Copies a box of rows from `row` on. `column` counts units of 128 bytes. Weights are read only
// once, so they are evicted first.
DEVICE void copy_box(u32 to, const TensorMap* map, int row, int column, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;"
      ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(column), "r"(bar), "l"(0x12F0000000000000ull) : "memory");
}
// Copies one unit of 128 bytes of rows from `row` on, as many rows as the map's box has.
DEVICE void copy_rows(u32 to, const TensorMap* map, int row, int column, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(map), "r"(column * 128), "r"(row), "r"(bar) : "memory");
}
// Copies plain bytes. Both addresses and the number of bytes must be multiples of 16.
DEVICE void copy_line(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// Copies 16 plain bytes. The copy is a write of this thread.
DEVICE void copy_chunk(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same for 4 bytes.
DEVICE void copy_word(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Arrives at a barrier when everything has been copied that this thread has started to copy.
DEVICE void arrive_after_chunks(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// -- arithmetic -------------------------------------------------------------------------------

DEVICE float from_bits(u32 v) { return __uint_as_float(v); }
DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
// Rounds two floats to bf16, with `low` in the low half.
DEVICE u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float rsqrt_of(float x) { return rsqrtf(x); }
DEVICE float greater(float a, float b) { return fmaxf(a, b); }
DEVICE float greater_size(float a, float b) { return fmaxf(fabsf(a), fabsf(b)); }
DEVICE float inverse_of(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Divides as Triton does.
DEVICE float quotient_of(float a, float b) {
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
template <u32 SELECT> DEVICE u32 bytes_of(u32 a, u32 b) { return __byte_perm(a, b, SELECT); }
DEVICE u32 bytes_of(u32 a, u32 b, u32 select) { return __byte_perm(a, b, select); }
// c (16 x 8) += a (16 x 16) b (16 x 8). In thread (g, t) = (lane / 4, lane % 4), a0 and a2 belong to row g,
// a1 and a3 to row g + 8, b0 and b1 to column g, c0 and c1 to row g and columns 2t and 2t + 1, and c2 and
// c3 to row g + 8 and the same columns.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same as mma() for rows 8 to 15 of a that are zero and whose results are not used.
DEVICE void mma_upper(float& c0, float& c1, u32 a0, u32 a2, u32 b0, u32 b1) {
  [[maybe_unused]] float c2, c3;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%9,%9};"
      : "+f"(c0), "+f"(c1), "=f"(c2), "=f"(c3) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.f));
}

// Rounds two floats to e4m3, with `low` in the low byte.
DEVICE u32 round_to_bytes(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
// Multiplies eight floats by `factor`, rounds them to e4m3, and stores them at an address in shared memory.
DEVICE void put_rounded(u32 at, const float2 (&v)[4], float factor) {
  const u32 low = round_to_bytes(v[0].x * factor, v[0].y * factor) | round_to_bytes(v[1].x * factor, v[1].y * factor) << 16;
  const u32 high = round_to_bytes(v[2].x * factor, v[2].y * factor) | round_to_bytes(v[3].x * factor, v[3].y * factor) << 16;
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(low), "r"(high) : "memory");
}
DEVICE void max_shared(u32 at, u32 value) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
DEVICE void or_shared(u32 at, u32 value) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

// -- products of 128 threads ------------------------------------------------------------------
// Operands are in shared memory as copy_rows() writes them: rows of 128 bytes with swizzled chunks.

DEVICE u64 operand_at(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;  // 1,024 bytes between groups of 8 rows
}
template <int COUNT> DEVICE void pin(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `LEFT` of the committed groups of products are not complete.
template <int LEFT> DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// c (64 x N) = or += a (64 x 32) b (N x 32)ᵀ in e4m3, N = 2 COUNT. Thread (w, g, t) = (warp, lane / 4, lane % 4)
// holds rows 16w + g (c[4i], c[4i + 1]) and 16w + g + 8 (c[4i + 2], c[4i + 3]), columns 8i + 2t and 8i + 2t + 1.
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)
#define MULTIPLY(NAME, KIND, FLAGS, N, COUNT, NAMES, A, B, ADDS, ...)                                           \
  DEVICE void NAME(float (&c)[COUNT], u64 a, u64 b, int adds) {                                                 \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" N KIND         \
                 " {" NAMES "}, " A ", " B ", p, " FLAGS "; }"                                                  \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"(adds));                                                    \
  }
#define E4M3 multiply, "k32.f32.e4m3.e4m3", "1, 1"
#define BF16 multiply_bf16, "k16.f32.bf16.bf16", "1, 1, 0, 0"
#define MULTIPLY_IN(...) MULTIPLY(__VA_ARGS__)
#define FROM_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FROM_8 "%8,%9,%10,%11,%12,%13,%14,%15"
#define FROM_16 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FROM_32                                                                                                  \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
MULTIPLY_IN(E4M3, "8", 4, "%0,%1,%2,%3", "%4", "%5", "%6", C4(0))
MULTIPLY_IN(E4M3, "16", 8, FROM_0, "%8", "%9", "%10", C4(0), C4(4))
MULTIPLY_IN(E4M3, "32", 16, FROM_0 "," FROM_8, "%16", "%17", "%18", C16(0))
MULTIPLY_IN(E4M3, "64", 32, FROM_0 "," FROM_8 "," FROM_16, "%32", "%33", "%34", C16(0), C16(16))
MULTIPLY_IN(E4M3, "128", 64, FROM_0 "," FROM_8 "," FROM_16 "," FROM_32, "%64", "%65", "%66", C16(0), C16(16), C16(32), C16(48))
// c (64 x N) = or += a (64 x 16) b (N x 16)ᵀ in bf16, held in the same way.
MULTIPLY_IN(BF16, "64", 32, FROM_0 "," FROM_8 "," FROM_16, "%32", "%33", "%34", C16(0), C16(16))
MULTIPLY_IN(BF16, "128", 64, FROM_0 "," FROM_8 "," FROM_16 "," FROM_32, "%64", "%65", "%66", C16(0), C16(16), C16(32), C16(48))
#undef MULTIPLY_IN
#undef E4M3
#undef BF16
#undef MULTIPLY
#undef C16
#undef C4

// -- time and failure -------------------------------------------------------------------------

DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
DEVICE u64 cycles() { return clock64(); }
DEVICE void sleep(u32 nanoseconds) { __nanosleep(nanoseconds); }
// Stops the kernel by a fault. `word` is in page-locked host memory, which outlives the context
// that the fault destroys. The fault is a store to address 0 rather than a `trap`: with a `trap` in
// the code, the compiler gives consumers no more registers than the kernel starts with, whatever
// setmaxnreg says. The first thread to stop has waited longest, so only this thread writes.
DEVICE void stop(u32* word, u32 first, u32 second) {
  if (*(volatile u32*)word) return;
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(word), "r"(first), "r"(second) : "memory");
  __threadfence_system();
  sleep(100000);
  asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(first) : "memory");
}
