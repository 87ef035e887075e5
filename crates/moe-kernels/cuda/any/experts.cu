// The grouped expert products of any dtype and shape: gate and up with the gated activation, and down.
#include "any/product.cuh"

namespace moe {
namespace {

enum class Activation : int { kSwiGlu = 0, kSwiGluOai = 1, kGelu = 2, kGeluTanh = 3 };

/// A gated activation; alpha and limit are gpt-oss's.
struct Gated {
  Activation kind;
  float alpha, limit;

  __device__ __forceinline__ float operator()(float gate, float up) const {
    switch (kind) {
      case Activation::kSwiGlu: return gate / (1.f + expf(-gate)) * up;
      case Activation::kSwiGluOai: {
        gate = fminf(gate, limit);
        up = fmaxf(-limit, fminf(up, limit));
        return gate / (1.f + expf(-alpha * gate)) * (up + 1.f);
      }
      case Activation::kGelu: return gate * 0.5f * (1.f + erff(gate * 0.70710678f)) * up;
      default: {
        const float inner = 0.7978846f * gate * (1.f + 0.044715f * gate * gate);
        return gate * 0.5f * (1.f + tanhf(inner)) * up;
      }
    }
  }
};

/// out[row] = round(act(gate + bias, up + bias)).
template <class T>
struct StoreGated {
  const T* bias;  // [experts, 2 n] or null
  T* out;         // [rows, n]
  int n;
  Gated gated;

  __device__ __forceinline__ void operator()(int expert, uint32_t row, int column, const float (&sum)[2]) const {
    float gate = sum[0], up = sum[1];
    if (bias != nullptr) {
      const T* own = bias + static_cast<size_t>(expert) * 2 * n + column;
      gate += widen(own[0]);
      up += widen(own[n]);
    }
    out[static_cast<size_t>(row) * n + column] = narrow<T>(gated(gate, up));
  }
};

}  // namespace
}  // namespace moe

/// For every grouped row i of local expert e: out[i] = act(x[in_rows[i]] * w13[e]^T + bias[e]).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [x_rows, hidden]; a row number from x_rows on reads as zeros |
/// | `offsets` | [experts + 1] u32, ascending: rows offsets[e]..offsets[e + 1] are of expert e |
/// | `in_rows` | [rows] u32, or null: row i reads row i of x |
/// | `w13`, `bias` | [experts, 2 width, hidden], [experts, 2 width] or null: gate rows, then up rows |
/// | `out` | [rows, width]; rows from offsets[experts] on are left as they were |
///
/// `activation`: 0 SwiGLU, 1 gpt-oss's (alpha, limit), 2 GELU by erf, 3 GELU by tanh. With `invariant` a row's bits do
/// not depend on `rows`.
extern "C" int moe_any_gate_up(const void* x, const void* offsets, const void* in_rows, const void* w13,
                               const void* bias, void* out, int dtype, int activation, float alpha, float limit,
                               int x_rows, int rows, int experts, int width, int hidden, int invariant,
                               void* stream) {
  using namespace moe;
  if (x_rows < 0 || activation < 0 || activation > 3 || offsets == nullptr) return cudaErrorInvalidValue;
  const Gated gated = {static_cast<Activation>(activation), alpha, limit};
  const Groups groups = {static_cast<const uint32_t*>(offsets), static_cast<const uint32_t*>(in_rows), experts, rows,
                         static_cast<uint32_t>(x_rows), invariant != 0};
  return with_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const Product<T> product = {static_cast<const T*>(x), static_cast<const T*>(w13), groups, width, hidden};
    const StoreGated<T> store = {static_cast<const T*>(bias), static_cast<T*>(out), width, gated};
    return launch_product<2>(product, store, stream);
  });
}

/// For every grouped row i of local expert e: out[out_rows[i]] = x[i] * w2[e]^T + bias[e], f32.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [rows, width] |
/// | `offsets` | as for moe_any_gate_up |
/// | `out_rows` | [rows] u32, distinct, or null: row i writes row i; a number from num_out on writes nothing |
/// | `w2`, `bias` | [experts, hidden, width], [experts, hidden] or null |
/// | `out` | [num_out, hidden] f32; rows that no grouped row names are left as they were |
extern "C" int moe_any_down(const void* x, const void* offsets, const void* out_rows, const void* w2, const void* bias,
                            void* out, int dtype, int rows, int num_out, int experts, int hidden, int width,
                            int invariant, void* stream) {
  using namespace moe;
  if (num_out < 0 || offsets == nullptr) return cudaErrorInvalidValue;
  const Groups groups = {static_cast<const uint32_t*>(offsets), nullptr, experts, rows, static_cast<uint32_t>(rows),
                         invariant != 0};
  return with_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const Product<T> product = {static_cast<const T*>(x), static_cast<const T*>(w2), groups, hidden, width};
    const StoreRow<T, float> store = {static_cast<const T*>(bias), static_cast<const uint32_t*>(out_rows),
                                      static_cast<float*>(out), hidden, static_cast<uint32_t>(num_out)};
    return launch_product<1>(product, store, stream);
  });
}
