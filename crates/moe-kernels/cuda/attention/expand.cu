// Attention of prompts over latent rows with keys and values of every head. This takes 320 multiply-adds per head and
// position instead of the 1,088 in latent space. In exchange, the latents of all positions that the prompts see are
// multiplied once by the up-projections.
//
// There are two launches with products between them. `moe_mla_expand` copies the sequences' latents out of the cache,
// one sequence after the other, and copies the rotated part to the keys of all heads. The caller multiplies.
// `moe_attention_expanded` attends (prefill_wgmma.cu). Floor of the first launch: it reads 1,152 bytes a position and
// writes 1,024 + 128 a head.
#include "attention/prefill.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;
constexpr int kLatent = 512, kRope = 64, kKey = 192;  // columns of a latent, of the rotated part, of a head's key

/// Positions of a sequence that its rows see.
__device__ __forceinline__ uint32_t positions_of(const MlaExpandArgs& a, int s) {
  const uint32_t begin = a.query_start_loc[s], end = a.query_start_loc[s + 1];
  return end > begin ? a.positions[end - 1] + 1 : 0;
}

/// One warp copies one row of the result: it searches the sequences for the row's own, 32 at a time. The first block
/// writes where each sequence begins.
__global__ void __launch_bounds__(kWarps * 32) expand_rows(const __grid_constant__ MlaExpandArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t row = blockIdx.x * kWarps + warp;
  uint32_t before = 0, position = 0;
  int sequence = -1;
  for (int first = 0; first < a.sequences; first += 32) {
    const int s = first + lane;
    const uint32_t count = s < a.sequences ? positions_of(a, s) : 0;
    uint32_t total;
    const uint32_t begin = before + warp_exclusive_sum(count, &total);
    if (blockIdx.x == 0 && warp == 0 && s < a.sequences) a.bases[s] = begin;
    const uint32_t hit = __ballot_sync(0xffffffffu, row >= begin && row < begin + count);
    if (hit != 0) {
      const int at = __ffs(hit) - 1;
      sequence = first + at;
      position = row - __shfl_sync(0xffffffffu, begin, at);
    }
    before += total;
  }
  if (sequence < 0 || row >= static_cast<uint32_t>(a.all)) return;
  const uint32_t block = a.block_tables[static_cast<size_t>(sequence) * a.max_blocks + position / a.block_size];
  const bf16* from = static_cast<const bf16*>(a.cache) +
                     (static_cast<size_t>(block) * a.block_size + position % a.block_size) * (kLatent + kRope);
  bf16* to = static_cast<bf16*>(a.latents) + static_cast<size_t>(row) * kLatent;
#pragma unroll
  for (int i = 0; i < kLatent / 256; ++i) {
    const int column = (i * 32 + lane) * 8;
    *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<const uint4*>(from + column);
  }
  // Eight lanes hold the rotated part, so the warp writes it for four heads at a time.
  const uint4 tail = *reinterpret_cast<const uint4*>(from + kLatent + lane % 8 * 8);
  bf16* key = static_cast<bf16*>(a.keys) + static_cast<size_t>(row) * kKey + kKey - kRope + lane % 8 * 8;
  for (int head = lane / 8; head < a.heads; head += 4)
    *reinterpret_cast<uint4*>(key + static_cast<size_t>(head) * a.all * kKey) = tail;
}

}  // namespace
}  // namespace moe

/// Latents and rotated parts of all positions that the sequences' rows see.
extern "C" int moe_mla_expand(const moe::MlaExpandArgs* args, void* stream) {
  using namespace moe;
  const MlaExpandArgs& c = *args;
  if (c.sequences < 0 || c.max_blocks < 0 || c.block_size <= 0 || c.heads <= 0 || c.all < 0)
    return cudaErrorInvalidValue;
  if (c.all == 0) return cudaSuccess;
  return launch(expand_rows, {dim3(ceil_div(c.all, kWarps)), dim3(kWarps * 32), stream}, c);
}

/// out = attention of q over keys [heads, all, 192] and values [heads, all, 128], bf16, in the rows where
/// `moe_mla_expand` has put the sequences. Hopper.
extern "C" int moe_attention_expanded(const moe::PagedAttentionArgs* args, const uint32_t* bases, int all,
                                      void* stream) {
  using namespace moe;
  const PagedAttentionArgs& c = *args;
  if (c.tokens < 0 || c.sequences < 0 || c.heads <= 0 || c.kv_heads != c.heads || c.head_dim != kKey ||
      c.value_dim != 128 || c.window < 0 || c.dtype != Dtype::kBf16 || c.q_dtype != Dtype::kBf16 ||
      c.counters == nullptr || all < 0 || static_cast<int64_t>(all) * c.heads > INT32_MAX)
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const attention_prefill::Args a = {static_cast<const bf16*>(c.q),
                                     cache_of(c.k_cache, c.v_cache, c.kv_heads, 1),
                                     c.query_start_loc,
                                     c.positions,
                                     nullptr,
                                     0,
                                     static_cast<bf16*>(c.out),
                                     c.tokens,
                                     c.sequences,
                                     c.heads,
                                     c.scale * kLog2E,
                                     c.window,
                                     0,
                                     INT32_MAX,
                                     c.counters,
                                     false,
                                     0,
                                     {}};
  return attention_prefill::launch_expanded(a, all, bases, stream);
}
