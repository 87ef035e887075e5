// Quantised experts with few rows each: the products of experts_tensor.cu by mma.sync instead of warpgroup products.
//
// Instructions and waiting bound int4, and warpgroup products cost many around each stage: fences, descriptors, waits
// that the compiler places right behind the products where registers are short. With few rows the tensor cores have
// little to do, so mma.sync, whose operands and results lie in a warp as a warpgroup's do, is fast enough: 135
// instructions for 64 weights of a lane and 8 rows instead of 178, and warps that wait for nobody but the ring.
// A stage is read into registers, so nothing but the arrival orders the reads before what fills it next.
//
// Integers with fewer rows still are multiplied as they are (experts_digits.cuh).
//
// Sums have an order of their own, so batch-invariant calls do not take it.
#pragma once

#include "experts/tensor_kernel.cuh"
#include "quant/experts.cuh"

namespace moe::experts_tensor {

/// As QuantWeights (experts_tensor.cu), for up to 32 rows of an expert at a time.
template <QuantFormat kFormat, int kColumns, int kShare>
struct FewWeights : quant::ExpertStage<kFormat, kColumns, kShare>, CopiedRows {
  using typename quant::ExpertStage<kFormat, kColumns, kShare>::Stage;
  using Self = FewWeights;
  template <int kCapacity>
  static constexpr int kFewBlocks = kCapacity == 16 ? 3 : 2;
  /// What a lane of the gathering warps asks for waits behind the weights that its SM has asked for.
  template <int>
  static constexpr int kMostStages = kFormat == QuantFormat::kInt4 ? 4 : kMaxStages;
  template <int kCapacity>
  static constexpr int kConsumerRegisters = kCapacity == 16 ? 64 : 88;

#if MOE_HAS_WGMMA
  /// acc += this warp's 16 weight rows x kRows token rows over the work tile's steps, and leaves the ring behind them.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kRows / 2]) {
    constexpr int kGroups = kRows / 8;  // of 8 token rows, the columns of an mma
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const quant::Source s = a.source[work.product];
    // Bytes from the beginning of a stage to this lane's weights, and to the 16 bytes of a row that it names to
    // ldmatrix; in the swizzle of 64 columns, the last 32 are 64 bytes away. Then which of the scales and zero points
    // beside the weights is its first.
    uint32_t weights_at = block * Stage::kBlockBytes + lane * 16;
    uint32_t x_at = Self::kBytes + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
    uint32_t side_at = Stage::first_scale(s, block);
    keep(weights_at), keep(x_at), keep(side_at);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_wait(b.full(at.stage), at.parity);
      const uint8_t *stage = b.weights(at.stage), *side = b.side(at.stage);
      typename Stage::Words words;
      Stage::read(stage + weights_at, words);
      typename Stage::Operands o;
      float sums[kGroups][4];  // of the columns of one scale
#pragma unroll
      for (int k = 0; k < Stage::kSteps; k += 2) {
        if (k % Stage::kShareSteps == 0 && (k == 0 || !s.uniform))
          o = Stage::operands(side, s, side_at, k / Stage::kShareSteps);
        uint32_t fragment[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) quant::unpack<kFormat>(words + (k + i) * Stage::kWords, o.zero, fragment[i]);
        const uint8_t* x = stage + (k / 2 % 2 == 0 ? x_at : x_at ^ 64) + k / 4 * (kCapacity * 128);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (k % Stage::kShareSteps == 0)
            for (float& sum : sums[group]) sum = 0;
          uint32_t columns[4];
          ldmatrix_x4(columns, x + group * 1024);
          mma_bf16(sums[group], fragment[0], columns[0], columns[1]);
          mma_bf16(sums[group], fragment[1], columns[2], columns[3]);
          if ((k + 2) % Stage::kShareSteps != 0) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[group * 4 + i] = fmaf(sums[group][i], o.exact[i / 2], acc[group * 4 + i]);
        }
      }
      Stage::give_back(b.empty(at.stage), false);
    }
  }
#endif
};

}  // namespace moe::experts_tensor
