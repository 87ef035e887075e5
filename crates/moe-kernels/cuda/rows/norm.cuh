// RMS norm of whole rows: of the residual stream after an addition, or of a row alone.
//
// A block processes every gridDim.x-th row, and a thread 8 consecutive elements of every 2,048. While it works, each
// warp copies its columns of the next data to a ring in shared memory. This needs no registers, no barrier and no start
// of a block, so that memory is always being read. (With one block per row, nothing is read while the block starts,
// reduces and ends; that took 1.4 times as long for 8,192 rows.) The only barrier is the one for a row's sum, whose
// order is the same for any number of rows.
#pragma once

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/fp8_row.cuh"

namespace moe {

constexpr int kThreads = 256, kNormWarps = kThreads / 32;
constexpr int kVector = 8;                                         // elements per thread and turn
constexpr int kWarpColumns = 32 * kVector;                         // of a warp in a turn
constexpr int kTurnColumns = kThreads * kVector;                   // of a block
constexpr uint32_t kResidualBytes = kWarpColumns * sizeof(float);  // of a warp in a turn

__device__ __forceinline__ void widen(const Vec16& v, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16(v.word[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

/// The arrays of a norm of rows, other than the data that is added.
struct NormRows {
  float* residual;  // written only if something is added
  const bf16* weight;
  float eps;
  bf16* out;
  int rows, hidden;
  fp8::RowsOut fp8;  // used instead of `out` if it has scales; `hidden` is then a multiple of 128
};

/// A unit of a block's work: part `part` of the data that is added to the columns of turn `turn` in a row.
struct Unit {
  int row, turn, part;

  __device__ __forceinline__ Unit() : row(blockIdx.x), turn(0), part(0) {}
  __device__ __forceinline__ int column() const {
    return turn * kTurnColumns + static_cast<int>(threadIdx.x) / 32 * kWarpColumns;
  }
  __device__ __forceinline__ void advance(int parts, int hidden) {
    if (++part < parts) return;
    part = 0;
    if (++turn * kTurnColumns < hidden) return;
    turn = 0;
    row += gridDim.x;
  }
};

/// Starts the copies of a warp's columns; the row has `left` columns left.
template <class T>
__device__ __forceinline__ void copy_columns(uint8_t* to, const T* from, int left) {
  constexpr int kPer = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVector / kPer; ++i) {
    const int at = (threadIdx.x % 32 + 32 * i) * kPer;
    if (at < left) cp_async16(to + at * sizeof(T), from + at);
  }
}

/// The lane's columns of a copy.
__device__ __forceinline__ void read_columns(const void* from, float (&x)[kVector]) {
  const float4* lane = static_cast<const float4*>(from) + threadIdx.x % 32 * 2;
  const float4 low = lane[0], high = lane[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

template <class Source>
__device__ __forceinline__ void fetch_unit(const Source& source, const NormRows& a, const Unit& u, uint8_t* stage) {
  const int left = a.hidden - u.column();
  if (u.row < a.rows && left > 0) {
    const float* residual = a.residual + static_cast<size_t>(u.row) * a.hidden + u.column();
    if (u.part == 0) copy_columns(stage, residual, left);
    source.fetch(stage + kResidualBytes, u, left);
  }
  cp_async_commit();
}

/// Writes x to the row in shared memory and, so that a warp writes whole lines, from there to the residual stream.
template <bool kWrites>
__device__ __forceinline__ void keep_columns(const float (&x)[kVector], float* kept, float* residual, int left) {
  const int lane = threadIdx.x % 32;
  float4* all = reinterpret_cast<float4*>(kept);
  if (lane * kVector < left) {
    all[2 * lane] = {x[0], x[1], x[2], x[3]};
    all[2 * lane + 1] = {x[4], x[5], x[6], x[7]};
  }
  if constexpr (!kWrites) return;
  __syncwarp();
#pragma unroll
  for (int at = lane; at < kWarpColumns / 4; at += 32)
    if (4 * at < left) reinterpret_cast<float4*>(residual)[at] = all[at];
}

/// Sum over the block, in a fixed order; every thread gets the result.
__device__ __forceinline__ float block_sum(float v, float* parts) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kNormWarps; ++i) sum += parts[i];
  return sum;
}

/// squares += the squares of a thread's columns. The order determines the bits.
__device__ __forceinline__ void add_squares(const float (&x)[kVector], float& squares) {
#pragma unroll
  for (int i = 0; i < kVector; i += 4)
    squares += x[i] * x[i] + x[i + 1] * x[i + 1] + x[i + 2] * x[i + 2] + x[i + 3] * x[i + 3];
}

/// The factor of a row, from the sum of its squares.
__device__ __forceinline__ float norm_scale(float squares, int hidden, float eps) {
  return 1.f / sqrtf(squares / hidden + eps);
}

/// A thread's columns of row * scale * norm_weight.
__device__ __forceinline__ uint4 normed(const float* row, float scale, const uint4& norm_weight) {
  float w[kVector];
  widen({{norm_weight.x, norm_weight.y, norm_weight.z, norm_weight.w}}, w);
  return {
      pack_bf16(row[0] * scale * w[0], row[1] * scale * w[1]), pack_bf16(row[2] * scale * w[2], row[3] * scale * w[3]),
      pack_bf16(row[4] * scale * w[4], row[5] * scale * w[5]), pack_bf16(row[6] * scale * w[6], row[7] * scale * w[7])};
}

/// out = row * scale * norm_weight. A thread only reads what it has written itself.
__device__ __forceinline__ void write_row(const float* row, const uint4* norm_weight, float scale, bf16* out,
                                          int hidden) {
  for (int at = threadIdx.x * kVector; at < hidden; at += kTurnColumns)
    *reinterpret_cast<uint4*>(out + at) = normed(row + at, scale, norm_weight[at / kVector]);
}

/// write_row in FP8.
__device__ __forceinline__ void write_fp8_row(const float* row, const uint4* norm_weight, float scale,
                                              const fp8::RowsOut& out, int at_row, int hidden) {
  for (int first = threadIdx.x / 32 * kWarpColumns; first < hidden; first += kTurnColumns) {
    const int at = first + static_cast<int>(threadIdx.x) % 32 * kVector, group = at / fp8::kGroup;
    const bool present = at < hidden;
    const uint4 columns = present ? normed(row + at, scale, norm_weight[at / kVector]) : uint4{0, 0, 0, 0};
    uint8_t* q = out.q + static_cast<size_t>(at_row) * hidden + group * fp8::kGroup;
    fp8::store_group(q, out.scale(at_row, group), columns, present, out.quads);
  }
}

/// residual += the sum of `source`, out = norm(residual). A Source has `parts()` parts that it adds to a row.
/// `fetch(to, unit, left)` copies one part for a warp's columns to kBytes, and `add(from, part, sum)` adds the lane's
/// columns. Whole warps call both.
template <class Source, int kStages>
__global__ void __launch_bounds__(kThreads, 2)
    norm_rows(const __grid_constant__ Source source, const __grid_constant__ NormRows a) {
  constexpr uint32_t kStage = kResidualBytes + Source::kBytes;
  extern __shared__ __align__(16) uint8_t smem[];
  __shared__ float warp_parts[2][kNormWarps];
  uint8_t* ring = smem + threadIdx.x / 32 * kStages * kStage;
  float* kept = reinterpret_cast<float*>(smem + kNormWarps * kStages * kStage);
  uint4* norm_weight = reinterpret_cast<uint4*>(kept + a.hidden);
  for (int at = threadIdx.x; at < a.hidden / kVector; at += kThreads)
    norm_weight[at] = __ldg(reinterpret_cast<const uint4*>(a.weight) + at);
  pdl_launch_dependents();
  pdl_wait();
  const int parts = source.parts();
  Unit ahead, now;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s, ahead.advance(parts, a.hidden)) fetch_unit(source, a, ahead, ring + s * kStage);
  float x[kVector], sum[kVector], squares = 0.f;
  for (int s = 0, turn = 0; now.row < a.rows; s = s + 1 == kStages ? 0 : s + 1) {
    uint8_t* stage = ring + s * kStage;
    cp_async_wait<kStages - 1>();
    __syncwarp();
    if (now.part == 0) {
      read_columns(stage, x);
#pragma unroll
      for (float& v : sum) v = 0.f;
    }
    source.add(stage + kResidualBytes, now.part, sum);
    __syncwarp();
    fetch_unit(source, a, ahead, stage);
    ahead.advance(parts, a.hidden);
    const int row = now.row;
    const size_t base = static_cast<size_t>(row) * a.hidden;
    const int column = now.column(), left = a.hidden - column;
    now.advance(parts, a.hidden);
    if (now.part != 0) continue;
    if constexpr (Source::kBytes > 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] += sum[i];
    }
    keep_columns<(Source::kBytes > 0)>(x, kept + column, a.residual + base + column, left);
    if (static_cast<int>(threadIdx.x) % 32 * kVector < left) add_squares(x, squares);
    if (now.turn != 0) continue;
    const float scale = norm_scale(block_sum(squares, warp_parts[turn]), a.hidden, a.eps);
    if (a.fp8.scales == nullptr) write_row(kept, norm_weight, scale, a.out + base, a.hidden);
    else write_fp8_row(kept, norm_weight, scale, a.fp8, row, a.hidden);
    squares = 0.f;
    turn ^= 1;
  }
}

/// Launches with kBlocks blocks per SM and kStages stages, or with half as many stages, and so on, if they do not fit.
template <int kStages, int kBlocks, class Source>
cudaError_t launch_norm(const Source& source, const NormRows& a, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const size_t ring = static_cast<size_t>(kNormWarps) * kStages * (kResidualBytes + Source::kBytes);
  const size_t smem = ring + static_cast<size_t>(a.hidden) * (sizeof(float) + sizeof(bf16));
  if constexpr (kStages > 1) {
    const size_t fixed = sizeof(float) * 2 * kNormWarps;
    if (smem + fixed > static_cast<size_t>(limits.block_smem))
      return launch_norm<kStages / 2, kBlocks>(source, a, stream);
  }
  const int blocks = kBlocks * limits.sms;
  const Launch l = {dim3(a.rows < blocks ? a.rows : blocks), dim3(kThreads), stream, smem};
  return launch(norm_rows<Source, kStages>, l, source, a);
}

}  // namespace moe
