// The dense product of any dtype and shape.
#include "any/product.cuh"

/// out = x w^T (+ bias). n is at most 4,194,240.
extern "C" int moe_any_linear(const moe::AnyLinearArgs* args, void* stream) {
  using namespace moe;
  const AnyLinearArgs& c = *args;
  if (c.rows < 0) return cudaErrorInvalidValue;
  const auto count = static_cast<uint32_t>(c.rows);
  return with_stream(c.dtype, c.out_dtype, [&](auto t, auto o) {
    using T = typename decltype(t)::type;
    using O = typename decltype(o)::type;
    const Groups all = {nullptr, nullptr, 1, c.rows, count, c.invariant != 0};
    const Product<T> product = {static_cast<const T*>(c.x), static_cast<const T*>(c.w), all, c.n, c.k};
    const StoreRow<T, O> store = {static_cast<const T*>(c.bias), nullptr, static_cast<O*>(c.out), c.n, count};
    return launch_product<1>(product, store, stream);
  });
}
