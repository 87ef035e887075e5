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
  // Two chains of sums, for every other step: an mma that waits for the one before takes twice as long.
  float odd[kPass / 8][4];
#pragma unroll
  for (int n = 0; n < kPass / 8; ++n)
    for (int c = 0; c < 4; ++c) acc[n][c] = odd[n][c] = 0;
  for (int k = 0; k < depth; k += chunk) {
    mbarrier_wait(b.full(at.stage), at.parity);
    const uint8_t* weights = b.stage(at.stage) + weight_at;
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
    __syncwarp();
    if (lane == 0) mbarrier_arrive(b.empty(at.stage));
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

/// The consumers of one block; `at` and `buffer` run on through both products.
template <int kPass>
struct Consumer {
  const Block& b;
  Flags flags;
  Cursor at;
  int buffer = 0;

  __device__ void sync() { named_barrier(1, kConsumers * 32); }

  /// A tile of gate and up rows: activations of this unit, to memory.
  template <class Sum>
  __device__ __forceinline__ void write_act(const Unit& unit, int tile, Sum sum) {
    constexpr int kRows = kTileRows / 2;
    const auto activate = [&](int r, int n) {
      const float gate = sum(r, n), up = sum(r + kRows, n);
      return gate / (1.0f + __expf(-gate)) * up;
    };
    if (b.a.few) {
      for_each_result(kRows / 2, unit.rows, [&](int pair, int n) {
        const size_t at_word = (static_cast<size_t>(b.slot(unit.first + n)) * b.a.inter + tile * kRows) / 2 + pair;
        store_relaxed(flags.act + at_word, pack_bf16(activate(2 * pair, n), activate(2 * pair + 1, n)), flags.epoch);
      });
    } else {
      for_each_result(kRows, unit.rows, [&](int r, int n) {
        b.a.act[static_cast<size_t>(b.slot(unit.first + n)) * b.a.inter + tile * kRows + r] = __float2bfloat16(activate(r, n));
      });
    }
  }

  /// This block's share of a product, by units.
  __device__ void product(int p, uint32_t& parity) {
    const bool stay = b.one_row();
    if (stay && b.units > 0) mbarrier_wait(b.rows_full(), 0);
    for_each_run(b.units, b.a.tiles(p), [&](int u, int first, int end) {
      const Unit unit = b.unit(u);
      if (!stay) {
        mbarrier_wait(b.rows_full(), parity);
        parity ^= 1;
      }
      for (int tile = first; tile < end; ++tile, buffer ^= 1) {
        float acc[kPass / 8][4];
        multiply<kPass>(b, p, 0, at, acc);
        const auto sum = reduce<kPass>(b, buffer, acc);
        if (p == 0) {
          write_act(unit, tile, sum);
        } else {
          for_each_result(kTileRows, unit.rows, [&](int r, int n) {
            const size_t slot = b.slot(unit.first + n);
            b.a.slot_rows[slot * b.a.hidden + tile * kTileRows + r] = sum(r, n);
          });
        }
      }
      __syncwarp();
      if (!stay && threadIdx.x % 32 == 0) mbarrier_arrive(b.rows_empty());
    });
  }

  /// Brings the activations of all slots, whoever computed them, to shared memory. Each 8 bytes carry the
  /// epoch beside their two values, so there is no flag to wait for before the data can be fetched.
  __device__ void collect_act() {
    const Unit last = b.unit(b.units - 1);
    const int quads = b.a.inter / 4, total = (last.first + last.rows) * quads;
    constexpr int kBatch = 8;  // loads in flight
    sync();  // all are done with the token rows, which lie in the same place
    for (int first = threadIdx.x; first < total; first += kBatch * kConsumers * 32) {
      ulonglong2 v[kBatch];
      const auto from = [&](int i) {
        return flags.act + (static_cast<size_t>(b.slot(i / quads)) * quads + i % quads) * 2;
      };
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kConsumers * 32;
        if (i < total) v[j] = load_relaxed_pair(from(i));
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kConsumers * 32;
        if (i >= total) break;
        while (v[j].x >> 32 != flags.epoch || v[j].y >> 32 != flags.epoch) v[j] = load_relaxed_pair(from(i));
        *reinterpret_cast<uint2*>(b.smem + b.l.rows + i / quads * padded(b.a.inter) + i % quads * 8) = {
            static_cast<uint32_t>(v[j].x), static_cast<uint32_t>(v[j].y)};
      }
    }
    sync();
  }

  /// Down product by output columns: the sum over k is this block's own.
  __device__ void columns() {
    float* results = reinterpret_cast<float*>(b.smem + b.l.results);  // [place][16]
    if (b.units == 0) {
      const Range zeros = share(b.a.tiles(1));
      for (int tile = zeros.begin; tile < zeros.end; ++tile) write_columns(results, tile);
      return;
    }
    collect_act();
    for_each_few(b, [&](int u, int tile) {
      const Unit unit = b.unit(u);
      float acc[kPass / 8][4];
      multiply<kPass>(b, 1, unit.first, at, acc);
      const auto sum = reduce<kPass>(b, buffer, acc);
      buffer ^= 1;
      for_each_result(kTileRows, unit.rows, [&](int r, int n) { results[(unit.first + n) * kTileRows + r] = sum(r, n); });
      if (u + 1 == b.units) write_columns(results, tile);
    });
  }

  __device__ __forceinline__ void write_columns(const float* results, int tile) {
    const Routing routing(b.smem, b.l);
    sync();
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
