// Activations to FP8 (E4M3), one scale for each row and 128 columns: scale = max |x| / 448, q = x / scale, rounded to
// nearest. Columns of each 128 lie in the order of fp8_product.cuh: of each 64 columns h byte 16 (2 c + h) + 4 j + i is
// column 16 j + 2 c + i % 2 + 8 (i / 2); by quads, for fp8_linear.cu, byte 4 c + i of each 16 is column 2 c + i % 2 + 8
// (i / 2). Rows keep their places, or go to those of their slots in order of experts.
//
// Floor: bytes. 8,192 rows of 2,048: 34 MB in, 17 MB out, 12 us at 4.3 TB/s, to the places of eight slots each 134 MB
// out, 40 us; 65,536 rows of 768: 36 us.
//
// Design: eight lanes have a row's 128 columns, 16 each, in two loads of 16 bytes, and exchange words so that each
// stores 16 bytes; a block has 32 rows of the same columns, so that its scales are one line.
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/args.cuh"

namespace moe::fp8 {
namespace {

constexpr int kBlockRows = 32, kLanes = 8, kGroup = 128;
constexpr int kPlaceThreads = 256;
constexpr float kMost = 448.f;  // the largest E4M3

/// Four numbers as bytes, the first one lowest.
__device__ __forceinline__ uint32_t pack_e4m3([[maybe_unused]] float a, [[maybe_unused]] float b,
                                              [[maybe_unused]] float c, [[maybe_unused]] float d) {
#if MOE_SM90
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<uint32_t>(high) << 16;
#else
  return 0;
#endif
}

/// Word c of lane j becomes word j of lane c, among four neighbouring lanes.
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

/// Where a slot's row goes in order of experts, or kNoExpert. `place_of` of a slot that no expert here has is whatever
/// was in its memory before, which `slot_at` tells apart.
__device__ __forceinline__ uint32_t place_of_slot(const Fp8QuantiseArgs& a, int slot) {
  const uint32_t place = __ldcg(a.place_of + slot);
  return place < static_cast<uint32_t>(a.rows * a.top_k) && __ldcg(a.slot_at + place) == static_cast<uint32_t>(slot)
             ? place
             : kNoExpert;
}

__global__ void __launch_bounds__(kBlockRows* kLanes)
    quantise_rows(const __grid_constant__ Fp8QuantiseArgs a, int scale_rows) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y * kBlockRows + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const size_t column = blockIdx.x * kGroup;
  const bf16* x = a.x + static_cast<size_t>(min(row, a.rows - 1)) * a.columns + column + lane * 16;
  const uint4 halves[2] = {reinterpret_cast<const uint4*>(x)[0], reinterpret_cast<const uint4*>(x)[1]};
  uint32_t place = row;
  if (a.place_of != nullptr)
    place = row < a.rows && lane < a.top_k ? place_of_slot(a, row * a.top_k + lane) : kNoExpert;
  float v[16];
  float most = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word[4] = {halves[half].x, halves[half].y, halves[half].z, halves[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16(word[i]);
      v[half * 8 + 2 * i] = pair.x, v[half * 8 + 2 * i + 1] = pair.y;
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  const float scale = __fdiv_rn(most, kMost);
  const float inverse = scale >= 0x1p-126f ? __fdiv_rn(1.f, scale) : 0.f;  // else nothing is left of the row
  uint32_t out[4];
#pragma unroll
  for (int c = 0; c < 4; ++c)
    out[c] = pack_e4m3(v[2 * c] * inverse, v[2 * c + 1] * inverse, v[2 * c + 8] * inverse, v[2 * c + 9] * inverse);
  if (a.quads == 0) transpose_words(out);
  const int chunk = a.quads == 0 ? lane % 4 * 2 + lane / 4 : lane;
  const auto store = [&](uint32_t to) {
    uint8_t* q = a.q + static_cast<size_t>(to) * a.columns + column;
    reinterpret_cast<uint4*>(q)[chunk] = {out[0], out[1], out[2], out[3]};
    if (lane == 0) a.scales[static_cast<size_t>(blockIdx.x) * scale_rows + to] = scale;
  };
  if (a.place_of == nullptr) {
    if (row < a.rows) store(place);
    return;
  }
  for (int first = 0; first < a.top_k; first += kLanes) {
    if (first > 0)
      place = row < a.rows && first + lane < a.top_k ? place_of_slot(a, row * a.top_k + first + lane) : kNoExpert;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t to = __shfl_sync(0xffffffffu, place, i, kLanes);
      if (to != kNoExpert) store(to);
    }
  }
}

/// A block for each expert.
__global__ void __launch_bounds__(kPlaceThreads) list_places(const __grid_constant__ Fp8PlacesArgs a) {
  __shared__ uint32_t warps[kPlaceThreads / 32];
  pdl_launch_dependents();
  pdl_wait();
  const int expert = blockIdx.x;
  uint32_t sum = 0;
  for (int e = threadIdx.x; e < expert; e += kPlaceThreads) sum += __ldcg(a.counts + e);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  uint32_t first = 0;
#pragma unroll
  for (int i = 0; i < kPlaceThreads / 32; ++i) first += warps[i];
  const uint32_t count = __ldcg(a.counts + expert);
  const uint32_t* slots = a.slots + static_cast<size_t>(expert) * a.bucket;
  for (uint32_t i = threadIdx.x; i < count; i += kPlaceThreads) {
    const uint32_t slot = __ldcg(slots + i);
    a.slot_at[first + i] = slot, a.place_of[slot] = first + i;
  }
  if (expert + 1 != a.experts) return;
  for (uint32_t i = first + count + threadIdx.x; i < static_cast<uint32_t>(a.num_slots); i += kPlaceThreads)
    a.slot_at[i] = kNoExpert;
}

}  // namespace
}  // namespace moe::fp8

/// q and scales of x. Hopper only.
extern "C" int moe_fp8_quantise(const moe::Fp8QuantiseArgs* args, void* stream) {
  using namespace moe;
  const Fp8QuantiseArgs& c = *args;
  const bool slots = c.place_of != nullptr;
  if (c.rows < 0 || c.columns <= 0 || c.columns % fp8::kGroup != 0 || ceil_div(c.rows, fp8::kBlockRows) > 65535 ||
      (slots && (c.slot_at == nullptr || c.top_k <= 0 || c.rows > INT32_MAX / c.top_k)))
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const dim3 grid(c.columns / fp8::kGroup, ceil_div(c.rows, fp8::kBlockRows));
  return launch(fp8::quantise_rows, {grid, dim3(fp8::kBlockRows * fp8::kLanes), stream}, c,
                round_up(slots ? c.rows * c.top_k : c.rows, 4));
}

/// Places of the slots in order of experts.
extern "C" int moe_fp8_places(const moe::Fp8PlacesArgs* args, void* stream) {
  using namespace moe;
  const Fp8PlacesArgs& c = *args;
  if (c.bucket < 0 || c.experts < 0 || c.num_slots < 0) return cudaErrorInvalidValue;
  if (c.experts == 0 || c.num_slots == 0) return cudaSuccess;
  return launch(fp8::list_places, {dim3(c.experts), dim3(fp8::kPlaceThreads), stream}, c);
}
