// The BatchedExperts layout: copies token rows to blocks of rows per expert and back, and numbers the rows of such
// blocks.
#include "any/any.cuh"
#include "experts/align.cuh"

namespace moe {
namespace {

/// out[e, r] = rows[slot / top_k] of expert e's r-th slot; counts[e] = its slots.
template <class T>
__global__ void batch_rows(const T* rows, const uint32_t* offsets, const uint32_t* slots, T* out, uint32_t* counts,
                           int top_k, int max_tokens, int width, uint32_t num_slots) {
  pdl_wait();
  const int e = blockIdx.x / max_tokens;
  const uint32_t r = blockIdx.x % max_tokens;
  const uint32_t begin = offsets[e], count = min(offsets[e + 1] - begin, static_cast<uint32_t>(max_tokens));
  const uint32_t slot = r < count && begin + r < num_slots ? slots[begin + r] : kNoExpert;
  if (r == 0 && blockIdx.y == 0 && threadIdx.x == 0) counts[e] = count;
  if (slot >= num_slots) return;
  const T* from = rows + static_cast<size_t>(slot / top_k) * width;
  T* to = out + static_cast<size_t>(blockIdx.x) * width;
  for (int i = column_start(); i < width; i += column_step()) to[i] = from[i];
}

/// out[slot] = rows[e, r] for expert e's r-th slot.
template <class T>
__global__ void unbatch_rows(const T* rows, const uint32_t* offsets, const uint32_t* slots, T* out, int max_tokens,
                             int width, uint32_t num_slots) {
  pdl_wait();
  const int e = blockIdx.x / max_tokens;
  const uint32_t at = offsets[e] + blockIdx.x % max_tokens;
  if (at >= offsets[e + 1] || at >= num_slots || slots[at] >= num_slots) return;
  const T* from = rows + static_cast<size_t>(blockIdx.x) * width;
  T* to = out + static_cast<size_t>(slots[at]) * width;
  for (int i = column_start(); i < width; i += column_step()) to[i] = from[i];
}

/// Sums of the counts before each expert, and every used row's number e * max_tokens + r. One block.
__global__ void number_rows(const uint32_t* counts, int experts, uint32_t max_tokens, uint32_t* offsets,
                            uint32_t* numbers) {
  pdl_wait();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) offsets[e] = min(counts[e], max_tokens);
  __syncthreads();
  if (threadIdx.x < 32) warp_offsets(offsets, experts);
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int e = threadIdx.x / 32; e < experts; e += warps) {
    const uint32_t begin = offsets[e], count = offsets[e + 1] - begin;
    for (uint32_t r = threadIdx.x % 32; r < count; r += 32) numbers[begin + r] = e * max_tokens + r;
  }
}

/// The number of rows of all blocks, or -1 if a kernel cannot number them.
int64_t all_rows(int experts, int max_tokens) {
  const int64_t rows = static_cast<int64_t>(experts) * max_tokens;
  return experts < 0 || max_tokens < 0 || rows > 0x7fffffff ? -1 : rows;
}

}  // namespace
}  // namespace moe

using namespace moe;

/// out [experts, max_tokens, width] = rows [num_slots / top_k, width] of each expert's slots. Slots of an expert after
/// the first max_tokens are dropped. Rows after an expert's last slot are not written; counts gives the number of
/// slots.
extern "C" int moe_any_batch_rows(const AnyBatchRowsArgs* args, void* stream) {
  const AnyBatchRowsArgs& c = *args;
  const int64_t all = all_rows(c.experts, c.max_tokens);
  if (all < 0 || c.num_slots < 0 || c.top_k <= 0 || c.width < 0) return cudaErrorInvalidValue;
  if (all == 0) return cudaMemsetAsync(c.counts, 0, sizeof(uint32_t) * c.experts, static_cast<cudaStream_t>(stream));
  return with_dtype(c.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(batch_rows<T>, over_rows(static_cast<int>(all), c.width, stream), static_cast<const T*>(c.rows),
                  c.offsets, c.slots, static_cast<T*>(c.out), c.counts, c.top_k, c.max_tokens, c.width,
                  static_cast<uint32_t>(c.num_slots));
  });
}

/// out [num_slots, width] = rows [experts, max_tokens, width] at the slots they belong to. Other rows of out are not
/// written.
extern "C" int moe_any_unbatch_rows(const AnyBatchRowsArgs* args, void* stream) {
  const AnyBatchRowsArgs& c = *args;
  const int64_t all = all_rows(c.experts, c.max_tokens);
  if (all < 0 || c.num_slots < 0 || c.width < 0) return cudaErrorInvalidValue;
  if (all == 0 || c.width == 0) return cudaSuccess;
  return with_dtype(c.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return launch(unbatch_rows<T>, over_rows(static_cast<int>(all), c.width, stream), static_cast<const T*>(c.rows),
                  c.offsets, c.slots, static_cast<T*>(c.out), c.max_tokens, c.width,
                  static_cast<uint32_t>(c.num_slots));
  });
}

/// Numbers the rows in use: offsets [experts + 1] u32 and numbers [experts * max_tokens] u32 (the first
/// offsets[experts] are written), from counts [experts] u32. Counts above max_tokens count as max_tokens.
extern "C" int moe_any_number_rows(const void* counts, int experts, int max_tokens, void* offsets, void* numbers,
                                   void* stream) {
  if (all_rows(experts, max_tokens) < 0) return cudaErrorInvalidValue;
  return launch(number_rows, {dim3(1), dim3(1024), stream}, static_cast<const uint32_t*>(counts), experts,
                static_cast<uint32_t>(max_tokens), static_cast<uint32_t*>(offsets), static_cast<uint32_t*>(numbers));
}
