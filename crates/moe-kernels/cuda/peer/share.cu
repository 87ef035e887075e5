// The end of a sub-layer for thousands of rows over peer memory, in one launch: each rank keeps the residual stream of
// a share of the rows, adds to it what all ranks computed for them, and sends the norms of its rows to all ranks.
//
//   rank r   its sums of rank p's rows, in bf16 ─► slots of p        rank p   + its own, in f32, in rank order
//            all rows' norms            ◄─ slots of r, bf16 ◄─────            residual += ..; norm
//
// That is a reduce-scatter, an addition with a norm, and an all-gather: Megatron's sequence parallelism. A sum that all
// ranks need completely moves 4 bytes of f32 per element and direction on two GPUs; this moves 2 x 2 / 2 bytes. Also,
// each addition and norm is computed only once.
//
// Why the parts may be sent in bf16: a part is one rank's share of a product that a model in bf16 rounds as a whole. A
// part is not larger than the product, except where parts cancel. So the rounding adds at most as much as transformers'
// own rounding of the product, and the residual stream stays f32, while transformers rounds it too. A rank's own part
// is not rounded.
//
// Three kinds of warps work at the same time, so that links carry rows in both directions all the time: some send sums,
// some add and norm (a block processes every gridDim.x-th row of the share), and some receive the norms of the other
// ranks. The sending warps wait for nothing, and all blocks are resident at the same time. peer.cuh explains slots,
// waiting, and why no barrier is needed.
//
// Floor, for two H200 at 450 GB/s each way, 8,192 rows of H = 2,048: 33.6 MB out and in, 75 us. In the same time local
// memory moves 50 MB of sums, 67 MB of the stream, 50 MB of norms, and twice the slots' 33.6 MB in L2: 40 us. Predicted
// 100 us (360 GB/s and 4 us for each of two launches), measured 116 us, compared with 321 us for NCCL's sum and the
// norm after it. Apart from some 5 us it moves 308 GB/s.
#include "peer/peer.cuh"
#include "ptx/ptx.cuh"

namespace moe {
namespace {

constexpr int kSenders = 128, kAdders = 256, kTakers = 128;  // threads
constexpr int kThreads = kSenders + kAdders + kTakers;
constexpr int kAdderWarps = kAdders / 32;
constexpr int kBlocksPerSm = 2;
constexpr int kBatch = 4;         // vectors that a sender has in flight
constexpr int kBarrier = 1;       // of the adders
constexpr uint32_t kGroup = 256;  // columns that a warp moves at once

struct Rows {
  const float* partial;  // [rows, hidden], this rank's sums
  float* residual;       // [rows, hidden], of which this rank's share is read and written
  const bf16* weight;    // [hidden]
  bf16* out;             // [rows, hidden]
  float eps;
  uint32_t rows, hidden;
  uint32_t share;  // rows of each rank, one after the other; the last ranks may have fewer rows or none

  /// Vectors of 8 elements in a row.
  __device__ __forceinline__ uint32_t vectors() const { return hidden / 8; }
  __device__ __forceinline__ uint32_t begin(int rank) const { return min(rank * share, rows); }
  __device__ __forceinline__ uint32_t count(int rank) const { return min(share, rows - begin(rank)); }
};

/// The columns of a vector: four at `low` and four at `high`, so that the lanes of a warp read contiguous ranges of
/// f32.
struct Columns {
  uint32_t low, high;

  __device__ __forceinline__ Columns(uint32_t vector, uint32_t hidden) {
    const uint32_t first = vector / 32 * kGroup, width = min(kGroup, hidden - first);
    low = first + vector % 32 * 4;
    high = low + width / 2;
  }
};

struct Eight {
  float4 low, high;
};

__device__ __forceinline__ Eight load_eight(const float* row, const Columns& c) {
  return {__ldcg(reinterpret_cast<const float4*>(row + c.low)), __ldcg(reinterpret_cast<const float4*>(row + c.high))};
}

__device__ __forceinline__ Vec16 narrow(const Eight& x) {
  return {{pack_bf16(x.low.x, x.low.y), pack_bf16(x.low.z, x.low.w), pack_bf16(x.high.x, x.high.y),
           pack_bf16(x.high.z, x.high.w)}};
}

__device__ __forceinline__ Eight widen(const Vec16& v) {
  const float2 a = unpack_bf16(v.word[0]), b = unpack_bf16(v.word[1]);
  const float2 c = unpack_bf16(v.word[2]), d = unpack_bf16(v.word[3]);
  return {{a.x, a.y, b.x, b.y}, {c.x, c.y, d.x, d.y}};
}

__device__ __forceinline__ void add(Eight& sum, const Eight& x) {
  sum.low.x += x.low.x, sum.low.y += x.low.y, sum.low.z += x.low.z, sum.low.w += x.low.w;
  sum.high.x += x.high.x, sum.high.y += x.high.y, sum.high.z += x.high.z, sum.high.w += x.high.w;
}

__device__ __forceinline__ void store_norm(bf16* row, const Columns& c, const Vec16& v) {
  *reinterpret_cast<uint2*>(row + c.low) = {v.word[0], v.word[1]};
  *reinterpret_cast<uint2*>(row + c.high) = {v.word[2], v.word[3]};
}

/// The index of `rank` among the ranks other than `without`.
__device__ __forceinline__ uint32_t place(int rank, int without) { return rank < without ? rank : rank - 1; }

/// The slot of vector `v` in a receiver's buffer: of the sums (0) or norms (1) from `sender`, for the share's row
/// `row`.
__device__ __forceinline__ uint32_t slot_of(const Exchange& x, const Rows& a, int kind, int sender, int receiver,
                                            uint32_t row, uint32_t v) {
  const uint32_t others = x.peers.ranks - 1;
  return ((kind * others + place(sender, receiver)) * a.share + row) * a.vectors() + v;
}

/// The work of thread `u` among all threads that send, or that receive: a vector of a row of another rank. The first
/// rows of all ranks come first, then the second rows, and so on. Each rank begins with a different rank's row.
struct Foreign {
  int rank;
  uint32_t row, vector;
  bool exists;

  __device__ __forceinline__ Foreign(const Exchange& x, const Rows& a, uint32_t u) {
    const uint32_t others = x.peers.ranks - 1, line = u / a.vectors();
    vector = u % a.vectors();
    row = line / others;
    const int next = x.peers.rank + 1 + static_cast<int>(line % others);
    rank = next < x.peers.ranks ? next : next - x.peers.ranks;
    exists = row < a.count(rank);
  }
};

__device__ __forceinline__ uint32_t foreign_vectors(const Exchange& x, const Rows& a) {
  return (x.peers.ranks - 1) * a.share * a.vectors();
}

/// Sends this rank's sums of the other ranks' rows.
__device__ __forceinline__ void send_sums(const Exchange& x, const Turn& turn, const Rows& a, uint32_t thread) {
  const uint32_t step = gridDim.x * kSenders, all = foreign_vectors(x, a);
  for (uint32_t u = blockIdx.x * kSenders + thread; u < all; u += kBatch * step) {
    Vec16 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Foreign f(x, a, u + i * step);
      if (f.exists) {
        const float* row = a.partial + static_cast<size_t>(a.begin(f.rank) + f.row) * a.hidden;
        v[i] = narrow(load_eight(row, Columns(f.vector, a.hidden)));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Foreign f(x, a, u + i * step);
      if (f.exists) send(slot(x, turn, f.rank, slot_of(x, a, 0, x.peers.rank, f.rank, f.row, f.vector)), v[i]);
    }
  }
}

/// Sum over the adding threads, in a fixed order; every thread gets it. `parts` may be reused after the next call with
/// a different array.
__device__ __forceinline__ float adders_sum(float v, float* parts, uint32_t thread) {
  v = warp_sum(v);
  if (thread % 32 == 0) parts[thread / 32] = v;
  named_barrier(kBarrier, kAdders);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kAdderWarps; ++i) sum += parts[i];
  return sum;
}

/// Adds up this rank's rows, norms them, and sends the norms to all ranks.
__device__ __forceinline__ void add_and_norm(const Exchange& x, Turn& turn, const Rows& a, float4* kept,
                                             uint32_t thread) {
  __shared__ float parts[2][kAdderWarps];
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  const uint32_t vectors = a.vectors(), count = a.count(rank);
  uint32_t odd = 0;
  for (uint32_t row = blockIdx.x; row < count; row += gridDim.x, odd ^= 1) {
    const size_t at = static_cast<size_t>(a.begin(rank) + row) * a.hidden;
    float squares = 0.f;
    for (uint32_t v = thread; v < vectors; v += kAdders) {
      const Columns c(v, a.hidden);
      const Eight mine = load_eight(a.partial + at, c);
      Eight stream = load_eight(a.residual + at, c);
      Eight sum = {};
      for (int r = 0; r < ranks; ++r)
        add(sum, r == rank ? mine : widen(take(x, turn, slot_of(x, a, 0, r, rank, row, v), r)));
      add(stream, sum);
      *reinterpret_cast<float4*>(a.residual + at + c.low) = stream.low;
      *reinterpret_cast<float4*>(a.residual + at + c.high) = stream.high;
      // A thread only reads back what it has written itself.
      kept[v] = stream.low, kept[vectors + v] = stream.high;
      squares += stream.low.x * stream.low.x + stream.low.y * stream.low.y + stream.low.z * stream.low.z +
                 stream.low.w * stream.low.w;
      squares += stream.high.x * stream.high.x + stream.high.y * stream.high.y + stream.high.z * stream.high.z +
                 stream.high.w * stream.high.w;
    }
    const float scale = 1.f / sqrtf(adders_sum(squares, parts[odd], thread) / a.hidden + a.eps);
    for (uint32_t v = thread; v < vectors; v += kAdders) {
      const Columns c(v, a.hidden);
      const uint2 low = __ldg(reinterpret_cast<const uint2*>(a.weight + c.low));
      const uint2 high = __ldg(reinterpret_cast<const uint2*>(a.weight + c.high));
      const Eight w = widen({{low.x, low.y, high.x, high.y}});
      const float4 l = kept[v], h = kept[vectors + v];
      const Vec16 norm =
          narrow({{l.x * scale * w.low.x, l.y * scale * w.low.y, l.z * scale * w.low.z, l.w * scale * w.low.w},
                  {h.x * scale * w.high.x, h.y * scale * w.high.y, h.z * scale * w.high.z, h.w * scale * w.high.w}});
      store_norm(a.out + at, c, norm);
      for (int i = 1; i < ranks; ++i) {
        const int to = rank + i < ranks ? rank + i : rank + i - ranks;
        send(slot(x, turn, to, slot_of(x, a, 1, rank, to, row, v)), norm);
      }
    }
  }
}

/// Receives the norms of the other ranks' rows.
__device__ __forceinline__ void take_norms(const Exchange& x, Turn& turn, const Rows& a, uint32_t thread) {
  const uint32_t step = gridDim.x * kTakers, all = foreign_vectors(x, a);
  for (uint32_t u = blockIdx.x * kTakers + thread; u < all; u += step) {
    const Foreign f(x, a, u);
    if (!f.exists) continue;
    const Vec16 v = take(x, turn, slot_of(x, a, 1, f.rank, x.peers.rank, f.row, f.vector), f.rank);
    store_norm(a.out + static_cast<size_t>(a.begin(f.rank) + f.row) * a.hidden, Columns(f.vector, a.hidden), v);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    share_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Rows a) {
  extern __shared__ __align__(16) uint8_t smem[];
  pdl_launch_dependents();
  pdl_wait();
  Turn turn = begin_turn(x);
  count_turn(x, turn);  // not after the first sends: receivers wait for thousands of rows, not for the first words
  if (threadIdx.x < kSenders) {
    send_sums(x, turn, a, threadIdx.x);
  } else if (threadIdx.x < kSenders + kAdders) {
    add_and_norm(x, turn, a, reinterpret_cast<float4*>(smem), threadIdx.x - kSenders);
  } else {
    take_norms(x, turn, a, threadIdx.x - kSenders - kAdders);
  }
}

/// Number of rows of each rank that fit in the slots of a call.
uint32_t most_rows(size_t half, int ranks, int hidden) {
  return static_cast<uint32_t>(half / 16 / (2 * (ranks - 1) * static_cast<size_t>(hidden / 8)));
}

}  // namespace

cudaError_t load_share_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(share_kernel));
}

}  // namespace moe

/// For the rows of [rows, hidden] that this rank keeps (the numbers of rows and ranks decide which ones): residual +=
/// the sum of all ranks' `partial`, both f32, with the other ranks' parts rounded to bf16. For all rows: out = residual
/// / rms(residual) * weight, bf16. `hidden` is a multiple of 8, at most 16,384. All calls of a group with the same
/// sizes keep the same rows.
extern "C" int moe_peer_share_add_rms_norm(const moe::Peers* peers, const float* partial, float* residual,
                                           const moe::bf16* weight, float eps, moe::bf16* out, int rows, int hidden,
                                           void* stream) {
  using namespace moe;
  if (!is_group(*peers) || rows < 0 || hidden <= 0 || hidden % 8 != 0) return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t e = device_limits(&limits); e != cudaSuccess) return e;
  const size_t half = half_bytes(peers->ranks, peers->capacity);
  const uint32_t ranks = peers->ranks, most = most_rows(half, peers->ranks, hidden) * ranks;
  if (most == 0) return cudaErrorInvalidValue;
  const uint32_t launches = ceil_div(static_cast<uint32_t>(rows), most);
  const uint32_t each = launches == 0 ? 0 : ceil_div(static_cast<uint32_t>(rows), launches);
  for (uint32_t begin = 0; begin < static_cast<uint32_t>(rows); begin += each) {
    const uint32_t count = min(each, rows - begin), share = ceil_div(count, ranks);
    const size_t at = static_cast<size_t>(begin) * hidden;
    const Rows a = {partial + at, residual + at, weight, out + at, eps, count, static_cast<uint32_t>(hidden), share};
    const Exchange x = {*peers, half, 0, 0};
    // Most of a rank's work for a row of its share is sending and receiving the other ranks' rows.
    const uint32_t wanted = ranks > 2 ? 2 * share : share;
    const unsigned blocks = min(static_cast<uint32_t>(kBlocksPerSm * limits.sms), wanted);
    const Launch l = {dim3(blocks), dim3(kThreads), stream, hidden * sizeof(float)};
    if (const cudaError_t e = launch(share_kernel, l, x, a); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}
