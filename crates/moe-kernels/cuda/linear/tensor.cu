// out [M, N] = x [M, K] w[N, K]^T for any M, on Hopper's warpgroup products; for M up to 8 see linear/stream.cu.
//
// Floor: 2 N K bytes of weights over the read bandwidth or 2 M N K FLOP over 790 TFLOP/s, whichever is longer; they
// meet near M = 170. Between them lies the path from L2 to the SMs: each block reads its tokens' x again.
//
// Weights are the 64-row operand and tokens the columns, as many as there are (16 .. 256 in one tile): a batch of 32
// then costs 32 columns and not 64 rows. A block takes 64 or 128 weight rows, a warpgroup for each 64; one producer
// warp fills a ring of TMA tiles of 64 columns. Tiles of N are too few for the SMs (80 of 64 rows for qkv, 32 for
// o_proj of Qwen3-30B-A3B), so K is cut over the blocks of a cluster, which add their sums in rank order through
// distributed shared memory: no atomics, no second launch, bits that repeat. Weights of the first stages are on their
// way before pdl_wait(); x follows after it.
#include "linear/linear.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"

namespace moe {
namespace {

constexpr int kMaxStages = 12;
constexpr int kMaxSplits = 8;  // blocks of a cluster, each with a part of K
constexpr int kHeader = 256;   // barriers

struct Args {
  const bf16* bias;
  void* out;
  int m, n, k, stages;
};

/// Sizes of a block: kGroups warpgroups of 64 weight rows, kTokens columns.
template <int kTokens, int kGroups>
struct Block {
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kWeightBytes = kRows * kTileColumns * 2;  // of a stage
  static constexpr int kStageBytes = kWeightBytes + kTokens * kTileColumns * 2;
#if MOE_SM90
  static constexpr int kColumns = kTokens < 128 ? kTokens : 128;  // of one wgmma: beyond 128 there are several
  static constexpr int kProducts = kTokens / kColumns;
#endif
  static constexpr int kSumPitch = kRows + 4;  // floats of a token's sums, against bank conflicts
};

#if MOE_SM90
/// The producer: fills the ring with this block's share of K. One thread.
template <class B>
__device__ __forceinline__ void produce(const CUtensorMap* w, const CUtensorMap* x, uint8_t* ring, uint64_t* full,
                                        uint64_t* empty, int stages, int row, int token, int begin, int end) {
  const auto weights = [&](int i, int stage) {
    arrive_expecting(full + stage, B::kStageBytes);
    load_tile(ring + stage * B::kStageBytes, w, row, i * kTileColumns, full + stage);
  };
  const auto tokens = [&](int i, int stage) {
    uint8_t* to = ring + stage * B::kStageBytes + B::kWeightBytes;
    load_tile(to, x, token, i * kTileColumns, full + stage);
  };
  const int ahead = min(stages, end - begin);
  for (int i = 0; i < ahead; ++i) weights(begin + i, i);
  pdl_wait();
  for (int i = 0; i < ahead; ++i) tokens(begin + i, i);
  int stage = 0, phase = 0;
  for (int i = begin + ahead; i < end; ++i) {
    mbarrier_wait(empty + stage, phase);
    weights(i, stage);
    tokens(i, stage);
    if (++stage == stages) stage = 0, phase ^= 1;
  }
}

/// Adds the block's share of K to `acc`; a warpgroup takes 64 weight rows and all tokens.
template <class B>
__device__ __forceinline__ void consume(const uint8_t* ring, uint64_t* full, uint64_t* empty, int stages, int count,
                                        float (&acc)[B::kProducts][B::kColumns / 2]) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  int stage = 0, phase = 0, previous = -1;
  for (int i = 0; i < count; ++i) {
    mbarrier_wait(full + stage, phase);
    const uint8_t* at = ring + stage * B::kStageBytes;
    const uint64_t a = tile_descriptor(at + group * 64 * kTileColumns * 2);
    const uint64_t b = tile_descriptor(at + B::kWeightBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileColumns / 16; ++k) {
#pragma unroll
      for (int c = 0; c < B::kProducts; ++c) {
        // 128 tokens are 16 KB further, 1,024 in units of the descriptor.
        wgmma<B::kColumns>(acc[c], a + 2 * k, b + 2 * k + 1024 * c);
      }
    }
    wgmma_commit();
    // One stage's products run while the next stage's are issued.
    wgmma_wait<1>();
    if (previous >= 0 && lane == 0) mbarrier_arrive(empty + previous);
    previous = stage;
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  wgmma_wait<0>();
}

/// Adds the cluster's sums for this block's share of the tokens and writes them; a thread takes four rows.
template <int kTokens, int kGroups, Output kOutput>
__device__ __forceinline__ void finish(const Args& a, const float* sums, int row, int token, int rank, int splits) {
  using B = Block<kTokens, kGroups>;
  constexpr int kLanes = B::kRows / 4;  // threads that write a token's rows, four each
  const int share = ceil_div(kTokens, splits), last = min(min((rank + 1) * share, kTokens), a.m - token);
  const int r = threadIdx.x % kLanes * 4, valid = min(4, a.n - row - r);
  if (valid <= 0) return;
  float bias[4] = {};
  if (a.bias != nullptr)
    for (int i = 0; i < valid; ++i) bias[i] = __bfloat162float(a.bias[row + r + i]);
  for (int t = rank * share + threadIdx.x / kLanes; t < last; t += B::kConsumers / kLanes) {
    const size_t at = static_cast<size_t>(token + t) * a.n + row + r;
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = bias[i] + (i < valid ? before<kOutput>(a.out, at + i) : 0.f);
    float4 x[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i)
      if (i < splits) x[i] = cluster_load4(sums + t * B::kSumPitch + r, i);
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i)
      if (i < splits) value[0] += x[i].x, value[1] += x[i].y, value[2] += x[i].z, value[3] += x[i].w;
    if (valid == 4 && a.n % 4 == 0) {
      store4<kOutput>(a.out, at, value);
    } else {
      for (int i = 0; i < valid; ++i) store<kOutput>(a.out, at + i, value[i]);
    }
  }
}

#endif  // MOE_SM90

template <int kTokens, int kGroups, Output kOutput>
__global__ void __launch_bounds__(128 * kGroups + 32, 1)
    tensor_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, Args a) {
#if MOE_SM90
  using B = Block<kTokens, kGroups>;
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* ring = smem;
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + a.stages * B::kStageBytes);
  uint64_t* empty = full + kMaxStages;
  float* sums = reinterpret_cast<float*>(smem);  // in place of the ring, when it has been consumed
  const int rank = cluster_rank(), splits = cluster_size();
  const int row = blockIdx.x / splits * B::kRows, token = blockIdx.y * kTokens;
  const int chunks = ceil_div(a.k, kTileColumns);
  const int begin = chunks * rank / splits, end = chunks * (rank + 1) / splits;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w);
    prefetch_tensor_map(&x);
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, B::kConsumers / 32);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == B::kConsumers / 32) {
    if (lane == 0) produce<B>(&w, &x, ring, full, empty, a.stages, row, token, begin, end);
    __syncwarp();
  } else {
    float acc[B::kProducts][B::kColumns / 2] = {};
    consume<B>(ring, full, empty, a.stages, end - begin, acc);
    pdl_wait();                       // for the epilogue; the products have waited through their x
    named_barrier(1, B::kConsumers);  // the ring becomes the buffer of the sums
    const int at = warp * 16 + lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      const float* d = acc[i * 8 / B::kColumns] + i % (B::kColumns / 8) * 4;
      float* to = sums + (i * 8 + 2 * t) * B::kSumPitch + at;
      to[0] = d[0];
      to[B::kSumPitch] = d[1];
      to[8] = d[2];
      to[B::kSumPitch + 8] = d[3];
    }
  }
  if (splits > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (warp < B::kConsumers / 32) finish<kTokens, kGroups, kOutput>(a, sums, row, token, rank, splits);
  if (splits > 1) cluster_sync();  // nobody leaves while its sums are read
#endif
}

struct Shape {
  int tokens, groups, splits;
  size_t ring;  // bytes
};

/// Tile, splits of K and depth of the ring, as measured (docs/kernels-labbook.md). Few rows: 64 weight rows per block
/// and as many blocks as keep every SM loading, two to an SM so that one's start hides behind the other's end. Many
/// rows: larger tiles, because each block reads its tokens' x again.
Shape shape(int m, int n, const DeviceLimits& limits) {
  const int tokens = m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
  Shape s = {tokens, m <= 128 ? 1 : 2, 1, static_cast<size_t>(limits.block_smem) - kHeader};
  if (n >= 128 * limits.sms) {  // enough blocks whatever the tile
    s.groups = 2;
    if (m > 128) s.tokens = 256;
    return s;
  }
  const int tiles = ceil_div(n, 64 * s.groups) * ceil_div(m, s.tokens), blocks = m <= 64 ? 160 : 100;
  while (s.splits < 4 && tiles * (s.splits + 1) <= blocks * limits.sms / 132) ++s.splits;
  if (m <= 64) s.ring = 112 * 1024;
  return s;
}

template <int kTokens, int kGroups, Output kOutput>
int run(const bf16* x, const bf16* w, Args a, const Shape& s, void* stream) {
  using B = Block<kTokens, kGroups>;
  constexpr size_t kSums = sizeof(float) * B::kSumPitch * kTokens;
  const int chunks = ceil_div(ceil_div(a.k, kTileColumns), s.splits), fit = static_cast<int>(s.ring / B::kStageBytes);
  a.stages = fit < kMaxStages ? fit : kMaxStages;
  if (chunks < a.stages) a.stages = chunks;
  const int least = static_cast<int>(ceil_div(kSums, B::kStageBytes));
  if (a.stages < least) a.stages = least;
  CUtensorMap wm, xm;
  cudaError_t e = make_tensor_map(&wm, w, a.n, a.k, B::kRows);
  if (e == cudaSuccess) e = make_tensor_map(&xm, x, a.m, a.k, kTokens);
  if (e != cudaSuccess) return e;
  Launch l = {dim3(ceil_div(a.n, B::kRows) * s.splits, ceil_div(a.m, kTokens)), dim3(B::kConsumers + 32), stream,
              static_cast<size_t>(a.stages) * B::kStageBytes + kHeader};
  l.cluster = s.splits;
  return launch(tensor_kernel<kTokens, kGroups, kOutput>, l, wm, xm, a);
}

template <int kTokens, int kGroups>
int run(const bf16* x, const bf16* w, const Args& a, Output output, const Shape& s, void* stream) {
  switch (output) {
    case Output::kF32: return run<kTokens, kGroups, Output::kF32>(x, w, a, s, stream);
    case Output::kBf16: return run<kTokens, kGroups, Output::kBf16>(x, w, a, s, stream);
    default: return run<kTokens, kGroups, Output::kAddF32>(x, w, a, s, stream);
  }
}

template <int kGroups>
int run(const bf16* x, const bf16* w, const Args& a, Output output, const Shape& s, void* stream) {
  switch (s.tokens) {
    case 16: return run<16, kGroups>(x, w, a, output, s, stream);
    case 32: return run<32, kGroups>(x, w, a, output, s, stream);
    case 64: return run<64, kGroups>(x, w, a, output, s, stream);
    case 128: return run<128, kGroups>(x, w, a, output, s, stream);
    default: return kGroups == 1 ? cudaErrorInvalidValue : run<256, 2>(x, w, a, output, s, stream);
  }
}

}  // namespace
}  // namespace moe

/// out = x w^T (+ bias) for any m, k a multiple of 64.
extern "C" int moe_linear_tensor(const moe::LinearTensorArgs* args, void* stream) {
  using namespace moe;
  const LinearTensorArgs& c = *args;
  if (c.m < 0 || c.n < 0 || c.k <= 0 || c.k % kTileColumns != 0 || !is_code(c.output, Output::kAddF32) ||
      c.splits < -1 || c.splits > kMaxSplits)
    return cudaErrorInvalidValue;
  if (c.m == 0 || c.n == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  Shape s = shape(c.m, c.n, limits);
  if (c.splits != 0) s.splits = c.splits > 0 ? c.splits : shape(1, c.n, limits).splits;
  if (s.splits > c.k / kTileColumns) s.splits = c.k / kTileColumns;
  const Args a = {c.bias, c.out, c.m, c.n, c.k, 0};
  return s.groups == 1 ? run<1>(c.x, c.w, a, c.output, s, stream) : run<2>(c.x, c.w, a, c.output, s, stream);
}
