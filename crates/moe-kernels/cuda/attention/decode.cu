// Attention of one new token per sequence over the paged KV cache, grouped heads, with the token's own q/k norm,
// rotary embedding and cache write in the prologue.
//
// Floor: the KV of every sequence once, 4 D bytes per position and KV head (2 KB per token of Qwen3-30B-A3B:
// 134 MB at 256 sequences of 256, 16.8 MB at one of 8k), over the read bandwidth. For one short sequence the floor
// is nothing and latency is all: everything that does not depend on this token (block tables, the first keys and
// values) is fetched before the grid dependency.
//
// A block takes one sequence, up to 8 query heads of one KV head, and a range of positions (a split). A warp walks
// units of 16 positions through its own cp.async buffers, so that warps never wait for each other in the loop. Both
// products put the KV side on the 16 rows of mma.sync and the 8 heads on its 8 columns: S^T = K q^T and
// O^T = V^T P^T, so no half of the tensor core idles as it would with 8 heads on 16 rows, and P^T is S^T transposed
// 8 x 8 in registers. Softmax is online per warp; q and P are rounded to bf16, sums are f32.
//
// Merging: warps through shared memory; splits within a cluster of up to 8 blocks through distributed shared
// memory, every block sending each head's part to the block that merges it; clusters of one sequence through global memory, the last to
// arrive merging. Every order is fixed, so results repeat bit for bit. The new token is a part of its own in the
// merge of split 0: its key and value come from registers, and the cache write needs no ordering at all.
//
// Splits begin at multiples of 64 positions from 0. Their length follows from the sequence's length, on the device:
// a captured launch serves any context.
#include "attention/merge.cuh"

namespace moe {
namespace {

template <int D>
__global__ void __launch_bounds__(kThreads) decode_kernel(DecodeArgs a) {
  extern __shared__ __align__(128) uint8_t smem[];
  const Shared<D> s(smem);
  pdl_launch_dependents();
  const Place p = place(a);
  const Range range = split_range(a, p);
  // A cluster without work leaves as one. The first split of every row waits for the kernels ahead, so the end of
  // this kernel still implies theirs.
  if (p.cluster_first >= range.active || (range.padding && p.split > 0)) return;
  const bool merges = a.splits > 1 && !range.padding;
  if (merges) cluster_arrive();  // this block runs, so the others may write to its shared memory
  const int warp = threadIdx.x / 32;
  Ring<D> ring(s.ring(warp), a, p, range);
  if (!range.padding) ring.start();
  const Constants<D> constants(a, p.row);
  pdl_wait();
  if (range.padding) {
    zero_out<D>(a, p);
    return;
  }
  const NewToken<D> token = prologue<D>(a, p, range.slot, constants, s);
  __syncthreads();
  uint32_t q[D / 8];
  load_q<D>(s, q);
  Part<D> part;
  for (int unit = ring.first; unit < range.end; unit += kUnit * kWarps) {
    float weight[4];
    ring.wait();
    score_unit<D>(weight, q, ring.keys, unit, range, a.scale);
    ring.next_keys();
    soften<D>(part, weight);
    ring.wait();
    add_values<D>(part, weight, ring.values);
    ring.next_values();
  }
  cp_async_wait<0>();
  part.store(s.values(warp), s.stats(warp));
  __syncthreads();
  const BlockPart<D> block(s, p.split == 0, token);
  if (!merges) {
    const Part8<D> mine;
    float out[Part8<D>::kPer];
#pragma unroll
    for (int i = 0; i < Part8<D>::kPer; ++i) out[i] = block.value[i] / block.sum;
    if (mine.head < p.heads) store_bf16(a.out + out_at<D>(a, p, mine.head) + mine.d, out);
    return;
  }
  cluster_wait();
  block.send(s);
  cluster_sync();
  merge_cluster<D>(a, p, range, s);
}

template <int D>
int run(const DecodeArgs& a, int rows, void* stream) {
  const int groups = ceil_div(a.heads / a.cache.heads, kHeads) * a.cache.heads;
  Launch l = {dim3(a.splits, groups, rows), dim3(kThreads), stream, Shared<D>::kBytes};
  l.cluster = a.splits < kMaxCluster ? a.splits : kMaxCluster;
  return launch(decode_kernel<D>, l, a);
}

bool valid_splits(int splits) {
  return splits == 1 || splits == 2 || splits == 4 || (splits > 0 && splits % 8 == 0 && splits <= 128);
}

}  // namespace
}  // namespace moe

using moe::bf16;

/// Splits that fill the processors (of a Hopper or later; 1 before) with `rows` sequences: 1, 2, 4 or a multiple of 8.
extern "C" int moe_attention_decode_splits(int rows, int heads, int kv_heads, int sms) {
  const int blocks = rows * moe::ceil_div(heads / kv_heads, moe::kHeads) * kv_heads;
  int splits = 1;
  while (splits < 64 && blocks * splits * 2 <= sms) splits *= 2;
  return splits;
}

/// Bytes of `workspace`, which must be zero before its first use and is left ready for the next.
extern "C" size_t moe_attention_decode_workspace(int rows, int heads, int kv_heads, int head_dim, int splits) {
  const size_t clusters = moe::ceil_div(splits, moe::kMaxCluster);
  const size_t groups = static_cast<size_t>(rows) * moe::ceil_div(heads / kv_heads, moe::kHeads) * kv_heads;
  if (clusters == 1) return 0;
  return groups * moe::kHeads * (sizeof(uint32_t) + clusters * (head_dim + 2) * sizeof(float));
}

/// out [rows, heads * head_dim] bf16: row i is the one new token of a sequence, at positions[i], with
/// block_tables[i][..max_blocks]. Its key and value go to slot_mapping[i] and take part. A row with slot u32::MAX is
/// padding: zeros out, nothing written. qkv, norms and angles as in moe_qk_norm_rope_cache. `window` 0 = all.
///
/// positions, slots, tables and the cache of earlier positions must have been written before this step began.
extern "C" int moe_attention_decode(const float* qkv, const bf16* q_norm, const bf16* k_norm, float eps,
                                    const float* cos, const float* sin, const uint32_t* angle_index,
                                    const uint32_t* slots, const uint32_t* positions, const uint32_t* block_tables,
                                    int max_blocks, bf16* k_cache, bf16* v_cache, bf16* out, void* workspace,
                                    int rows, int heads, int kv_heads, int head_dim, int block_size, float scale,
                                    int window, int splits, void* stream) {
  using namespace moe;
  if (rows < 0 || rows > 65535 || kv_heads <= 0 || heads <= 0 || heads % kv_heads != 0 || block_size <= 0 ||
      window < 0 || !valid_splits(splits))
    return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9 && splits > 1) return cudaErrorNotSupported;  // needs clusters
  DecodeArgs a = {qkv, q_norm, k_norm, eps, {cos, sin, angle_index}, slots, positions, block_tables, max_blocks,
                  {k_cache, v_cache, kv_heads, block_size}, out, nullptr, nullptr, heads,
                  scale * 1.44269504088896341f, static_cast<uint32_t>(window), splits};
  const size_t groups = static_cast<size_t>(rows) * ceil_div(heads / kv_heads, kHeads) * kv_heads;
  a.arrived = static_cast<uint32_t*>(workspace);
  a.partials = reinterpret_cast<float*>(a.arrived + groups * kHeads);
  if (head_dim == 128) return run<128>(a, rows, stream);
  if (head_dim == 64) return run<64>(a, rows, stream);
  return cudaErrorInvalidValue;
}
