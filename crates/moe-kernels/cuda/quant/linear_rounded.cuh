// Quantised weights of dense products with more than 64 rows of x: linear_tensor.cu with scales that multiply the
// weights instead of the sums.
//
// With this many rows the bound is x, which every block reads again from L2: at 256 rows of Qwen3-30B-A3B's qkv 84 MB
// with tiles of 64 weight rows, 42 MB with 128. But a tile of 128 x 128 leaves registers for one sum of each result,
// and not for a second one over the columns of a scale. So weights are bf16(scale (q - zero)), rounded once, as when
// they are turned into rows for cuBLAS (dequantise.cu). The scale is the sum of two bf16, which holds f16 exactly and
// f32 to 16 bits. FP4 needs no second sum and no rounding: the factor of a row multiplies the only sum at the end. Q4_K
// is the same as with fewer rows.
#pragma once

#include "linear/tensor_kernel.cuh"
#include "quant/stage.cuh"

namespace moe::linear_tensor {

struct QuantSource : quant::Source {
  int gates;  // rows of gate in a gate and up pack; else 0
};

/// The column of the result that belongs to a pack's row. Tiles of gate and up have 8 gate rows, then their up rows.
__device__ __forceinline__ int column_of(const QuantSource& s, int row) {
  return s.gates == 0 ? row : row / 16 * 8 + row % 8 + (row / 8 % 2) * s.gates;
}

template <QuantFormat kFormat, int kColumns, int kShare>
struct RoundedWeights {
  using Source = QuantSource;
  static constexpr int kLoaders = 1;
  static constexpr bool kOnly128 = true;  // only tiles of 128 tokens

  static __device__ __forceinline__ int column(const Args<RoundedWeights>& a, int row) {
    return column_of(a.source, row);
  }

  template <int kGroups>
  struct Stage : quant::QuantStage<kFormat, kColumns, kShare, 4 * kGroups> {
    using Base = quant::QuantStage<kFormat, kColumns, kShare, 4 * kGroups>;
    static constexpr int kRowBytes = 2 * Base::kColumns;
    static constexpr bool kRowScales = false;

#if MOE_HAS_WGMMA
    using Side = typename Base::template SideCopies<32>;

    static __device__ __forceinline__ void load(void* to, const CUtensorMap* w, int row, int step, uint64_t* bar,
                                                uint64_t policy) {
      load_tile(to, w, row / 16, step * (Base::kBlockBytes / 8), bar, policy);
    }

    template <class B>
    static __device__ __forceinline__ void consume(const uint8_t* ring, const uint8_t* side, const Source& source,
                                                   uint64_t* full, uint64_t* empty, int stages, int count,
                                                   float (&acc)[B::kProducts][B::kColumns / 2]) {
      constexpr int kUnit = Base::kShareSteps < 4 ? 2 : 4, kUnits = Base::kSteps / kUnit;  // k-steps unpacked together
      const int block = threadIdx.x / 32;
      int stage = 0, phase = 0;
      typename Base::Words words;
      typename Base::Operands o;
      uint2 scale[2];  // scales of a lane's two rows
      uint32_t fragments[2][kUnit][4];
      const auto read = [&] {
        mbarrier_wait(full + stage, phase);
        Base::read(ring + stage * B::kStageBytes, block, words);
      };
      const auto unpack = [&](int from, int unit) {
        if (unit == 0 || (unit * kUnit % Base::kShareSteps == 0 && !source.uniform)) {
          Base::fetch(side + from * Base::kSideBytes, source, block, unit * kUnit, &o);
          for (int i = 0; i < 2 && !Base::kFp4 && !Base::kWhole; ++i) scale[i] = quant::scale_operands(o.exact[i]);
        }
#pragma unroll
        for (int k = 0; k < kUnit; ++k) {
          uint32_t (&a)[4] = fragments[unit % 2][k];
          if constexpr (Base::kFp4 || Base::kWhole) {
            Base::fetch_step_of(side + from * Base::kSideBytes, block, unit * kUnit + k, &o);
            Base::template fragment<false>(words, o, unit * kUnit + k, a);
            continue;
          }
          quant::unpack<kFormat>(words + (unit * kUnit + k) * Base::kWords, o.zero, a);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = quant::fma2(a[i], scale[i % 2].x, quant::mul2(a[i], scale[i % 2].y));
          wgmma_hold(a);
        }
      };
      read();
      unpack(stage, 0);
      for (int step = 0; step < count; ++step) {
        const uint64_t x = tile_descriptor(ring + stage * B::kStageBytes + B::kWeightBytes);
        const bool more = step + 1 < count;
        const int used = stage;
        if (++stage == stages) stage = 0, phase ^= 1;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kUnit; ++i) {
            const int k = u * kUnit + i;
            wgmma<B::kColumns, false>(acc[0], fragments[u % 2][i], x + k / 4 * (B::kPartBytes / 16) + k % 4 * 2, 1);
          }
          wgmma_commit();
          // The next unit is unpacked while these products run.
          if (u + 1 < kUnits) unpack(used, u + 1);
          if (u + 2 == kUnits && more) read();
          if (u + 1 == kUnits && more) unpack(stage, 0);
          wgmma_wait<0>();
          if (u + 1 == kUnits) Base::give_back(empty + used, false);
        }
      }
      wgmma_hold(acc[0]);
      if constexpr (Base::kFp4) {
#pragma unroll
        for (int i = 0; i < B::kColumns / 2; ++i) acc[0][i] *= o.exact[i / 2 % 2];
      }
    }
#endif
  };
};

}  // namespace moe::linear_tensor
