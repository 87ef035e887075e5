// The grouped expert products of any dtype and shape: gate and up with the gated activation, and down.
#include "any/gated.cuh"
#include "any/product.cuh"

namespace moe {
namespace {

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

/// out = act(gate, up) of rows that are `stride` apart.
template <class T>
__global__ void gated_rows(const float* gate, const float* up, T* out, int width, int64_t stride, Gated gated) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t from = static_cast<int64_t>(blockIdx.x) * stride, to = static_cast<int64_t>(blockIdx.x) * width;
  for (int i = column_start(); i < width; i += column_step())
    out[to + i] = narrow<T>(gated(gate[from + i], up[from + i]));
}

}  // namespace
}  // namespace moe

/// Gate and up products with the activation.
extern "C" int moe_any_gate_up(const moe::AnyGateUpArgs* args, void* stream) {
  using namespace moe;
  const AnyGateUpArgs& c = *args;
  if (c.x_rows < 0 || c.activation < 0 || c.activation > 3 || c.offsets == nullptr) return cudaErrorInvalidValue;
  const Gated gated = {static_cast<Activation>(c.activation), c.alpha, c.limit};
  const Groups groups = {c.offsets, c.in_rows, c.experts, c.rows, static_cast<uint32_t>(c.x_rows), c.invariant != 0};
  return with_dtype(c.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const Product<T> product = {static_cast<const T*>(c.x), static_cast<const T*>(c.w13), groups, c.width, c.hidden};
    const StoreGated<T> store = {static_cast<const T*>(c.bias), static_cast<T*>(c.out), c.width, gated};
    return launch_product<2>(product, store, stream);
  });
}

/// The gated activation of f32 sums: out [rows, width] of `dtype`, rounded once.
extern "C" int moe_any_gated(const moe::AnyGatedArgs* args, void* stream) {
  using namespace moe;
  const AnyGatedArgs& c = *args;
  if (c.rows < 0 || c.width < 0 || c.stride < c.width || c.activation < 0 || c.activation > 3)
    return cudaErrorInvalidValue;
  if (c.rows == 0 || c.width == 0) return cudaSuccess;
  const Gated gated = {static_cast<Activation>(c.activation), c.alpha, c.limit};
  return with_dtype(c.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(gated_rows<T>, over_rows(c.rows, c.width, stream), c.gate, c.up, static_cast<T*>(c.out), c.width,
                  static_cast<int64_t>(c.stride), gated);
  });
}

/// The down product.
extern "C" int moe_any_down(const moe::AnyDownArgs* args, void* stream) {
  using namespace moe;
  const AnyDownArgs& c = *args;
  if (c.num_out < 0 || c.offsets == nullptr) return cudaErrorInvalidValue;
  const Groups groups = {c.offsets, nullptr, c.experts, c.rows, static_cast<uint32_t>(c.rows), c.invariant != 0};
  return with_dtype(c.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const Product<T> product = {static_cast<const T*>(c.x), static_cast<const T*>(c.w2), groups, c.hidden, c.width};
    const StoreRow<T, float> store = {static_cast<const T*>(c.bias), c.out_rows, c.out, c.hidden,
                                      static_cast<uint32_t>(c.num_out)};
    return launch_product<1>(product, store, stream);
  });
}
