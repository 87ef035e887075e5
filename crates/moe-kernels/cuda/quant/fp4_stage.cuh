// The scales of FP4 in a stage of weights for warpgroup products (quant/stage.cuh): for each block of 16 rows its
// factors, which are the same in all stages, and the bytes of the stage's groups.
#pragma once

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/unpack.cuh"

namespace moe::quant {

template <QuantFormat kFormat, int kColumns, int kRowBlocks>
struct Fp4Side {
  static constexpr int kGroups = kColumns / fp4_group(kFormat), kSteps = operand_steps(kFormat);
  static constexpr int kBlockBytes = fp4_row_bytes(kGroups), kBytes = kRowBlocks * kBlockBytes;
  static constexpr int kItems = kBytes / 16, kBlockItems = kBlockBytes / 16, kFactorItems = kFp4Factors / 16;

#if MOE_HAS_WGMMA
  /// Copies a lane's part of a stage for all stages of a work tile; `index` is the lane's number among kLanes.
  template <int kLanes>
  class Copies {
    static constexpr int kEach = ceil_div(kItems, kLanes);
    const uint8_t* from[kEach];  // a piece of the factors, or the piece of a row block's first group
    int index, last_group;

   public:
    template <class Source>
    __device__ __forceinline__ Copies(const Source& s, int row_block, int index)
        : index(index), last_group(s.groups - 1) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int item = index + i * kLanes, within = min(item % kBlockItems, kFactorItems);
        const int block = min(row_block + item / kBlockItems, s.all_blocks - 1);
        from[i] = s.scales + static_cast<size_t>(block) * fp4_row_bytes(s.groups) + within * 16;
      }
    }

    /// Copies this lane's pieces of `step` by cp.async.
    __device__ __forceinline__ void copy(uint8_t* side, int step) const {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int item = index + i * kLanes, group = item % kBlockItems - kFactorItems;
        if (item >= kItems) continue;
        const int at = group < 0 ? 0 : min(step * kGroups + group, last_group) * kFp4Bytes;
        cp_async16(side + item * 16, from[i] + at);
      }
    }
  };

  /// The offset of the scale of row g in a group of a block, counted from the first group.
  static __device__ __forceinline__ int first(int block) {
    return block * kBlockBytes + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  /// What multiplies the sums of a lane's two rows. `at` is `first` of the block.
  static __device__ __forceinline__ void load_factors(const uint8_t* side, int at, float (&exact)[2]) {
    const uint8_t* factors = side + at + static_cast<int>(threadIdx.x) % 32 / 4 * 3;
    exact[0] = load_fp4_factor<kFormat>(factors, 0), exact[1] = load_fp4_factor<kFormat>(factors, 1);
  }
  /// Loads the operands of `unpack` if other columns begin at this k-step.
  static __device__ __forceinline__ void load_operands(const uint8_t* side, int at, int k, uint32_t (&operand)[2]) {
    if (k % kSteps == 0) load_fp4_operands<kFormat>(side + at + kFp4Factors + k / kSteps * kFp4Bytes, operand);
  }
#endif
};

}  // namespace moe::quant
