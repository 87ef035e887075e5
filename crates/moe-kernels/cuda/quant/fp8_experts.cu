// The experts' products of FP8 weights with FP8 activations, a launch each, over lists of slots as moe_experts_wide has
// them and rows of activations in order of experts.
//
// Floor: 6 T K H I FLOPs at twice the rate of bf16: 618 GFLOP for 8,192 tokens of Qwen3-30B-A3B, 312 us at 1,980
// TFLOP/s; the weights' 604 MB are 140 us. Measured: 816 us.
#include "quant/fp8_product_kernel.cuh"

namespace moe::fp8 {

#if MOE_SM90
__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
#endif

/// act = silu(gate) up in bf16, in order of experts. Of the weight tile's 16s of rows 8 are gate's and 8 up's.
struct StoreActivations {
  static constexpr bool kSlots = false;

#if MOE_SM90
  template <class F>
  static __device__ __forceinline__ void store(const Args& a, const Piece& piece, int tile, const float* sums, int rows,
                                               F place) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* d = sums + (2 * i + j / 2) * 8 + j % 2 * 2;
        v[j] = pack_bf16(swiglu(d[0], d[4]), swiglu(d[1], d[5]));
      }
      piece.put(i, v);
    }
    const int inter = a.n / 2;
    piece.each([&](int row, int column, const uint4& bytes) {
      bf16* to = a.out + static_cast<size_t>(place(row)) * inter + tile * (kTileRows / 2);
      if (row < rows) reinterpret_cast<uint4*>(to)[column] = bytes;
    });
  }
#endif
};

/// Rows in bf16 to the places of their slots.
struct StoreSlotRows {
  static constexpr bool kSlots = true;

#if MOE_SM90
  template <class F>
  static __device__ __forceinline__ void store(const Args& a, const Piece& piece, int tile, const float* sums, int rows,
                                               F place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* d = sums + half * 32 + i * 8;
        const uint32_t v[4] = {pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), pack_bf16(d[4], d[5]),
                               pack_bf16(d[6], d[7])};
        piece.put(i, v);
      }
      piece.each([&](int row, int column, const uint4& bytes) {
        bf16* to = a.out + static_cast<size_t>(place(row)) * a.n + tile * kTileRows + half * 64;
        if (row < rows) reinterpret_cast<uint4*>(to)[column] = bytes;
      });
    }
  }
#endif
};

inline bool experts_fit(const Fp8ExpertsArgs& c, bool gate_up) {
  return fits(c.w) && (c.w.gate_up != 0) == gate_up && c.tokens >= 0 && c.top_k > 0 &&
         c.tokens <= INT32_MAX / c.top_k && c.bucket >= 0 && c.w.experts <= INT16_MAX;
}

template <class Kind>
cudaError_t experts(const Fp8ExpertsArgs& c, void* stream) {
  Args a = {};
  a.scales = c.scales, a.slots = c.slots, a.counts = c.counts, a.out = c.out;
  a.bucket = c.bucket, a.experts = static_cast<int>(c.w.experts), a.rows = c.tokens * c.top_k;
  return run<Kind>(a, c.q, c.w, stream);
}

}  // namespace moe::fp8

/// out [T K, I] = silu(gate) up of the slots, from q [T K, H]; all in order of experts.
extern "C" int moe_fp8_experts_gate_up(const moe::Fp8ExpertsArgs* args, void* stream) {
  using namespace moe;
  if (!fp8::experts_fit(*args, true)) return cudaErrorInvalidValue;
  return fp8::experts<fp8::StoreActivations>(*args, stream);
}

/// out [T K, H], the row of each slot that has a local expert, from q [T K, I] in order of experts.
extern "C" int moe_fp8_experts_down(const moe::Fp8ExpertsArgs* args, void* stream) {
  using namespace moe;
  if (!fp8::experts_fit(*args, false)) return cudaErrorInvalidValue;
  return fp8::experts<fp8::StoreSlotRows>(*args, stream);
}
