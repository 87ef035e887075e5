// The experts' products of FP8 weights with FP8 activations, a launch each, over lists of slots as moe_experts_wide has
// them.
//
// Floor: 6 T K H I FLOPs at twice the rate of bf16: 618 GFLOP for 8,192 tokens of Qwen3-30B-A3B, 412 us at 1,500
// TFLOP/s, and at the power that holds bf16 at 560 about 600. The weights' 604 MB are 140 us.
#include "quant/fp8_product_kernel.cuh"

namespace moe::fp8 {

#if MOE_SM90
__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
#endif

/// act = silu(gate) up in bf16, in order of experts.
struct StoreActivations {
  static constexpr bool kGather = true, kPlaces = false;

#if MOE_SM90
  static __device__ __forceinline__ void store(const Args& a, Pieces& p, const Work& work, const float* sums) {
    const int inter = a.n / 2;
#pragma unroll
    for (int first = 0; first < kRows; first += 64) {
      if (first >= work.rows) continue;
      uint8_t* at = p.next();
#pragma unroll
      for (int half = 0; half < 64; half += 32) {
        if (first + half >= work.rows) continue;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = sums + (first + half + 8 * i) / 2;
          v[i] = pack_bf16(swiglu(d[0], d[2]), swiglu(d[1], d[3]));
        }
        stmatrix_x4_trans(at + (half + p.lane) * 64 + ((p.warp ^ (p.lane / 2 & 3)) << 4), v);
      }
      p.meet();
#pragma unroll
      for (int half = 0; half < 64; half += 32) {
        const int r = half + p.thread / 4, column = p.thread % 4;
        if (first + r >= work.rows) continue;
        bf16* to = static_cast<bf16*>(a.out) + static_cast<size_t>(work.first + first + r) * inter + work.tile * 64 +
                   p.group * 32;
        reinterpret_cast<uint4*>(to)[column] =
            *reinterpret_cast<const uint4*>(at + r * 64 + ((column ^ (r / 2 & 3)) << 4));
      }
    }
  }
#endif
};

/// Rows in bf16 to the places of their slots.
struct StoreSlotRows {
  static constexpr bool kGather = false, kPlaces = true;

#if MOE_SM90
  static __device__ __forceinline__ void store(const Args& a, Pieces& p, const Work& work, const float* sums) {
    const int columns = work.tile * kTileRows + p.group * 64;
    const uint32_t* places = p.places();
#pragma unroll
    for (int first = 0; first < kRows; first += 32) {
      if (first >= work.rows) continue;
      uint8_t* at = p.next();
#pragma unroll
      for (int half = 0; half < 32; half += 16) {
        const float* d = sums + (first + half) / 2;
        const uint32_t v[4] = {pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), pack_bf16(d[4], d[5]),
                               pack_bf16(d[6], d[7])};
        const int r = half + p.lane / 16 * 8 + p.lane % 8, column = p.warp * 2 + p.lane / 8 % 2;
        stmatrix_x4_trans(at + r * 128 + ((column ^ (r & 7)) << 4), v);
      }
      p.meet();
#pragma unroll
      for (int half = 0; half < 32; half += 16) {
        const int r = half + p.thread / 8, column = p.thread % 8;
        if (first + r >= work.rows) continue;
        bf16* to = static_cast<bf16*>(a.out) + static_cast<size_t>(places[first + r]) * a.n + columns;
        reinterpret_cast<uint4*>(to)[column] =
            *reinterpret_cast<const uint4*>(at + r * 128 + ((column ^ (r & 7)) << 4));
      }
    }
  }
#endif
};

inline bool experts_fit(const Fp8ExpertsArgs& c, bool gate_up) {
  return fits(c.w) && (c.w.gate_up != 0) == gate_up && c.w.n % kTileRows == 0 && c.tokens >= 0 && c.top_k > 0 &&
         c.tokens <= INT32_MAX / c.top_k && c.bucket >= 0 && c.w.experts <= INT16_MAX;
}

template <class Kind>
cudaError_t experts(const Fp8ExpertsArgs& c, int rows, void* stream) {
  Args a = {};
  a.q = c.q, a.scales = c.scales, a.slots = c.slots, a.counts = c.counts, a.out = c.out;
  a.bucket = c.bucket, a.top_k = c.top_k, a.experts = static_cast<int>(c.w.experts);
  a.rows = c.tokens * c.top_k, a.scale_rows = rows;
  return run<Kind>(a, c.w, rows, stream);
}

}  // namespace moe::fp8

/// out [T K, I] = silu(gate) up of the slots in order of experts, from q [T, H] and scales [H / 128, T].
extern "C" int moe_fp8_experts_gate_up(const moe::Fp8ExpertsArgs* args, void* stream) {
  using namespace moe;
  if (!fp8::experts_fit(*args, true)) return cudaErrorInvalidValue;
  return fp8::experts<fp8::StoreActivations>(*args, args->tokens, stream);
}

/// out [T K, H], the row of each slot that has a local expert, from q [T K, I] and scales [I / 128, T K] in order of
/// experts.
extern "C" int moe_fp8_experts_down(const moe::Fp8ExpertsArgs* args, void* stream) {
  using namespace moe;
  if (!fp8::experts_fit(*args, false)) return cudaErrorInvalidValue;
  return fp8::experts<fp8::StoreSlotRows>(*args, args->tokens * args->top_k, stream);
}
