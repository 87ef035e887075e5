// out [M, N] = x [M, K] w[N, K]^T for any M, with Hopper's warpgroup products; for M up to 8 see linear/stream.cu.
//
// Floor: 2 N K bytes of weights over the read bandwidth, or 2 M N K FLOP over 790 TFLOP/s, whichever takes longer; they
// are equal near M = 170. Between these two the path from L2 to the SMs is the limit, because each block reads its
// tokens' x again.
//
// Weights are the 64-row operand, and tokens are the columns, as many as there are (16 .. 256 in one tile). So a batch
// of 32 costs 32 columns and not 64 rows. A block computes 64 or 128 weight rows, with a warpgroup for each 64. One
// producer warp fills a ring of TMA tiles of 64 columns. There are too few tiles of N for all SMs (80 of 64 rows for
// qkv, 32 for o_proj of Qwen3-30B-A3B). So K is divided over the blocks of a cluster, which add their sums in rank
// order through distributed shared memory: no atomics, no second launch, reproducible bits. The copies of the first
// stages' weights start before pdl_wait(); x is copied after it.
#include "linear/tensor_kernel.cuh"

namespace moe::linear_tensor {

/// Rows of bf16, copied by a tensor map, which writes the swizzle that wgmma reads.
struct Bf16Weights {
  struct Source {};
  static constexpr int kLoaders = 1;
  template <int kGroups>
  static constexpr int kMostTokens = kGroups == 1 ? 128 : 256;

  static __device__ __forceinline__ int column(const Args<Bf16Weights>&, int row) { return row; }

  template <int kGroups>
  struct Stage {
    static constexpr int kColumns = kTileColumns, kBytes = 64 * kGroups * kTileColumns * 2, kSideBytes = 0;
    static constexpr int kRowBytes = 2 * kColumns;
    static constexpr bool kRowScales = false;
    static constexpr uint32_t kReleases = kProductArrivals;

    struct Side {
      __device__ __forceinline__ Side(const Source&, int, int) {}
    };

#if MOE_HAS_WGMMA
    static __device__ __forceinline__ void load(void* to, const CUtensorMap* w, int row, int step, uint64_t* bar,
                                                uint64_t policy) {
      load_tile(to, w, row, step * kTileColumns, bar, policy);
    }

    /// Adds the block's share of K to `acc`. A warpgroup computes 64 weight rows and all tokens.
    template <class B>
    static __device__ __forceinline__ void consume(const uint8_t* ring, const uint8_t*, const Source&, uint64_t* full,
                                                   uint64_t* empty, int stages, int count,
                                                   float (&acc)[B::kProducts][B::kColumns / 2]) {
      const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
      int stage = 0, phase = 0, previous = -1;
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(full + stage, phase);
        const uint8_t* at = ring + stage * B::kStageBytes;
        const uint64_t a = tile_descriptor(at + group * 64 * kTileColumns * 2);
        const uint64_t b = tile_descriptor(at + B::kWeightBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileColumns / 16; ++k) {
#pragma unroll
          for (int c = 0; c < B::kProducts; ++c) {
            // The next 128 tokens are 16 KB further, which is 1,024 in units of the descriptor.
            wgmma<B::kColumns>(acc[c], a + 2 * k, b + 2 * k + 1024 * c);
          }
        }
        wgmma_commit();
        // The products of one stage run while the products of the next stage are issued.
        wgmma_wait<1>();
        if (previous >= 0 && lane == 0) mbarrier_arrive(empty + previous);
        previous = stage;
        if (++stage == stages) stage = 0, phase ^= 1;
      }
      wgmma_wait<0>();
    }
#endif
  };
};

}  // namespace moe::linear_tensor

/// out = x w^T (+ bias) for any m, k a multiple of 64.
extern "C" int moe_linear_tensor(const moe::LinearTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::linear_tensor;
  const LinearTensorArgs& c = *args;
  if (c.m < 0 || c.n < 0 || c.k <= 0 || c.k % kTileColumns != 0 || !is_code(c.output, Output::kAddF32) ||
      c.splits < -1 || c.splits > kMaxSplits)
    return cudaErrorInvalidValue;
  if (c.m == 0 || c.n == 0) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const Shape s = shape_for(c.m, c.n, c.k / kTileColumns, c.splits, limits);
  CUtensorMap w;
  e = make_tensor_map(&w, c.w, c.n, c.k, 64 * s.groups);
  if (e != cudaSuccess) return e;
  const Args<Bf16Weights> a = {c.bias, c.out, c.m, c.n, c.k, 0, {}};
  return s.groups == 1 ? run<Bf16Weights, 1>(w, c.x, a, c.output, s, stream)
                       : run<Bf16Weights, 2>(w, c.x, a, c.output, s, stream);
}
