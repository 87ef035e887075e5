// Activations to FP8 (E4M3), one scale for each row and 128 columns: scale = max |x| / 448, q = x / scale, rounded to
// nearest. Columns of each 16 lie in the order of fp8_product_kernel.cuh.
//
// Floor: bytes. 8,192 rows of 2,048: 34 MB in, 17 MB out, 12 us at 4.3 TB/s; 65,536 rows of 768: 36 us.
//
// Design: eight lanes have a row's 128 columns, 16 each, in two loads of 16 bytes; a block has 32 rows of the same
// columns, so that its scales are one line.
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/args.cuh"

namespace moe::fp8 {
namespace {

constexpr int kBlockRows = 32, kLanes = 8, kGroup = 128;
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

__global__ void __launch_bounds__(kBlockRows* kLanes)
    quantise_rows(const bf16* x, uint8_t* q, float* scales, int rows, int columns) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x * kBlockRows + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const size_t at = static_cast<size_t>(min(row, rows - 1)) * columns + blockIdx.y * kGroup + lane * 16;
  float v[16];
  float most = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 words = *reinterpret_cast<const uint4*>(x + at + half * 8);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
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
  // Word c: columns 2c, 2c + 1, 2c + 8 and 2c + 9.
  uint32_t out[4];
#pragma unroll
  for (int c = 0; c < 4; ++c)
    out[c] = pack_e4m3(v[2 * c] * inverse, v[2 * c + 1] * inverse, v[2 * c + 8] * inverse, v[2 * c + 9] * inverse);
  if (row >= rows) return;
  *reinterpret_cast<uint4*>(q + at) = {out[0], out[1], out[2], out[3]};
  if (lane == 0) scales[static_cast<size_t>(blockIdx.y) * rows + row] = scale;
}

}  // namespace
}  // namespace moe::fp8

/// q [rows, columns] and scales [columns / 128, rows] of x [rows, columns]. Hopper only.
extern "C" int moe_fp8_quantise(const moe::Fp8QuantiseArgs* args, void* stream) {
  using namespace moe;
  const Fp8QuantiseArgs& c = *args;
  if (c.rows < 0 || c.columns <= 0 || c.columns % fp8::kGroup != 0 || c.columns / fp8::kGroup > 65535)
    return cudaErrorInvalidValue;
  if (c.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const dim3 grid(ceil_div(c.rows, fp8::kBlockRows), c.columns / fp8::kGroup);
  return launch(fp8::quantise_rows, {grid, dim3(fp8::kBlockRows * fp8::kLanes), stream}, c.x, c.q, c.scales, c.rows,
                c.columns);
}
