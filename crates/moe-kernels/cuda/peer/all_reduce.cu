// All-reduce of small arrays over peer memory, alone or with the ops that follow it in a decoder layer: residual += sum
// and out = norm(residual). An NCCL call and an add + norm kernel need two launches and their own buffers for this.
//
// Sums are f32 additions of the ranks' values in rank order, rounded once: the same bits on every rank and in every
// run. peer.cuh explains slots, waiting, and why no barrier is needed.
//
// One shot (small arrays): each rank stores its values in the slots of all peers, and adds up all that it receives;
// this takes one hop. Two shots: rank r adds up vectors r * chunk .. and stores the sums in the slots of all ranks, its
// own included; this takes two hops and sends fewer bytes. The limit between the two is the size at which the saved
// bytes take as long as the second hop.
//
// Floor for one token of H = 2,048 on 4 GPUs: a grid boundary (0.65 us, measured between the kernels of a layer), one
// store over NVLink until a poll sees it (about 1 us), and reading and writing L2 (0.3 us), together 2 us. The time for
// the bytes is negligible (24 KB out, 0.05 us at 450 GB/s). Predicted, not yet measured: 2.7 us for the sum and 3.1 us
// with the norm, whose sum of squares needs a cluster barrier, in a graph of consecutive calls; 32 tokens (256 KB, one
// shot, 0.79 MB out at 350 GB/s) 5.2 us, 128 tokens (1 MB, two shots, 1.6 MB) 8.5 us, 256 tokens 13 us. add_rms_norm
// alone takes 1.5 us, NCCL alone 15 us.
//
// Every block waits for data from the peers' blocks, so all blocks of a launch must be resident at the same time. There
// are at most two blocks of 128 threads per SM, in addition to blocks of the kernels before and after. Vectors are
// distributed over all threads. A cluster of up to 8 blocks computes a row's norm, so that several SMs send and poll
// even for one row.
#include "codes.cuh"
#include "peer/peer.cuh"
#include "ptx/cluster.cuh"

namespace moe {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 32 / kWarps;  // the sums of a cluster's warps are one load of a warp
constexpr int kBlocksPerSm = 2;

/// Elements of a vector as f32.
template <class T>
struct Floats {
  static constexpr int kCount = 16 / sizeof(T);
  float at[kCount];
};

template <class T>
__device__ __forceinline__ Floats<T> widen(const Vec16& v) {
  Floats<T> x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x.at[i] = __uint_as_float(v.word[i]);
    } else {
      const float2 pair = unpack_bf16(v.word[i]);
      x.at[2 * i] = pair.x;
      x.at[2 * i + 1] = pair.y;
    }
  }
  return x;
}

template <class T>
__device__ __forceinline__ Vec16 narrow(const Floats<T>& x) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v.word[i] = __float_as_uint(x.at[i]);
    } else {
      v.word[i] = pack_bf16(x.at[2 * i], x.at[2 * i + 1]);
    }
  }
  return v;
}

/// An array as vectors of 16 bytes, the last one padded with zeros. Only the count determines how much data peers
/// expect. So unaligned arrays are read and written in the same vectors, element by element.
template <class T>
struct Vectors {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  static constexpr int kCount = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  const Bits* in;
  Bits* out;
  size_t count;
  bool aligned;

  __device__ __forceinline__ bool whole(uint32_t u) const {
    return aligned && (static_cast<size_t>(u) + 1) * kCount <= count;
  }

  /// Vector u; beyond the end it is filled with zeros.
  __device__ __forceinline__ Vec16 load(uint32_t u) const {
    const size_t at = static_cast<size_t>(u) * kCount;
    Vec16 v = {};
    if (whole(u)) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(in + at));
      v = {{words.x, words.y, words.z, words.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (at + i < count) v.word[i / kPerWord] |= static_cast<uint32_t>(__ldcg(in + at + i)) << (i % kPerWord * 16);
    }
    return v;
  }

  __device__ __forceinline__ void store(uint32_t u, const Vec16& v) const {
    const size_t at = static_cast<size_t>(u) * kCount;
    if (whole(u)) {
      *reinterpret_cast<uint4*>(out + at) = {v.word[0], v.word[1], v.word[2], v.word[3]};
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (at + i < count) out[at + i] = static_cast<Bits>(v.word[i / kPerWord] >> (i % kPerWord * 16));
    }
  }
};

/// Adds up a vector: this rank's, and the vectors in the slots base + r * stride of the other ranks r, for up to kRanks
/// ranks.
template <class T, int kRanks>
__device__ __forceinline__ Floats<T> add_up(const Exchange& x, Turn& turn, const Vec16& own, uint32_t base,
                                            uint32_t stride) {
  Vec16 v[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) v[r] = own;
  const uint32_t peers = ((1u << x.peers.ranks) - 1) & ~(1u << x.peers.rank);
  receive(x, turn, v, peers, 0, base, stride);
  Floats<T> sum = widen<T>(v[0]);
#pragma unroll
  for (int r = 1; r < kRanks; ++r) {
    if (r >= x.peers.ranks) break;
    const Floats<T> next = widen<T>(v[r]);
#pragma unroll
    for (int i = 0; i < Floats<T>::kCount; ++i) sum.at[i] += next.at[i];
  }
  return sum;
}

/// Sends the data that other ranks need from this rank. `mine` is the thread's first vector, which was loaded while the
/// turn began.
template <class T, int kRanks, bool kOneShot>
__device__ __forceinline__ void contribute(const Exchange& x, Turn& turn, const Vectors<T>& data, Vec16 mine) {
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const int rank = x.peers.rank, ranks = x.peers.ranks;
  // Each rank begins with a different peer.
  const auto peer = [=](int i) { return rank + i < ranks ? rank + i : rank + i - ranks; };
#pragma unroll 1
  for (uint32_t u = first; u < x.vectors; u += step, mine = data.load(u)) {
    if (kOneShot) {
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        if (i < ranks) send(slot(x, turn, peer(i), rank * x.vectors + u), mine);
    } else if (const uint32_t owner = u / x.chunk; owner != static_cast<uint32_t>(rank)) {
      send(slot(x, turn, owner, rank * x.chunk + u - owner * x.chunk), mine);
    }
  }
  count_turn(x, turn);
  if (kOneShot) return;
  const uint32_t begin = rank * x.chunk, end = min(begin + x.chunk, x.vectors);
#pragma unroll 1
  for (uint32_t u = begin + first; u < end; u += step) {
    const Vec16 sum = narrow<T>(add_up<T, kRanks>(x, turn, data.load(u), u - begin, x.chunk));
    for (int i = 0; i < ranks; ++i) send(slot(x, turn, peer(i), ranks * x.chunk + u), sum);
  }
}

/// The sum of vector u, after `contribute`.
template <class T, int kRanks, bool kOneShot>
__device__ __forceinline__ Floats<T> sum_of(const Exchange& x, Turn& turn, const Vectors<T>& data, uint32_t u) {
  if (kOneShot) return add_up<T, kRanks>(x, turn, data.load(u), u, x.vectors);
  Vec16 v[1];
  receive(x, turn, v, 1u, u / x.chunk, x.peers.ranks * x.chunk + u, 0);
  return widen<T>(v[0]);
}

template <class T, int kRanks, bool kOneShot>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sum_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Vectors<T> data) {
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const Vec16 mine = data.load(first);
  Turn turn = begin_turn(x);
  contribute<T, kRanks, kOneShot>(x, turn, data, mine);
  for (uint32_t u = first; u < x.vectors; u += step)
    data.store(u, narrow<T>(sum_of<T, kRanks, kOneShot>(x, turn, data, u)));
}

/// Sum over a cluster, in a fixed order; every thread gets the result. `parts` [32] may be reused after the next call
/// with a different array.
__device__ __forceinline__ float cluster_total(float v, float* parts) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = cluster_size();
  v = warp_sum(v);
  if (lane < blocks) cluster_store(parts + cluster_rank() * kWarps + warp, lane, v);
  cluster_sync();
  return warp_sum(lane < blocks * kWarps ? parts[lane] : 0.f);
}

struct Norm {
  float* residual;     // [rows, hidden]
  const bf16* weight;  // [hidden]
  bf16* out;           // [rows, hidden]; null: no norm
  float eps;
  int rows;
  int hidden;
};

/// residual += the sum of all ranks' data, out = norm(residual). A cluster processes a row, and each block of it a
/// range of the row's vectors.
template <int kRanks, bool kOneShot>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norm_kernel(const __grid_constant__ Exchange x, const __grid_constant__ Vectors<float> data, const Norm n) {
  extern __shared__ __align__(16) uint8_t smem[];
  __shared__ float parts[2][32];
  const uint32_t blocks = cluster_size(), row_vectors = n.hidden / 4, run = ceil_div(row_vectors, blocks);
  const uint32_t begin = min(cluster_rank() * run, row_vectors), vectors = min(run, row_vectors - begin);
  float4* row = reinterpret_cast<float4*>(smem);
  uint2* norm_weight = reinterpret_cast<uint2*>(row + run);
  // Each thread only reads what it has written itself, so no barrier is needed around the row.
  if (n.out != nullptr) {
    cluster_arrive();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < vectors; i += kThreads)
      norm_weight[i] = __ldg(reinterpret_cast<const uint2*>(n.weight) + begin + i);
  }
  pdl_launch_dependents();
  pdl_wait();
  const Vec16 mine = data.load(blockIdx.x * kThreads + threadIdx.x);
  Turn turn = begin_turn(x);
  contribute<float, kRanks, kOneShot>(x, turn, data, mine);
  // All blocks of the cluster have begun, so their shared memory may be written.
  if (n.out != nullptr) cluster_wait();
  uint32_t odd = 0;
#pragma unroll 1
  for (int t = blockIdx.x / blocks; t < n.rows; t += gridDim.x / blocks, odd ^= 1) {
    const uint32_t first = t * row_vectors + begin;
    float squares = 0.f;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < vectors; i += kThreads) {
      float4* at = reinterpret_cast<float4*>(n.residual) + first + i;
      const float4 before = __ldcg(at);
      const Floats<float> sum = sum_of<float, kRanks, kOneShot>(x, turn, data, first + i);
      const float4 v = {before.x + sum.at[0], before.y + sum.at[1], before.z + sum.at[2], before.w + sum.at[3]};
      *at = v;
      row[i] = v;
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    if (n.out == nullptr) continue;
    const float scale = rsqrtf(cluster_total(squares, parts[odd]) / n.hidden + n.eps);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < vectors; i += kThreads) {
      const float4 v = row[i];
      const float2 low = unpack_bf16(norm_weight[i].x), high = unpack_bf16(norm_weight[i].y);
      uint2 packed;
      packed.x = pack_bf16(v.x * scale * low.x, v.y * scale * low.y);
      packed.y = pack_bf16(v.z * scale * high.x, v.w * scale * high.y);
      reinterpret_cast<uint2*>(n.out)[first + i] = packed;
    }
  }
}

/// Calls `use` with the number of ranks for which a kernel is compiled, and whether it is one shot, which two ranks
/// always use.
template <class Use>
cudaError_t for_form(int ranks, bool once, Use use) {
  return for_ranks(ranks, [&](auto most) {
    if constexpr (most() > 2)
      if (!once) return use(most, std::false_type());
    return use(most, std::true_type());
  });
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class T>
int all_reduce(const Peers& peers, const void* in, void* out, size_t count, void* stream) {
  using Bits = typename Vectors<T>::Bits;
  DeviceLimits limits;
  Exchange x;
  cudaError_t e = exchange(peers, count * sizeof(T), &x);
  if (e == cudaSuccess && count > 0) e = device_limits(&limits);
  if (e != cudaSuccess || count == 0) return e;
  const Vectors<T> data = {static_cast<const Bits*>(in), static_cast<Bits*>(out), count,
                           is_aligned(in) && is_aligned(out)};
  const int blocks = min(ceil_div(static_cast<int>(x.vectors), kThreads), kBlocksPerSm * limits.sms);
  const Launch l = {dim3(blocks), dim3(kThreads), stream};
  return for_form(peers.ranks, x.chunk == 0,
                  [&](auto most, auto once) { return launch(sum_kernel<T, most(), once()>, l, x, data); });
}

/// Blocks per row: the largest number such that each thread has a vector and the blocks of all rows are resident at the
/// same time.
int cluster_blocks(const DeviceLimits& limits, int rows, int row_vectors) {
  int blocks = 1;
  while (limits.major >= 9 && blocks < kMaxCluster && blocks * kThreads < row_vectors &&
         2 * blocks * rows <= kBlocksPerSm * limits.sms)
    blocks *= 2;
  return blocks;
}

}  // namespace
}  // namespace moe

/// Bytes of each rank's buffer for calls of up to `capacity` bytes; 0 for an invalid number of ranks or capacity.
extern "C" size_t moe_peer_buffer_bytes(int ranks, size_t capacity) {
  if (ranks < 2 || ranks > moe::kMaxRanks || capacity > (size_t{1} << 30)) return 0;
  return moe::kControlBytes + 2 * moe::half_bytes(ranks, capacity);
}

/// Initialises a new buffer. All ranks' buffers must be initialised before any is used. It also loads the kernels: if a
/// kernel were loaded at its first launch, the load could wait for running kernels, and these may wait for a rank of
/// this process that is about to launch.
extern "C" int moe_peer_buffer_init(void* buffer, size_t bytes, void* stream) {
  using namespace moe;
  cudaError_t e = cudaSuccess;
  for (const int ranks : {2, 4, kMaxRanks})
    for (const bool one_shot : {true, false})
      if (e == cudaSuccess)
        e = for_form(ranks, one_shot, [](auto most, auto once) {
          return load_kernels(sum_kernel<float, most(), once()>, sum_kernel<bf16, most(), once()>,
                              norm_kernel<most(), once()>);
        });
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (e == cudaSuccess) e = load_gather_kernels();
  if (e == cudaSuccess) e = load_scatter_kernels();
  if (e == cudaSuccess) e = load_share_kernel();
  if (e == cudaSuccess) e = load_combine_kernel();
  if (e == cudaSuccess) e = load_dispatch_kernels();
  if (e == cudaSuccess) e = cudaMemsetAsync(buffer, 0, kControlBytes, s);
  if (e != cudaSuccess) return e;
  return cudaMemsetAsync(static_cast<uint8_t*>(buffer) + kControlBytes, 0xff, bytes - kControlBytes, s);
}

/// out [count] = the sum of all ranks' `in` [count], which may be `out`; f32, or bf16 added in f32 and rounded once.
/// Neither array needs to be aligned.
extern "C" int moe_peer_all_reduce(const moe::Peers* peers, const void* in, void* out, moe::Dtype dtype, size_t count,
                                   void* stream) {
  if (dtype == moe::Dtype::kF32) return moe::all_reduce<float>(*peers, in, out, count, stream);
  if (dtype == moe::Dtype::kBf16) return moe::all_reduce<moe::bf16>(*peers, in, out, count, stream);
  return cudaErrorInvalidValue;
}

/// residual [rows, hidden] += the sum of all ranks' `partial`, both f32; then out = residual / rms(residual) * weight,
/// rounded once to bf16. With a null `out` there is only the addition, and `weight` is not read. `hidden` is a multiple
/// of 8.
extern "C" int moe_peer_all_reduce_add_rms_norm(const moe::Peers* peers, const float* partial, float* residual,
                                                const moe::bf16* weight, float eps, moe::bf16* out, int rows,
                                                int hidden, void* stream) {
  using namespace moe;
  if (rows < 0 || hidden <= 0 || hidden % 8 != 0) return cudaErrorInvalidValue;
  const size_t count = static_cast<size_t>(rows) * hidden;
  DeviceLimits limits;
  Exchange x;
  cudaError_t e = exchange(*peers, count * sizeof(float), &x);
  if (e == cudaSuccess && rows > 0) e = device_limits(&limits);
  if (e != cudaSuccess || rows == 0) return e;
  const Vectors<float> data = {reinterpret_cast<const uint32_t*>(partial), nullptr, count, true};
  const Norm n = {residual, weight, out, eps, rows, hidden};
  const int blocks = cluster_blocks(limits, rows, hidden / 4);
  const int clusters = max(1, min(rows, kBlocksPerSm * limits.sms / blocks));
  Launch l = {dim3(clusters * blocks), dim3(kThreads), stream};
  l.smem = ceil_div(static_cast<size_t>(hidden / 4), blocks) * (sizeof(float4) + sizeof(uint2));
  l.cluster = blocks;
  return for_form(peers->ranks, x.chunk == 0,
                  [&](auto most, auto once) { return launch(norm_kernel<most(), once()>, l, x, data, n); });
}
