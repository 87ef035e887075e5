// The end of a sparse layer: the weighted sum of each token's expert rows. It is computed alone, or together with the
// addition to the residual stream and the next layer's RMS norm.
//
// Floor: 4 T K H bytes of f32 rows from L2 (Qwen3-30B-A3B, T = 64: 4 MB, under 1 us; 256: 17 MB, 3.5 us), and half of
// that for bf16 rows, which come from memory. The fused form moves 10 T H more (T = 8,192: 436 MB, 95 us at 4.59 TB/s,
// 107 measured). With few tokens the time is latency, so the fused form replaces two launches by one. Where ranks own
// experts, the sum alone reads only the rows of its own slots: of 4 x 8,192 tokens 268 MB instead of 1.07 GB.
#include "experts/combine.cuh"
#include "rows/norm.cuh"

namespace moe {
namespace {

// With at most this many tokens, the slots of other ranks are read, too: 4 MB of f32 rows, from L2.
constexpr int kFewTokens = 64;

template <bool kPresent, class Row>
__global__ __launch_bounds__(256) void combine(const __grid_constant__ Combine<Row> a) {
  pdl_launch_dependents();
  pdl_wait();
  combine_share<kPresent>(a);
}

/// A token's slot rows for norm_rows; a part holds kSlots of them.
template <class Row>
struct SlotRows {
  Combine<Row> a;
  static constexpr int kColumns = Combine<Row>::kColumns, kSlots = kColumns, kVectors = kVector / kColumns;
  static constexpr uint32_t kRowBytes = kWarpColumns * sizeof(Row), kIds = kSlots * kRowBytes;
  static constexpr uint32_t kWeights = kIds + kSlots * sizeof(uint32_t), kBytes = kWeights + kSlots * sizeof(float);

  __device__ __forceinline__ int parts() const { return ceil_div(a.top_k, kSlots); }

  __device__ __forceinline__ void fetch(uint8_t* to, const Unit& u, int left) const {
    const int first = u.part * kSlots, count = min(kSlots, a.top_k - first), lane = threadIdx.x % 32;
    const size_t slot = static_cast<size_t>(u.row) * a.top_k + first;
    const Row* row = a.slot_rows + slot * a.hidden + u.column();
#pragma unroll
    for (int k = 0; k < kSlots; ++k)
      if (k < count) copy_columns(to + k * kRowBytes, row + static_cast<size_t>(k) * a.hidden, left);
    if (lane < count) {
      cp_async4(to + kIds + lane * sizeof(uint32_t), a.topk_ids + slot + lane);
      cp_async4(to + kWeights + lane * sizeof(float), a.topk_weights + slot + lane);
    }
  }

  /// Adds slots in their order. Rows of absent slots are read and not used.
  __device__ __forceinline__ void add(const uint8_t* from, int part, float (&sum)[kVector]) const {
    const int lane = threadIdx.x % 32;
    bool own = false;
    if (lane < min(kSlots, a.top_k - part * kSlots)) {
      const uint32_t id = reinterpret_cast<const uint32_t*>(from + kIds)[lane];
      own = local_expert(id, a.expert_map, a.num_ids, a.num_local) >= 0;
    }
    const uint32_t present = __ballot_sync(0xffffffffu, own);
    uint4 row[kSlots][kVectors];
    float weight[kSlots];
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      weight[k] = reinterpret_cast<const float*>(from + kWeights)[k];
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        row[k][i] = reinterpret_cast<const uint4*>(from + k * kRowBytes)[lane * kVectors + i];
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if ((present >> k & 1) == 0) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) add_weighted(weight[k], row[k][i], sum, i * kColumns, Row());
    }
  }
};

bool valid(const CombineArgs& c) {
  return c.tokens >= 0 && c.top_k > 0 && c.num_ids > 0 && c.num_local > 0 && c.hidden > 0 &&
         is_code(c.rows, Dtype::kBf16);
}

/// The inputs of the kernels; `out` or `out_f32` receives the sum.
template <class Row>
Combine<Row> combine_of(const CombineArgs& c, bf16* out, float* out_f32) {
  return {static_cast<const Row*>(c.slot_rows),
          c.topk_ids,
          c.topk_weights,
          c.expert_map,
          out,
          out_f32,
          c.tokens,
          c.top_k,
          c.num_ids,
          c.num_local,
          c.hidden};
}

template <class Row>
cudaError_t run(const CombineArgs& c, void* stream) {
  const Combine<Row> a = c.output == Output::kF32 ? combine_of<Row>(c, nullptr, static_cast<float*>(c.out))
                                                  : combine_of<Row>(c, static_cast<bf16*>(c.out), nullptr);
  const int64_t blocks = ceil_div(static_cast<int64_t>(c.tokens) * (c.hidden / Combine<Row>::kColumns), 256);
  const Launch l = {dim3(static_cast<unsigned>(blocks)), dim3(256), stream};
  const bool elsewhere = c.expert_map != nullptr && c.tokens > kFewTokens;
  return elsewhere ? launch(combine<true, Row>, l, a) : launch(combine<false, Row>, l, a);
}

template <class Row>
cudaError_t run_add_norm(const CombineArgs& c, const NormRows& rows, void* stream) {
  const SlotRows<Row> source = {combine_of<Row>(c, nullptr, nullptr)};
  constexpr int kStages = sizeof(Row);  // two rows of 8 slots: 83 KB
  return launch_norm<kStages, 1>(source, rows, stream);
}

/// Adds the sum to the residual stream, and writes its norm to `c.out` or in FP8.
int add_norm(const CombineArgs& c, float* residual, const bf16* weight, float eps, const fp8::RowsOut& fp8,
             void* stream) {
  if (!valid(c) || c.hidden % kVector != 0 || c.output != Output::kBf16) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const NormRows rows = {residual, weight, eps, static_cast<bf16*>(c.out), c.tokens, c.hidden, fp8};
  return c.rows == Dtype::kF32 ? run_add_norm<float>(c, rows, stream) : run_add_norm<bf16>(c, rows, stream);
}

}  // namespace
}  // namespace moe

/// out[t] = sum over k of topk_weights[t, k] slot_rows[t, k], k ascending in f32. H is a multiple of 4, or of 8 if the
/// rows are bf16.
extern "C" int moe_combine(const moe::CombineArgs* args, void* stream) {
  using namespace moe;
  const CombineArgs& c = *args;
  if (!valid(c) || c.hidden % (c.rows == Dtype::kF32 ? 4 : 8) != 0 || !is_code(c.output, Output::kBf16))
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return c.rows == Dtype::kF32 ? run<float>(c, stream) : run<bf16>(c, stream);
}

/// residual [T, H] f32 += what moe_combine computes, then out = residual / rms(residual) * weight [H]. The bits are the
/// same as those from moe_combine followed by moe_add_rms_norm. `output` is kBf16, H a multiple of 8.
extern "C" int moe_combine_add_rms_norm(const moe::CombineArgs* args, float* residual, const __nv_bfloat16* weight,
                                        float eps, void* stream) {
  return moe::add_norm(*args, residual, weight, eps, {}, stream);
}

/// The same as moe_combine_add_rms_norm followed by moe_fp8_quantise, bit for bit: `out` is [T, H] bytes, by quads or
/// not, and scales are [H / 128, lines]. Hopper, H a multiple of 128.
extern "C" int moe_combine_add_rms_norm_fp8(const moe::CombineArgs* args, float* residual, const __nv_bfloat16* weight,
                                            float eps, float* scales, int lines, int quads, void* stream) {
  using namespace moe;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const fp8::RowsOut fp8 = {static_cast<uint8_t*>(args->out), scales, lines, quads != 0};
  if (!fp8.holds(args->tokens, args->hidden)) return cudaErrorInvalidValue;
  return add_norm(*args, residual, weight, eps, fp8, stream);
}
