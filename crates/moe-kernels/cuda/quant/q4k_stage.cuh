// The scales of Q4_K in a stage of weights for warpgroup products (quant/stage.cuh): for each block of 16 rows a unit
// of 128 columns, or, in stages of 64 columns, the half of a unit's integers and its shared floats.
#pragma once

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/unpack.cuh"

namespace moe::quant {

template <int kColumns, int kRowBlocks>
struct Q4kSide {
  static constexpr int kIntegers = kColumns / 64 * kUnitHalf;  // bytes of a block's integers
  static constexpr int kBlockBytes = kIntegers + (kUnitBytes - kUnitShared), kBytes = kRowBlocks * kBlockBytes;
  static constexpr int kItems = kBytes / 16, kBlockItems = kBlockBytes / 16, kIntegerItems = kIntegers / 16;
  static_assert(kColumns == 64 || kColumns == kUnitColumns);

#if MOE_HAS_WGMMA
  /// Copies a lane's part of a stage for all stages of a work tile; `index` is the lane's number among kLanes.
  template <int kLanes>
  class Copies {
    static constexpr int kEach = ceil_div(kItems, kLanes);
    const uint8_t* from[kEach];  // a piece of the row block's first unit
    int index;

    static __device__ __forceinline__ bool is_shared(int item) { return item % kBlockItems >= kIntegerItems; }

   public:
    template <class Source>
    __device__ __forceinline__ Copies(const Source& s, int row_block, int index) : index(index) {
      const size_t row_bytes = static_cast<size_t>(ceil_div(s.groups, kUnitGroups)) * kUnitBytes;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int item = index + i * kLanes, within = item % kBlockItems * 16;
        const int block = min(row_block + item / kBlockItems, s.all_blocks - 1);
        from[i] = s.scales + block * row_bytes + (is_shared(item) ? within - kIntegers + kUnitShared : within);
      }
    }

    /// Copies this lane's pieces of `step` by cp.async.
    __device__ __forceinline__ void copy(uint8_t* side, int step) const {
      constexpr int kSteps = kUnitColumns / kColumns;  // stages of a unit
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int item = index + i * kLanes;
        if (item >= kItems) continue;
        const int half = is_shared(item) ? 0 : step % kSteps * kUnitHalf;
        cp_async16(side + item * 16, from[i] + step / kSteps * kUnitBytes + half);
      }
    }
  };

  /// Loads the operands of a lane's rows in one group of its columns. `block` points to the scales of the block.
  static __device__ __forceinline__ void load(const uint8_t* block, uint32_t (&own)[2]) {
    load_q4k_operands<kColumns>(block, block + kIntegers, own);
  }
#endif
};

}  // namespace moe::quant
