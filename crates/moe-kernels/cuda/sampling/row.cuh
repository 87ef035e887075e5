// A row of logits in the shared memory of a cluster's blocks: loading, reductions, exchange.
//
// Each block has a slice of ids. Blocks exchange values by writing: every block writes its values into the box of every
// other block. So one cluster barrier makes one exchange, and no barrier is needed before a block may return.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/common.cuh"
#include "sampling/sampling.cuh"

namespace moe {

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / 32;
constexpr int kRowCluster = 8;
constexpr int kBins = 256;
constexpr int kGather = 256;  // number of tokens from which on down a search compares all with all

struct RowShared {
  uint64_t box[2][2][kRowCluster];  // values that other blocks sent to this one, for two turns
  uint64_t warps[kRowWarps];        // parts of block sums
  uint32_t bins[3 * kBins];         // of this block, for each bin: its number of tokens, or its weight in three parts
  uint64_t totals[kBins];           // of the row
  uint64_t found[2];
  uint64_t own[kGather], all[kGather], mass[kGather];  // gathered keys of this block, of the row; their weights
  uint32_t gathered;
};

/// The largest of two; NaN if one is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

__device__ __forceinline__ float max4(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

__device__ __forceinline__ uint64_t warp_total(uint64_t v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, v, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) v += other;
  }
  return v;
}

/// One block's part of a row. All threads of the block call every method; methods that say so must be called by all
/// blocks of the cluster.
struct Row {
  RowShared& s;
  float* logits;  // of the slice, filled up with -inf to a multiple of 4
  int first, count;
  uint32_t turn;

  /// The slice of this block. The other blocks may write here once they have waited too.
  __device__ __forceinline__ Row(RowShared& shared, float* buffer, int vocab) : s(shared), logits(buffer), turn(0) {
    cluster_arrive();
    const int share = round_up(ceil_div(vocab, kRowCluster), 4);
    first = min(vocab, static_cast<int>(cluster_rank()) * share);
    count = min(share, vocab - first);
  }

  __device__ __forceinline__ int groups() const { return ceil_div(count, 4); }
  __device__ __forceinline__ float4 group(int g) const { return reinterpret_cast<const float4*>(logits)[g]; }

  /// Loads the slice to shared memory. Returns the largest value in this thread's groups g = thread, thread +
  /// kRowThreads, .. (NaN if one is NaN). A block barrier must follow.
  __device__ __forceinline__ float load(const float* row) {
    const float* from = row + first;
    float top = -INFINITY;
    const bool whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 && count % 4 == 0;
    if (whole) {
      // The whole slice is copied at once, which registers could not hold. A thread copies what it reads, so no thread
      // waits for another.
      for (int g = threadIdx.x; g < groups(); g += kRowThreads) cp_async16(logits + 4 * g, from + 4 * g);
      cp_async_commit();
      cp_async_wait<0>();
      top = largest();
    } else {
#pragma unroll 4
      for (int i = threadIdx.x; i < 4 * groups(); i += kRowThreads)
        logits[i] = i < count ? __ldcg(from + i) : -INFINITY;
      __syncthreads();
      top = largest();
    }
    return top;
  }

  /// The result of `load` after the slice was changed and a block barrier has passed.
  __device__ __forceinline__ float largest() const {
    float top = -INFINITY;
    for (int g = threadIdx.x; g < groups(); g += kRowThreads) {
      const float4 x = group(g);
      top = max_nan(top, max_nan(max_nan(x.x, x.y), max_nan(x.z, x.w)));
    }
    return top;
  }

  /// The lowest id of the block's slice for whose logit `is` is true, u32::MAX if there is none. Only threads for which
  /// `look` is true take part.
  template <class Is>
  __device__ __forceinline__ uint32_t first_id(bool look, Is is) {
    uint32_t id = ~0u;
    for (int g = threadIdx.x; look && id == ~0u && g < groups(); g += kRowThreads) {
      const float4 x = group(g);
      const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 3; j >= 0; --j) id = is(each[j]) ? first + 4 * g + j : id;
    }
    id = __reduce_min_sync(0xffffffffu, id);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = id;
    __syncthreads();
    for (int w = 0; w < kRowWarps; ++w) id = min(id, static_cast<uint32_t>(s.warps[w]));
    return id;
  }

  __device__ __forceinline__ float block_max(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = max_nan(v, __shfl_xor_sync(0xffffffffu, v, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = __float_as_uint(v);
    __syncthreads();
    for (int w = 0; w < kRowWarps; ++w) v = max_nan(v, __uint_as_float(static_cast<uint32_t>(s.warps[w])));
    return v;
  }

  /// The sum over the block; s.warps keeps the sums of the warps until the next reduction.
  __device__ __forceinline__ uint64_t block_sum(uint64_t v) {
    v = warp_total(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < kRowWarps; ++w) v += s.warps[w];
    return v;
  }

  /// Exchanges two values of every block of the cluster; all blocks call it.
  __device__ __forceinline__ void exchange(uint64_t a, uint64_t b, uint64_t (&all)[2][kRowCluster]) {
    const uint32_t rank = cluster_rank(), parity = turn++ & 1;
    if (turn == 1) cluster_wait();  // for the barrier that the constructor began: every block runs
    if (threadIdx.x < kRowCluster) {
      cluster_store(&s.box[parity][0][rank], threadIdx.x, a);
      cluster_store(&s.box[parity][1][rank], threadIdx.x, b);
    }
    cluster_sync();
#pragma unroll
    for (int r = 0; r < kRowCluster; ++r) all[0][r] = s.box[parity][0][r], all[1][r] = s.box[parity][1][r];
  }

  /// The largest logit of the whole row, and its position; all blocks call it.
  struct Top {
    uint64_t key;  // of the largest logit; its id counts only if `exact` was asked for
    uint64_t bad;  // ~id of the first NaN or +inf; 0 if there is none
  };
  __device__ __forceinline__ Top top(float own, bool exact) {
    const float largest = block_max(own);
    uint64_t key = 0, bad = 0, all[2][kRowCluster];
    if (!(largest < INFINITY)) {
      bad = ~first_id(true, [](float x) { return !(x < INFINITY); });
    } else if (count > 0) {
      const auto is_largest = [=](float x) { return x == largest; };
      key = token_key(largest, exact ? first_id(own == largest, is_largest) : first);
    }
    exchange(key, bad, all);
#pragma unroll
    for (int r = 0; r < kRowCluster; ++r) key = max(key, all[0][r]), bad = max(bad, all[1][r]);
    return {key, bad};
  }
};

/// Dynamic shared memory of a block.
inline size_t row_smem(int vocab) {
  return static_cast<size_t>(round_up(ceil_div(vocab, kRowCluster), 4)) * sizeof(float);
}

/// Whether rows of this vocabulary can be held.
inline cudaError_t row_fits(int vocab) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;  // needs clusters
  const bool fits = row_smem(vocab) + sizeof(RowShared) <= static_cast<size_t>(limits.block_smem);
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace moe
