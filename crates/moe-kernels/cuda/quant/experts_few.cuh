// Quantised experts with few rows each: the products of experts_tensor.cu with mma.sync instead of warpgroup products.
//
// The bound of int4 is instructions and waiting, and warpgroup products cost many instructions in each stage: fences,
// descriptors, and waits that the compiler puts right after the products where registers are short. With few rows the
// tensor cores have little to do, so mma.sync is fast enough. Its operands and results are in the same lanes as a
// warpgroup's. It takes 135 instructions for 64 weights of a lane and 8 rows instead of 178, and a warp waits only for
// the ring. A stage is read into registers, so the arrival at its barrier is enough to order these reads before the
// copy that fills it next.
//
// With even fewer rows, integers are multiplied without unpacking (experts_digits.cuh).
//
// The order of these sums differs from the order in the other kernels, so batch-invariant calls do not use this kernel.
#pragma once

#include "experts/tensor_kernel.cuh"
#include "quant/experts.cuh"

namespace moe::experts_tensor {

/// The same as QuantWeights (experts_tensor.cu), for up to 32 rows of an expert at a time.
template <QuantFormat kFormat, int kColumns, int kShare, class E>
struct FewWeights : quant::ExpertStage<kFormat, kColumns, kShare>, CopiedRows {
  using Epilogue = E;
  using typename quant::ExpertStage<kFormat, kColumns, kShare>::Stage;
  using Self = FewWeights;
  template <int kCapacity>
  static constexpr int kFewBlocks = kCapacity == 16 ? 3 : 2;
  /// More stages would not help: the loads of the gathering warps wait until the weights that their SM has requested
  /// have come.
  template <int>
  static constexpr int kMostStages = code_bits(kFormat) == 4 ? 4 : kMaxStages;
  template <int kCapacity>
  static constexpr int kConsumerRegisters = kCapacity == 16 ? 64 : 88;

#if MOE_HAS_WGMMA
  /// acc += this warp's 16 weight rows x kRows token rows over the work tile's steps. `at` is then past these steps.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kRows / 2]) {
    constexpr int kGroups = kRows / 8;  // groups of 8 token rows, the columns of an mma
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const quant::Source s = a.source[work.product];
    // Byte offsets from the beginning of a stage to this lane's weights, and to the 16 bytes of a row whose address it
    // gives to ldmatrix (in the swizzle of 64 columns, the last 32 are 64 bytes away). Then the index of this lane's
    // first scale and zero point.
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
      float sums[kGroups][4];  // sums over the columns of one scale
      float (*into)[4] = Stage::kWhole ? reinterpret_cast<float (*)[4]>(acc) : sums;
#pragma unroll
      for (int k = 0; k < Stage::kSteps; k += 2) {
        // The factors of FP4 are loaded when they are needed, because registers are short.
        if (!Stage::kFp4 && k % Stage::kShareSteps == 0 && (k == 0 || !s.uniform))
          o = Stage::operands(side, s, side_at, k / Stage::kShareSteps);
        uint32_t fragment[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Stage::fetch_step(side, side_at, k + i, &o);
          quant::unpack<kFormat>(words + (k + i) * Stage::kWords, o.zero, fragment[i]);
        }
        if (Stage::kFp4 && k + 2 == Stage::kSteps) o = Stage::operands(side, s, side_at, 0);
        const uint8_t* x = stage + (k / 2 % 2 == 0 ? x_at : x_at ^ 64) + k / 4 * (kCapacity * 128);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (!Stage::kWhole && k % Stage::kShareSteps == 0)
            for (float& sum : sums[group]) sum = 0;
          uint32_t columns[4];
          ldmatrix_x4(columns, x + group * 1024);
          mma_bf16(into[group], fragment[0], columns[0], columns[1]);
          mma_bf16(into[group], fragment[1], columns[2], columns[3]);
          if constexpr (!Stage::kWhole) {
            if ((k + 2) % Stage::kShareSteps != 0) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[group * 4 + i] = fmaf(sums[group][i], o.exact[i / 2], acc[group * 4 + i]);
          }
        }
      }
      Stage::give_back(b.empty(at.stage), false);
    }
  }
#endif
};

}  // namespace moe::experts_tensor
