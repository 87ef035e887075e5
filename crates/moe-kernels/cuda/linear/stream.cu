// out [M, N] = x [M, K] w[N, K]^T for few rows: weights are streamed, and each is multiplied with M <= 8 tokens.
//
// Floor: 2 N K bytes of weights (21.0 MB for qkv, 16.8 MB for o_proj, 622 MB for the vocabulary projection of
// Qwen3-30B-A3B) over the read bandwidth. The time of 2 M N K FLOP is negligible.
//
// One block per SM owns N / blocks consecutive weight rows. Its producer warp copies them to shared memory in stages of
// 8 rows x 2,048 columns, one bulk copy of 4 KB per row, up to 133 KB ahead. For qkv and o_proj that is most or all of
// a block's share (159 and 127 KB). The copies start before pdl_wait(), so weights are copied while the earlier kernels
// still run. Once x is there, a block only reads shared memory.
//
// Eight consumer warps multiply with mma.sync. Weights are the row operand (8 of its 16 rows are used, so that shares
// of N are equal) and the tokens are the 8 columns. Each warp processes its own columns of K, and their partial sums
// are added in warp order. So an output's bits depend on its rows of x and w and on K, but not on M. Up to K = 4,096 a
// warp keeps its columns of x in registers.
//
// mma.sync contracts over k in any order that both operands share. So a lane loads 8 consecutive elements, the operands
// of two products, with one 16-byte access, and needs neither ldmatrix nor shuffles. Rows are padded by 64 bytes so
// that such loads hit every bank once.
//
// Prologue: x is bf16, or the f32 residual, which is RMS-normed while it is loaded: x * weight is rounded to bf16, and
// the factor 1 / rms multiplies the sum. This needs no additional pass, and rounds as often as norming first. Epilogue:
// the result is stored as f32 or bf16, or added to the f32 residual. Together they save two launches per sub-layer.
#include "linear/stream.cuh"

namespace moe {
namespace {

constexpr int kRows = 8;      // weight rows of a stage
constexpr int kChunk = 2048;  // columns of a stage
constexpr int kPad = 64;      // bytes between rows, against bank conflicts
constexpr int kRowBytes = kChunk * 2 + kPad;
constexpr int kStageBytes = kRows * kRowBytes;
constexpr int kSteps = kChunk / 32 / kWarps;  // 32-column steps of a warp and stage
constexpr int kMaxStages = 4;                 // 133 KB: room for a block of the kernel ahead
constexpr int kHeader = 128;                  // barriers
constexpr int kBatch = 3;                     // row groups whose sums are added together
constexpr int kSumPitch = kTokens + 2;        // floats of a weight row's sums, against bank conflicts
constexpr int kSumFloats = kBatch * kWarps * kRows * kSumPitch;

struct Args : StreamInput {
  const bf16* w;
  const bf16* bias;
  void* out;
  int n, stages;
};

static_assert(kHeader + (kSumFloats + kTokens * kWarps) * sizeof(float) == 8064 && kPad == 64 && kStageBytes == 33280,
              "the plan has these sizes, too: src/plan/linear.rs");

/// Shared memory without the stages: barriers, sums, parts of the norms, rows of x.
size_t fixed_bytes(int m, int k) {
  return kHeader + (kSumFloats + kTokens * kWarps) * sizeof(float) + static_cast<size_t>(m) * (2 * k + kPad);
}

/// A warp's columns of x in a chunk, as the column operand of its steps s = warp, warp + 8, .. Lane 4g + t holds
/// columns 8t .. 8t + 7 of token g.
struct Columns {
  uint4 step[kSteps];

  /// Lanes without a token repeat the last one; their results are not stored.
  __device__ __forceinline__ void load(const uint8_t* x, int pitch, int m, int steps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint8_t* from = x + static_cast<size_t>(min(lane / 4, m - 1)) * pitch + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int s = j * kWarps + warp;
      step[j] = s < steps ? *reinterpret_cast<const uint4*>(from + s * 64) : uint4{};
    }
  }
};

/// Adds a warp's share of a stage. There are four chains of sums, so that products do not wait for each other.
__device__ __forceinline__ void multiply(const uint8_t* stage, const Columns& x, int steps, float (&acc)[4][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint8_t* w = stage + lane / 4 * kRowBytes + lane % 4 * 16;
  uint4 a[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int s = j * kWarps + warp;
    a[j] = s < steps ? *reinterpret_cast<const uint4*>(w + s * 64) : uint4{};
  }
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    mma_bf16(acc[j % 2 * 2], {a[j].x, 0, a[j].y, 0}, x.step[j].x, x.step[j].y);
    mma_bf16(acc[j % 2 * 2 + 1], {a[j].z, 0, a[j].w, 0}, x.step[j].z, x.step[j].w);
  }
}

/// kHeld: number of chunks of x that stay in registers, 0 for none.
template <int kHeld, bool kNormed, Output kOutput>
__global__ void __launch_bounds__(kConsumers + 32, 1) stream_kernel(Args a) {
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
  const int first = static_cast<int>(static_cast<int64_t>(a.n) * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(static_cast<int64_t>(a.n) * (blockIdx.x + 1) / gridDim.x);
  const int chunks = ceil_div(a.k, kChunk);
  // This is loaded before the weights: a later load would wait until the weights have arrived.
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
    for (int row = first; row < last; row += kRows) {
      for (int column = 0; column < a.k; column += kChunk) {
        if (round > 0) mbarrier_wait(empty + stage, (round - 1) & 1);
        const bf16* from = a.w + static_cast<size_t>(row) * a.k + column;
        const uint32_t bytes = min(kChunk, a.k - column) * 2;
        uint8_t* to = ring + stage * kStageBytes;
        if (last - row >= kRows) {
          copy_strided<kRows>(to, kRowBytes, from, static_cast<size_t>(a.k) * 2, bytes, full + stage);
        } else {
          copy_rows(to, kRowBytes, last - row, bytes, full + stage,
                    [&](uint32_t r) { return from + static_cast<size_t>(r) * a.k; });
        }
        if (++stage == a.stages) stage = 0, ++round;
      }
    }
    return;
  }

  if constexpr (kNormed) {
    pdl_wait();
    stage_normed(a, norm_weight, x, pitch, squares);
    named_barrier(1, kConsumers);
  } else {
    pdl_wait();
    const bf16* from = static_cast<const bf16*>(a.x);
    if (warp == 0)
      copy_rows(x, pitch, a.m, a.k * 2, x_full, [&](uint32_t r) { return from + static_cast<size_t>(r) * a.k; });
    mbarrier_wait(x_full, 0);
  }
  const auto steps = [&](int chunk) { return min(kChunk, a.k - chunk * kChunk) / 32; };
  Columns held[kHeld > 0 ? kHeld : 1];
#pragma unroll
  for (int chunk = 0; chunk < kHeld; ++chunk)
    if (chunk < chunks) held[chunk].load(x + chunk * kChunk * 2, pitch, a.m, steps(chunk));
  const int my_row = threadIdx.x % (kBatch * kRows), my_token = threadIdx.x / (kBatch * kRows);
  float scale = 1.f;
  if (kNormed && my_token < a.m) scale = norm_factor(a, squares, my_token);
  int stage = 0, phase = 0, refills = ceil_div(last - first, kRows) * chunks - a.stages;
  for (int batch = first; batch < last; batch += kBatch * kRows) {
    const bool mine = my_token < a.m && batch + my_row < last;
    const size_t at = static_cast<size_t>(my_token) * a.n + batch + my_row;
    float value = mine ? before<kOutput>(a.out, at) : 0.f;
    if (mine && a.bias != nullptr) value += __bfloat162float(a.bias[batch + my_row]);
    float2 part[kBatch];
#pragma unroll
    for (int group = 0; group < kBatch; ++group) {
      if (batch + group * kRows >= last) break;
      float acc[4][4] = {};
      const auto next = [&](const Columns& columns, int chunk) {
        mbarrier_wait(full + stage, phase);
        multiply(ring + stage * kStageBytes, columns, steps(chunk), acc);
        if (refills-- > 0) release_to_copies(empty + stage);
        if (++stage == a.stages) stage = 0, phase ^= 1;
      };
      if constexpr (kHeld > 0) {
#pragma unroll
        for (int chunk = 0; chunk < kHeld; ++chunk)
          if (chunk < chunks) next(held[chunk], chunk);
      } else {
        for (int chunk = 0; chunk < chunks; ++chunk) {
          held[0].load(x + chunk * kChunk * 2, pitch, a.m, steps(chunk));
          next(held[0], chunk);
        }
      }
      part[group] = {acc[0][0] + acc[1][0] + acc[2][0] + acc[3][0], acc[0][1] + acc[1][1] + acc[2][1] + acc[3][1]};
    }
    if (batch > first) named_barrier(1, kConsumers);  // the sums before have been read
#pragma unroll
    for (int group = 0; group < kBatch; ++group) {
      if (batch + group * kRows >= last) break;
      float* to = sums + ((group * kWarps + warp) * kRows + lane / 4) * kSumPitch + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = part[group];
    }
    named_barrier(1, kConsumers);
    if (mine) {
      const float* from = sums + (my_row / kRows * kWarps * kRows + my_row % kRows) * kSumPitch + my_token;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += from[i * kRows * kSumPitch];
      store<kOutput>(a.out, at, value + sum * scale);
    }
  }
}

template <int kHeld, bool kNormed, Output kOutput>
int run(Args a, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const int blocks = a.n < limits.sms ? a.n : limits.sms;
  const size_t fixed = fixed_bytes(a.m, a.k);
  if (fixed + kStageBytes > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  // There are no more stages than a block's share fills; the remaining shared memory lets the neighbouring kernels use
  // the SM.
  const int needed = ceil_div(ceil_div(a.n, blocks), kRows) * ceil_div(a.k, kChunk);
  const int fit = static_cast<int>((limits.block_smem - fixed) / kStageBytes);
  a.stages = needed < fit ? needed : fit;
  if (a.stages > kMaxStages) a.stages = kMaxStages;
  const Launch l = {dim3(blocks), dim3(kConsumers + 32), stream, fixed + static_cast<size_t>(a.stages) * kStageBytes};
  return launch(stream_kernel<kHeld, kNormed, kOutput>, l, a);
}

template <int kHeld, bool kNormed>
int run(Output output, const Args& a, void* stream) {
  switch (output) {
    case Output::kF32: return run<kHeld, kNormed, Output::kF32>(a, stream);
    case Output::kBf16: return run<kHeld, kNormed, Output::kBf16>(a, stream);
    default: return run<kHeld, kNormed, Output::kAddF32>(a, stream);
  }
}

template <bool kNormed>
int run(Output output, const Args& a, void* stream) {
  if (a.k <= kChunk) return run<1, kNormed>(output, a, stream);
  if (a.k <= 2 * kChunk) return run<2, kNormed>(output, a, stream);
  return run<0, kNormed>(output, a, stream);
}

}  // namespace
}  // namespace moe

/// out = x w^T (+ bias), m <= 8, k a multiple of 64 (up to 10,000 or so: m rows of x and a stage must fit into shared
/// memory).
extern "C" int moe_linear_stream(const moe::LinearStreamArgs* args, void* stream) {
  using namespace moe;
  const LinearStreamArgs& c = *args;
  if (c.m < 0 || c.m > kTokens || c.n < 0 || c.k <= 0 || c.k % 64 != 0 || !is_code(c.output, Output::kAddF32))
    return cudaErrorInvalidValue;
  if (c.m == 0 || c.n == 0) return cudaSuccess;
  const Args a = {{c.x, c.norm, c.eps, c.m, c.k}, c.w, c.bias, c.out, c.n, 0};
  return c.norm ? run<true>(c.output, a, stream) : run<false>(c.output, a, stream);
}
