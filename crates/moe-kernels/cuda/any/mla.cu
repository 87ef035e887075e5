// Latent attention before and after its products and softmax, of any dtype and shape: norm and rotation of the
// down-projected rows, cache writes, rotated queries, and products with a matrix per head. src/ops/mla.rs defines the
// semantics.
//
// The rotation has the same bits as on the CPU: plain multiplications and additions.
#include "any/latent_rows.cuh"
#include "any/product.cuh"
#include "attention/args.cuh"

namespace moe {
namespace {

/// A block per row.
template <class T>
__global__ void __launch_bounds__(kAnyThreads) latent(const __grid_constant__ MlaLatentArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const size_t row = blockIdx.x, angles = row * (a.rope / 2);
  split_latent(a.compressed + row * (a.latent + a.rope), static_cast<const T*>(a.norm), a.eps, a.latent, a.rope,
               a.cos + angles, a.sin + angles, static_cast<T*>(a.latent_out) + row * a.latent,
               static_cast<T*>(a.rotated_out) + row * a.rope);
}

/// The threads are distributed over the values of a row's heads.
template <class T, class S>
__global__ void __launch_bounds__(kAnyThreads) cache(const __grid_constant__ MlaCacheArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const size_t row = blockIdx.x;
  const uint32_t slot = a.slots[row];
  if (slot == kNoSlot || slot >= a.num_slots) return;
  const int plain = a.key - a.rope, each = a.key + a.value;
  const S* kv = static_cast<const S*>(a.kv) + row * a.heads * (plain + a.value);
  const T* tail = static_cast<const T*>(a.rotated) + row * a.rope;
  for (int i = column_start(); i < a.heads * each; i += column_step()) {
    const int head = i / each, d = i % each;
    const size_t to = (static_cast<size_t>(slot / a.block_size) * a.heads + head) * a.block_size + slot % a.block_size;
    const S* own = kv + static_cast<size_t>(head) * (plain + a.value);
    T* key = static_cast<T*>(a.k_cache) + to * a.key;
    if (d < plain) key[d] = narrow<T>(widen(own[d]));
    else if (d < a.key) key[d] = tail[d - plain];
    else static_cast<T*>(a.v_cache)[to * a.value + d - a.key] = narrow<T>(widen(own[d - a.rope]));
  }
}

/// Writes values `first`, `first` + `step`, .. of a row's queries `q` [heads, plain_dim + rope] to the output arrays of
/// `a`.
template <class T, class O, class Args>
__device__ __forceinline__ void split_queries(const Args& a, size_t row, const float* q, int first, int step) {
  const size_t angles = row * (a.rope / 2);
  const int each = a.plain_dim + a.rope;
  for (int i = first; i < a.heads * each; i += step) {
    const int d = i % each;
    const size_t head = row * a.heads + i / each;
    const float* x = q + i - d;
    O* out = static_cast<O*>(a.out) + head * a.width;
    if (d >= a.plain_dim) {
      const int at = d - a.plain_dim;
      out[a.width - a.rope + at] = narrow<O>(rotated(x + a.plain_dim, a.cos + angles, a.sin + angles, at));
    } else if (a.plain != nullptr) {
      static_cast<T*>(a.plain)[head * a.plain_dim + d] = narrow<T>(x[d]);
    } else {
      out[d] = narrow<O>(x[d]);
    }
  }
}

/// The threads are distributed over the values of a row's heads.
template <class T, class O>
__global__ void __launch_bounds__(kAnyThreads) query(const __grid_constant__ MlaQueryArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const size_t row = blockIdx.x;
  const float* q = a.q + row * a.heads * (a.plain_dim + a.rope);
  split_queries<T, O>(a, row, q, column_start(), column_step());
}

/// A row's first block writes the cache row, the others write the queries.
template <class T, class O>
__global__ void __launch_bounds__(kAnyThreads) rows(const __grid_constant__ MlaRowsArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const size_t row = blockIdx.x;
  if (blockIdx.y > 0) {
    const int first = (blockIdx.y - 1) * kAnyThreads + threadIdx.x, step = (gridDim.y - 1) * kAnyThreads;
    return split_queries<T, O>(a, row, a.queries + row * a.query_row, first, step);
  }
  cache_row<T>(a, row, a.latents + row * a.latent_row);
}

template <class T>
__global__ void copy_columns(const T* from, T* to, int width, int from_row, int to_row) {
  pdl_wait();
  const size_t row = blockIdx.x;
  for (int i = column_start(); i < width; i += column_step()) to[row * to_row + i] = from[row * from_row + i];
}

/// out[row, head] = sums, rounded; rows of out are `stride` long.
template <class O>
struct StoreHead {
  O* out;
  int stride;
  uint32_t rows, heads;

  __device__ __forceinline__ void operator()(int, uint32_t row, int column, const float (&sum)[1]) const {
    out[static_cast<size_t>(alternating_row(row, rows, heads)) * stride + column] = narrow<O>(sum[0]);
  }
};

}  // namespace
}  // namespace moe

using namespace moe;

/// Latent and rotated part of the down-projected rows.
extern "C" int moe_any_mla_latent(const MlaLatentArgs* args, void* stream) {
  const MlaLatentArgs& c = *args;
  if (c.rows < 0 || c.latent <= 0 || c.rope <= 0 || c.rope % 2 != 0) return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  return with_dtype(c.dtype, [&](auto t) {
    return launch(latent<typename decltype(t)::type>, {dim3(c.rows), dim3(kAnyThreads), stream}, c);
  });
}

/// Stores keys and values in the rows' slots. `kv_dtype` is `dtype` or f32.
extern "C" int moe_any_mla_cache(const MlaCacheArgs* args, void* stream) {
  const MlaCacheArgs& c = *args;
  if (c.rows < 0 || c.heads <= 0 || c.rope < 0 || c.key < c.rope || c.value < 0 || c.block_size <= 0 ||
      c.num_slots < 0 || c.num_slots > kNoSlot || (c.value > 0 && c.v_cache == nullptr) ||
      static_cast<int64_t>(c.heads) * (c.key + c.value) > 0x7fffffff)
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  return with_stream(c.dtype, c.kv_dtype, [&](auto t, auto s) {
    return launch(cache<typename decltype(t)::type, typename decltype(s)::type>,
                  over_rows(c.rows, c.heads * (c.key + c.value), stream), c);
  });
}

/// Queries with their tails rotated. `out_dtype` is `dtype` or f32.
extern "C" int moe_any_mla_query(const MlaQueryArgs* args, void* stream) {
  const MlaQueryArgs& c = *args;
  const int least = c.rope + (c.plain == nullptr ? c.plain_dim : 0);
  if (c.rows < 0 || c.heads <= 0 || c.plain_dim < 0 || c.rope < 0 || c.rope % 2 != 0 || c.width < least ||
      static_cast<int64_t>(c.heads) * (c.plain_dim + c.rope) > 0x7fffffff)
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  return with_stream(c.dtype, c.out_dtype, [&](auto t, auto o) {
    return launch(query<typename decltype(t)::type, typename decltype(o)::type>,
                  over_rows(c.rows, c.heads * (c.plain_dim + c.rope), stream), c);
  });
}

/// Queries with their tails rotated, and cache rows. `out_dtype` is `dtype` or f32.
extern "C" int moe_any_mla_rows(const MlaRowsArgs* args, void* stream) {
  const MlaRowsArgs& c = *args;
  const int least = c.rope + (c.plain == nullptr ? c.plain_dim : 0);
  const int64_t queries = static_cast<int64_t>(c.heads) * (c.plain_dim + c.rope);
  if (c.rows < 0 || c.heads <= 0 || c.plain_dim < 0 || c.rope <= 0 || c.rope % 2 != 0 || c.latent <= 0 ||
      c.width < least || c.num_slots < 0 || c.num_slots > kNoSlot || queries > c.query_row ||
      c.latent + c.rope > c.latent_row)
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  Launch l = over_rows(c.rows, static_cast<int>(queries), stream);
  ++l.grid.y;
  return with_stream(c.dtype, c.out_dtype, [&](auto t, auto o) {
    return launch(rows<typename decltype(t)::type, typename decltype(o)::type>, l, c);
  });
}

/// The product of every head's rows with the head's matrix. `out_dtype` is `dtype` or f32; n is at most 4,194,240.
extern "C" int moe_any_per_head(const PerHeadArgs* args, void* stream) {
  const PerHeadArgs& c = *args;
  const int64_t rows = static_cast<int64_t>(c.rows) * c.heads;
  if (c.rows < 0 || c.heads <= 0 || c.stride < c.n || rows > 0x7fffffff) return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  return with_stream(c.dtype, c.out_dtype, [&](auto t, auto o) {
    using T = typename decltype(t)::type;
    using O = typename decltype(o)::type;
    const auto all = static_cast<uint32_t>(rows);
    const Groups heads = {nullptr, nullptr, c.heads, static_cast<int>(rows), all, c.invariant != 0, c.rows};
    const Product<T> product = {static_cast<const T*>(c.x), static_cast<const T*>(c.w), heads, c.n, c.k};
    const StoreHead<O> store = {static_cast<O*>(c.out), c.stride, static_cast<uint32_t>(c.rows),
                                static_cast<uint32_t>(c.heads)};
    return launch_product<1>(product, store, stream);
  });
}

/// Copies from [rows, width] to `to`, in rows that are `from_row` and `to_row` long.
extern "C" int moe_any_copy_columns(const void* from, void* to, moe::Dtype dtype, int rows, int width, int from_row,
                                    int to_row, void* stream) {
  if (rows < 0 || width < 0 || from_row < width || to_row < width) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(copy_columns<T>, over_rows(rows, width, stream), static_cast<const T*>(from), static_cast<T*>(to),
                  width, from_row, to_row);
  });
}
