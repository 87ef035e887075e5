// Projects a few tokens' queries to latent space, and does everything else before their attention: rotation, the
// latents' norm, and the cache rows. It does in one launch what moe_any_mla_rows and a product with W_UK of every head
// do.
//
// Floor: W_UK of all heads (DeepSeek-V2-Lite: 2.1 MB, 0.5 us). Everything else is latency. So a block has its part of
// W_UK, 32 KB, in registers before the products that it reads exist: 128 latent columns of a head, for all tokens.
#include "any/latent_rows.cuh"
#include "attention/args.cuh"
#include "ptx/ptx.cuh"

namespace moe {
namespace {

constexpr int kPlain = 128;    // elements of a head's query that are not rotated
constexpr int kColumns = 128;  // latent columns of a block
constexpr int kWarps = 8;
constexpr int kLanes = kPlain / 8;                             // of a column, eight elements each
constexpr int kEach = kColumns / (kWarps * (32 / kLanes));     // columns of a lane
static_assert(kWarps * 32 == kAnyThreads && kEach <= kLanes);  // a lane stores one column

__global__ void __launch_bounds__(kWarps * 32)
    latent_query(const __grid_constant__ MlaRowsArgs a, const bf16* __restrict__ w_uk) {
  const int parts = a.latent / kColumns;
  const int head = blockIdx.x / parts;
  if (head >= a.heads) {  // the last blocks write a cache row each
    const int row = blockIdx.x - a.heads * parts;
    pdl_launch_dependents();
    pdl_wait();
    return cache_row<bf16>(a, row, a.latents + static_cast<size_t>(row) * a.latent_row);
  }
  const int warp = threadIdx.x / 32, k = threadIdx.x % kLanes * 8;
  const int first = blockIdx.x % parts * kColumns + warp * (kColumns / kWarps) + threadIdx.x % 32 / kLanes * kEach;
  Vec16 w[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    w[j] = load_const(w_uk + (static_cast<size_t>(head) * a.latent + first + j) * kPlain + k);
  pdl_launch_dependents();
  pdl_wait();
  for (int row = 0; row < a.rows; ++row) {
    const float* q = a.queries + static_cast<size_t>(row) * a.query_row + head * (kPlain + a.rope);
    bf16* out = static_cast<bf16*>(a.out) + (static_cast<size_t>(row) * a.heads + head) * a.width;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __bfloat162float(__float2bfloat16_rn(q[k + i]));
    float own = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(w[j].word[i]);
        sum = fmaf(x[2 * i], v.x, fmaf(x[2 * i + 1], v.y, sum));
      }
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (threadIdx.x % kLanes == j) own = sum;
    }
    if (threadIdx.x % kLanes < kEach) out[first + threadIdx.x % kLanes] = __float2bfloat16_rn(own);
    if (blockIdx.x % parts == 0 && static_cast<int>(threadIdx.x) < a.rope) {
      const size_t angles = static_cast<size_t>(row) * (a.rope / 2);
      out[a.width - a.rope + threadIdx.x] =
          __float2bfloat16_rn(rotated(q + kPlain, a.cos + angles, a.sin + angles, threadIdx.x));
    }
  }
}

}  // namespace
}  // namespace moe

/// Queries in latent space, [rows, heads, latent + rope] bf16, and cache rows. It takes only bf16, plain_dim 128, a
/// latent of a multiple of 128, and rope up to 256; products and w_uk begin at multiples of 16 bytes.
extern "C" int moe_attention_latent_query(const moe::MlaRowsArgs* args, const void* w_uk, void* stream) {
  using namespace moe;
  const MlaRowsArgs& c = *args;
  if (c.rows < 0 || c.heads <= 0 || c.plain_dim != kPlain || c.rope <= 0 || c.rope % 2 != 0 || c.rope > kAnyThreads ||
      c.latent <= 0 || c.latent % kColumns != 0 || c.width != c.latent + c.rope || c.dtype != Dtype::kBf16 ||
      c.query_row < c.heads * (kPlain + c.rope) || c.latent_row < c.latent + c.rope || c.out_dtype != Dtype::kBf16 ||
      c.num_slots < 0 || c.num_slots > kNoSlot || w_uk == nullptr)
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  const Launch l = {dim3(c.heads * (c.latent / kColumns) + c.rows), dim3(kWarps * 32), stream};
  return launch(latent_query, l, c, static_cast<const bf16*>(w_uk));
}
