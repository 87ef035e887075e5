// The warps of the weight-streaming expert kernels that multiply, and what they do with their results.
#pragma once

#include "experts/epilogue.cuh"
#include "experts/stream_load.cuh"

namespace moe::stream {

/// Stores this warp's part of a tile in shared memory and waits for the parts of the other warps. Returns the sum of
/// all parts, in warp order, of one weight row and column.
template <int kPass, class Weights>
__device__ __forceinline__ auto reduce(const Block<Weights>& b, int buffer, const float (&acc)[kPass / 8][4]) {
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

/// Calls f(weight row, column) for the results of a tile, spread over the consumers' threads. A thread's row is always
/// the same one, threadIdx.x % rows: `rows` is a power of two.
template <class F>
__device__ __forceinline__ void for_each_result(int rows, int columns, F f) {
  for (int i = threadIdx.x; i < rows * columns; i += kConsumers * 32) f(i % rows, i / rows);
}

/// The biases of the rows of which for_each_result gives results to this thread.
template <class Weights>
__device__ __forceinline__ auto row_biases(const Block<Weights>& b, int product, int expert, int tile) {
  constexpr int kRows = kTileRows / 2;
  const auto& e = b.a.w.epilogue;
  const int thread = static_cast<int>(threadIdx.x);
  return product == 0 ? e.gate_up(expert, b.a.inter, tile * kRows + thread % kRows)
                      : e.down(expert, b.a.hidden, tile * kTileRows + thread % kTileRows);
}

/// The consuming warps go through all runs of this block.
template <int kPass, class Weights>
__device__ void consume(const Block<Weights>& b) {
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
      const auto biases = row_biases(b, product, group.expert, tile);
      float acc[kPass / 8][4];
      b.a.w.template multiply<kPass>(b, product, group.expert, tile, b.rows(product, i, kPass), at, acc);
      const auto sum = reduce<kPass>(b, buffer, acc);
      if (product == 0) {
        constexpr int kRows = kTileRows / 2;
        for_each_result(kRows, group.rows, [&](int r, int n) {
          bf16* to = b.a.act + static_cast<size_t>(b.slot(group.first + n)) * b.a.inter + tile * kRows + r;
          *to = __float2bfloat16(b.a.w.epilogue.activate(sum(r, n), sum(r + kRows, n), biases));
        });
      } else {
        for_each_result(kTileRows, group.rows, [&](int r, int n) {
          const size_t slot = b.slot(group.first + n);
          b.a.slot_rows[slot * b.a.hidden + tile * kTileRows + r] = b.a.w.epilogue.low(sum(r, n), biases);
        });
      }
    }
    release_to_copies(b.rows_empty(place));
  });
}

}  // namespace moe::stream
