// Kernels of a step other than its layers: copies of its arrays and results from and to the host, tokens that the step
// before sampled, rotary angles, random weights.
//
// Between two steps the device waits for these copies. A copy by the copy engine takes 5 to 8 us there, mostly for
// switching from the kernels' engine and back. A kernel that reads or writes page-locked memory directly takes a launch
// and a round trip over the bus.
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "rows/args.cuh"
#include "sampling/sampling.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHalf = 256;

/// Rotary frequencies, passed by value, so that the launch needs no other memory.
struct Frequencies {
  float inv_freq[kMaxHalf];
  float attention_factor;
  int half;
  float theta, factor, max_len;  // dynamic NTK; factor 0 = none
};

/// x^y, computed in f64 and rounded once to f32.
__device__ __forceinline__ float pow_once(float x, float y) {
  return static_cast<float>(pow(static_cast<double>(x), static_cast<double>(y)));
}

/// Dynamic NTK: the inverse frequency for a sequence of `len` tokens, longer than `max_len`; roundings as on the CPU.
__device__ __forceinline__ float dynamic_inv_freq(const Frequencies& f, float len, int i) {
  const double dim = 2.0 * f.half;
  const float stretched = __fsub_rn(__fdiv_rn(__fmul_rn(f.factor, len), f.max_len), static_cast<float>(f.factor - 1.0));
  const float base = __fmul_rn(f.theta, pow_once(stretched, static_cast<float>(dim / (dim - 2.0))));
  return __fdiv_rn(1.f, pow_once(base, __fdiv_rn(static_cast<float>(2 * i), static_cast<float>(dim))));
}

/// Floor: 8 D / 2 bytes per row. The angle is an f32 product as in torch. Its functions are computed in f64 and rounded
/// once, as on the CPU, so that both agree.
__global__ void rope_rows(const uint32_t* positions, const uint32_t* rope_len, const __grid_constant__ Frequencies f,
                          float* cos, float* sin, int rows) {
  const int at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= rows * f.half) return;
  const int row = at / f.half, i = at % f.half;
  float freq = f.inv_freq[i];
  if (f.factor > 0.f && static_cast<float>(rope_len[row]) > f.max_len)
    freq = dynamic_inv_freq(f, static_cast<float>(rope_len[row]), i);
  const float angle = __fmul_rn(static_cast<float>(positions[row]), freq);
  double sine, cosine;
  sincos(static_cast<double>(angle), &sine, &cosine);
  const float factor = freq == 0.f ? 1.f : f.attention_factor;  // a pair that is not rotated keeps its values
  cos[at] = __fmul_rn(static_cast<float>(cosine), factor);
  sin[at] = __fmul_rn(static_cast<float>(sine), factor);
}

/// Reads host memory, bypassing caches that may have an old value.
__device__ __forceinline__ uint32_t load_host(const uint32_t* p) { return __ldcv(p); }

/// One of the two may be page-locked host memory. Floor: a round trip over the bus, and 4 bytes per word at its rate.
__global__ void copy_words(const uint32_t* from, uint32_t* to, size_t words) {
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < words; i += step)
    to[i] = load_host(from + i);
}

/// copy_words for a step's arrays, whose rows may take their token from `sampled`. It also copies the results of the
/// step before in the other direction.
__global__ void upload_step(const uint32_t* from, uint32_t* to, size_t words, const uint32_t* sampled, size_t ids,
                            size_t source, size_t rows, uint32_t* kept_valid, uint32_t* read_back, size_t results) {
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  const size_t first = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (size_t i = first; i < results; i += step) read_back[i] = sampled[i];
  for (size_t i = first; i < words; i += step) {
    uint32_t word = load_host(from + i);
    if (i >= ids && i - ids < rows) {
      const uint32_t row = load_host(from + source + (i - ids));
      if (row != ~0u) word = sampled[row];
    }
    if (i == 0) *kept_valid = word;
    to[i] = word;
  }
}

/// A launch that copies words after all earlier work.
Launch copy_launch(size_t words, void* stream) {
  constexpr size_t kMostBlocks = 256;
  const size_t blocks = ceil_div(words, kThreads);
  Launch l = {dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(kThreads), stream};
  l.overlap = false;
  return l;
}

/// Uniform in [-bound, bound): each value uses 16 of the 64 bits that Philox gives for four values. Floor: 2 bytes
/// written per value.
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

/// Cosines and sines of all rows. Does not overlap the launch before it.
extern "C" int moe_rope_rows(const moe::RopeRowsArgs* args, void* stream) {
  using namespace moe;
  const RopeRowsArgs& c = *args;
  if (c.rows < 0 || c.half <= 0 || c.half > kMaxHalf || c.rows > INT_MAX / kMaxHalf) return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  Frequencies f = {{}, c.attention_factor, c.half, c.theta, c.factor, c.max_len};
  for (int i = 0; i < c.half; ++i) f.inv_freq[i] = c.inv_freq[i];
  Launch l = {dim3(ceil_div(c.rows * c.half, kThreads)), dim3(kThreads), stream};
  l.overlap = false;
  return launch(rope_rows, l, c.positions, c.rope_len, f, c.cos, c.sin, c.rows);
}

/// to [words] = from [words]; one of them may be page-locked host memory. Does not overlap the launch before it.
extern "C" int moe_copy_words(const uint32_t* from, uint32_t* to, size_t words, void* stream) {
  using namespace moe;
  if (words == 0) return cudaSuccess;
  return launch(copy_words, copy_launch(words, stream), from, to, words);
}

/// The first launch of a step: to [words] = from [words], which is page-locked host memory, with one exception. For
/// each of `rows` rows where from[source + row] is not u32::MAX, word ids + row is sampled[from[source + row]].
/// kept_valid [1] = from[0]. It also copies read_back [results] = sampled [results]; read_back is page-locked host
/// memory too. It does not overlap the launch before it.
extern "C" int moe_upload_step(const uint32_t* from, uint32_t* to, size_t words, const uint32_t* sampled, size_t ids,
                               size_t source, size_t rows, uint32_t* kept_valid, uint32_t* read_back, size_t results,
                               void* stream) {
  using namespace moe;
  if (rows > words || ids > words - rows || source > words - rows) return cudaErrorInvalidValue;
  const size_t most = words < results ? results : words;
  if (most == 0) return cudaSuccess;
  return launch(upload_step, copy_launch(most, stream), from, to, words, sampled, ids, source, rows, kept_valid,
                read_back, results);
}

/// out [count] bf16 uniform in [-bound, bound), which depends only on seed and stream_id (below 2^24).
extern "C" int moe_fill_random(moe::bf16* out, size_t count, uint64_t seed, uint64_t stream_id, float bound,
                               void* stream) {
  using namespace moe;
  if (count == 0) return cudaSuccess;
  const size_t blocks = ceil_div(count, 4 * kThreads);
  Launch l = {dim3(static_cast<unsigned>(blocks < 4096 ? blocks : 4096)), dim3(kThreads), stream};
  l.overlap = false;
  return launch(fill_random, l, out, count, seed, stream_id, bound);
}
