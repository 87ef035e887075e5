// Thin wrappers of the PTX instructions that the kernels use. They do not depend on the kernels.
//
// Two kinds of copies bring rows to shared memory under one interface (`copy_rows`): Hopper's bulk copies, which need
// one instruction per row and complete by counting bytes, and Ampere's cp.async, with 16 bytes per lane. So a pipelined
// kernel is written once for sm_80 and sm_90a.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace moe {

// Features of the compiled architecture beyond sm_80. Host code sees none of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MOE_HAS_PDL 1            // griddepcontrol: a launch that begins before the one ahead ends
#define MOE_HAS_TMA 1            // bulk copies, tensor maps and barriers that count their bytes
#define MOE_HAS_CLUSTERS 1       // blocks that share their shared memory
#define MOE_HAS_STMATRIX 1       // matrices of registers to shared memory
#define MOE_HAS_RELEASE_FENCE 1  // a fence that only releases
#else
#define MOE_HAS_PDL 0
#define MOE_HAS_TMA 0
#define MOE_HAS_CLUSTERS 0
#define MOE_HAS_STMATRIX 0
#define MOE_HAS_RELEASE_FENCE 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MOE_HAS_FP8 1  // conversions to and from E4M3
#else
#define MOE_HAS_FP8 0
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOE_HAS_WGMMA 1  // warpgroup products, and registers that move between warps; sm_90a alone
#else
#define MOE_HAS_WGMMA 0
#endif

__device__ __forceinline__ uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- programmatic dependent launch; before Hopper kernels simply run one after the other

/// Waits until the kernels before this one have finished and their writes are visible. Everything that does not depend
/// on them (barriers, weight prefetch) belongs before this call.
__device__ __forceinline__ void pdl_wait() {
#if MOE_HAS_PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel's blocks start if there is room for them. It does not order anything.
__device__ __forceinline__ void pdl_launch_dependents() {
#if MOE_HAS_PDL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- mbarrier

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(count) : "memory");
}

/// Makes initialised barriers visible to the copy engine; a block barrier must follow.
__device__ __forceinline__ void mbarrier_fence_init() {
#if MOE_HAS_CLUSTERS
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(smem_addr(bar)) : "memory");
}

/// Number of arrivals of a warp at a barrier for data that its lanes have read or written. Each lane arrives itself, so
/// that its own accesses are ordered, and all arrive at the same time, so that the warp stays together (otherwise a
/// launch of 73 us takes 10 us more).
constexpr uint32_t kWarpArrivals = 32;

/// Number of arrivals of a warp for data that only wgmma has read. wgmma_wait ends these reads for the whole warp, so
/// one lane arrives for it (if all lanes arrived, a decode step in bf16 would take 0.2 % longer).
constexpr uint32_t kProductArrivals = 1;

template <uint32_t kArrivals = kWarpArrivals>
__device__ __forceinline__ void warp_arrive(uint64_t* bar) {
  __syncwarp();
  if (threadIdx.x % 32 < kArrivals) mbarrier_arrive(bar);
}

__device__ __forceinline__ bool mbarrier_test(uint64_t* bar, uint32_t parity) {
  uint32_t done;
#if MOE_HAS_TMA
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(smem_addr(bar)), "r"(parity)
               : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(smem_addr(bar)), "r"(parity)
               : "memory");
#endif
  return done != 0;
}

/// Waits for the phase with this parity to complete.
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
  while (!mbarrier_test(bar, parity)) {}
}

/// Orders this thread's ordinary accesses with copies by the bulk engine.
__device__ __forceinline__ void fence_async_proxy() {
#if MOE_HAS_TMA
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

/// fence_async_proxy for shared memory only.
__device__ __forceinline__ void fence_async_shared() {
#if MOE_HAS_TMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// fence_async_proxy for global memory only. It does not wait for earlier stores, so it must be followed by an
/// operation that makes the stores visible.
__device__ __forceinline__ void fence_async_global() {
#if MOE_HAS_TMA
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

/// Like `warp_arrive`, after reads of shared memory that a copy will fill next. The fence orders the reads before the
/// writes of the copy engine, which uses a different path.
__device__ __forceinline__ void release_to_copies(uint64_t* bar) {
  fence_async_shared();
  warp_arrive(bar);
}

// ---- global memory to shared memory

__device__ __forceinline__ void cp_async16(void* dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async4(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async8(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
}

/// Like `cp_async16`, but if `valid` is false it writes zeros and reads nothing.
__device__ __forceinline__ void cp_async16_or_zero(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most N groups of this thread are in progress.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// Arrivals that complete a phase of a barrier filled by one call of `copy_rows`, or of `copy_strided`
/// (ptx/policy.cuh).
__device__ __forceinline__ uint32_t copy_arrivals() { return MOE_HAS_TMA ? 1 : 32; }

/// One arrival of this thread at a barrier, when all its earlier cp.async copies are complete.
__device__ __forceinline__ void cp_async_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_addr(bar)) : "memory");
}

#if MOE_HAS_TMA
/// True in one lane of the warp. Unlike a test of the lane number it tells the compiler that, which then issues bulk
/// copies back to back (a loop over lanes costs about 75 cycles per copy).
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void arrive_expecting(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(dst)),
      "l"(src), "r"(bytes), "r"(smem_addr(bar))
      : "memory");
}

/// Increases the number of bytes for which the current phase waits, without an arrival.
__device__ __forceinline__ void expect_bytes(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_many(uint64_t* bar, uint32_t count) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(smem_addr(bar)), "r"(count)
               : "memory");
}
#endif

/// Copies `rows` rows of `bytes` bytes (a multiple of 16) into shared rows `stride` bytes apart;
/// `source(r)` is row r's address, 16-byte aligned. Called by one whole warp; the data is there when
/// the current phase of `bar`, initialised with `copy_arrivals()`, completes.
template <class Source>
__device__ __forceinline__ void copy_rows(uint8_t* dst, uint32_t stride, uint32_t rows, uint32_t bytes, uint64_t* bar,
                                          Source source) {
  const uint32_t lane = threadIdx.x % 32;
#if MOE_HAS_TMA
  if (lane == 0) arrive_expecting(bar, rows * bytes);
  __syncwarp();
  for (uint32_t r = lane; r < rows; r += 32) bulk_copy(dst + r * stride, source(r), bytes, bar);
#else
  for (uint32_t r = 0; r < rows; ++r) {
    const uint8_t* src = reinterpret_cast<const uint8_t*>(source(r));
    for (uint32_t at = lane * 16; at < bytes; at += 32 * 16) cp_async16(dst + r * stride + at, src + at);
  }
  cp_async_arrive(bar);
#endif
}

// ---- flags in global memory

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// Adds to a counter; this thread's earlier writes are visible to a thread that acquires the sum.
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// A thread that acquires a counter which this thread raises by `add_relaxed` after this fence sees the earlier writes
/// of this thread. It is for several counters: `add_release` would wait for memory once for each.
__device__ __forceinline__ void fence_release() {
#if MOE_HAS_RELEASE_FENCE
  asm volatile("fence.release.gpu;" ::: "memory");  // acq_rel would empty L1, too
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

__device__ __forceinline__ void add_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// Adds to a counter and returns its old value. This thread's earlier writes are visible to a thread that acquires the
/// sum, and this thread sees the writes that others released before.
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void add_release(uint64_t* p, uint64_t v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// A word whose value shows whether it has been written. These accesses order no other access.
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// Two neighbouring words of that kind, 16-byte aligned.
__device__ __forceinline__ uint4 load_relaxed_pair(const uint64_t* p) {
  uint64_t v, w;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v), "=l"(w) : "l"(p) : "memory");
  return {static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32), static_cast<uint32_t>(w),
          static_cast<uint32_t>(w >> 32)};
}

__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- barriers among some warps of a block

/// Barrier `id` (1..15) among `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Counts `threads` threads towards barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- tensor cores

/// Four 8 x 8 matrices of 16-bit elements; lanes 8i..8i+7 hold the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}

/// Two 8 x 8 matrices; lanes 0..15 hold the row addresses.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_addr(row))
               : "memory");
}

/// The same as `ldmatrix_x4`, each matrix transposed: lane 4g + t gets elements [2t][g] and [2t + 1][g].
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}

#if MOE_HAS_STMATRIX
/// Stores 16 bytes with a policy for L2.
__device__ __forceinline__ void store16(void* to, const uint4& v, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w), "l"(policy)
               : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements to shared memory; lanes 8i..8i+7 hold the row addresses of matrix i, lane 4g
/// + t its elements [g][2t] and [g][2t + 1].
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
/// Stores four 8 x 8 matrices of 16-bit elements, each transposed: lane 4g + t gives [2t][g] and [2t + 1][g] of matrix
/// i in v[i], and lanes 8i .. 8i + 7 the addresses of its rows.
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr(row)),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
#endif

#if MOE_HAS_WGMMA
/// Sets the registers of each thread of a warpgroup; all its warps call it. Taking more waits until others give some.
template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#endif

/// 2^x, subnormal results as zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Transposes an 8 x 8 matrix of 16-bit elements held by a warp: lane 4g + t holds [g][2t] and [g][2t + 1].
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

/// c[16 x 8] += a[16 x 16] b[16 x 8]. Lane 4g + t holds c[g][2t], c[g][2t+1], c[g+8][2t], c[g+8][2t+1].
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace moe
