// Dense products on warpgroup products (linear/tensor_kernel.cuh) with quantised weights, for 8 rows and more.
//
// Floor: a quarter or half of bf16's bytes (Qwen3-30B-A3B's qkv: int4 5.4 MB = 1.2 us, int8 and FP8 10.6 MB = 2.4 us at
// 4.4 TB/s); as with bf16, latency is most of the time.
//
// Design: the same as with bf16, with stages of 128 columns. A warp unpacks 64 columns of its 16 rows to the A operand
// in registers while the products of the 64 columns before run. Up to 64 rows of x the tiles are the same as bf16's,
// and up to 128 rows too if bf16's tiles split K. Otherwise the bound is the rows of x that every block reads again:
// tiles are then 128 weight rows x 64 tokens, or x 128 tokens with rounded weights (linear_rounded.cuh).
#include "quant/linear_rounded.cuh"

namespace moe::linear_tensor {

constexpr int kStageColumns = 128;

template <QuantFormat kFormat, int kShare>
struct QuantWeights {
  using Source = QuantSource;
  static constexpr int kLoaders = 1;
  static constexpr bool kOnly128 = false;
  template <int kGroups>
  static constexpr int kMostTokens = kGroups == 1 ? 128 : 64;  // two sums of each result are in registers

  static __device__ __forceinline__ int column(const Args<QuantWeights>& a, int row) {
    return column_of(a.source, row);
  }

  template <int kGroups>
  struct Stage : quant::QuantStage<kFormat, kStageColumns, kShare, 4 * kGroups> {
    using Base = quant::QuantStage<kFormat, kStageColumns, kShare, 4 * kGroups>;
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
      const int block = threadIdx.x / 32;
      // The reads of a stage have ended, because their results are in registers, so it needs no fence before it is
      // given back. Small tiles are 0.2 us faster with a fence, others up to 0.7 us slower (docs/lessons/quantised.md).
      constexpr bool kFence = kGroups == 1 && B::kColumns <= 64;
      int stage = 0, phase = 0;
      typename Base::Words words;
      const auto read = [&] {
        mbarrier_wait(full + stage, phase);
        Base::read(ring + stage * B::kStageBytes, block, words);
      };
      // The number of k-steps that are unpacked together: it is small where sums take many registers.
      constexpr int kUnit = Base::kShareSteps < 4 || B::kColumns > 64 ? 2 : 4, kUnits = Base::kSteps / kUnit;
      uint32_t fragments[2][kUnit][4];
      typename Base::Operands o;
      const auto unpack = [&](int from, int unit) {
        Base::fetch(side + from * Base::kSideBytes, source, block, unit * kUnit, &o);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) {
          Base::fetch_step_of(side + from * Base::kSideBytes, block, unit * kUnit + k, &o);
          Base::template fragment<false>(words, o, unit * kUnit + k, fragments[unit % 2][k]);
        }
      };
      read();
      unpack(stage, 0);
      float sums[B::kColumns / 2];  // sums over the columns of one scale
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
            const uint64_t columns = x + k / 4 * (B::kPartBytes / 16) + k % 4 * 2;
            if constexpr (Base::kWhole) wgmma<B::kColumns, false>(acc[0], fragments[u % 2][i], columns, 1);
            else wgmma<B::kColumns, false>(sums, fragments[u % 2][i], columns, k % Base::kShareSteps > 0);
          }
          wgmma_commit();
          // The next unit is unpacked while these products run. The next stage is read as soon as the words of this one
          // have been used.
          const typename Base::Operands multiplied = o;
          if (u + 1 < kUnits) unpack(used, u + 1);
          if (u + 2 == kUnits && more) read();
          if (u + 1 == kUnits && more) unpack(stage, 0);
          wgmma_wait<0>();
          if (u + 1 == kUnits) Base::give_back(empty + used, kFence);
          if (!Base::kWhole && (u + 1) * kUnit % Base::kShareSteps == 0) Base::add_scaled(acc[0], sums, multiplied);
        }
      }
      wgmma_hold(acc[0]);
    }
#endif
  };
};

template <class W>
Args<W> arguments(const QuantLinearTensorArgs& c) {
  const int n = static_cast<int>(c.w.n), k = static_cast<int>(c.w.k);
  const int share = quant::share(c.w, kStageColumns);
  return {c.bias, c.out, c.m, n, k, 0, {quant::source(c.w, kStageColumns, share), c.w.gate_up != 0 ? n / 2 : 0}};
}

/// Tiles of 128 weight rows and `tokens` tokens, one on each SM. K is cut into halves if no SM gets two tiles then.
/// `weight` is the time of one tile; returns the time of all of them.
inline int tiles_for(int m, int n, int tokens, int weight, const DeviceLimits& limits, Shape* s) {
  const int tiles = ceil_div(n, 128) * ceil_div(m, tokens);
  *s = {tokens, 2, 2 * tiles <= limits.sms ? 2 : 1, static_cast<size_t>(limits.block_smem) - kHeader};
  return 2 * weight * ceil_div(tiles * s->splits, limits.sms) / s->splits;
}

/// Returns whether K is cut into halves and weights are rounded, as measured (docs/lessons/quantised.md). Up to 64 rows
/// of x, and where bf16's tiles split K, the tiles stay the same as bf16's.
inline bool halves_of_rounded(int m, int n, const DeviceLimits& limits, Shape* s) {
  if (m <= 64 || s->splits > 1 || 4 * ceil_div(n, 128) <= limits.sms || 2 * ceil_div(n, 128) > limits.sms) return false;
  *s = {128, 2, 2, static_cast<size_t>(limits.block_smem) - kHeader};
  return true;
}

/// With more than 128 rows, tiles have 64 tokens, or 128 with rounded weights, which take a third longer: the choice is
/// whichever ends first. Returns whether weights are rounded.
inline bool shape_of_many(int m, int n, const DeviceLimits& limits, Shape* s) {
  Shape rounded;
  const int exact_time = tiles_for(m, n, 64, 3, limits, s);
  s->ring = 111 * 1024;
  if (tiles_for(m, n, 128, 4, limits, &rounded) >= exact_time) return false;
  *s = rounded;
  return true;
}

template <class W, int kGroups>
cudaError_t map_and_run(const QuantLinearTensorArgs& c, const Shape& s, void* stream) {
  CUtensorMap map;
  const cudaError_t e = quant::make_pack_map(&map, c.w, 4 * kGroups, W::template Stage<1>::kBlockBytes);
  if (e != cudaSuccess) return e;
  if constexpr (W::kOnly128) return run<W, 128, kGroups>(map, c.x, arguments<W>(c), c.output, s, stream);
  else return run<W, kGroups>(map, c.x, arguments<W>(c), c.output, s, stream);
}

template <QuantFormat kFormat, int kShare>
cudaError_t launch(const QuantLinearTensorArgs& c, const DeviceLimits& limits, void* stream) {
  using Exact = QuantWeights<kFormat, kShare>;
  const int n = static_cast<int>(c.w.n), steps = ceil_div(static_cast<int>(c.w.k), kStageColumns);
  Shape s = shape_for(c.m, n, steps, c.splits, limits);
  const int asked = s.splits;
  bool rounded = false;
  if (c.m > Exact::template kMostTokens<1>) {
    rounded = shape_of_many(c.m, n, limits, &s) && c.splits >= 0;
    if (!rounded) s.tokens = Exact::template kMostTokens<2>;
    if (c.splits != 0) s.splits = asked;
    if (s.splits > steps) s.splits = steps;
  } else if (c.splits == 0 && halves_of_rounded(c.m, n, limits, &s)) {
    rounded = true;
  } else if (c.m > Exact::template kMostTokens<2>) {
    s.groups = 1;
  }
  if (rounded) return map_and_run<RoundedWeights<kFormat, kStageColumns, kShare>, 2>(c, s, stream);
  return s.groups == 1 ? map_and_run<Exact, 1>(c, s, stream) : map_and_run<Exact, 2>(c, s, stream);
}

}  // namespace moe::linear_tensor

/// out = x w^T (+ bias) for any m and one matrix that fits (quant/stage.cuh). With m > 64 weights may be rounded to
/// bf16; with splits = -1 they never are, and a row's bits do not depend on m.
extern "C" int moe_quant_linear_tensor(const moe::QuantLinearTensorArgs* args, void* stream) {
  using namespace moe;
  const QuantLinearTensorArgs& c = *args;
  if (c.m < 0 || !quant::fits(c.w) || c.w.experts != 1 || !is_code(c.output, Output::kAddF32) || c.splits < -1 ||
      c.splits > linear_tensor::kMaxSplits)
    return cudaErrorInvalidValue;
  if (c.m == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const bool wide_groups = quant::share(c.w, linear_tensor::kStageColumns) == linear_tensor::kStageColumns;
  switch (c.w.format) {
    case QuantFormat::kInt4:
      return wide_groups ? linear_tensor::launch<QuantFormat::kInt4, 128>(c, limits, stream)
                         : linear_tensor::launch<QuantFormat::kInt4, 32>(c, limits, stream);
    case QuantFormat::kInt8:
      return wide_groups ? linear_tensor::launch<QuantFormat::kInt8, 128>(c, limits, stream)
                         : linear_tensor::launch<QuantFormat::kInt8, 32>(c, limits, stream);
    case QuantFormat::kFp4: return linear_tensor::launch<QuantFormat::kFp4, 128>(c, limits, stream);
    case QuantFormat::kNvfp4: return linear_tensor::launch<QuantFormat::kNvfp4, 128>(c, limits, stream);
    case QuantFormat::kQ4k: return linear_tensor::launch<QuantFormat::kQ4k, 128>(c, limits, stream);
    default: return linear_tensor::launch<QuantFormat::kFp8, 128>(c, limits, stream);
  }
}
