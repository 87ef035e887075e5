// Code that all-gather (gather.cu) and reduce-scatter (scatter.cu) over peer memory share: which slots of each rank are
// sent in a launch and to which ranks, which threads of a block send them, and which form of a kernel is launched.
//
// In short calls each thread sends and then receives. In long ones some warps send while others receive, a sender has
// several slots in progress, and slots that half a buffer does not hold are left to further launches.
//
// If the experts of a row are known, it may be sent only to the ranks that own an expert of its token, and only their
// sums return. The ids, which every rank has, decide whether a slot is sent, so nothing is counted and nothing moves to
// another place. The first slot of a launch is always sent.
//
// The calls of a decode step have their own form without code for other calls (`kPlain`). One kernel for all calls had
// 93 KiB of instructions and took three times as long (docs/lessons/ranks.md).
#pragma once

#include "peer/needs.cuh"

namespace moe {

constexpr int kThreads = 128;         // threads that send, and threads that receive; in short calls they are the same
constexpr int kBlocksPerSm = 2;       // all blocks of a launch must be resident at once
constexpr uint32_t kLong = 1u << 17;  // slots of a rank from which on some warps send while others receive: 2 MiB

/// The number of slots that a sender has in progress. A thread of a short call usually has one.
template <bool kPlain>
constexpr int kBatch = kPlain ? 1 : 4;

/// The slots that a launch sends of each rank's part: `counts` slots from slot `first` on.
struct Range {
  uint32_t first;
  uint32_t counts[kMaxRanks];

  /// Number of slots that are sent from a rank.
  __host__ __device__ __forceinline__ uint32_t sent(int rank) const { return counts[rank] > 0 ? counts[rank] : 1; }
};

/// The rest of `slots` of each rank from `range.first` on, at most `most` of each. Returns whether there is any.
inline bool fill(const size_t* slots, int ranks, uint32_t most, Range& range) {
  bool any = false;
  for (int r = 0; r < ranks; ++r) {
    const size_t left = slots[r] > range.first ? slots[r] - range.first : 0;
    range.counts[r] = static_cast<uint32_t>(left < most ? left : most);
    any = any || left > 0;
  }
  return any;
}

/// Which threads of a block send, and which receive.
template <bool kPlain>
struct Roles {
  uint32_t first, step;
  bool apart, sends, receives;

  __device__ __forceinline__ Roles() {
    apart = !kPlain && blockDim.x > kThreads;
    first = blockIdx.x * kThreads + threadIdx.x % kThreads;
    step = gridDim.x * kThreads;
    sends = !apart || threadIdx.x < kThreads;
    receives = !apart || threadIdx.x >= kThreads;
  }
};

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// A call: `Args` and, as kernel<kRanks, kPlain>(), the kernels for up to kRanks ranks. kPlain: for few, aligned slots
/// that all ranks need.
template <class Call>
cudaError_t load_call() {
  cudaError_t e = cudaSuccess;
  for (const int ranks : {2, 4, kMaxRanks})
    if (e == cudaSuccess)
      e = for_ranks(ranks, [](auto most) {
        return load_kernels(Call::template kernel<most(), true>(), Call::template kernel<most(), false>());
      });
  return e;
}

/// Launches a kernel of `Call` once for each range of every rank's part, `slots` [ranks].
template <class Call>
cudaError_t launch_ranges(const Peers& peers, const size_t* slots, const typename Call::Args& args, bool aligned,
                          const Needs* needs, void* stream) {
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
    const bool brief = longest < kLong, plain = brief && aligned && needs == nullptr;
    const Launch l = {dim3(blocks), dim3(brief ? kThreads : 2 * kThreads), stream};
    const Needs needed = needs != nullptr ? *needs : Needs{};
    e = for_ranks(peers.ranks, [&](auto most) {
      return plain ? launch(Call::template kernel<most(), true>(), l, x, args, range, needed)
                   : launch(Call::template kernel<most(), false>(), l, x, args, range, needed);
    });
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace moe
