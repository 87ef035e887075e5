// The dense product of any dtype and shape.
#include "any/product.cuh"

/// out [rows, n] (of `dtype` or f32) = x [rows, k] * w [n, k]^T + bias [n]; bias may be null. n is at most 4,194,240.
/// With `invariant` a row's bits do not depend on `rows`.
extern "C" int moe_any_linear(const void* x, const void* w, const void* bias, void* out, int dtype, int out_dtype,
                              int rows, int n, int k, int invariant, void* stream) {
  using namespace moe;
  if (rows < 0) return cudaErrorInvalidValue;
  const auto count = static_cast<uint32_t>(rows);
  return with_stream(dtype, out_dtype, [&](auto t, auto o) {
    using T = typename decltype(t)::type;
    using O = typename decltype(o)::type;
    const Groups all = {nullptr, nullptr, 1, rows, count, invariant != 0};
    const Product<T> product = {static_cast<const T*>(x), static_cast<const T*>(w), all, n, k};
    const StoreRow<T, O> store = {static_cast<const T*>(bias), nullptr, static_cast<O*>(out), n, count};
    return launch_product<1>(product, store, stream);
  });
}
