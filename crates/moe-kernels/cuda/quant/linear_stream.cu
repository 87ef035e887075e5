// out [M, N] = x [M, K] w[N, K]^T for few rows and quantised weights: moe_linear_stream with rows of tiles (args.cuh)
// in the place of rows.
//
// Floor: K / 2 bytes a row at 4 bits (5.2 MB for qkv of Qwen3-30B-A3B, 4.2 MB for o_proj: 1.2 and 1.0 us), so latency
// is what there is: a block's whole share (52 and 35 KB with scales) is in shared memory when x comes. From there on a
// row of tiles costs a warp K / 512 steps of about 70 instructions, of which 44 unpack 4 bits: 0.3 us for K = 2,048,
// and three of them for qkv, whose 320 rows of tiles meet 132 blocks. Weights that were unpacked into registers ahead
// of x, and x held in registers, were slower than this loop: their straight code has to be fetched.
//
// Tiles hold the fragments of mma.sync, so weights need no ldmatrix. Warps take every 8th step of 64 columns and are
// added in warp order: an output's bits depend on its rows of x and w and on K.
// The norm in the prologue and the addition in the epilogue are as in linear/stream.cu.
#include "linear/stream.cuh"
#include "quant/product.cuh"

namespace moe::quant {
namespace {

constexpr int kChunk = 2048;  // columns of a stage
constexpr int kPad = 16;      // bytes between rows of x, against bank conflicts
constexpr int kMaxStages = 8;
constexpr int kMaxRing = 136 * 1024;               // leaves room for a block of the kernel ahead
constexpr size_t kSoleBlock = 116 * 1024;          // of shared memory: two blocks of a launch do not share an SM
constexpr int kHeader = 8 * (2 * kMaxStages + 2);  // barriers
constexpr int kBatch = 3;                          // rows of tiles whose sums are added together
constexpr int kBatchRows = kBatch * kTileRows;
constexpr int kPasses = ceil_div(kBatchRows * kTokens, kConsumers);  // sums of a batch that a thread adds
constexpr int kSumPitch = kTokens + 2;                               // floats of a row's sums, against bank conflicts
constexpr int kSumFloats = kBatch * kWarps * kTileRows * kSumPitch;

struct Args : StreamInput {
  Matrix w;
  StageLayout layout;
  const bf16* bias;
  void* out;
  Output output;
  int n, stages;
};

/// Shared memory but for the stages: barriers, sums, parts of the norms, rows of x.
size_t fixed_bytes(int m, int k) {
  return kHeader + (kSumFloats + kTokens * kWarps) * sizeof(float) + static_cast<size_t>(m) * (2 * k + kPad);
}

template <class Kind, bool kNormed>
__global__ void __launch_bounds__(kConsumers + 32, 1) quant_stream_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t smem[];
  uint64_t* full = reinterpret_cast<uint64_t*>(smem);
  uint64_t* empty = full + kMaxStages;
  uint64_t* x_full = empty + kMaxStages;
  float* sums = reinterpret_cast<float*>(smem + kHeader);
  float* squares = sums + kSumFloats;
  uint8_t* x = reinterpret_cast<uint8_t*>(squares + kTokens * kWarps);
  const int pitch = 2 * a.k + kPad;
  uint8_t* ring = x + static_cast<size_t>(a.m) * pitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = static_cast<int>(static_cast<int64_t>(a.w.n_tiles) * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(static_cast<int64_t>(a.w.n_tiles) * (blockIdx.x + 1) / gridDim.x);
  const int chunks = ceil_div(a.k, kChunk);
  const auto columns = [&](int chunk) { return min(kChunk, a.k - chunk * kChunk); };
  // Ahead of the weights: a load behind them waits until they have come.
  Vec16 norm_weight = {};
  if (kNormed && threadIdx.x * 8 < a.k && warp < kWarps) norm_weight = load_const(a.norm + threadIdx.x * 8);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(full + i, copy_arrivals());
      mbarrier_init(empty + i, kWarps * kWarpArrivals);
    }
    mbarrier_init(x_full, copy_arrivals());
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();

  if (warp == kWarps) {
    int stage = 0, round = 0;
    for (int tile = first; tile < last; ++tile) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        if (round > 0) mbarrier_wait(empty + stage, (round - 1) & 1);
        copy_pieces(ring + static_cast<size_t>(stage) * a.layout.bytes,
                    pieces<Kind::kFormat>(a.w, a.layout, tile, chunk * kChunk, columns(chunk)), full + stage);
        if (++stage == a.stages) stage = 0, ++round;
      }
    }
    return;
  }

  int refills = (last - first) * chunks - a.stages;
  pdl_wait();
  if constexpr (kNormed) {
    stage_normed(a, norm_weight, x, pitch, squares);
    named_barrier(1, kConsumers);
  } else {
    const bf16* from = static_cast<const bf16*>(a.x);
    if (warp == 0)
      copy_rows(x, pitch, a.m, a.k * 2, x_full, [&](uint32_t r) { return from + static_cast<size_t>(r) * a.k; });
    mbarrier_wait(x_full, 0);
  }
  // Lanes without a token repeat the last one: their results are not stored.
  const uint8_t* own_x = x + static_cast<size_t>(min(lane / 4, a.m - 1)) * pitch;
  float scale[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int token = (threadIdx.x + pass * kConsumers) / kBatchRows;
    scale[pass] = kNormed && token < a.m ? norm_factor(a, squares, token) : 1.f;
  }
  int stage = 0, phase = 0;
  for (int batch = first; batch < last; batch += kBatch) {
    const int tiles = min(kBatch, last - batch), rows = min(tiles * kTileRows, a.n - batch * kTileRows);
    if (batch > first) named_barrier(1, kConsumers);  // the sums before have been read
    float value[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = threadIdx.x + pass * kConsumers, row = i % kBatchRows, token = i / kBatchRows;
      value[pass] = 0.f;
      if (token >= a.m || row >= rows) continue;
      value[pass] = before(a.output, a.out, static_cast<size_t>(token) * a.n + batch * kTileRows + row);
      if (a.bias != nullptr) value[pass] += __bfloat162float(a.bias[batch * kTileRows + row]);
    }
    for (int group = 0; group < tiles; ++group) {
      float sum[4] = {};
      for (int chunk = 0; chunk < chunks; ++chunk) {
        mbarrier_wait(full + stage, phase);
        const Stage<Kind> s(a.w, a.layout, ring + static_cast<size_t>(stage) * a.layout.bytes, batch + group,
                            chunk * kChunk);
        const int steps = columns(chunk) / kStep;
#pragma unroll 2
        for (int i = warp; i < steps; i += kWarps) {
          const int column = chunk * kChunk + i * kStep;
          Columns of;
          of.load(own_x + column * 2);
          s.operands(i, column).multiply(of, sum);
        }
        if (refills-- > 0) release_to_copies(empty + stage);
        if (++stage == a.stages) stage = 0, phase ^= 1;
      }
      float* to = sums + ((group * kWarps + warp) * kTileRows + lane / 4) * kSumPitch + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = {sum[0], sum[1]};
      *reinterpret_cast<float2*>(to + 8 * kSumPitch) = {sum[2], sum[3]};
    }
    named_barrier(1, kConsumers);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = threadIdx.x + pass * kConsumers, row = i % kBatchRows, token = i / kBatchRows;
      if (token >= a.m || row >= rows) continue;
      const float* from = sums + (row / kTileRows * kWarps * kTileRows + row % kTileRows) * kSumPitch + token;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += from[w * kTileRows * kSumPitch];
      const size_t at = static_cast<size_t>(token) * a.n + batch * kTileRows + row;
      store(a.output, a.out, at, value[pass] + sum * scale[pass]);
    }
  }
}

template <class Kind, bool kNormed>
int run(Args a, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const int blocks = a.w.n_tiles < limits.sms ? a.w.n_tiles : limits.sms, chunks = ceil_div(a.k, kChunk);
  a.layout = stage_layout(a.w, Kind::kFormat, a.k < kChunk ? a.k : kChunk);
  const size_t fixed = fixed_bytes(a.m, a.k), stage = a.layout.bytes;
  if (fixed + stage > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  // No more stages than a block's share fills: what is left lets the kernels around it share the SM.
  const size_t room = limits.block_smem - fixed, ring = room < kMaxRing ? room : kMaxRing;
  const int fit = ring < stage ? 1 : static_cast<int>(ring / stage), needed = ceil_div(a.w.n_tiles, blocks) * chunks;
  a.stages = needed < fit ? needed : fit;
  if (a.stages > kMaxStages) a.stages = kMaxStages;
  const size_t smem = fixed + a.stages * stage, most = limits.block_smem, sole = most < kSoleBlock ? most : kSoleBlock;
  const Launch l = {dim3(blocks), dim3(kConsumers + 32), stream, smem > sole ? smem : sole};
  return launch(quant_stream_kernel<Kind, kNormed>, l, a);
}

template <class Kind>
int run(const Args& a, void* stream) {
  return a.norm ? run<Kind, true>(a, stream) : run<Kind, false>(a, stream);
}

}  // namespace
}  // namespace moe::quant

/// out = x w^T (+ bias), m <= 8; k up to 10,000 or so: m rows of x and a stage must fit into shared memory.
extern "C" int moe_quant_linear_stream(const moe::QuantLinearStreamArgs* args, void* stream) {
  using namespace moe;
  const QuantLinearStreamArgs& c = *args;
  quant::Args a = {};
  if (c.m < 0 || c.m > kTokens || !is_code(c.output, Output::kAddF32) || c.w.gate_up != 0 || c.w.experts != 1 ||
      !quant::make_matrix(c.w, &a.w))
    return cudaErrorInvalidValue;
  if (c.m == 0) return cudaSuccess;
  a.x = c.x, a.norm = c.norm, a.eps = c.eps, a.m = c.m, a.k = a.w.k;
  a.bias = c.bias, a.out = c.out, a.output = c.output, a.n = static_cast<int>(c.w.n);
  return quant::with_kind(c.w.format, a.w.wide(), [&](auto kind) { return quant::run<decltype(kind)>(a, stream); });
}
