// The experts on warpgroup products (experts/tensor_kernel.cuh) with quantised weights, for 8 tokens and more.
//
// Floor: the bytes of the touched experts (Qwen3-30B-A3B, all 128: int4 in groups of 128 with f16 scales 312 MB = 71 us
// at 4.4 TB/s, in groups of 32 with zero points 359 MB = 82 us, int8 613 MB = 139 us, FP8 604 MB = 137 us).
// gpt-oss-20b in MXFP4, 13.3 MB an expert at 4.37 TB/s: the experts that 1 and 8 tokens choose take 12 and 64 us, all
// 32, from 64 tokens on, 97 us. The 51 GFLOP of 256 tokens take less.
//
// Design: one instruction of the copy engine loads a stage, 128 rows x 128 columns of weights in the order of the pack.
// The gathering warps load scales, zero points and token rows. A consumer warp has 16 rows: it unpacks 32 or 64 columns
// to the A operand in registers while the products of the columns before run, so unpacked weights never go through
// shared memory. Two or three blocks share an SM where experts have few rows, and their warps hide each other's
// latency. Up to a mean of kMostFew rows the products are made by mma.sync (experts_few.cuh). Below kMostDigits rows,
// integer weights are multiplied without unpacking (experts_digits.cuh).
#include "quant/experts_digits.cuh"
#include "quant/experts_few.cuh"

namespace moe::experts_tensor {

constexpr int kColumns = 128;  // columns of a stage; half as many would double the work for each stage
constexpr int kMostFew = 9;    // mean rows of an expert up to which mma.sync is faster
/// Mean rows below which integers use digits: of more rows, making digits takes too long. Q4_K's weights take longer.
template <QuantFormat kFormat>
constexpr int kMostDigits = is_q4k(kFormat) ? 5 : 4;

template <QuantFormat kFormat, int kShare, class E>
struct QuantWeights : quant::ExpertStage<kFormat, kColumns, kShare>, CopiedRows {
  using Epilogue = E;
  using typename quant::ExpertStage<kFormat, kColumns, kShare>::Stage;
  using Self = QuantWeights;
  /// The number of blocks that share an SM: their warps hide each other's latency.
  template <int kCapacity>
  static constexpr int kFewBlocks = 2;
  /// Where registers allow it, the next stage is read as soon as the words of this one have been used.
  static constexpr int kReadEarly = code_bits(kFormat) == 4 ? 1 : 0;
  template <int kCapacity>
  static constexpr int kConsumerRegisters = kCapacity == 128  ? 208
                                            : kCapacity == 32 ? 88
                                                              : 0;

#if MOE_HAS_WGMMA
  /// acc += 64 weight rows x kRows token rows over the work tile's steps. `at` is then past these steps.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kRows / 2]) {
    const int block = threadIdx.x / 32;
    const quant::Source s = a.source[work.product];
    typename Stage::Words words;
    const auto read = [&](const Cursor& from) {
      mbarrier_wait(b.full(from.stage), from.parity);
      if (work.product == 0) fence_async_shared();  // ordinary stores wrote the rows of x
      Stage::read(b.weights(from.stage), block, words);
    };
    // The number of k-steps that are unpacked together, while the products of the k-steps before run. It is small where
    // sums take many registers.
    constexpr int kUnit = Stage::kShareSteps < 4 || kRows > 16 ? 2 : 4, kUnits = Stage::kSteps / kUnit;
    uint32_t fragments[2][kUnit][4];
    typename Stage::Operands o;
    const auto unpack = [&](const Cursor& from, int unit) {
      Stage::fetch(b.side(from.stage), s, block, unit * kUnit, &o);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        Stage::fetch_step_of(b.side(from.stage), block, unit * kUnit + k, &o);
        Stage::template fragment<false>(words, o, unit * kUnit + k, fragments[unit % 2][k]);
      }
    };
    read(at);
    unpack(at, 0);
    float sums[kRows / 2];  // sums over the columns of one scale
    for (int step = 0; step < work.steps; ++step) {
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      const bool more = step + 1 < work.steps;
      Cursor next = at;
      next.advance(b.stages);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          const int k = u * kUnit + i;
          const uint64_t columns = x + k / 4 * (kCapacity * 128 / 16) + k % 4 * 2;
          if constexpr (Stage::kWhole) wgmma<kRows, false>(acc, fragments[u % 2][i], columns, 1);
          else wgmma<kRows, false>(sums, fragments[u % 2][i], columns, k % Stage::kShareSteps > 0);
        }
        wgmma_commit();
        const typename Stage::Operands multiplied = o;
        if (u + 1 < kUnits) unpack(at, u + 1);
        if (u + 1 + kReadEarly == kUnits && more) read(next);
        if (u + 1 == kUnits && more) unpack(next, 0);
        wgmma_wait<0>();
        if (u + 1 == kUnits) Stage::give_back(b.empty(at.stage), false);
        if (!Stage::kWhole && (u + 1) * kUnit % Stage::kShareSteps == 0) Stage::add_scaled(acc, sums, multiplied);
      }
      at = next;
    }
    wgmma_hold(acc);
  }
#endif
};

/// The kernel, its limits and its launch for weights of type W.
template <class W>
struct Prepared {
  CUtensorMap w13, w2;
  Args<W> args;
};

template <class W>
cudaError_t prepare(const QuantExpertsTensorArgs& c, int share, const typename W::Epilogue& epilogue, Prepared<W>* p) {
  p->args = {c.x,
             c.slots,
             c.counts,
             c.act,
             static_cast<float*>(c.slot_rows),
             {c.counters, static_cast<int>(c.w13.experts)},
             c.bucket,
             c.tokens,
             c.top_k,
             static_cast<int>(c.w13.experts),
             static_cast<int>(c.w13.k),
             static_cast<int>(c.w2.k),
             0,
             c.tokens * c.top_k >= 2 * c.num_ids,
             {quant::source(c.w13, kColumns, share), quant::source(c.w2, kColumns, share)},
             epilogue};
  return quant::make_pack_maps(&p->w13, &p->w2, c, W::kBlockBytes);
}

/// The launch for few rows: two blocks per SM where few experts are touched, else three.
template <class W>
cudaError_t launch_few(const QuantExpertsTensorArgs& c, int share, int mean, const typename W::Epilogue& epilogue,
                       const DeviceLimits& limits, void* stream) {
  Prepared<W> p;
  const cudaError_t e = prepare(c, share, epilogue, &p);
  if (e != cudaSuccess) return e;
  if constexpr (W::kFewestRows < 8)
    if (c.tokens <= 8) return run<8>(p.args, p.w13, p.w2, limits, stream);
  return mean <= 1 ? run<32>(p.args, p.w13, p.w2, limits, stream) : run<16>(p.args, p.w13, p.w2, limits, stream);
}

template <QuantFormat kFormat, int kShare, class E>
cudaError_t launch(const QuantExpertsTensorArgs& c, const E& epilogue, const DeviceLimits& limits, void* stream) {
  const int mean = c.tokens * c.top_k / c.num_ids;
  if constexpr (is_integer(kFormat) || is_q4k(kFormat))
    if (mean < kMostDigits<kFormat> && c.invariant == 0)
      return launch_few<DigitWeights<kFormat, kShare, E>>(c, kShare, mean, epilogue, limits, stream);
  if (mean <= kMostFew && c.invariant == 0)
    return launch_few<FewWeights<kFormat, kColumns, kShare, E>>(c, kShare, mean, epilogue, limits, stream);
  Prepared<QuantWeights<kFormat, kShare, E>> p;
  const cudaError_t e = prepare(c, kShare, epilogue, &p);
  return e != cudaSuccess ? e : run(p.args, c.num_ids, p.w13, p.w2, limits, stream);
}

template <class E>
cudaError_t launch_format(const QuantExpertsTensorArgs& c, const E& epilogue, const DeviceLimits& limits,
                          void* stream) {
  const bool wide_groups = quant::share(c.w13, kColumns) == kColumns && quant::share(c.w2, kColumns) == kColumns;
  switch (c.w13.format) {
    case QuantFormat::kInt4:
      return wide_groups ? launch<QuantFormat::kInt4, 128>(c, epilogue, limits, stream)
                         : launch<QuantFormat::kInt4, 32>(c, epilogue, limits, stream);
    case QuantFormat::kInt8:
      return wide_groups ? launch<QuantFormat::kInt8, 128>(c, epilogue, limits, stream)
                         : launch<QuantFormat::kInt8, 32>(c, epilogue, limits, stream);
    case QuantFormat::kFp4: return launch<QuantFormat::kFp4, 128>(c, epilogue, limits, stream);
    case QuantFormat::kNvfp4: return launch<QuantFormat::kNvfp4, 128>(c, epilogue, limits, stream);
    case QuantFormat::kQ4k: return launch<QuantFormat::kQ4k, 128>(c, epilogue, limits, stream);
    default: return launch<QuantFormat::kFp8, 128>(c, epilogue, limits, stream);
  }
}

}  // namespace moe::experts_tensor

/// The same as moe_experts_tensor with packs: in w13 gate and up rows alternate by 8, w2 is plain, and both have the
/// same format.
extern "C" int moe_quant_experts_tensor(const moe::QuantExpertsTensorArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::experts_tensor;
  const QuantExpertsTensorArgs& c = *args;
  if (!quant::experts_fit(c)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  return with_epilogue(c.epilogue, [&](auto epilogue) { return launch_format(c, epilogue, limits, stream); });
}
