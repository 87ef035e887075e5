// Dense products of FP8 weights with FP8 activations: the experts' kernel with one matrix and rows in order.
//
// Floor: 2 m n k FLOPs; Qwen3-30B-A3B's qkv at 8,192 rows 172 GFLOP, 115 us at 1,500 TFLOP/s, about 170 at the power
// that holds bf16 at 700.
#include "quant/fp8_product_kernel.cuh"

namespace moe::fp8 {

/// A row's sums in f32 or bf16; of tiles with gate and up rows all gates, then all ups.
struct StoreRows {
  static constexpr bool kGather = false, kPlaces = false;

#if MOE_SM90
  static __device__ __forceinline__ void store(const Args& a, Pieces& p, const Work& work, const float* sums) {
    const int g = p.lane / 4, row = work.tile * kTileRows + p.group * 64 + p.warp * 16;
    if (row >= a.n) return;
    const int low = a.gates == 0 ? row + g : row / 2 + g, high = low + (a.gates == 0 ? 8 : a.gates);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = 8 * j + p.lane % 4 * 2 + e;
        if (r >= work.rows) continue;
        const size_t at = static_cast<size_t>(work.first + r) * a.n;
        const float v = sums[4 * j + e], w = sums[4 * j + 2 + e];
        if (a.output == Output::kBf16) {
          bf16* to = static_cast<bf16*>(a.out) + at;
          to[low] = __float2bfloat16_rn(v), to[high] = __float2bfloat16_rn(w);
        } else {
          float* to = static_cast<float*>(a.out) + at;
          to[low] = v, to[high] = w;
        }
      }
    }
  }
#endif
};

}  // namespace moe::fp8

/// out [m, n] = q w^T from q [m, k] and scales [k / 128, m]; `output` kF32 or kBf16.
extern "C" int moe_fp8_linear(const moe::Fp8LinearArgs* args, void* stream) {
  using namespace moe;
  const Fp8LinearArgs& c = *args;
  if (c.m < 0 || !fp8::fits(c.w) || c.w.experts != 1 || !is_code(c.output, Output::kBf16)) return cudaErrorInvalidValue;
  fp8::Args a = {};
  a.q = c.q, a.scales = c.scales, a.out = c.out, a.output = c.output;
  a.experts = 1, a.rows = a.scale_rows = c.m, a.gates = c.w.gate_up != 0 ? static_cast<int>(c.w.n / 2) : 0;
  return fp8::run<fp8::StoreRows>(a, c.w, c.m, stream);
}
