// Activations to FP8 (E4M3), with one scale for each row and 128 columns: scale = max |x| / 448, q = x / scale, rounded
// to nearest. The columns of each 128 are stored in the order that fp8_product.cuh reads: of each 64 columns h, byte 16
// (2 c + h) + 4 j + i is column 16 j + 2 c + i % 2 + 8 (i / 2). By quads, for fp8_linear.cu, byte 4 c + i of each 16 is
// column 2 c + i % 2 + 8 (i / 2). Another launch copies rows to the places of their slots in order of experts.
//
// Floor: bytes. 8,192 rows of 2,048: 34 MB in, 17 MB out, 12 us at 4.3 TB/s; to the places of eight slots each 134 MB
// out, 31 us (the 17 MB come out of L2).
//
// Design: eight lanes have a row's 128 columns, 16 each, in two loads of 16 bytes, and exchange words so that each
// stores 16 bytes; a block has 32 rows of the same columns, so that its scales are one line. The copy goes through the
// places and not through the rows, so that a block writes consecutive bytes: 58 us. Writing each row to its eight
// places takes 70 us, and 79 us if the copy engine reads and writes.
#include "ptx/ptx.cuh"
#include "quant/args.cuh"
#include "quant/fp8_row.cuh"

namespace moe::fp8 {
namespace {

constexpr int kBlockRows = 32, kLanes = 8;
// Sizes of a block that copies rows.
constexpr int kPlaces = 32, kCopyThreads = 256, kCopyWarps = kCopyThreads / 32;
// The largest number of experts whose counts are added up.
constexpr int kMaxExperts = 1024;

/// Transposes words among four neighbouring lanes: word c of lane j becomes word j of lane c.
__device__ __forceinline__ void transpose_words(uint32_t (&v)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + 2], 2);
    (upper ? v[i] : v[i + 2]) = got;
  }
}

__global__ void __launch_bounds__(kBlockRows* kLanes)
    quantise_rows(const __grid_constant__ Fp8QuantiseArgs a, int lines) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y * kBlockRows + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const size_t column = blockIdx.x * kGroup;
  const bf16* x = a.x + static_cast<size_t>(min(row, a.rows - 1)) * a.columns + column + lane * 16;
  const uint4 halves[2] = {reinterpret_cast<const uint4*>(x)[0], reinterpret_cast<const uint4*>(x)[1]};
  float v[16];
  uint32_t largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word[4] = {halves[half].x, halves[half].y, halves[half].z, halves[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(word[i]);
      v[half * 8 + 2 * i] = pair.x, v[half * 8 + 2 * i + 1] = pair.y;
      largest = larger(largest, word[i]);
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const Scale scale = scale_of(larger_half(largest));
  const float inverse = scale.inverse;
  uint32_t out[4];
#pragma unroll
  for (int c = 0; c < 4; ++c)
    out[c] = pack_e4m3(v[2 * c] * inverse, v[2 * c + 1] * inverse, v[2 * c + 8] * inverse, v[2 * c + 9] * inverse);
  if (a.quads == 0) transpose_words(out);
  const int chunk = a.quads == 0 ? lane % 4 * 2 + lane / 4 : lane;
  if (row >= a.rows) return;
  uint8_t* q = a.q + static_cast<size_t>(row) * a.columns + column;
  reinterpret_cast<uint4*>(q)[chunk] = {out[0], out[1], out[2], out[3]};
  if (lane == 0) a.scales[static_cast<size_t>(blockIdx.x) * lines + row] = scale.scale;
}

/// The first place of each expert, and after the last one the number of places.
__device__ __forceinline__ void first_places(const uint32_t* counts, int experts, uint32_t* first) {
  constexpr int kEach = kMaxExperts / kCopyThreads;
  __shared__ uint32_t warps[kCopyWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t own[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = threadIdx.x * kEach + i;
    own[i] = expert < experts ? __ldcg(counts + expert) : 0;
    sum += own[i];
  }
  uint32_t total;
  uint32_t before = warp_exclusive_sum(sum, &total);
  if (lane == 0) warps[warp] = total;
  __syncthreads();
  for (int i = 0; i < warp; ++i) before += warps[i];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = threadIdx.x * kEach + i;
    if (expert <= experts) first[expert] = before;
    before += own[i];
  }
  if (threadIdx.x == kCopyThreads - 1 && experts == kMaxExperts) first[experts] = before;
  __syncthreads();
}

/// The expert of a place: the last one that begins at or before it.
__device__ __forceinline__ int expert_of(const uint32_t* first, int experts, uint32_t place) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

/// Copies rows to kPlaces places in order of experts.
__global__ void __launch_bounds__(kCopyThreads)
    copy_to_places(const __grid_constant__ Fp8PlacesArgs a, int from_lines, int lines) {
  __shared__ uint32_t first[kMaxExperts + 1];
  __shared__ int rows[kPlaces];
  pdl_launch_dependents();
  pdl_wait();
  first_places(a.counts, a.experts, first);
  const uint32_t begin = blockIdx.x * kPlaces;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = static_cast<int>(min(static_cast<uint32_t>(kPlaces), max(first[a.experts], begin) - begin));
  if (count == 0) return;
  if (static_cast<int>(threadIdx.x) < count) {
    const uint32_t place = begin + threadIdx.x;
    const int expert = expert_of(first, a.experts, place);
    const uint32_t* slots = a.slots + static_cast<size_t>(expert) * a.bucket;
    rows[threadIdx.x] = static_cast<int>(__ldcg(slots + place - first[expert])) / a.top_k;
  }
  __syncthreads();
  const int groups = a.columns / kGroup;
  if (lane < count) {
    for (int group = warp; group < groups; group += kCopyWarps)
      a.scales[static_cast<size_t>(group) * lines + begin + lane] =
          __ldcg(a.x_scales + static_cast<size_t>(group) * from_lines + rows[lane]);
  }
  constexpr int kEach = kPlaces / kCopyWarps, kWide = 32 * 16;  // rows of a warp; bytes that it copies at once
  for (int column = lane * 16; column < a.columns; column += kWide) {
    uint4 v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      v[i] = __ldcg(reinterpret_cast<const uint4*>(
          a.x + static_cast<size_t>(rows[min(i * kCopyWarps + warp, count - 1)]) * a.columns + column));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kCopyWarps + warp;
      if (at < count) *reinterpret_cast<uint4*>(a.q + static_cast<size_t>(begin + at) * a.columns + column) = v[i];
    }
  }
}

}  // namespace
}  // namespace moe::fp8

/// q and scales of x. Hopper only.
extern "C" int moe_fp8_quantise(const moe::Fp8QuantiseArgs* args, void* stream) {
  using namespace moe;
  const Fp8QuantiseArgs& c = *args;
  if (c.rows < 0 || c.columns <= 0 || c.columns % fp8::kGroup != 0 || ceil_div(c.rows, fp8::kBlockRows) > 65535)
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const dim3 grid(c.columns / fp8::kGroup, ceil_div(c.rows, fp8::kBlockRows));
  return launch(fp8::quantise_rows, {grid, dim3(fp8::kBlockRows * fp8::kLanes), stream}, c, round_up(c.rows, 4));
}

/// Rows in FP8 and their scales to the places of their slots in order of experts.
extern "C" int moe_fp8_places(const moe::Fp8PlacesArgs* args, void* stream) {
  using namespace moe;
  const Fp8PlacesArgs& c = *args;
  if (c.bucket < 0 || c.experts < 0 || c.experts > fp8::kMaxExperts || c.tokens < 0 || c.top_k <= 0 || c.columns <= 0 ||
      c.columns % fp8::kGroup != 0 || c.tokens > INT32_MAX / c.top_k)
    return cudaErrorInvalidValue;
  const int slots = c.tokens * c.top_k;
  if (c.experts == 0 || slots == 0) return cudaSuccess;
  const Launch l = {dim3(ceil_div(slots, fp8::kPlaces)), dim3(fp8::kCopyThreads), stream};
  return launch(fp8::copy_to_places, l, c, round_up(c.tokens, 4), round_up(slots, 4));
}
