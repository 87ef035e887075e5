// The warps of the weight-streaming expert kernel that multiply, and what becomes of their results.
#pragma once

#include "experts/stream_load.cuh"

namespace moe::stream {

/// One 16-row tile times the rows at `rows`: this warp's steps along K, from ring to registers.
template <int kPass>
__device__ __forceinline__ void multiply(const Block& b, int product, const uint8_t* rows, Cursor& at,
                                         float (&acc)[kPass / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int depth = b.a.depth(product), chunk = b.a.chunk[product];
  // Gate and up rows lie in two stages, rows of w2 in one.
  const bool upper = product == 0 && lane % 16 >= 8;
  const uint32_t weight_at = (lane % 16 - (upper ? 8 : 0)) * padded(chunk) + lane / 16 * 16;
  // Matrices for ldmatrix: (columns 0-7, K 0-7), (0-7, 8-15), then the same of columns 8-15.
  const uint32_t stride = padded(depth);
  const uint8_t* row = rows + (lane % 8 + (kPass > 8 ? lane / 16 * 8 : 0)) * stride + lane / 8 % 2 * 16;
  // Two chains of sums, for every other step: an mma that waits for the one before takes twice as long.
  float odd[kPass / 8][4];
#pragma unroll
  for (int n = 0; n < kPass / 8; ++n)
    for (int c = 0; c < 4; ++c) acc[n][c] = odd[n][c] = 0;
  for (int k = 0; k < depth; k += chunk) {
    const Cursor first = at;
    mbarrier_wait(b.full(at.stage), at.parity);
    if (product == 0) {
      at.advance(b.a.stages);
      mbarrier_wait(b.full(at.stage), at.parity);
    }
    const uint8_t* weights = b.stage(upper ? at.stage : first.stage) + weight_at;
    const int steps = min(chunk, depth - k) / 16;
    const auto step = [&](int s, float (&sum)[kPass / 8][4]) {
      uint32_t w[4];
      ldmatrix_x4(w, weights + s * 32);
      if constexpr (kPass == 8) {
        uint32_t x[2];
        ldmatrix_x2(x, row + (k + s * 16) * 2);
        mma_bf16(sum[0], w, x[0], x[1]);
      } else {
#pragma unroll
        for (int n = 0; n < kPass / 16; ++n) {
          uint32_t x[4];
          ldmatrix_x4(x, row + n * 16 * stride + (k + s * 16) * 2);
          mma_bf16(sum[2 * n], w, x[0], x[1]);
          mma_bf16(sum[2 * n + 1], w, x[2], x[3]);
        }
      }
    };
#pragma unroll 2
    for (int s = warp; s < steps; s += 2 * kConsumers) {
      step(s, acc);
      if (s + kConsumers < steps) step(s + kConsumers, odd);
    }
    release_to_copies(b.empty(first.stage));
    if (product == 0) release_to_copies(b.empty(at.stage));
    at.advance(b.a.stages);
  }
#pragma unroll
  for (int n = 0; n < kPass / 8; ++n)
    for (int c = 0; c < 4; ++c) acc[n][c] += odd[n][c];
}

/// Leaves this warp's part of a tile in shared memory and waits for the others'. Returns the sum of all
/// parts, in warp order, of one weight row and column.
template <int kPass>
__device__ __forceinline__ auto reduce(const Block& b, int buffer, const float (&acc)[kPass / 8][4]) {
  constexpr int kStride = kPass + 4, kTile = kTileRows * kStride;
  float* partial = reinterpret_cast<float*>(b.smem + b.l.partial) + buffer * kConsumers * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* own = partial + warp * kTile + lane / 4 * kStride + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kPass / 8; ++n) {
    *reinterpret_cast<float2*>(own + n * 8) = {acc[n][0], acc[n][1]};
    *reinterpret_cast<float2*>(own + n * 8 + 8 * kStride) = {acc[n][2], acc[n][3]};
  }
  named_barrier(1, kConsumers * 32);
  return [partial](int r, int n) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) v += partial[w * kTile + r * kStride + n];
    return v;
  };
}

/// Calls f(weight row, column) for the results of a tile, spread over the consumers' threads.
template <class F>
__device__ __forceinline__ void for_each_result(int rows, int columns, F f) {
  for (int i = threadIdx.x; i < rows * columns; i += kConsumers * 32) f(i % rows, i / rows);
}

/// The consuming warps: all runs of this block.
template <int kPass>
__device__ void consume(const Block& b) {
  Cursor at;
  int buffer = 0;
  uint32_t full_parity[2] = {0, 0};
  for_each_run_and_ticket(b, [&](int product, const Run& run, int i) {
    const Group group = b.group(run.group);
    const int place = product == 0 ? 0 : i % 2;
    mbarrier_wait(b.rows_full(place), place == 0 ? full_parity[0] : full_parity[1]);
    if (place == 0) full_parity[0] ^= 1;
    else full_parity[1] ^= 1;
    for (int tile = run.first; tile < run.end; ++tile, buffer ^= 1) {
      float acc[kPass / 8][4];
      multiply<kPass>(b, product, b.rows(product, i, kPass), at, acc);
      const auto sum = reduce<kPass>(b, buffer, acc);
      if (product == 0) {
        constexpr int kRows = kTileRows / 2;
        for_each_result(kRows, group.rows, [&](int r, int n) {
          const float gate = sum(r, n), up = sum(r + kRows, n);
          bf16* to = b.a.act + static_cast<size_t>(b.slot(group.first + n)) * b.a.inter + tile * kRows + r;
          *to = __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
        });
      } else {
        for_each_result(kTileRows, group.rows, [&](int r, int n) {
          const size_t slot = b.slot(group.first + n);
          b.a.slot_rows[slot * b.a.hidden + tile * kTileRows + r] = sum(r, n);
        });
      }
    }
    release_to_copies(b.rows_empty(place));
  });
}

}  // namespace moe::stream
