// Attention of one new token per sequence over the paged KV cache, grouped heads, with the token's own q/k norm,
// rotary embedding and cache write in the prologue.
//
// Floor: the KV of every sequence once, 4 D bytes per position and KV head (2 KB per token of Qwen3-30B-A3B, with 4
// heads of 128, and of Qwen3.5-35B-A3B, with 2 of 256: 134 MB at 256 sequences of 256, 16.8 MB at one of 8k), over the
// read bandwidth. For one short sequence the floor is nothing and latency is all: everything that does not depend on
// this token (block tables, the first keys and values) is fetched before pdl_wait().
//
// A block takes one sequence, up to 8 query heads of one KV head, and a range of positions (a split). Each warp goes
// through its own tiles of 16 positions, which are copied to its own part of shared memory (attention/ring.cuh), so
// that warps never wait for each other in the loop. Both products put the KV side on the 16 rows of mma.sync and the 8
// heads on its 8 columns: S^T = K q^T and O^T = V^T P^T. With 8 heads on 16 rows half of the tensor core would idle.
// P^T is S^T transposed 8 x 8 in registers. Softmax is online per warp; q and P are rounded to bf16, sums are f32.
//
// Merging: warps merge through shared memory. Splits within a cluster of up to 8 blocks merge through distributed
// shared memory: every block sends each head's part to the block that merges it. Clusters of one sequence merge through
// global memory: the last of them merges what the others publish. Every order is fixed, so results repeat bit for bit.
// The new token is a part of its own in the merge of split 0: its key and value come from registers, and the cache
// write needs no ordering at all.
//
// Splits begin at multiples of 64 positions from 0. Their length follows from the sequence's length, on the device:
// a captured launch serves any context.
#include "attention/merge.cuh"

namespace moe {
namespace {

/// Writes zeros for a row of padding.
template <int D, bool kFp8>
__device__ __forceinline__ void zero_out(const DecodeArgs& a, const Place& p) {
  for (int i = threadIdx.x; i < p.heads * D; i += kThreads) {
    const size_t at = out_at<D>(a, p, i / D) + i % D;
    if constexpr (kFp8) {
      a.fp8.q[at] = 0;
      if (i % D == 0) *a.fp8.scale(p.row, p.head + i / D) = 0.f;
    } else {
      a.out[at] = __float2bfloat16_rn(0.f);
    }
  }
}

template <int D, class Ring, bool kFp8>
__device__ __forceinline__ void attend(const DecodeArgs& a, const KvMaps& maps, const Shared<D>& s) {
  const Place p = place(a);
  const Range range = split_range(a, p);
  // All blocks of a cluster without work end here together. The first split of every row waits for the kernels before
  // this one, so the end of this kernel still implies their end.
  if (p.cluster_first >= range.active || (range.padding && p.split > 0)) return;
  const bool merges = a.splits > 1 && !range.padding;
  if (merges) cluster_arrive();  // this block runs, so the others may write to its shared memory
  const int warp = threadIdx.x / 32;
  const uint32_t* table = a.block_tables + static_cast<size_t>(p.row) * a.max_blocks;
  const Span span = {a.cache, table, p.kv_head, range.begin, range.end, range.visible_begin};
  Ring ring(s.ring(warp), s.full(warp), maps, span);
  if (!range.padding) ring.start();
  const Constants<D> constants(a, p.row);
  // If this kernel runs at the same time as the kernel before it (`overlapped`), there is nothing to wait for. That
  // kernel lets this one begin after its own wait, so everything before both has ended, and what it wrote (qkv) is read
  // from L2.
  if (!a.overlapped) pdl_wait();
  if (range.padding) {
    zero_out<D, kFp8>(a, p);
    return;
  }
  const NewToken<D> token = prologue<D>(a, p, range.slot, constants, s);
  __syncthreads();
  uint32_t q[D / 8];
  load_q<D>(s, q);
  Partial<D> part;
  for (int tile = ring.first(); tile < range.end; tile += kTurn) {
    float weight[4];
    score_tile<D>(weight, q, ring.keys(), tile, range, a.scale);
    ring.next_keys();
    update_softmax<D>(part, weight);
    add_values<D>(part, weight, ring.values(tile));
    ring.next_values();
  }
  ring.end();
  part.store(s.values(warp), s.stats(warp));
  __syncthreads();
  const BlockPartial<D> block(a, p, s, token);
  if (!merges) {
    const ThreadSlice<D> mine;
    float out[ThreadSlice<D>::kPer], gate[ThreadSlice<D>::kPer] = {};
    load_gates<D>(gate, a, p, mine.head, mine.d);
#pragma unroll
    for (int i = 0; i < ThreadSlice<D>::kPer; ++i) out[i] = gated<D>(a, block.value[i] / block.sum, gate[i]);
    if constexpr (kFp8) return store_fp8(a, p, mine.head, out);
    if (mine.head < p.heads) store_bf16(a.out + out_at<D>(a, p, mine.head) + mine.d, out);
    return;
  }
  cluster_wait();
  block.send(s);
  cluster_sync();
  merge_cluster<D, kFp8>(a, p, range, s);
}

template <int D, class Ring, bool kFp8>
__device__ __forceinline__ void decode(const DecodeArgs& a, const KvMaps& maps) {
  extern __shared__ __align__(1024) uint8_t smem[];
  pdl_launch_dependents();
  attend<D, Ring, kFp8>(a, maps, Shared<D>(smem));
  // With `overlapped`, one block waits for the kernel before at last, so that the end of this kernel still implies its
  // end.
  const bool last = blockIdx.x == 0 && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z;
  if (a.overlapped && last) pdl_wait();
}

/// The number of blocks for which an SM has registers. With heads of 256 it has shared memory for two.
template <int D, bool kTiles>
constexpr int kSmBlocks = D <= 128 ? 4
                          : kTiles ? 3
                                   : 2;

/// kTiles: whether the copy engine copies tiles. There are registers for some blocks on an SM, or for one next to a
/// block of the products before.
template <int D, bool kTiles, bool kFp8>
__global__ void __launch_bounds__(kThreads, kSmBlocks<D, kTiles>)
    decode_kernel(DecodeArgs a, const __grid_constant__ KvMaps maps) {
  if constexpr (!kTiles) {
    decode<D, CopyRing<D>, kFp8>(a, maps);
  } else {
#if MOE_HAS_TMA
    decode<D, TileRing<D>, kFp8>(a, maps);
#endif
  }
}

template <int D, bool kFp8>
int run(const DecodeArgs& a, int rows, int major, void* stream) {
  const int groups = ceil_div(a.heads / a.cache.heads, kHeads) * a.cache.heads;
  Launch l = {dim3(a.splits, groups, rows), dim3(kThreads), stream, Shared<D>::kBytes};
  l.cluster = a.splits < kMaxCluster ? a.splits : kMaxCluster;
  KvMaps maps = {};
  if (major < 9 || a.cache.block_size % kKvTile != 0) return launch(decode_kernel<D, false, kFp8>, l, a, maps);
  cudaError_t e = make_rows_map(&maps.k, a.cache.k, kMapRows, D, kKvTile);
  if (e == cudaSuccess) e = make_rows_map(&maps.v, a.cache.v, kMapRows, D, kKvTile);
  return e == cudaSuccess ? launch(decode_kernel<D, true, kFp8>, l, a, maps) : e;
}

static_assert(Shared<256>::kBytes == 78272, "the plan has this size, too: src/plan/attention.rs");

bool valid_splits(int splits) {
  return splits == 1 || splits == 2 || splits == 4 || (splits > 0 && splits % 8 == 0 && splits <= 128);
}

int run_decode(const AttentionDecodeArgs& c, int overlapped, const fp8::RowsOut& fp8, void* stream) {
  if (c.rows < 0 || c.rows > 65535 || c.kv_heads <= 0 || c.heads <= 0 || c.heads % c.kv_heads != 0 ||
      c.block_size <= 0 || c.window < 0 || !valid_splits(c.splits) || c.num_slots < 0 || c.num_slots > kNoSlot ||
      (c.norm_dtype != Dtype::kBf16 && c.norm_dtype != Dtype::kF32) || !holds_qkv(c) ||
      !fits_gates(c.gates, c.gate_row, c.heads, c.head_dim))
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9 && c.splits > 1) return cudaErrorNotSupported;  // needs clusters
  const bool norms_in_f32 = c.norm_dtype == Dtype::kF32;
  const DecodeArgs a = {c.qkv,
                        {c.q_norm, norms_in_f32},
                        {c.k_norm, norms_in_f32},
                        c.eps,
                        {c.cos, c.sin, c.angle_index},
                        c.slots,
                        static_cast<uint32_t>(c.num_slots),
                        c.positions,
                        c.block_tables,
                        c.max_blocks,
                        cache_of(c.k_cache, c.v_cache, c.kv_heads, c.block_size),
                        static_cast<bf16*>(c.out),
                        static_cast<uint32_t*>(c.workspace),
                        c.heads,
                        c.scale * kLog2E,
                        static_cast<uint32_t>(c.window),
                        c.splits,
                        overlapped != 0,
                        fp8,
                        c.sinks,
                        c.qkv_row,
                        gates_of(c.gates, c.gate_row, c.heads * c.head_dim)};
  if (fp8.scales != nullptr) return run<fp8::kGroup, true>(a, c.rows, limits.major, stream);
  if (c.head_dim == 256) return run<256, false>(a, c.rows, limits.major, stream);
  if (c.head_dim == 128) return run<128, false>(a, c.rows, limits.major, stream);
  if (c.head_dim == 64) return run<64, false>(a, c.rows, limits.major, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace moe

/// The number of splits that gives every SM a block with `rows` sequences: 1, 2, 4 or a multiple of 8 (on Hopper or
/// later; 1 on older cards).
extern "C" int moe_attention_decode_splits(int rows, int heads, int kv_heads, int sms) {
  const int blocks = rows * moe::ceil_div(heads / kv_heads, moe::kHeads) * kv_heads;
  int splits = 1;
  while (splits < 64 && blocks * splits * 2 <= sms) splits *= 2;
  return splits;
}

/// Bytes of `workspace`. It must be zero before its first use; a launch leaves it ready for the next one.
extern "C" size_t moe_attention_decode_workspace(int rows, int heads, int kv_heads, int head_dim, int splits) {
  const size_t clusters = moe::ceil_div(splits, moe::kMaxCluster);
  const size_t groups = static_cast<size_t>(rows) * moe::ceil_div(heads / kv_heads, moe::kHeads) * kv_heads;
  if (clusters == 1) return 0;
  return groups * moe::kHeads * clusters * (head_dim + 2) * sizeof(uint32_t);
}

/// out = attention of one new token per sequence. The token's key and value are stored in the cache and take part.
/// Positions, slots, tables and the cache of earlier positions must have been written before this step began. head_dim
/// is 64, 128 or 256.
extern "C" int moe_attention_decode(const moe::AttentionDecodeArgs* args, void* stream) {
  return moe_attention_decode_overlapped(args, 0, stream);
}

/// The same as moe_attention_decode. With `overlapped`, it may run at the same time as the kernel before it on the
/// stream. That kernel writes nothing that this one reads, and lets this one begin when everything before both is
/// there.
extern "C" int moe_attention_decode_overlapped(const moe::AttentionDecodeArgs* args, int overlapped, void* stream) {
  return moe::run_decode(*args, overlapped, {}, stream);
}

/// The same as moe_attention_decode_overlapped, followed by moe_fp8_quantise, bit for bit: `out` is [rows, heads 128]
/// bytes, by quads or not, and scales are [heads, lines]. Hopper, heads of 128.
extern "C" int moe_attention_decode_fp8(const moe::AttentionDecodeArgs* args, int overlapped, float* scales, int lines,
                                        int quads, void* stream) {
  using namespace moe;
  const AttentionDecodeArgs& c = *args;
  const fp8::RowsOut fp8 = {static_cast<uint8_t*>(c.out), scales, lines, quads != 0};
  if (c.head_dim != fp8::kGroup || !fp8.holds(c.rows, fp8::kGroup)) return cudaErrorInvalidValue;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  return limits.major < 9 ? static_cast<int>(cudaErrorNotSupported) : run_decode(c, overlapped, fp8, stream);
}
