// The end of a sparse layer whose tokens came from other ranks, over peer memory. Each rank weights and adds the slot
// rows that its experts computed for a token. The token's owner adds the ranks' sums in rank order, adds the result to
// its residual stream, and computes the norm of the next sub-layer. This is three launches (experts/combine.cu,
// peer/scatter.cu, rows/norm.cuh) in one, bit for bit: sums go from the slots to the other rank without being stored in
// between, and one grid boundary remains of three.
//
// A block processes one row at a time: first rows of other ranks, whose sums it sends, then its own rows, for whose
// sums it waits. Sending blocks wait for nothing, and all blocks are resident at the same time, so there can be no
// deadlock. In a decode step every row has its own block. peer.cuh explains slots, waiting, and why no barrier is
// needed.
//
// If the owners of experts are given, a rank sends nothing for a row of which it has computed no slot (dispatch.cu did
// not send it that row), and the row's owner waits only for the others. The first row of each rank is the exception:
// for it every rank sends at least one slot, so that each rank still receives something from each. Sums keep their
// bits, because what is left out is zero.
//
// Floor on 4 GPUs, for 64 tokens per rank, 8 slots of which 2 are on this rank, and H = 2,048: 1.6 MB out, 3.5 us at
// 450 GB/s, a hop of 1 us, a grid boundary of 0.65 us, and reading ids and then rows from L2, 1.2 us, together 6.5 us.
// Predicted 9 us, measured 11.9 instead of 16.4 for three launches (docs/lessons/ranks.md).
#include "experts/combine.cuh"
#include "peer/needs.cuh"
#include "rows/norm.cuh"

namespace moe {
namespace {

/// Blocks per SM, for up to kRanks ranks.
template <int kRanks>
constexpr int kBlocksPerSm = kRanks > 4 ? 1 : 2;
constexpr int kBatch = 4;  // slot rows that a thread has in flight
constexpr int kWords = 4;  // columns of a slot of 16 bytes

/// The rows of all ranks, in rank order.
struct Owned {
  uint32_t counts[kMaxRanks], begins[kMaxRanks];

  /// Number of rows of a rank that blocks process. If there is none, one empty row counts, so that every rank sends
  /// something to every other one.
  __device__ __forceinline__ uint32_t tasks(int rank) const { return max(counts[rank], 1u); }
};

/// The slots of a token on this rank. It is the same in all lanes, except for `weight`: lane k has the weight of slot
/// k.
struct Present {
  uint32_t slots;  // a bit for each
  float weight;
};

__device__ __forceinline__ Present present(const Combine<float>& a, int token) {
  if (a.topk_ids == nullptr) return {1u, 1.f};
  const int lane = threadIdx.x % 32, slot = token * a.top_k + lane;
  const bool here =
      lane < a.top_k && local_expert(__ldcg(a.topk_ids + slot), a.expert_map, a.num_ids, a.num_local) >= 0;
  return {__ballot_sync(0xffffffffu, here), here ? __ldcg(a.topk_weights + slot) : 0.f};
}

/// The sum of a token's slots on this rank in ascending k, for the four columns from each of at[2] on. Whole warps call
/// it. Lanes after the last column are not `valid`.
__device__ __forceinline__ void weigh(const Combine<float>& a, int token, const Present& p, const int (&at)[2],
                                      const bool (&valid)[2], float (&sum)[2 * kWords]) {
#pragma unroll
  for (float& v : sum) v = 0.f;
  for (uint32_t left = p.slots; left != 0;) {
    uint4 row[kBatch][2];
    float weight[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool more = left != 0;
      const int k = more ? __ffs(left) - 1 : 0;
      left &= left - 1;  // without a slot left, it stays 0
      weight[b] = __shfl_sync(0xffffffffu, p.weight, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row[b][i] = {};
        if (more && valid[i]) row[b][i] = a.load(token * a.top_k + k, at[i]);
      }
      if (!more) weight[b] = 0.f;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int i = 0; i < 2; ++i) add_weighted(weight[b], row[b][i], sum, kWords * i, float());
  }
}

/// The columns of a lane in a turn. For sending, they are four columns and another four that are 128 columns further,
/// so that a warp stores ranges of 512 bytes. For adding to the residual stream, they are eight consecutive columns, in
/// the order in which norm.cuh adds up squares.
template <bool kSends>
__device__ __forceinline__ void columns_of(int turn, int hidden, int (&at)[2], bool (&valid)[2]) {
  const int warp = turn * kTurnColumns + static_cast<int>(threadIdx.x) / 32 * kWarpColumns, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    at[i] = warp + (kSends ? i * (kWarpColumns / 2) + lane * kWords : lane * kVector + i * kWords);
    valid[i] = at[i] < hidden;
  }
}

__device__ __forceinline__ Vec16 words(const float* x) {
  return {{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
}

/// Sends this rank's sum of row `row` of rank `to`.
__device__ __forceinline__ void send_row(const Exchange& x, const Turn& turn, const Combine<float>& a,
                                         const Owned& owned, const Needs& needs, int to, uint32_t row) {
  const uint32_t first = x.peers.rank * x.vectors + row * (a.hidden / kWords);
  const int token = owned.begins[to] + row;
  const bool exists = row < owned.counts[to];
  if (!exists || (needs.of_row(token) >> x.peers.rank & 1u) == 0) {
    if (row == 0 && threadIdx.x == 0) send(slot(x, turn, to, first), Vec16{});
    return;
  }
  const Present p = present(a, token);
  for (int t = 0; t * kTurnColumns < a.hidden; ++t) {
    int at[2];
    bool valid[2];
    float sum[2 * kWords];
    columns_of<true>(t, a.hidden, at, valid);
    weigh(a, token, p, at, valid, sum);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (valid[i]) send(slot(x, turn, to, first + at[i] / kWords), words(sum + kWords * i));
  }
}

/// Adds the sums of eight columns of the ranks in `peers` to this rank's, in rank order, for up to kRanks ranks.
template <int kRanks>
__device__ __forceinline__ void add_ranks(const Exchange& x, Turn& turn, uint32_t peers, uint32_t vector,
                                          float (&sum)[kVector]) {
  constexpr int kAtOnce = kRanks > 4 ? 1 : 2;  // vectors, as registers allow
  const int rank = x.peers.rank, ranks = x.peers.ranks;
#pragma unroll
  for (int half = 0; half < 2; half += kAtOnce) {
    Vec16 v[kAtOnce * kRanks] = {};
    receive_at<kRanks>(x, turn, v, kAtOnce == 1 ? peers : peers | peers << kRanks, 0,
                       [&](int i) { return vector + half + i / kRanks + i % kRanks * x.vectors; });
#pragma unroll
    for (int i = 0; i < kAtOnce * kWords; ++i) {
      float all = 0.f;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r >= ranks) break;
        const float next =
            r == rank ? sum[half * kWords + i] : __uint_as_float(v[i / kWords * kRanks + r].word[i % kWords]);
        all = r == 0 ? next : all + next;
      }
      sum[half * kWords + i] = all;
    }
  }
}

/// residual += the ranks' sums of this rank's row `row`, then out = norm(residual).
template <int kRanks>
__device__ __forceinline__ void take_row(const Exchange& x, Turn& turn, const Combine<float>& a, const Owned& owned,
                                         const Needs& needs, const NormRows& n, uint32_t row, float* kept,
                                         float* parts) {
  const int own = x.peers.rank;
  const uint32_t first = row * (a.hidden / kWords);
  const uint32_t peers = ((1u << x.peers.ranks) - 1) & ~(1u << own);
  const int token = owned.begins[own] + row;
  const bool exists = row < owned.counts[own];
  const uint32_t senders = exists ? peers & needs.of_row(token) : 0u;
  if (row == 0 && threadIdx.x == 0)
    for (int r = 0; r < x.peers.ranks; ++r)
      if ((peers & ~senders) >> r & 1u) take(x, turn, first + r * x.vectors, r);
  if (!exists) return;
  const size_t base = static_cast<size_t>(row) * a.hidden;
  const Present p = present(a, token);
  float squares = 0.f;
  for (int t = 0; t * kTurnColumns < a.hidden; ++t) {
    int at[2];
    bool valid[2];
    float sum[kVector], before[kVector];
    columns_of<false>(t, a.hidden, at, valid);
    if (valid[0]) {
      const float4* from = reinterpret_cast<const float4*>(n.residual + base + at[0]);
      const float4 low = __ldcg(from), high = __ldcg(from + 1);
      before[0] = low.x, before[1] = low.y, before[2] = low.z, before[3] = low.w;
      before[4] = high.x, before[5] = high.y, before[6] = high.z, before[7] = high.w;
    }
    weigh(a, token, p, at, valid, sum);
    if (!valid[0]) continue;
    add_ranks<kRanks>(x, turn, senders, first + at[0] / kWords, sum);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = before[i] + sum[i];
    float4* to = reinterpret_cast<float4*>(n.residual + base + at[0]);
    float4* keep = reinterpret_cast<float4*>(kept + at[0]);
    to[0] = keep[0] = {sum[0], sum[1], sum[2], sum[3]};
    to[1] = keep[1] = {sum[4], sum[5], sum[6], sum[7]};
    add_squares(sum, squares);
  }
  const float scale = norm_scale(block_sum(squares, parts), a.hidden, n.eps);
  write_row(kept, reinterpret_cast<const uint4*>(kept + a.hidden), scale, n.out + base, a.hidden);
}

template <int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kRanks>)
    combine_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Combine<float> a,
                   const __grid_constant__ Owned owned, const __grid_constant__ Needs needs,
                   const __grid_constant__ NormRows n) {
  extern __shared__ __align__(16) float kept[];  // a row, then the norm's weight
  __shared__ float parts[2][kNormWarps];
#pragma unroll 1
  for (int at = threadIdx.x; at < a.hidden / kVector; at += kThreads)
    reinterpret_cast<uint4*>(kept + a.hidden)[at] = __ldg(reinterpret_cast<const uint4*>(n.weight) + at);
  pdl_launch_dependents();
  pdl_wait();
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  Turn turn = begin_turn(x);
  uint32_t task = blockIdx.x;
  for (int i = 1; i < ranks; ++i) {  // each rank begins with another peer
    const int to = rank + i < ranks ? rank + i : rank + i - ranks;
    const uint32_t tasks = owned.tasks(to);
    for (; task < tasks; task += gridDim.x) send_row(x, turn, a, owned, needs, to, task);
    task -= tasks;
  }
  count_turn(x, turn);
  for (uint32_t odd = 0; task < owned.tasks(rank); task += gridDim.x, odd ^= 1)
    take_row<kRanks>(x, turn, a, owned, needs, n, task, kept, parts[odd]);
}

template <int kRanks>
cudaError_t run(const Exchange& x, const Combine<float>& a, const Owned& owned, const Needs& needs, const NormRows& n,
                uint32_t tasks, size_t smem, const DeviceLimits& limits, void* stream) {
  const int blocks = min(static_cast<int>(tasks), kBlocksPerSm<kRanks> * limits.sms);
  return launch(combine_kernel<kRanks>, {dim3(blocks), dim3(kThreads), stream, smem}, x, a, owned, needs, n);
}

}  // namespace

cudaError_t load_combine_kernel() {
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(combine_kernel<4>));
  if (e != cudaSuccess) return e;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(combine_kernel<kMaxRanks>));
}

}  // namespace moe

/// The largest number of rows of a rank in a call of moe_peer_combine_add_rms_norm.
extern "C" int64_t moe_peer_combine_rows(int ranks, size_t capacity, int hidden) {
  using namespace moe;
  if (ranks < 2 || ranks > kMaxRanks || hidden <= 0 || hidden % kVector != 0) return 0;
  return static_cast<int64_t>(half_bytes(ranks, capacity) / 16 / ranks) / (hidden / kWords);
}

/// residual [counts[rank], H] f32 += the sum over the ranks, in rank order, of each rank's sum of these rows' slots,
/// added as in moe_combine; then out bf16 = residual / rms(residual) * weight, as in moe_add_rms_norm. `slots` has all
/// ranks' rows, [sum(counts), K, H] f32, K at most 32; without ids each row has one slot of weight 1, which every rank
/// has. Its `out` and `output` are not read. H is a multiple of 8; arrays that are read in vectors are aligned to 16
/// bytes. With `needs`, of up to 32 ids for each of all ranks' rows, a rank that owns none of a row's experts sends
/// nothing for that row; its sum is taken as zero.
extern "C" int moe_peer_combine_add_rms_norm(const moe::Peers* peers, const moe::CombineArgs* slots,
                                             const uint32_t* counts, const moe::Needs* needs, float* residual,
                                             const moe::bf16* weight, float eps, moe::bf16* out, void* stream) {
  using namespace moe;
  const CombineArgs& c = *slots;
  if (!is_group(*peers) || c.rows != Dtype::kF32 || c.tokens < 0 || c.hidden <= 0 || c.hidden % kVector != 0 ||
      c.top_k <= 0 || c.top_k > (c.topk_ids == nullptr ? 1 : 32) || c.num_ids <= 0 ||
      (needs != nullptr && needs->top_k > 32))
    return cudaErrorInvalidValue;
  Owned owned = {};
  uint32_t total = 0, longest = 1, tasks = 0;
  for (int r = 0; r < peers->ranks; ++r) {
    owned.begins[r] = total, owned.counts[r] = counts[r];
    total += counts[r], longest = max(longest, counts[r]), tasks += max(counts[r], 1u);
  }
  if (total != static_cast<uint32_t>(c.tokens) ||
      longest > moe_peer_combine_rows(peers->ranks, peers->capacity, c.hidden))
    return cudaErrorInvalidValue;
  if (total == 0) return cudaSuccess;
  DeviceLimits limits;
  Exchange x;
  cudaError_t e = device_limits(&limits);
  if (e == cudaSuccess) e = exchange_slots(*peers, static_cast<size_t>(longest) * (c.hidden / kWords), &x);
  if (e != cudaSuccess) return e;
  const Combine<float> a = {static_cast<const float*>(c.slot_rows),
                            c.topk_ids,
                            c.topk_weights,
                            c.expert_map,
                            nullptr,
                            nullptr,
                            c.tokens,
                            c.top_k,
                            c.num_ids,
                            c.num_local,
                            c.hidden};
  const NormRows n = {residual, weight, eps, out, static_cast<int>(counts[peers->rank]), c.hidden, {}};
  const size_t smem = static_cast<size_t>(c.hidden) * (sizeof(float) + sizeof(bf16));
  if (2 * smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  const Needs needed = needs != nullptr ? *needs : Needs{};
  return peers->ranks <= 4 ? run<4>(x, a, owned, needed, n, tasks, smem, limits, stream)
                           : run<kMaxRanks>(x, a, owned, needed, n, tasks, smem, limits, stream);
}
