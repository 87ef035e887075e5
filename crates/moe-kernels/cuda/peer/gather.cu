// All-gather and reduce-scatter over peer memory: how rows reach every rank's experts, and how the ranks' sums of them
// come back. For a decode step's few rows an NCCL call takes some 10 us however little it moves; for the thousands of a
// step with prompts it costs the host a thread's start, and more where ranks bring different numbers.
//
// Both are one hop: a rank stores what another one needs in its slots; that one puts it in place, or adds what all have
// sent in rank order, so that sums have the same bits in every run. Slots, waiting, and why no barrier is needed:
// peer.cuh. Each rank sends to every other one in every call, so each receives a word of each: a rank without a part
// sends a slot that nobody stores.
//
// A word of all ones is an empty slot. In floats it is a NaN and travels as another one; integers, of which every bit
// must arrive, travel as two words of 16 bits each.
//
// Of rows whose experts are known each may travel only to the ranks that own an expert of its token, and only their
// sums travel back: whether a slot is sent follows from ids that every rank has, so nothing is counted and nothing
// moves to another place. The first slot of a launch always travels.
//
// Sums of thousands of rows of a model in bf16 may travel in bf16, half of the bytes: each rank's part is rounded once,
// where the model rounds the sum, and they are added in f32 (share.cu says why that is no loss).
//
// In short calls each thread sends and then receives. In long ones some warps send while others receive, a sender has
// several slots under way, and what half a buffer does not hold is left to further launches.
//
// Floor for one token of H = 2,048 in bf16 with 8 ids and weights on 4 GPUs: as for a sum (all_reduce.cu), 2 us: 12 KB
// out. Predicted: 2.7 us, 64 tokens a rank (805 KB out at 350 GB/s) 5 us; the sums back, f32, 2.8 and 7 us. Two GPUs,
// 1,024 tokens a rank: 4.3 MB out, 12 us and 3 for the launch; the sums back 8.4 MB, 24 + 3 us.
#include "peer/peer.cuh"
#include "peer/words.cuh"

namespace moe {

/// Which ranks need a row: those that own an expert of its token. Known to moe-kernels' `cuda::PeerBuffers`.
struct Needs {
  const uint32_t* ids;     // [rows of all ranks, top_k]; null: all ranks need all rows
  const uint32_t* owners;  // [experts]
  uint32_t top_k, experts;
  uint32_t row_slots;

  /// A bit for each rank that needs what lies in this slot of all ranks' rows.
  __device__ __forceinline__ uint32_t of(size_t slot) const {
    if (ids == nullptr) return 0xffffffffu;
    const uint32_t* chosen = ids + slot / row_slots * top_k;
    uint32_t ranks = 0;
    for (uint32_t k = 0; k < top_k; ++k) {
      const uint32_t id = __ldcg(chosen + k);
      if (id < experts) ranks |= 1u << __ldg(owners + id);
    }
    return ranks;
  }
};

namespace {

constexpr int kThreads = 128;    // that send, and that receive: the same, or others
constexpr int kBlocksPerSm = 2;  // all blocks of a launch must be resident at once
constexpr int kMaxArrays = 4;
constexpr int kBatch = 4;             // slots that a sender has under way: a short call's to all of four ranks
constexpr uint32_t kLong = 1u << 17;  // slots of a rank from which on some warps send while others receive: 2 MiB

/// An array of which each rank has a part.
struct Array {
  const uint8_t* in;           // this rank's
  uint8_t* out;                // all, in rank order
  uint32_t slots[kMaxRanks];   // of each rank's part
  uint32_t begins[kMaxRanks];  // where it begins in `out`
  bool exact;                  // integers: 8 bytes to a slot
  bool aligned;

  /// What a slot carries; never a word that looks empty.
  __device__ __forceinline__ Vec16 load(uint32_t u) const {
    if (exact) {
      uint32_t w[2];
      load_words(in + static_cast<size_t>(u) * 8, aligned, w);
      return {{w[0] & 0xffffu, w[0] >> 16, w[1] & 0xffffu, w[1] >> 16}};
    }
    Vec16 v;
    load_words(in + static_cast<size_t>(u) * 16, aligned, v.word);
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = v.word[i] == kEmpty ? kOtherNan : v.word[i];
    return v;
  }

  __device__ __forceinline__ void store(int rank, uint32_t u, const Vec16& v) const {
    uint8_t* to = out + (static_cast<size_t>(begins[rank]) + u) * (exact ? 8 : 16);
    if (exact) {
      const uint32_t w[2] = {v.word[0] | v.word[1] << 16, v.word[2] | v.word[3] << 16};
      store_words(to, aligned, w);
    } else {
      store_words(to, aligned, v.word);
    }
  }
};

/// What of each rank a launch moves: `counts` slots from the `first`-th of its part on.
struct Range {
  uint32_t first;
  uint32_t counts[kMaxRanks];

  /// Slots that travel from a rank.
  __host__ __device__ __forceinline__ uint32_t sent(int rank) const { return counts[rank] > 0 ? counts[rank] : 1; }
};

/// What is left of `slots` of each rank from `range.first` on, at most `most` of each; whether anything is.
bool fill(const size_t* slots, int ranks, uint32_t most, Range& range) {
  bool any = false;
  for (int r = 0; r < ranks; ++r) {
    const size_t left = slots[r] > range.first ? slots[r] - range.first : 0;
    range.counts[r] = static_cast<uint32_t>(left < most ? left : most);
    any = any || left > 0;
  }
  return any;
}

/// Who of a block sends and who receives.
struct Roles {
  uint32_t first, step;
  bool apart, sends, receives;

  __device__ __forceinline__ Roles() {
    apart = blockDim.x > kThreads;
    first = blockIdx.x * kThreads + threadIdx.x % kThreads;
    step = gridDim.x * kThreads;
    sends = !apart || threadIdx.x < kThreads;
    receives = !apart || threadIdx.x >= kThreads;
  }
};

struct Arrays {
  Array at[kMaxArrays];

  /// The array that slot u of a rank's parts belongs to; u becomes its place there.
  __device__ __forceinline__ const Array& of(int rank, uint32_t& u) const {
    int i = 0;
    for (; i < kMaxArrays - 1 && u >= at[i].slots[rank]; ++i) u -= at[i].slots[rank];
    return at[i];
  }
};

/// The i-th peer after this rank: each rank begins with another one.
__device__ __forceinline__ int peer_after(const Exchange& x, int i) {
  const int next = x.peers.rank + i;
  return next < x.peers.ranks ? next : next - x.peers.ranks;
}

/// The other ranks that send slot u to this one.
__device__ __forceinline__ uint32_t senders(const Exchange& x, const Arrays& arrays, const Range& range,
                                            const Needs& needs, uint32_t u) {
  uint32_t all = 0;
  for (int r = 0; r < x.peers.ranks; ++r) {
    if (r == x.peers.rank || u >= range.sent(r)) continue;
    if (u == 0 || needs.of(arrays.at[0].begins[r] + range.first + u) >> x.peers.rank & 1u) all |= 1u << r;
  }
  return all;
}

__global__ void __launch_bounds__(2 * kThreads, kBlocksPerSm)
    gather_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Arrays arrays,
                  const __grid_constant__ Range range, const __grid_constant__ Needs needs) {
  pdl_launch_dependents();
  pdl_wait();
  const Roles roles;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  const uint32_t sent = roles.sends ? range.sent(rank) : 0;
  Vec16 mine[kBatch];
  uint32_t to[kBatch];
  const auto load = [&](uint32_t first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t u = first + b * roles.step;
      if (u >= sent) continue;
      uint32_t at = range.first + u;
      const Array& part = arrays.of(rank, at);
      mine[b] = u < range.counts[rank] ? part.load(at) : Vec16{};
      to[b] = u == 0 ? 0xffffffffu : needs.of(arrays.at[0].begins[rank] + range.first + u);
    }
  };
  load(roles.first);  // while the turn begins
  Turn turn = begin_turn(x);
  for (uint32_t first = roles.first; first < sent;) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t u = first + b * roles.step;
      if (u >= sent) continue;
      for (int i = 1; i < ranks; ++i) {
        const int p = peer_after(x, i);
        if (to[b] >> p & 1u) send(slot(x, turn, p, rank * x.vectors + u), mine[b]);
      }
      if (u >= range.counts[rank]) continue;
      uint32_t at = range.first + u;
      const Array& part = arrays.of(rank, at);
      part.store(rank, at, mine[b]);
    }
    first += kBatch * roles.step;
    load(first);
  }
  if (!roles.receives) return;
  for (uint32_t u = roles.first; u < x.vectors; u += roles.step) {
    Vec16 v[kMaxRanks] = {};
    const uint32_t from = senders(x, arrays, range, needs, u);
    receive(x, turn, v, from, 0, u, x.vectors, roles.apart);
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) {
      if (!(from >> r & 1u) || u >= range.counts[r]) continue;
      uint32_t at = range.first + u;
      const Array& part = arrays.of(r, at);
      part.store(r, at, v[r]);
    }
  }
}

/// All ranks' parts of sums, of slots of 4 elements of f32 or 8 of bf16.
struct Sums {
  const uint8_t* in;           // of this rank
  uint8_t* out;                // its part
  uint32_t begins[kMaxRanks];  // where each rank's part begins
  bool aligned;
};

/// Adds what a slot carries to `sum`, or, as the first that is added, puts it there.
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
template <bool kNarrow>
__global__ void __launch_bounds__(2 * kThreads, kBlocksPerSm)
    scatter_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Sums sums,
                   const __grid_constant__ Range range, const __grid_constant__ Needs needs) {
  pdl_launch_dependents();
  pdl_wait();
  const Roles roles;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  const auto part = [&](int r, uint32_t u) -> Vec16 {
    Vec16 v = {};
    if (u < range.counts[r])
      load_words(sums.in + (static_cast<size_t>(sums.begins[r]) + range.first + u) * 16, sums.aligned, v.word);
    return v;
  };
  // A thread's n-th slot to send: its first ones of all peers, then its second ones, because who receives adds up a
  // slot of all ranks at once.
  const uint32_t others = ranks - 1;
  const auto peer = [&](uint32_t n) { return peer_after(x, 1 + static_cast<int>(n % others)); };
  const auto place = [&](uint32_t n) { return roles.first + n / others * roles.step; };
  Vec16 mine[kBatch];
  bool needed[kBatch];
  const auto load = [&](uint32_t n) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t p = peer(n + b), u = place(n + b);
      needed[b] = u < range.sent(p) && (u == 0 || needs.of(sums.begins[p] + range.first + u) >> rank & 1u);
      if (needed[b]) mine[b] = part(p, u);
    }
  };
  if (roles.sends) load(0);  // while the turn begins
  Turn turn = begin_turn(x);
  for (uint32_t n = 0; roles.sends && place(n) < x.vectors;) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (needed[b]) send(slot(x, turn, peer(n + b), rank * x.vectors + place(n + b)), mine[b]);
    n += kBatch;
    load(n);
  }
  if (!roles.receives) return;
  const uint32_t peers = ((1u << ranks) - 1) & ~(1u << rank);
  for (uint32_t u = roles.first; u < range.sent(rank); u += roles.step) {
    // Under way while the others' are waited for.
    const Vec16 own = part(rank, u);
    Vec16 v[kMaxRanks] = {};
    const uint32_t added = u < range.counts[rank] ? needs.of(sums.begins[rank] + range.first + u) : 0;
    receive(x, turn, v, peers & (u == 0 ? 0xffffffffu : added), 0, u, x.vectors, roles.apart);
    if (u >= range.counts[rank]) continue;
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r)
      if (r == rank) v[r] = own;
    float sum[kNarrow ? 8 : 4] = {};
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r)
      if (r < ranks && (added >> r & 1u)) add_slot<kNarrow>(sum, v[r], r == 0);
    uint8_t* to = sums.out + (static_cast<size_t>(range.first) + u) * sizeof(sum);
#pragma unroll
    for (int i = 0; i < (kNarrow ? 2 : 1); ++i) {
      const float* from = sum + 4 * i;
      const uint32_t words[4] = {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                                 __float_as_uint(from[3])};
      store_words(to + 16 * i, sums.aligned, words);
    }
  }
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Launches `kernel` once for each range of what every rank has, `slots` [ranks].
template <class Kernel, class Args>
cudaError_t launch_ranges(Kernel kernel, const Peers& peers, const size_t* slots, const Args& args, const Needs* needs,
                          void* stream) {
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e == cudaSuccess && !is_group(peers)) e = cudaErrorInvalidValue;
  if (e != cudaSuccess) return e;
  const uint32_t most = static_cast<uint32_t>(half_bytes(peers.ranks, peers.capacity) / 16 / peers.ranks);
  for (Range range = {}; fill(slots, peers.ranks, most, range); range.first += most) {
    uint32_t longest = 1;
    for (int r = 0; r < peers.ranks; ++r) longest = max(longest, range.sent(r));
    Exchange x;
    if (e = exchange_slots(peers, longest, &x); e != cudaSuccess) return e;
    const int blocks = min(ceil_div(static_cast<int>(longest), kThreads), kBlocksPerSm * limits.sms);
    const Launch l = {dim3(blocks), dim3(longest < kLong ? kThreads : 2 * kThreads), stream};
    if (e = launch(kernel, l, x, args, range, needs != nullptr ? *needs : Needs{}); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t load_gather_kernels() {
  cudaFuncAttributes attributes;
  const void* kernels[] = {reinterpret_cast<const void*>(gather_kernel),
                           reinterpret_cast<const void*>(scatter_kernel<false>),
                           reinterpret_cast<const void*>(scatter_kernel<true>)};
  for (const void* kernel : kernels)
    if (const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel); e != cudaSuccess) return e;
  return cudaSuccess;
}

}  // namespace moe

using namespace moe;

/// An array of which each rank has a part: known to moe-kernels' `cuda::PeerBuffers`.
struct PeerArray {
  const void* in;             // this rank's
  void* out;                  // all ranks', in rank order
  uint32_t slots[kMaxRanks];  // of each rank's part: of 16 bytes, or, of integers, of 8
  uint32_t exact;             // integers
};

/// Gathers up to 4 arrays. Slots and kinds are the same on all ranks; addresses are multiples of 2 bytes. With `needs`,
/// one array of floats, of which each rank gets the rows that it needs.
extern "C" int moe_peer_all_gather(const Peers* peers, const PeerArray* arrays, int count, const Needs* needs,
                                   void* stream) {
  if (count < 0 || count > kMaxArrays || !is_group(*peers)) return cudaErrorInvalidValue;
  if (needs != nullptr && (count != 1 || arrays[0].exact != 0 || needs->row_slots == 0)) return cudaErrorInvalidValue;
  Arrays all = {};
  size_t slots[kMaxRanks] = {};
  for (int i = 0; i < count; ++i) {
    const PeerArray& a = arrays[i];
    Array& to = all.at[i];
    // A part's size is a multiple of a slot's, so all parts begin as the first does.
    to = {static_cast<const uint8_t*>(a.in),    static_cast<uint8_t*>(a.out), {}, {}, a.exact != 0,
          is_aligned(a.in) && is_aligned(a.out)};
    uint32_t begin = 0;
    for (int r = 0; r < peers->ranks; ++r) {
      to.slots[r] = a.slots[r], to.begins[r] = begin;
      begin += a.slots[r], slots[r] += a.slots[r];
    }
  }
  return launch_ranges(gather_kernel, *peers, slots, all, needs, stream);
}

/// out f32 = this rank's part of the sum over the ranks of `in`, f32 or, if `narrow`, bf16, which holds `slots`[r]
/// slots of 16 bytes for each rank r, in rank order; added in f32 in rank order. Addresses are multiples of 4 bytes, of
/// bf16 of 2. With `needs`, of each row the sum over the ranks that need it.
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
  return narrow != 0 ? launch_ranges(scatter_kernel<true>, *peers, all, sums, needs, stream)
                     : launch_ranges(scatter_kernel<false>, *peers, all, sums, needs, stream);
}
