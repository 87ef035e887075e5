// Sums of hashed words, from which the checksum of an expert's weights is made; moe_kernels::checksum on the CPU is the
// specification.
//
// Integers wrap around, so the words may be added in any order. Floor: each byte is read once, 2.8 us for an expert
// of 9.4 MB at 3.35 TB/s; some 20 integer instructions a word are half of that.
#include "any/any.cuh"

namespace moe {
namespace {

constexpr uint64_t kPlace = 0x9e3779b97f4a7c15u, kFactor = 0xbf58476d1ce4e5b9u;

/// The hash of word `index`.
__device__ __forceinline__ uint64_t hashed(uint64_t index, uint64_t word) {
  uint64_t x = word ^ (index + 1) * kPlace;
  x = (x ^ x >> 32) * kFactor;
  return x ^ x >> 29;
}

/// *sum += the hashes of all words; the last one is filled up with zeros.
__global__ void word_sum(const uint8_t* bytes, int64_t len, unsigned long long* sum) {
  __shared__ unsigned long long parts[kAnyThreads / 32];
  unsigned long long own = 0;
  const int64_t pairs = len / 16;
#pragma unroll 4
  for (int64_t i = element_start(); i < pairs; i += element_step()) {
    const Vec16 v = load_stream(bytes + 16 * i);
    own += hashed(2 * i, v.word[0] | static_cast<uint64_t>(v.word[1]) << 32);
    own += hashed(2 * i + 1, v.word[2] | static_cast<uint64_t>(v.word[3]) << 32);
  }
  if (element_start() == 0) {
    for (int64_t at = 16 * pairs; at < len; at += 8) {
      uint64_t word = 0;
      for (int i = 0; i < 8 && at + i < len; ++i) word |= static_cast<uint64_t>(bytes[at + i]) << 8 * i;
      own += hashed(at / 8, word);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kAnyThreads / 32; ++warp) own += parts[warp];
  atomicAdd(sum, own);
}

}  // namespace
}  // namespace moe

using namespace moe;

/// *sum (u64) = the sum, modulo 2^64, of the hashes of the words of 8 bytes of `bytes` [len], which begin at a multiple
/// of 16. It does not overlap the launch before it.
extern "C" int moe_any_word_sum(const void* bytes, int64_t len, void* sum, void* stream) {
  if (len < 0 || reinterpret_cast<uintptr_t>(bytes) % 16 != 0) return cudaErrorInvalidValue;
  const cudaError_t e = cudaMemsetAsync(sum, 0, sizeof(uint64_t), static_cast<cudaStream_t>(stream));
  if (e != cudaSuccess || len == 0) return e;
  // A thread issues four loads at a time.
  const int64_t threads = ceil_div(len, 64);
  Launch l = over_elements(threads < 1 << 19 ? threads : 1 << 19, stream);
  l.overlap = false;
  return launch(word_sum, l, static_cast<const uint8_t*>(bytes), len, static_cast<unsigned long long*>(sum));
}
