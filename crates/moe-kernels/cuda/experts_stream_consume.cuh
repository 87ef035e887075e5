// The warps of the weight-streaming expert kernel that multiply, and what becomes of their results.
#pragma once

#include "experts_stream_load.cuh"

namespace moe::stream {

/// One 16-row tile times the rows from `first` on: this warp's steps along K, from ring to registers.
template <int kPass>
__device__ __forceinline__ void multiply(const Block& b, int product, int first, Cursor& at,
                                         float (&acc)[kPass / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int depth = b.a.depth(product), chunk = b.a.chunk[product];
  const uint32_t weight_at = lane % 16 * padded(chunk) + lane / 16 * 16;
  // Matrices for ldmatrix: (columns 0-7, K 0-7), (0-7, 8-15), then the same of columns 8-15.
  const uint32_t stride = b.row_stride(product);
  const uint8_t* row =
      b.smem + b.l.rows + (first + lane % 8 + (kPass > 8 ? lane / 16 * 8 : 0)) * stride + lane / 8 % 2 * 16;
#pragma unroll
  for (auto& c : acc) c[0] = c[1] = c[2] = c[3] = 0;
  for (int k = 0; k < depth; k += chunk) {
    mbarrier_wait(b.full(at.stage), at.parity);
    const uint8_t* weights = b.stage(at.stage) + weight_at;
    const int steps = min(chunk, depth - k) / 16;
#pragma unroll 4
    for (int s = warp; s < steps; s += kConsumers) {
      uint32_t w[4];
      ldmatrix_x4(w, weights + s * 32);
      if constexpr (kPass == 8) {
        uint32_t x[2];
        ldmatrix_x2(x, row + (k + s * 16) * 2);
        mma_bf16(acc[0], w, x[0], x[1]);
      } else {
#pragma unroll
        for (int n = 0; n < kPass / 16; ++n) {
          uint32_t x[4];
          ldmatrix_x4(x, row + n * 16 * stride + (k + s * 16) * 2);
          mma_bf16(acc[2 * n], w, x[0], x[1]);
          mma_bf16(acc[2 * n + 1], w, x[2], x[3]);
        }
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(b.empty(at.stage));
    at.advance(b.a.stages);
  }
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

/// The consumers of one block; `at`, `parity` and `buffer` run on through both products.
template <int kPass>
struct Consumer {
  const Block& b;
  Cursor at;
  uint32_t parity = 0;
  int buffer = 0;

  __device__ void wait_for_rows() {
    mbarrier_wait(b.rows_full(), parity);
    parity ^= 1;
  }

  __device__ __forceinline__ void release_rows() {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(b.rows_empty());
  }

  __device__ void gate_up() {
    constexpr int kRows = kTileRows / 2;
    for_each_run(b.units, b.a.tiles(0), [&](int u, int first, int end) {
      const Unit unit = b.unit(u);
      wait_for_rows();
      for (int tile = first; tile < end; ++tile, buffer ^= 1) {
        float acc[kPass / 8][4];
        multiply<kPass>(b, 0, 0, at, acc);
        if (tile + 1 == end) release_rows();
        const auto sum = reduce<kPass>(b, buffer, acc);
        for_each_result(kRows, unit.rows, [&](int r, int n) {
          const float gate = sum(r, n), up = sum(r + kRows, n);
          bf16* to = b.a.act + static_cast<size_t>(b.slot(unit.first + n)) * b.a.inter + tile * kRows + r;
          *to = __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
        });
      }
      __threadfence();
      fence_async_proxy();
      named_barrier(1, kConsumers * 32);
      if (threadIdx.x == 0) add_release(b.flags + 1 + u, end - first);
    });
  }

  /// Down product by units: rows of slots go to memory.
  __device__ void down() {
    for_each_run(b.units, b.a.tiles(1), [&](int u, int first, int end) {
      const Unit unit = b.unit(u);
      wait_for_rows();
      for (int tile = first; tile < end; ++tile, buffer ^= 1) {
        float acc[kPass / 8][4];
        multiply<kPass>(b, 1, 0, at, acc);
        if (tile + 1 == end) release_rows();
        const auto sum = reduce<kPass>(b, buffer, acc);
        for_each_result(kTileRows, unit.rows, [&](int r, int n) {
          const size_t slot = b.slot(unit.first + n);
          b.a.slot_rows[slot * b.a.hidden + tile * kTileRows + r] = sum(r, n);
        });
      }
    });
  }

  /// Down product by output columns: the sum over k is this block's own.
  __device__ void down_few() {
    float* results = reinterpret_cast<float*>(b.smem + b.l.results);  // [place][16]
    if (b.units > 0) wait_for_rows();
    for_each_few(b, [&](int u, int tile) {
      const Unit unit = b.unit(u);
      float acc[kPass / 8][4];
      multiply<kPass>(b, 1, unit.first, at, acc);
      const auto sum = reduce<kPass>(b, buffer, acc);
      buffer ^= 1;
      for_each_result(kTileRows, unit.rows, [&](int r, int n) { results[(unit.first + n) * kTileRows + r] = sum(r, n); });
      if (u + 1 == b.units) write_columns(results, tile);
    });
    if (b.units > 0) return;
    const Range columns = share(b.a.tiles(1));
    for (int tile = columns.begin; tile < columns.end; ++tile) write_columns(results, tile);
  }

  __device__ __forceinline__ void write_columns(const float* results, int tile) {
    const Routing routing(b.smem, b.l);
    named_barrier(1, kConsumers * 32);
    for_each_result(kTileRows, b.a.tokens, [&](int r, int t) {
      float sum = 0;
      for (int k = 0; k < b.a.top_k; ++k) {
        const int slot = t * b.a.top_k + k, place = routing.places[slot];
        if (place != kNoPlace) sum = fmaf(routing.weights[slot], results[place * kTileRows + r], sum);
      }
      b.a.out[static_cast<size_t>(t) * b.a.hidden + tile * kTileRows + r] = __float2bfloat16(sum);
    });
  }
};

}  // namespace moe::stream
