// All-gather of small arrays and reduce-scatter over peer memory: how the rows of a decode step reach every rank's
// experts, and how the ranks' sums of them come back. An NCCL call takes some 10 us each however little it moves.
//
// Both are one hop: a rank stores what another one needs in its slots; that one puts it in place, or adds what all have
// sent in rank order, so that sums have the same bits in every run. Slots, waiting, and why no barrier is needed:
// peer.cuh. Here each rank sends to every other one in every call, so each receives a word of each.
//
// A word of all ones is an empty slot. In floats it is a NaN and travels as another one; integers, of which every bit
// must arrive, travel as two words of 16 bits each.
//
// Floor for one token of H = 2,048 in bf16 with 8 ids and weights on 4 GPUs: as for a sum (all_reduce.cu), 2 us: 12 KB
// out. Predicted: 2.7 us, 64 tokens a rank (805 KB out at 350 GB/s) 5 us; the sums back, f32, 2.8 and 7 us.
#include "peer/peer.cuh"

namespace moe {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 2;  // all blocks of a launch must be resident at once
constexpr int kMaxArrays = 4;

/// kWords words that begin at a multiple of 2 bytes, or, with `aligned`, of their size.
template <int kWords>
__device__ __forceinline__ void load_words(const uint8_t* p, bool aligned, uint32_t (&w)[kWords]) {
  static_assert(kWords == 2 || kWords == 4, "half a slot or a slot");
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(p) + 2 * i;
      w[i] = __ldcg(halves) | static_cast<uint32_t>(__ldcg(halves + 1)) << 16;
    }
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
    w[0] = v.x, w[1] = v.y;
  } else {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p));
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(uint8_t* p, bool aligned, const uint32_t (&w)[kWords]) {
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint16_t* halves = reinterpret_cast<uint16_t*>(p) + 2 * i;
      halves[0] = static_cast<uint16_t>(w[i]), halves[1] = static_cast<uint16_t>(w[i] >> 16);
    }
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(p) = {w[0], w[1]};
  } else {
    *reinterpret_cast<uint4*>(p) = {w[0], w[1], w[2], w[3]};
  }
}

/// An array of which each rank has a part of `slots` slots.
struct Array {
  const uint8_t* in;  // this rank's
  uint8_t* out;       // all, in rank order
  uint32_t slots;
  bool exact;  // integers: 8 bytes to a slot
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
    uint8_t* to = out + (static_cast<size_t>(rank) * slots + u) * (exact ? 8 : 16);
    if (exact) {
      const uint32_t w[2] = {v.word[0] | v.word[1] << 16, v.word[2] | v.word[3] << 16};
      store_words(to, aligned, w);
    } else {
      store_words(to, aligned, v.word);
    }
  }
};

struct Arrays {
  Array at[kMaxArrays];

  /// The part that slot u of the call belongs to; u becomes its place there.
  __device__ __forceinline__ const Array& of(uint32_t& u) const {
    int i = 0;
    for (; i < kMaxArrays - 1 && u >= at[i].slots; ++i) u -= at[i].slots;
    return at[i];
  }
};

/// The i-th peer after this rank: each rank begins with another one.
__device__ __forceinline__ int peer_after(const Exchange& x, int i) {
  const int next = x.peers.rank + i;
  return next < x.peers.ranks ? next : next - x.peers.ranks;
}

__device__ __forceinline__ uint32_t other_ranks(const Exchange& x) {
  return ((1u << x.peers.ranks) - 1) & ~(1u << x.peers.rank);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gather_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Arrays arrays) {
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  Turn turn = begin_turn(x);
  for (uint32_t u = first; u < x.vectors; u += step) {
    uint32_t at = u;
    const Vec16 mine = arrays.of(at).load(at);
    for (int i = 1; i < ranks; ++i) send(slot(x, turn, peer_after(x, i), rank * x.vectors + u), mine);
  }
  for (uint32_t u = first; u < x.vectors; u += step) {
    uint32_t at = u;
    const Array& part = arrays.of(at);
    Vec16 v[kMaxRanks];
    const Vec16 mine = part.load(at);
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) v[r] = mine;
    receive(x, turn, v, other_ranks(x), 0, u, x.vectors);
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r)
      if (r < ranks) part.store(r, at, v[r]);
  }
}

/// out [4 vectors] = the sum over the ranks of `in` [ranks, 4 vectors], this rank's part.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    scatter_kernel(const __grid_constant__ Exchange x, const uint8_t* in, uint8_t* out, bool aligned) {
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  Turn turn = begin_turn(x);
  const auto part = [&](int r, uint32_t u) {
    Vec16 v;
    load_words(in + (static_cast<size_t>(r) * x.vectors + u) * 16, aligned, v.word);
    return v;
  };
  for (uint32_t u = first; u < x.vectors; u += step)
    for (int i = 1; i < ranks; ++i) {
      const int p = peer_after(x, i);
      send(slot(x, turn, p, rank * x.vectors + u), part(p, u));
    }
  for (uint32_t u = first; u < x.vectors; u += step) {
    Vec16 v[kMaxRanks];
    const Vec16 mine = part(rank, u);
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) v[r] = mine;
    receive(x, turn, v, other_ranks(x), 0, u, x.vectors);
    uint32_t sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float all = __uint_as_float(v[0].word[i]);
#pragma unroll
      for (int r = 1; r < kMaxRanks; ++r)
        if (r < ranks) all += __uint_as_float(v[r].word[i]);
      sum[i] = __float_as_uint(all);
    }
    store_words(out + static_cast<size_t>(u) * 16, aligned, sum);
  }
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Blocks of a call; they are resident at once.
cudaError_t grid(const Exchange& x, unsigned* blocks) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e == cudaSuccess) *blocks = min(ceil_div(static_cast<int>(x.vectors), kThreads), kBlocksPerSm * limits.sms);
  return e;
}

}  // namespace

cudaError_t load_gather_kernels() {
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(gather_kernel));
  return e == cudaSuccess ? cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(scatter_kernel)) : e;
}

}  // namespace moe

using namespace moe;

/// An array of which each rank has an equal part: known to moe-kernels' `cuda::PeerBuffers`.
struct PeerArray {
  const void* in;  // this rank's
  void* out;       // all ranks', in rank order
  uint32_t slots;  // of 16 bytes, or, of integers, of 8
  uint32_t exact;  // integers
};

/// Slots that each rank may send to each other one in a call.
extern "C" size_t moe_peer_slots(int ranks, size_t capacity) {
  return ranks < 2 || ranks > kMaxRanks ? 0 : half_bytes(ranks, capacity) / 16 / ranks;
}

/// Gathers up to 4 arrays. Slots and kinds are the same on all ranks; addresses are multiples of 2 bytes.
extern "C" int moe_peer_all_gather(const Peers* peers, const PeerArray* arrays, int count, void* stream) {
  if (count < 0 || count > kMaxArrays) return cudaErrorInvalidValue;
  Arrays all = {};
  size_t slots = 0;
  for (int i = 0; i < count; ++i) {
    const PeerArray& a = arrays[i];
    // A part's size is a multiple of a slot's, so all arrays begin as the first does.
    const bool aligned = is_aligned(a.in) && is_aligned(a.out);
    all.at[i] = {static_cast<const uint8_t*>(a.in), static_cast<uint8_t*>(a.out), a.slots, a.exact != 0, aligned};
    slots += a.slots;
  }
  Exchange x;
  unsigned blocks = 0;
  cudaError_t e = exchange_slots(*peers, slots, &x);
  if (e == cudaSuccess && slots > 0) e = grid(x, &blocks);
  if (e != cudaSuccess || slots == 0) return e;
  return launch(gather_kernel, {dim3(blocks), dim3(kThreads), stream}, x, all);
}

/// out [count] = this rank's part of the sum over the ranks of `in` [ranks, count] f32, added in rank order; count is a
/// multiple of 4.
extern "C" int moe_peer_reduce_scatter(const Peers* peers, const float* in, float* out, size_t count, void* stream) {
  if (count % 4 != 0) return cudaErrorInvalidValue;
  Exchange x;
  unsigned blocks = 0;
  cudaError_t e = exchange_slots(*peers, count / 4, &x);
  if (e == cudaSuccess && count > 0) e = grid(x, &blocks);
  if (e != cudaSuccess || count == 0) return e;
  return launch(scatter_kernel, {dim3(blocks), dim3(kThreads), stream}, x, reinterpret_cast<const uint8_t*>(in),
                reinterpret_cast<uint8_t*>(out), is_aligned(in) && is_aligned(out));
}
