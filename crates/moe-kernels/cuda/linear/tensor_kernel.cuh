// The kernel of dense products on warpgroup products, for bf16 weights (tensor.cu, which explains the design) and for
// quantised weights (quant/linear_tensor.cu; with rows of x in FP8 quant/fp8_linear.cu).
//
// `W` describes the layout of weights in memory. It has a Source for the tensor map, `column`, where a row's results
// go, and kLoaders, the number of warps in addition to the warps that multiply. One of these loads; if there are four
// (a warpgroup), they give most of their registers to the others. For 64 kGroups rows, `W` also has the largest number
// of tokens in a tile and a Stage:
//   kColumns    of a stage, a multiple of 64
//   kBytes      of its weights, kSideBytes of what else it needs (scales)
//   kRowBytes   of its columns of a row of x, a multiple of 128; kRowScales whether a row has an f32 scale for them
//   load        brings its weights, by one thread
//   Side        a lane's part of copying the scales and zero points, by a warp
//   load_scales loads the scales of rows of x, if there are any, after the scales of weights, by one thread
//   consume     adds the block's share of K to accumulators; kReleases lanes of a warp give a stage back
#pragma once

#include "linear/linear.cuh"
#include "ptx/cluster.cuh"
#include "ptx/policy.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"

namespace moe::linear_tensor {

constexpr int kMaxStages = 12;
constexpr int kMaxSplits = 8;  // blocks of a cluster, each with a part of K
constexpr int kHeader = 256;   // barriers
// Three warpgroups have 168 registers a thread; the loaders' one leaves most of its own to the two others.
constexpr int kLoaderRegisters = 72, kConsumerRegisters = 216;

template <class W>
struct Args {
  const bf16* bias;
  void* out;
  int m, n, k, stages;
  typename W::Source source;
};

/// Sizes of a block: kGroups warpgroups of 64 weight rows, kTokens columns.
template <class W, int kTokens, int kGroups>
struct Block {
  using Source = typename W::Source;
  using Stage = typename W::template Stage<kGroups>;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 32 * W::kLoaders;
  static constexpr bool kTrades = W::kLoaders == 4;      // whether loaders give registers to consumers
  static constexpr int kParts = Stage::kRowBytes / 128;  // parts of a stage's token rows, one after the other
  static constexpr int kPartBytes = kTokens * 128;
  static constexpr int kWeightBytes = Stage::kBytes;
  static constexpr int kStageBytes = kWeightBytes + kParts * kPartBytes;
  static constexpr int kSideBytes = Stage::kSideBytes + (Stage::kRowScales ? kTokens * 4 : 0);
#if MOE_HAS_WGMMA
  static constexpr int kColumns = kTokens < 128 ? kTokens : 128;  // columns of one wgmma; more tokens take several
  static constexpr int kProducts = kTokens / kColumns;
#endif
  static constexpr int kSumPitch = kRows + 4;  // floats of a token's sums, against bank conflicts
};

#if MOE_HAS_WGMMA
/// The producer: fills the ring with this block's share of K. It is one thread, or one warp if there is data in
/// addition to the weights.
template <class B>
__device__ __forceinline__ void produce(const CUtensorMap* w, const CUtensorMap* x, const typename B::Source& source,
                                        uint8_t* ring, uint8_t* side, uint64_t* full, uint64_t* empty, int stages,
                                        int row, int token, int begin, int end) {
  const bool leads = threadIdx.x % 32 == 0;
  // With one tile of tokens no other block reads these weights.
  const uint64_t policy = gridDim.y == 1 ? read_once() : read_again();
  [[maybe_unused]] const typename B::Stage::Side side_rows(source, row / 16, threadIdx.x % 32);
  const auto weights = [&](int i, int stage) {
    if (leads) {
      arrive_expecting(full + stage, B::kStageBytes);
      B::Stage::load(ring + stage * B::kStageBytes, w, row, i, full + stage, policy);
    }
    if constexpr (B::Stage::kSideBytes > 0) {
      side_rows.copy(side + stage * B::kSideBytes, i);
      cp_async_arrive(full + stage);
    }
  };
  const auto tokens = [&](int i, int stage) {
    if (!leads) return;
    // This comes first: the barrier waits until the rows have arrived, so the number of expected bytes may still grow.
    if constexpr (B::Stage::kRowScales) {
      uint8_t* scales = side + stage * B::kSideBytes + B::Stage::kSideBytes;
      B::Stage::template load_scales<B>(scales, source, token, i, full + stage);
    }
    uint8_t* to = ring + stage * B::kStageBytes + B::kWeightBytes;
#pragma unroll
    for (int part = 0; part < B::kParts; ++part)
      load_tile(to + part * B::kPartBytes, x, token, (i * B::kParts + part) * kTileColumns, full + stage);
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

/// Adds the cluster's sums for this block's share of the tokens, and writes them. A thread processes four rows.
template <class W, int kTokens, int kGroups, Output kOutput>
__device__ __forceinline__ void finish(const Args<W>& a, const float* sums, int row, int token, int rank, int splits) {
  using B = Block<W, kTokens, kGroups>;
  constexpr int kLanes = B::kRows / 4;  // threads that write a token's rows, four each
  const int share = ceil_div(kTokens, splits), last = min(min((rank + 1) * share, kTokens), a.m - token);
  const int r = threadIdx.x % kLanes * 4, valid = min(4, a.n - row - r);
  if (valid <= 0) return;
  const int column = W::column(a, row + r);
  float bias[4] = {};
  if (a.bias != nullptr)
    for (int i = 0; i < valid; ++i) bias[i] = __bfloat162float(a.bias[column + i]);
  for (int t = rank * share + threadIdx.x / kLanes; t < last; t += B::kConsumers / kLanes) {
    const size_t at = static_cast<size_t>(token + t) * a.n + column;
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

#endif  // MOE_HAS_WGMMA

template <class W, int kTokens, int kGroups, Output kOutput>
__global__ void __launch_bounds__(Block<W, kTokens, kGroups>::kThreads, 1)
    tensor_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ Args<W> a) {
#if MOE_HAS_WGMMA
  using B = Block<W, kTokens, kGroups>;
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* ring = smem;
  uint8_t* side = ring + a.stages * B::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(side + a.stages * B::kSideBytes);
  uint64_t* empty = full + kMaxStages;
  float* sums = reinterpret_cast<float*>(smem);  // in place of the ring, when it has been consumed
  const int rank = cluster_rank(), splits = cluster_size();
  const int row = blockIdx.x / splits * B::kRows, token = blockIdx.y * kTokens;
  const int chunks = ceil_div(a.k, B::Stage::kColumns);
  const int begin = chunks * rank / splits, end = chunks * (rank + 1) / splits;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w);
    prefetch_tensor_map(&x);
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(full + i, B::Stage::kSideBytes > 0 ? 33 : 1);
      mbarrier_init(empty + i, B::kConsumers / 32 * B::Stage::kReleases);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= B::kConsumers / 32) {
    if constexpr (B::kTrades) give_registers<kLoaderRegisters>();
    if (warp == B::kConsumers / 32 && (lane == 0 || B::Stage::kSideBytes > 0))
      produce<B>(&w, &x, a.source, ring, side, full, empty, a.stages, row, token, begin, end);
    __syncwarp();
  } else {
    if constexpr (B::kTrades) take_registers<kConsumerRegisters>();
    float acc[B::kProducts][B::kColumns / 2] = {};
    B::Stage::template consume<B>(ring, side, a.source, full, empty, a.stages, end - begin, acc);
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
  if (warp < B::kConsumers / 32) finish<W, kTokens, kGroups, kOutput>(a, sums, row, token, rank, splits);
  if (splits > 1) cluster_sync();  // nobody leaves while its sums are read
#endif
}

struct Shape {
  int tokens, groups, splits;
  size_t ring;  // bytes
};

/// Tile, splits of K and depth of the ring, as measured (docs/lessons/steps.md). For few rows a block has 64 weight
/// rows, and there are as many blocks as keep every SM loading: two per SM, so that one block starts while the other
/// ends. For many rows tiles are larger, because each block reads its tokens' x again.
inline Shape shape(int m, int n, const DeviceLimits& limits) {
  const int tokens = m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
  Shape s = {tokens, m <= 128 ? 1 : 2, 1, static_cast<size_t>(limits.block_smem) - kHeader};
  if (n >= 128 * limits.sms) {  // enough blocks with any tile
    s.groups = 2;
    if (m > 128) s.tokens = 256;
    return s;
  }
  const int tiles = ceil_div(n, 64 * s.groups) * ceil_div(m, s.tokens), blocks = m <= 64 ? 160 : 100;
  while (s.splits < 4 && tiles * (s.splits + 1) <= blocks * limits.sms / 132) ++s.splits;
  if (m <= 64) s.ring = 112 * 1024;
  return s;
}

template <class W, int kTokens, int kGroups, Output kOutput>
cudaError_t run(const CUtensorMap& w, const bf16* x, Args<W> a, const Shape& s, void* stream) {
  using B = Block<W, kTokens, kGroups>;
  constexpr size_t kSums = sizeof(float) * B::kSumPitch * kTokens;
  constexpr int kStage = B::kStageBytes + B::kSideBytes;
  const int chunks = ceil_div(ceil_div(a.k, B::Stage::kColumns), s.splits), fit = static_cast<int>(s.ring / kStage);
  a.stages = fit < kMaxStages ? fit : kMaxStages;
  if (chunks < a.stages) a.stages = chunks;
  const int least = static_cast<int>(ceil_div(kSums, B::kStageBytes));
  if (a.stages < least) a.stages = least;
  CUtensorMap xm;
  // The map treats rows of x as rows of bf16 with the same number of bytes, whatever they contain. The last stage may
  // be a part of a stage.
  const int64_t columns = int64_t{a.k} * (B::Stage::kRowBytes / 2) / B::Stage::kColumns;
  const cudaError_t e = make_tensor_map(&xm, x, a.m, static_cast<int>(columns), kTokens);
  if (e != cudaSuccess) return e;
  Launch l = {dim3(ceil_div(a.n, B::kRows) * s.splits, ceil_div(a.m, kTokens)), dim3(B::kThreads), stream,
              static_cast<size_t>(a.stages) * kStage + kHeader};
  l.cluster = s.splits;
  return launch(tensor_kernel<W, kTokens, kGroups, kOutput>, l, w, xm, a);
}

template <class W, int kTokens, int kGroups>
cudaError_t run(const CUtensorMap& w, const bf16* x, const Args<W>& a, Output output, const Shape& s, void* stream) {
  switch (output) {
    case Output::kF32: return run<W, kTokens, kGroups, Output::kF32>(w, x, a, s, stream);
    case Output::kBf16: return run<W, kTokens, kGroups, Output::kBf16>(w, x, a, s, stream);
    default: return run<W, kTokens, kGroups, Output::kAddF32>(w, x, a, s, stream);
  }
}

/// The same, with the map of w in boxes of 64 kGroups rows.
template <class W, int kGroups>
cudaError_t run(const CUtensorMap& w, const bf16* x, const Args<W>& a, Output output, const Shape& s, void* stream) {
  switch (s.tokens) {
    case 16: return run<W, 16, kGroups>(w, x, a, output, s, stream);
    case 32: return run<W, 32, kGroups>(w, x, a, output, s, stream);
    case 64: return run<W, 64, kGroups>(w, x, a, output, s, stream);
    case 128:
      if constexpr (W::template kMostTokens<kGroups> >= 128) return run<W, 128, kGroups>(w, x, a, output, s, stream);
      return cudaErrorInvalidValue;
    default:
      if constexpr (W::template kMostTokens<kGroups> >= 256) return run<W, 256, kGroups>(w, x, a, output, s, stream);
      return cudaErrorInvalidValue;
  }
}

/// Tile and splits for a call; `asked` is LinearTensorArgs::splits.
inline Shape shape_for(int m, int n, int steps, int asked, const DeviceLimits& limits) {
  Shape s = shape(m, n, limits);
  if (asked != 0) s.splits = asked > 0 ? asked : shape(1, n, limits).splits;
  if (s.splits > steps) s.splits = steps;
  return s;
}

}  // namespace moe::linear_tensor
