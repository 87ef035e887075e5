// Reduce-scatter over peer memory: returns the ranks' sums, of rows that came from all ranks, to the owners of the rows
// (gather.cu sends the rows).
//
// One hop: a rank stores the data of another rank's rows in that rank's slots. The other rank adds what all ranks have
// sent in rank order, so that sums have the same bits in every run. peer.cuh explains slots, waiting, and why no
// barrier is needed.
//
// The sums of thousands of rows of a bf16 model may be sent in bf16, which is half of the bytes. Each rank's part is
// rounded once, where the model rounds the sum, and the parts are added in f32 (share.cu explains why that loses
// nothing).
//
// Predicted for four GPUs: one token of H = 2,048, f32, 2.8 us; 64 tokens per rank 7 us. Two GPUs, 1,024 tokens per
// rank: 8.4 MB out, 24 us and 3 us for the launch.
#include "peer/ranges.cuh"
#include "peer/words.cuh"

namespace moe {
namespace {

/// All ranks' parts of sums, in slots of 4 elements of f32 or 8 of bf16.
struct Sums {
  const uint8_t* in;           // of this rank
  uint8_t* out;                // its part
  uint32_t begins[kMaxRanks];  // where each rank's part begins
  bool aligned;
};

/// Adds the contents of a slot to `sum`; the first ones are stored there.
template <bool kNarrow>
__device__ __forceinline__ void add_slot(float (&sum)[kNarrow ? 8 : 4], const Vec16& v, bool first) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kNarrow) {
      const float2 pair = unpack_bf16(v.word[i]);
      sum[2 * i] = first ? pair.x : sum[2 * i] + pair.x;
      sum[2 * i + 1] = first ? pair.y : sum[2 * i + 1] + pair.y;
    } else {
      const float x = __uint_as_float(v.word[i]);
      sum[i] = first ? x : sum[i] + x;
    }
  }
}

/// out f32 = this rank's part of the sum over the ranks of `in`, which is f32 or, with kNarrow, bf16.
template <int kRanks, bool kPlain, bool kNarrow>
__global__ void __launch_bounds__(2 * kThreads, kBlocksPerSm)
    scatter_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Sums sums,
                   const __grid_constant__ Range range, const __grid_constant__ Needs needs) {
  pdl_launch_dependents();
  pdl_wait();
  const Roles<kPlain> roles;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  const auto part = [&](int r, uint32_t u) -> Vec16 {
    Vec16 v = {};
    if (u < range.counts[r])
      load_words(sums.in + (static_cast<size_t>(sums.begins[r]) + range.first + u) * 16, kPlain || sums.aligned,
                 v.word);
    return v;
  };
  // Data for all peers is sent at the same time, because a receiver adds up a slot of all ranks at once.
  constexpr int kOthers = kRanks - 1, kPlaces = kPlain ? 1 : ceil_div(kBatch<kPlain>, kOthers);
  const uint32_t end = roles.sends ? x.vectors : 0;
  Turn turn;
  uint32_t first = roles.first;
  do {
    Vec16 mine[kPlaces][kOthers];
    bool needed[kPlaces][kOthers];
#pragma unroll
    for (int b = 0; b < kPlaces; ++b)
#pragma unroll
      for (int i = 0; i < kOthers; ++i) {
        const int p = peer_after(x, 1 + i);
        const uint32_t u = first + b * roles.step;
        needed[b][i] = 1 + i < ranks && u < end && u < range.sent(p) &&
                       (u == 0 || needs.of<kPlain>(sums.begins[p] + range.first + u) >> rank & 1u);
        if (needed[b][i]) mine[b][i] = part(p, u);
      }
    if (first == roles.first) turn = begin_turn(x);  // this load is in flight together with the first data
#pragma unroll
    for (int b = 0; b < kPlaces; ++b)
#pragma unroll
      for (int i = 0; i < kOthers; ++i)
        if (needed[b][i])
          send(slot(x, turn, peer_after(x, 1 + i), rank * x.vectors + first + b * roles.step), mine[b][i]);
    if (first == roles.first) count_turn(x, turn);
    first += kPlaces * roles.step;
  } while (first < end);
  if (!roles.receives) return;
  const uint32_t peers = ((1u << ranks) - 1) & ~(1u << rank);
  for (uint32_t u = roles.first; u < range.sent(rank); u += roles.step) {
    // This load runs while the thread waits for the other ranks' slots.
    const Vec16 own = part(rank, u);
    Vec16 v[kRanks] = {};
    const uint32_t added = u < range.counts[rank] ? needs.of<kPlain>(sums.begins[rank] + range.first + u) : 0;
    receive(x, turn, v, peers & (u == 0 ? 0xffffffffu : added), 0, u, x.vectors, roles.apart);
    if (u >= range.counts[rank]) continue;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r == rank) v[r] = own;
    float sum[kNarrow ? 8 : 4] = {};
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < ranks && (added >> r & 1u)) add_slot<kNarrow>(sum, v[r], r == 0);
    uint8_t* to = sums.out + (static_cast<size_t>(range.first) + u) * sizeof(sum);
#pragma unroll
    for (int i = 0; i < (kNarrow ? 2 : 1); ++i) {
      const float* from = sum + 4 * i;
      const uint32_t words[4] = {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                                 __float_as_uint(from[3])};
      store_words(to + 16 * i, kPlain || sums.aligned, words);
    }
  }
}

template <bool kNarrow>
struct Scatter {
  using Args = Sums;
  template <int kRanks, bool kPlain>
  static auto kernel() {
    return scatter_kernel<kRanks, kPlain, kNarrow>;
  }
};

}  // namespace

cudaError_t load_scatter_kernels() {
  const cudaError_t e = load_call<Scatter<false>>();
  return e == cudaSuccess ? load_call<Scatter<true>>() : e;
}

}  // namespace moe

using namespace moe;

/// out f32 = this rank's part of the sum over the ranks of `in`, f32 or, if `narrow`, bf16, which has `slots`[r] slots
/// of 16 bytes for each rank r, in rank order. Additions are in f32 in rank order. Addresses are multiples of 4 bytes,
/// for bf16 of 2. With `needs`, each row is the sum over the ranks that need it.
extern "C" int moe_peer_reduce_scatter(const Peers* peers, const void* in, int narrow, float* out,
                                       const uint32_t* slots, const Needs* needs, void* stream) {
  if (!is_group(*peers) || (needs != nullptr && needs->row_slots == 0)) return cudaErrorInvalidValue;
  Sums sums = {static_cast<const uint8_t*>(in), reinterpret_cast<uint8_t*>(out), {}, is_aligned(in) && is_aligned(out)};
  size_t all[kMaxRanks] = {};
  uint32_t begin = 0;
  for (int r = 0; r < peers->ranks; ++r) {
    sums.begins[r] = begin;
    all[r] = slots[r];
    begin += slots[r];
  }
  return narrow != 0 ? launch_ranges<Scatter<true>>(*peers, all, sums, sums.aligned, needs, stream)
                     : launch_ranges<Scatter<false>>(*peers, all, sums, sums.aligned, needs, stream);
}
