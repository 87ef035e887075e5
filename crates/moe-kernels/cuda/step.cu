// What a step needs besides its layers: rotary angles, tokens fed from the step before, random weights.
#include "common.cuh"
#include "ptx.cuh"
#include "sampling.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHalf = 256;

/// Rotary frequencies, by value: a step's launch needs no other memory.
struct Frequencies {
  float inv_freq[kMaxHalf];
  float attention_factor;
  int half;
};

/// Floor: 8 D / 2 bytes per row. The angle is an f32 product as in torch, its functions are f64 rounded once as on
/// the CPU, so that both agree.
__global__ void rope_rows(const uint32_t* positions, const __grid_constant__ Frequencies f, float* cos, float* sin,
                          int rows) {
  const int at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= rows * f.half) return;
  const float angle = __fmul_rn(static_cast<float>(positions[at / f.half]), f.inv_freq[at % f.half]);
  double sine, cosine;
  sincos(static_cast<double>(angle), &sine, &cosine);
  cos[at] = __fmul_rn(static_cast<float>(cosine), f.attention_factor);
  sin[at] = __fmul_rn(static_cast<float>(sine), f.attention_factor);
}

__global__ void feed_tokens(const uint32_t* from, const uint32_t* sampled, uint32_t* ids, const uint32_t* valid,
                            uint32_t* kept_valid, int rows) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row == 0) *kept_valid = *valid;
  if (row < rows && from[row] != ~0u) ids[row] = sampled[from[row]];
}

/// Uniform in [-bound, bound): 16 of the 64 bits that Philox gives per four values. Floor: 2 bytes written per value.
__global__ void fill_random(bf16* out, size_t count, uint64_t seed, uint64_t stream_id, float bound) {
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; 4 * i < count; i += step) {
    const uint64_t bits = random_bits(seed, stream_id << 40 | i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int value = static_cast<int16_t>(bits >> 16 * j);
      if (4 * i + j < count) out[4 * i + j] = __float2bfloat16_rn(static_cast<float>(value) * (bound / 32768.f));
    }
  }
}

}  // namespace
}  // namespace moe

/// cos, sin [rows, half] f32 of positions [rows] u32; inv_freq [half] is host memory, half at most 256. Does not
/// overlap the launch before it.
extern "C" int moe_rope_rows(const uint32_t* positions, const float* inv_freq, int half, float attention_factor,
                             float* cos, float* sin, int rows, void* stream) {
  using namespace moe;
  if (rows < 0 || half <= 0 || half > kMaxHalf || rows > INT_MAX / kMaxHalf) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  Frequencies f = {{}, attention_factor, half};
  for (int i = 0; i < half; ++i) f.inv_freq[i] = inv_freq[i];
  Launch l = {dim3(ceil_div(rows * half, kThreads)), dim3(kThreads), stream};
  l.overlap = false;
  return launch(rope_rows, l, positions, f, cos, sin, rows);
}

/// ids[row] = sampled[from[row]] where from [rows] is not u32::MAX; ids [rows]; kept_valid [1] = valid [1]. Does not
/// overlap the launch before it.
extern "C" int moe_feed_tokens(const uint32_t* from, const uint32_t* sampled, uint32_t* ids, const uint32_t* valid,
                               uint32_t* kept_valid, int rows, void* stream) {
  using namespace moe;
  if (rows < 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  Launch l = {dim3(ceil_div(rows, kThreads)), dim3(kThreads), stream};
  l.overlap = false;
  return launch(feed_tokens, l, from, sampled, ids, valid, kept_valid, rows);
}

/// out [count] bf16 uniform in [-bound, bound): a function of seed and stream_id (below 2^24) alone.
extern "C" int moe_fill_random(moe::bf16* out, size_t count, uint64_t seed, uint64_t stream_id, float bound,
                               void* stream) {
  using namespace moe;
  if (count == 0) return cudaSuccess;
  const size_t blocks = ceil_div(count, 4 * kThreads);
  Launch l = {dim3(static_cast<unsigned>(blocks < 4096 ? blocks : 4096)), dim3(kThreads), stream};
  l.overlap = false;
  return launch(fill_random, l, out, count, seed, stream_id, bound);
}
