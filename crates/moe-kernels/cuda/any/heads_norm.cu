// RMS norm of q and of k over all of their heads, of any dtype and head size, in two launches. The first computes the
// sums of squares with a warp per head, the second the norms with a block per row. Ranks exchange the sums between the
// launches.
#include "any/any.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;

/// squares[token, head] = the sum of squares of a head of q or k.
__global__ void __launch_bounds__(kWarps * 32)
    head_squares(const float* qkv, float* squares, int normed, int all, int head_dim) {
  pdl_wait();
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  if (head >= normed) return;
  const float* x = qkv + (static_cast<size_t>(blockIdx.x) * all + head) * head_dim;
  float sum = 0;
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) sum += x[i] * x[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) squares[static_cast<size_t>(blockIdx.x) * normed + head] = sum;
}

/// Norms the heads of a row. Every thread adds the sums of all ranks itself, in the order of heads.
template <class T>
__global__ void __launch_bounds__(kAnyThreads)
    heads_norm(float* qkv, const float* squares, const T* q_norm, const T* k_norm, float eps, int tokens, int heads,
               int kv_heads, int head_dim, int ranks, int kv_replicas) {
  pdl_wait();
  const int token = blockIdx.x, normed = heads + kv_heads;
  float q = 0, k = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const float* row = squares + (static_cast<size_t>(rank) * tokens + token) * normed;
    for (int head = 0; head < heads; ++head) q += row[head];
    if (rank % kv_replicas == 0)
      for (int head = heads; head < normed; ++head) k += row[head];
  }
  const float q_count = static_cast<float>(heads) * ranks * head_dim;
  const float k_count = static_cast<float>(kv_heads) * (ranks / kv_replicas) * head_dim;
  const float q_scale = 1.f / sqrtf(q / q_count + eps), k_scale = 1.f / sqrtf(k / k_count + eps);
  const int q_width = heads * head_dim;
  float* x = qkv + static_cast<size_t>(token) * (heads + 2 * kv_heads) * head_dim;
  for (int i = threadIdx.x; i < normed * head_dim; i += kAnyThreads)
    x[i] = i < q_width ? x[i] * q_scale * widen(q_norm[i]) : x[i] * k_scale * widen(k_norm[i - q_width]);
}

}  // namespace
}  // namespace moe

/// Writes squares [tokens, normed] f32 of the first `normed` of `all` heads of qkv [tokens, all, head_dim] f32.
extern "C" int moe_any_head_squares(const void* qkv, void* squares, int tokens, int normed, int all, int head_dim,
                                    void* stream) {
  using namespace moe;
  if (tokens < 0 || normed < 0 || all < normed || head_dim < 0 || normed > 65535 * kWarps) return cudaErrorInvalidValue;
  if (tokens == 0 || normed == 0) return cudaSuccess;
  const dim3 grid(tokens, static_cast<unsigned>(ceil_div(normed, kWarps)));
  return launch(head_squares, {grid, dim3(kWarps * 32), stream}, static_cast<const float*>(qkv),
                static_cast<float*>(squares), normed, all, head_dim);
}

/// Norms the heads of q and k in qkv [tokens, heads + 2 kv_heads, head_dim] f32. `squares` is [ranks, tokens, heads +
/// kv_heads] f32; q_norm [heads head_dim] and k_norm [kv_heads head_dim] are of `dtype`.
extern "C" int moe_any_heads_norm(void* qkv, const void* squares, const void* q_norm, const void* k_norm, float eps,
                                  moe::Dtype dtype, int tokens, int heads, int kv_heads, int head_dim, int ranks,
                                  int kv_replicas, void* stream) {
  using namespace moe;
  if (tokens < 0 || heads <= 0 || kv_heads <= 0 || head_dim <= 0 || ranks <= 0 || kv_replicas <= 0 ||
      ranks % kv_replicas != 0)
    return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  return with_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(heads_norm<T>, {dim3(tokens), dim3(kAnyThreads), stream}, static_cast<float*>(qkv),
                  static_cast<const float*>(squares), static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps,
                  tokens, heads, kv_heads, head_dim, ranks, kv_replicas);
  });
}
