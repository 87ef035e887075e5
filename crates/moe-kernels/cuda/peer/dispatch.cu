// The rows of a decode step to the ranks whose experts need them, in one launch and in one hop. A rank stores each of
// its rows in the slots of the ranks that own an expert of the row's token, and ids and weights, which are small, in
// the slots of all ranks. A receiver reads a row's ids as they arrive. They tell whether the row itself was sent, so no
// count is exchanged, no rank waits for all others, and each row has a place that is known before the launch: a graph
// can replay it. peer.cuh explains slots, waiting, the two halves, and why no barrier is needed.
//
//   slots of a row:  [ ids, two in a slot | weights, four in a slot | row, 16 bytes in a slot ]
//                      always                                         if the receiver owns one of the ids
//
// gather.cu with `needs` sends the same rows in two launches, as it needs the ids of all ranks before it begins;
// without `needs` it sends all rows in one.
//
// A block processes one row at a time: first this rank's rows, which it sends, then the other ranks' rows, for which it
// waits. Sending blocks wait for nothing, and all blocks are resident at the same time, so there can be no deadlock. In
// a decode step every row has its own block. The first look at a row's slots is in flight while its ids are awaited.
//
// Floor on 8 GPUs for 64 tokens per rank of H = 2,048 in bf16 of which a rank needs a third: 64 x 7 x (96 + 1,365)
// bytes = 655 KB out, 1.5 us at 450 GB/s, after a hop of 1 us and a launch boundary of 0.65 us. A gather of all rows is
// 1.9 MB.
#include "peer/ranges.cuh"

namespace moe {
namespace {

constexpr uint32_t kMaxIds = 32;  // of a token: each lane of a warp checks one
constexpr int kInFlight = 4;      // slots of a row that a thread has in progress

/// The tokens of all ranks.
struct Tokens {
  const uint8_t* rows;            // this rank's
  const uint32_t *ids, *weights;  // [counts[rank], top_k]
  uint8_t* all_rows;              // all ranks', in rank order
  uint32_t *all_ids, *all_weights;
  uint32_t counts[kMaxRanks], begins[kMaxRanks];
  uint32_t top_k;
  uint32_t id_slots, head, row_slots;  // slots of ids, of ids and weights, and of a row

  /// Number of rows of a rank that blocks process. If there is none, one empty row counts, so that every rank sends
  /// something to every other one.
  __device__ __forceinline__ uint32_t tasks(int rank) const { return max(counts[rank], 1u); }

  /// Where slot `s` of a row begins in the current half. The row is `row` of rank `from`.
  __device__ __forceinline__ uint32_t index(const Exchange& x, int from, uint32_t row) const {
    return from * x.vectors + row * (head + row_slots);
  }

  /// Slot s of the head of this rank's row. Ids are carried as halves, of which no word can look empty.
  __device__ __forceinline__ Vec16 head_slot(uint32_t row, uint32_t s) const {
    Vec16 v = {};
    const size_t base = static_cast<size_t>(row) * top_k;
    if (s < id_slots) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t k = 2 * s + i;
        const uint32_t id = k < top_k ? __ldcg(ids + base + k) : 0u;
        v.word[2 * i] = id & 0xffffu, v.word[2 * i + 1] = id >> 16;
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t k = 4 * (s - id_slots) + i;
        v.word[i] = k < top_k ? __ldcg(weights + base + k) : 0u;
      }
    }
    return v;
  }

  /// Writes slot s of the head of row `at` of all ranks' rows. Returns whether `rank` owns one of its ids.
  __device__ __forceinline__ bool store_head(const Needs& needs, int rank, uint32_t at, uint32_t s,
                                             const Vec16& v) const {
    const size_t base = static_cast<size_t>(at) * top_k;
    bool owns = false;
    if (s < id_slots) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t k = 2 * s + i;
        if (k >= top_k) continue;
        const uint32_t id = v.word[2 * i] | v.word[2 * i + 1] << 16;
        all_ids[base + k] = id;
        if (id < needs.experts) owns = owns || __ldg(needs.owners + id) == static_cast<uint32_t>(rank);
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t k = 4 * (s - id_slots) + i;
        if (k < top_k) all_weights[base + k] = v.word[i];
      }
    }
    return owns;
  }
};

/// Sends this rank's row `row`, and copies it to its place among all rows.
template <int kRanks>
__device__ __forceinline__ void send_row(const Exchange& x, const Turn& turn, const Tokens& a, const Needs& needs,
                                         uint32_t row) {
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  const uint32_t first = a.index(x, rank, row);
  if (row >= a.counts[rank]) {
    if (static_cast<int>(threadIdx.x) + 1 < ranks) send(slot(x, turn, peer_after(x, threadIdx.x + 1), first), Vec16{});
    return;
  }
  const uint32_t at = a.begins[rank] + row;
  if (threadIdx.x < a.head) {
    const Vec16 v = a.head_slot(row, threadIdx.x);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (i < ranks) send(slot(x, turn, peer_after(x, i), first + threadIdx.x), v);
    a.store_head(needs, rank, at, threadIdx.x, v);
  }
  const uint32_t to = needs.of_row(row);
  const uint8_t* from = a.rows + static_cast<size_t>(row) * a.row_slots * 16;
  uint8_t* place = a.all_rows + static_cast<size_t>(at) * a.row_slots * 16;
  for (uint32_t base = threadIdx.x; base < a.row_slots; base += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      const uint32_t u = base + b * kThreads;
      if (u < a.row_slots) v[b] = __ldcg(reinterpret_cast<const uint4*>(from) + u);
    }
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      const uint32_t u = base + b * kThreads;
      if (u >= a.row_slots) continue;
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        const int p = peer_after(x, i);
        if (i < ranks && (to >> p & 1u) != 0)
          send(slot(x, turn, p, first + a.head + u), {{v[b].x, v[b].y, v[b].z, v[b].w}});
      }
      reinterpret_cast<uint4*>(place)[u] = v[b];
    }
  }
}

/// Waits for slot `index` without pauses, and empties it.
__device__ __forceinline__ Vec16 take_at_once(const Exchange& x, Turn& turn, uint32_t index, int sender) {
  uint8_t* from = slot(x, turn, x.peers.rank, index);
  Vec16 v = load_system(from);
  while (!is_full(v) && !gives_up(x, turn, sender)) v = load_system(from);
  store_system(from, {{kEmpty, kEmpty, kEmpty, kEmpty}});
  return v;
}

/// Receives row `row` of rank `from`: ids and weights, and the row itself if this rank needs it. `needed` is in shared
/// memory; the next row uses another one, so that all threads have read it before it is written again.
__device__ __forceinline__ void receive_row(const Exchange& x, Turn& turn, const Tokens& a, const Needs& needs,
                                            int from, uint32_t row, bool* needed) {
  const int rank = x.peers.rank;
  const uint32_t first = a.index(x, from, row);
  if (row >= a.counts[from]) {
    if (threadIdx.x == 0) take_at_once(x, turn, first, from);
    return;
  }
  const uint32_t at = a.begins[from] + row;
  Vec16 v[kInFlight];
  uint32_t base = threadIdx.x;
  const auto look = [&](uint32_t wanted) {
#pragma unroll
    for (int b = 0; b < kInFlight; ++b)
      if (wanted >> b & 1u) v[b] = load_system(slot(x, turn, rank, first + a.head + base + b * kThreads));
  };
  const auto slots_from = [&](uint32_t begin) {
    uint32_t wanted = 0;
#pragma unroll
    for (int b = 0; b < kInFlight; ++b)
      if (begin + b * kThreads < a.row_slots) wanted |= 1u << b;
    return wanted;
  };
  look(slots_from(base));
  if (threadIdx.x < 32) {
    bool owns = false;
    if (threadIdx.x < a.head) {
      const Vec16 head = take_at_once(x, turn, first + threadIdx.x, from);
      owns = a.store_head(needs, rank, at, threadIdx.x, head);
    }
    owns = __any_sync(0xffffffffu, owns);
    if (threadIdx.x == 0) *needed = owns;
  }
  __syncthreads();
  if (!*needed) return;
  uint4* place = reinterpret_cast<uint4*>(a.all_rows + static_cast<size_t>(at) * a.row_slots * 16);
  while (base < a.row_slots) {
    const uint32_t wanted = slots_from(base);
    uint32_t missing = wanted;
    while (true) {
#pragma unroll
      for (int b = 0; b < kInFlight; ++b)
        if ((missing >> b & 1u) != 0 && is_full(v[b])) missing &= ~(1u << b);
      if (missing == 0 || gives_up(x, turn, from)) break;
      look(missing);
    }
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      if ((wanted >> b & 1u) == 0) continue;
      const uint32_t u = base + b * kThreads;
      store_system(slot(x, turn, rank, first + a.head + u), {{kEmpty, kEmpty, kEmpty, kEmpty}});
      place[u] = {v[b].word[0], v[b].word[1], v[b].word[2], v[b].word[3]};
    }
    base += kInFlight * kThreads;
    look(slots_from(base));
  }
}

/// Needs::ids are this rank's own.
template <int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dispatch_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Tokens a,
                    const __grid_constant__ Needs needs) {
  __shared__ bool needed[2];
  pdl_launch_dependents();
  pdl_wait();
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  Turn turn = begin_turn(x);
  uint32_t task = blockIdx.x;
  for (; task < a.tasks(rank); task += gridDim.x) send_row<kRanks>(x, turn, a, needs, task);
  task -= a.tasks(rank);
  count_turn(x, turn);
  uint32_t odd = 0;
  for (int i = 1; i < ranks; ++i) {
    const int from = peer_after(x, i);
    const uint32_t tasks = a.tasks(from);
    for (; task < tasks; task += gridDim.x, odd ^= 1) receive_row(x, turn, a, needs, from, task, needed + odd);
    task -= tasks;
  }
}

/// The slots of ids of a row, and of ids and weights.
uint32_t slots_of_ids(uint32_t top_k) { return ceil_div(top_k, 2u); }
uint32_t slots_of_head(uint32_t top_k) { return slots_of_ids(top_k) + ceil_div(top_k, 4u); }

}  // namespace

cudaError_t load_dispatch_kernels() {
  return load_kernels(dispatch_kernel<2>, dispatch_kernel<4>, dispatch_kernel<kMaxRanks>);
}

}  // namespace moe

using namespace moe;

/// The tokens of a call of moe_peer_dispatch. moe-kernels' `cuda::PeerBuffers` uses the same layout.
struct PeerTokens {
  const void* rows;  // of this rank
  void* all_rows;    // of all ranks, in rank order
  const uint32_t* ids;
  uint32_t* all_ids;
  const float* weights;
  float* all_weights;
  const uint32_t* owners;      // [experts]: the rank of each
  uint32_t counts[kMaxRanks];  // rows of each rank
  uint32_t row_slots;          // 16 bytes each
  uint32_t top_k, experts;
};

/// The largest number of rows of a rank in a call of moe_peer_dispatch; 0 if it takes no such rows.
extern "C" int64_t moe_peer_dispatch_rows(int ranks, size_t capacity, uint32_t row_slots, uint32_t top_k) {
  if (ranks < 2 || ranks > kMaxRanks || row_slots == 0 || row_slots > 1u << 16 || top_k == 0 || top_k > kMaxIds)
    return 0;
  return static_cast<int64_t>(half_bytes(ranks, capacity) / 16 / ranks) / (slots_of_head(top_k) + row_slots);
}

/// Concatenates ids [counts[r], K] and weights of every rank r in rank order, K at most 32, and of the rows those that
/// have an expert of this rank. Other rows of other ranks are not written. Rows are aligned to 16 bytes.
extern "C" int moe_peer_dispatch(const Peers* peers, const PeerTokens* tokens, void* stream) {
  const PeerTokens& t = *tokens;
  if (!is_group(*peers)) return cudaErrorInvalidValue;
  Tokens a = {static_cast<const uint8_t*>(t.rows),
              t.ids,
              reinterpret_cast<const uint32_t*>(t.weights),
              static_cast<uint8_t*>(t.all_rows),
              t.all_ids,
              reinterpret_cast<uint32_t*>(t.all_weights),
              {},
              {},
              t.top_k,
              slots_of_ids(t.top_k),
              slots_of_head(t.top_k),
              t.row_slots};
  const int64_t most = moe_peer_dispatch_rows(peers->ranks, peers->capacity, t.row_slots, t.top_k);
  uint32_t total = 0, longest = 1, tasks = 0;
  for (int r = 0; r < peers->ranks; ++r) {
    a.begins[r] = total, a.counts[r] = t.counts[r];
    total += t.counts[r], longest = max(longest, t.counts[r]), tasks += max(t.counts[r], 1u);
  }
  if (longest > most) return cudaErrorInvalidValue;
  if (total == 0) return cudaSuccess;
  DeviceLimits limits;
  Exchange x;
  cudaError_t e = device_limits(&limits);
  if (e == cudaSuccess) e = exchange_slots(*peers, static_cast<size_t>(longest) * (a.head + a.row_slots), &x);
  if (e != cudaSuccess) return e;
  const Needs needs = {t.ids, t.owners, t.top_k, t.experts, t.row_slots};
  const int blocks = min(static_cast<int>(tasks), kBlocksPerSm * limits.sms);
  const Launch l = {dim3(blocks), dim3(kThreads), stream};
  return for_ranks(peers->ranks, [&](auto ranks) { return launch(dispatch_kernel<ranks()>, l, x, a, needs); });
}
