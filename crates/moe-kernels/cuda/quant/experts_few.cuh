// The products of quantised experts with few rows each, by mma.sync (few_kernel.cuh).
//
// Instructions bound int4: with warpgroup products, which cost many around each stage, a lane had 178 for 64 weights
// and 8 rows, and where every weight is unpacked to q - zero 144, of which masks and shifts fill the integer pipe. So q
// is unpacked to 128 + q alone, and a second product of the same token rows, whose weights are all -(128 + zero), takes
// away what is too much: one instruction instead of four subtractions. Products are exact and sums f32 as before.
//
// A stage is read into registers, so nothing but the arrival orders the reads before what fills it next. Sums have an
// order of their own, so batch-invariant calls do not take it.
#pragma once

#include "experts/tensor_kernel.cuh"
#include "quant/experts.cuh"

namespace moe::experts_tensor {

/// As QuantWeights (experts_tensor.cu), for up to 32 rows of an expert at a time.
template <QuantFormat kFormat, int kColumns, int kShare>
struct FewWeights : quant::ExpertStage<kFormat, kColumns, kShare, 32> {
  using Base = quant::ExpertStage<kFormat, kColumns, kShare, 32>;
  using typename Base::Stage;
  using Self = FewWeights;

#if MOE_SM90
  static constexpr bool kAbove = kFormat == QuantFormat::kInt4;  // weights are unpacked to 128 + q

  /// What the columns of a scale need beside their weights.
  struct Share {
    float scale[2];
    uint32_t minus[4];  // -(128 + zero), an operand of a k-step
    uint32_t zero[2];   // where weights are unpacked to q - zero

    __device__ __forceinline__ Share() : minus{kMinusMiddle, kMinusMiddle, kMinusMiddle, kMinusMiddle} {}

    __device__ __forceinline__ void fetch(const uint8_t* side, const quant::Source& s, int at, int share) {
      if constexpr (kAbove) {
        Stage::scales(side, s, at, share, scale);
        if (s.zeros == nullptr) return;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          minus[i] = minus[i + 2] = quant::kPairSign | quant::zero_operand<kFormat>(Stage::zero(side, at, share, i));
      } else {
        const typename Stage::Operands o = Stage::operands(side, s, at, share);
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[i] = o.exact[i], zero[i] = o.zero[i];
      }
    }

   private:
    static constexpr uint32_t kMinusMiddle = 0xc308c308u;
  };

  /// Keeps a value in a register: where registers are short the compiler would compute it anew for each stage.
  static __device__ __forceinline__ void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }

  static __device__ __forceinline__ void unpack(const uint32_t* words, const Share& o, uint32_t (&a)[4]) {
    if constexpr (kAbove) quant::unpack_above(*words, a);
    else quant::unpack<kFormat>(words, o.zero, a);
  }

  /// acc += this warp's 16 weight rows x kRows token rows over the work tile's steps, and leaves the ring behind them.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kRows / 2]) {
    constexpr int kGroups = kRows / 8;  // of 8 token rows, the columns of an mma
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const quant::Source s = a.source[work.product];
    // Bytes from the beginning of a stage to this lane's weights, and to the 16 bytes of a row that it names to
    // ldmatrix; in the swizzle of 64 columns, those of the last 32 are 64 bytes away. Of what lies beside the weights
    // its first scale and zero point.
    uint32_t weights_at = block * Stage::kBlockBytes + lane * 16;
    uint32_t x_at = Self::kBytes + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
    uint32_t side_at = Stage::first_scale(s, block);
    keep(weights_at), keep(x_at), keep(side_at);
    Share o;
#pragma unroll
    for (uint32_t& v : o.minus) keep(v);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_sleep(b.full(at.stage), at.parity);
      const uint8_t *stage = b.weights(at.stage), *side = b.side(at.stage);
      typename Stage::Words words;
      Stage::read(stage + weights_at, words);
      // Of the columns of one scale; apart what is too much in them, where that fits the registers: else products that
      // add to the same sums would wait for each other.
      constexpr bool kApart = kAbove && kGroups == 1;
      float sums[kGroups][4], minus[kGroups][4];
#pragma unroll
      for (int k = 0; k < Stage::kSteps; k += 2) {
        if (k % Stage::kShareSteps == 0 && (k == 0 || !s.uniform)) o.fetch(side, s, side_at, k / Stage::kShareSteps);
        uint32_t fragment[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack(words + (k + i) * Stage::kWords, o, fragment[i]);
        const uint8_t* x = stage + (k / 2 % 2 == 0 ? x_at : x_at ^ 64) + k / 4 * (kCapacity * 128);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (k % Stage::kShareSteps == 0)
            for (int i = 0; i < 4; ++i) sums[group][i] = minus[group][i] = 0;
          uint32_t columns[4];
          ldmatrix_x4(columns, x + group * 1024);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (kAbove)
              mma_bf16(kApart ? minus[group] : sums[group], o.minus, columns[2 * i], columns[2 * i + 1]);
            mma_bf16(sums[group], fragment[i], columns[2 * i], columns[2 * i + 1]);
          }
          if ((k + 2) % Stage::kShareSteps != 0) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float sum = kApart ? sums[group][i] + minus[group][i] : sums[group][i];
            acc[group * 4 + i] = fmaf(sum, o.scale[i / 2], acc[group * 4 + i]);
          }
        }
      }
      Stage::give_back(b.empty(at.stage), false);
    }
  }
#endif
};

}  // namespace moe::experts_tensor
