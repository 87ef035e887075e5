// All-gather over peer memory: brings rows to every rank's experts. For the few rows of a decode step an NCCL call
// takes some 10 us, however little data it moves. For the thousands of rows in a step with prompts, NCCL starts a
// thread on the host, and does more if the ranks bring different numbers of rows.
//
// One hop: a rank stores the data for another rank in that rank's slots, and the other rank copies it to its place.
// peer.cuh explains slots, waiting, and why no barrier is needed. Each rank sends to every other one in every call, so
// each receives a word from each: a rank without a part sends one empty slot.
//
// A word of all ones is an empty slot. As a float it is a NaN, which is sent as a different NaN. Integers, of which
// every bit must arrive, are sent as two words of 16 bits each.
//
// Floor for one token of H = 2,048 in bf16 with 8 ids and weights on 4 GPUs: 2 us, as for a sum (all_reduce.cu), with
// 12 KB out. Predicted: 2.7 us; for 64 tokens per rank (805 KB out at 350 GB/s) 5 us. On two GPUs with 1,024 tokens per
// rank: 4.3 MB out, 12 us and 3 us for the launch.
#include "peer/ranges.cuh"
#include "peer/words.cuh"

namespace moe {
namespace {

constexpr int kMaxArrays = 4;

/// An array of which each rank has a part.
struct Array {
  const uint8_t* in;           // this rank's
  uint8_t* out;                // all, in rank order
  uint32_t begins[kMaxRanks];  // where each rank's part begins in `out`, in slots
  bool exact;                  // whether the elements are integers, of which a slot carries 8 bytes
  bool aligned;

  /// The contents for a slot, unchanged. The value is not used here, so the load may run while the turn begins.
  template <bool kAligned>
  __device__ __forceinline__ Vec16 load(uint32_t u) const {
    Vec16 v = {};
    if (exact) {
      uint32_t w[2];
      load_words(in + static_cast<size_t>(u) * 8, kAligned || aligned, w);
      v.word[0] = w[0], v.word[1] = w[1];
    } else {
      load_words(in + static_cast<size_t>(u) * 16, kAligned || aligned, v.word);
    }
    return v;
  }
};

/// The loaded words in the form in which a slot carries them, which is never the empty word.
__device__ __forceinline__ Vec16 carried(const Vec16& v, bool exact) {
  if (exact) return {{v.word[0] & 0xffffu, v.word[0] >> 16, v.word[1] & 0xffffu, v.word[1] >> 16}};
  Vec16 to;
#pragma unroll
  for (int i = 0; i < 4; ++i) to.word[i] = v.word[i] == kEmpty ? kOtherNan : v.word[i];
  return to;
}

/// Writes a slot that has arrived to its place.
template <bool kAligned>
struct Place {
  uint8_t* to;
  bool exact, aligned;

  __device__ __forceinline__ void store(const Vec16& v) const {
    if (exact) {
      const uint32_t w[2] = {v.word[0] | v.word[1] << 16, v.word[2] | v.word[3] << 16};
      store_words(to, kAligned || aligned, w);
    } else {
      store_words(to, kAligned || aligned, v.word);
    }
  }
};

struct Arrays {
  Array at[kMaxArrays];
  uint32_t ends[kMaxRanks][kMaxArrays];  // of each array among the slots of a rank

  /// The array to which slot u of a rank's parts belongs; u becomes its index there.
  __device__ __forceinline__ const Array& of(int rank, uint32_t& u) const {
    const uint32_t* end = ends[rank];
    int array = 0;
    uint32_t begin = 0;
#pragma unroll
    for (int i = 0; i < kMaxArrays - 1; ++i)
      if (u >= end[i]) array = i + 1, begin = end[i];
    u -= begin;
    return at[array];
  }

  template <bool kAligned>
  __device__ __forceinline__ Place<kAligned> place(int rank, uint32_t u) const {
    const Array& a = of(rank, u);
    return {a.out + (static_cast<size_t>(a.begins[rank]) + u) * (a.exact ? 8 : 16), a.exact, a.aligned};
  }
};

/// The other ranks, out of up to kRanks, that send slot u to this rank.
template <int kRanks, bool kPlain>
__device__ __forceinline__ uint32_t senders(const Exchange& x, const Arrays& arrays, const Range& range,
                                            const Needs& needs, uint32_t u) {
  uint32_t all = 0;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r >= x.peers.ranks || r == x.peers.rank || u >= range.sent(r)) continue;
    if (u == 0 || needs.of<kPlain>(arrays.at[0].begins[r] + range.first + u) >> x.peers.rank & 1u) all |= 1u << r;
  }
  return all;
}

/// Gathers from up to kRanks ranks. kPlain: arrays are aligned, and each thread first sends and then receives.
template <int kRanks, bool kPlain>
__global__ void __launch_bounds__(2 * kThreads, kBlocksPerSm)
    gather_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Arrays arrays,
                  const __grid_constant__ Range range, const __grid_constant__ Needs needs) {
  pdl_launch_dependents();
  pdl_wait();
  const Roles<kPlain> roles;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  const uint32_t sent = roles.sends ? range.sent(rank) : 0;
  Turn turn;
  uint32_t first = roles.first;
  do {
    Vec16 mine[kBatch<kPlain>];
    uint32_t to[kBatch<kPlain>];
    bool exact[kBatch<kPlain>];
#pragma unroll
    for (int b = 0; b < kBatch<kPlain>; ++b) {
      const uint32_t u = first + b * roles.step;
      if (u >= sent) continue;
      uint32_t at = range.first + u;
      const Array& part = arrays.of(rank, at);
      exact[b] = part.exact;
      mine[b] = u < range.counts[rank] ? part.load<kPlain>(at) : Vec16{};
      to[b] = u == 0 ? 0xffffffffu : needs.of<kPlain>(arrays.at[0].begins[rank] + range.first + u);
    }
    if (first == roles.first) turn = begin_turn(x);  // this load is in flight together with the first data
#pragma unroll
    for (int b = 0; b < kBatch<kPlain>; ++b) {
      const uint32_t u = first + b * roles.step;
      if (u >= sent) continue;
      mine[b] = carried(mine[b], exact[b]);
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        if (i >= ranks) break;
        const int p = peer_after(x, i);
        if (to[b] >> p & 1u) send(slot(x, turn, p, rank * x.vectors + u), mine[b]);
      }
      if (u < range.counts[rank]) arrays.place<kPlain>(rank, range.first + u).store(mine[b]);
    }
    if (first == roles.first) count_turn(x, turn);
    first += kBatch<kPlain> * roles.step;
  } while (first < sent);
  if (!roles.receives) return;
  for (uint32_t u = roles.first; u < x.vectors; u += roles.step) {
    Vec16 v[kRanks] = {};
    const uint32_t from = senders<kRanks, kPlain>(x, arrays, range, needs, u);
    receive(x, turn, v, from, 0, u, x.vectors, roles.apart);
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if ((from >> r & 1u) && u < range.counts[r]) arrays.place<kPlain>(r, range.first + u).store(v[r]);
  }
}

struct Gather {
  using Args = Arrays;
  template <int kRanks, bool kPlain>
  static auto kernel() {
    return gather_kernel<kRanks, kPlain>;
  }
};

}  // namespace

cudaError_t load_gather_kernels() { return load_call<Gather>(); }

}  // namespace moe

using namespace moe;

/// An array of which each rank has a part. moe-kernels' `cuda::PeerBuffers` uses the same layout.
struct PeerArray {
  const void* in;             // this rank's
  void* out;                  // all ranks', in rank order
  uint32_t slots[kMaxRanks];  // slots of each rank's part: a slot has 16 bytes, or 8 bytes of integers
  uint32_t exact;             // integers
};

/// Gathers up to 4 arrays. Slots and kinds are the same on all ranks; addresses are multiples of 2 bytes. With `needs`
/// it gathers one array of floats, and each rank gets the rows that it needs.
extern "C" int moe_peer_all_gather(const Peers* peers, const PeerArray* arrays, int count, const Needs* needs,
                                   void* stream) {
  if (count < 0 || count > kMaxArrays || !is_group(*peers)) return cudaErrorInvalidValue;
  if (needs != nullptr && (count != 1 || arrays[0].exact != 0 || needs->row_slots == 0)) return cudaErrorInvalidValue;
  Arrays all = {};
  size_t slots[kMaxRanks] = {};
  bool aligned = true;
  for (int i = 0; i < count; ++i) {
    const PeerArray& a = arrays[i];
    Array& to = all.at[i];
    // A part's size is a multiple of a slot's, so all parts have the alignment of the first one.
    to = {static_cast<const uint8_t*>(a.in),
          static_cast<uint8_t*>(a.out),
          {},
          a.exact != 0,
          is_aligned(a.in) && is_aligned(a.out)};
    aligned = aligned && to.aligned;
    uint32_t begin = 0;
    for (int r = 0; r < peers->ranks; ++r) {
      to.begins[r] = begin;
      begin += a.slots[r], slots[r] += a.slots[r];
      all.ends[r][i] = static_cast<uint32_t>(slots[r]);
    }
  }
  for (int i = count; i < kMaxArrays; ++i)
    for (int r = 0; r < peers->ranks; ++r) all.ends[r][i] = static_cast<uint32_t>(slots[r]);
  return launch_ranges<Gather>(*peers, slots, all, aligned, needs, stream);
}
