// The warps of the weight-streaming expert kernel that bring weights and rows to shared memory.
#pragma once

#include "experts_stream.cuh"

namespace moe::stream {

/// Everything the roles of a block share.
struct Block {
  const Args& a;
  Layout l;
  uint8_t* smem;
  uint32_t* flags;  // of this launch: barrier arrivals, then one per unit
  int units;

  __device__ uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(smem) + stage; }
  __device__ uint64_t* empty(int stage) const { return full(kMaxStages + stage); }
  __device__ uint64_t* rows_full() const { return full(2 * kMaxStages); }
  __device__ uint64_t* rows_empty() const { return full(2 * kMaxStages + 1); }
  __device__ uint8_t* stage(int i) const { return smem + l.stage + i * l.stage_bytes; }
  __device__ Unit unit(int u) const { return Routing(smem, l).units[u]; }
  __device__ int slot(int place) const { return Routing(smem, l).sorted[place]; }
  __device__ uint32_t row_stride(int product) const {
    return product == 1 && a.few ? padded(a.inter) : l.row_stride;
  }
};

/// Calls f(unit, tile) for every tile of the down product's share where a block owns whole columns.
template <class F>
__device__ __forceinline__ void for_each_few(const Block& b, F f) {
  const Range columns = share(b.a.tiles(1));
  for (int tile = columns.begin; tile < columns.end; ++tile)
    for (int u = 0; u < b.units; ++u) f(u, tile);
}

/// This warp's rows of one tile, stage by stage.
__device__ __forceinline__ void load_tile(const Block& b, int product, int expert, int tile, Cursor& at) {
  constexpr int kRows = kTileRows / kLoaders;
  const int depth = b.a.depth(product), chunk = b.a.chunk[product];
  const int r = (threadIdx.x / 32 - kConsumers) * kRows;  // first row of this warp within the tile
  const bf16* from;
  if (product == 0) {
    const int row = tile * (kTileRows / 2) + r % (kTileRows / 2) + (r < kTileRows / 2 ? 0 : b.a.inter);
    from = b.a.w13 + (static_cast<size_t>(expert) * 2 * b.a.inter + row) * depth;
  } else {
    from = b.a.w2 + (static_cast<size_t>(expert) * b.a.hidden + tile * kTileRows + r) * depth;
  }
  for (int k = 0; k < depth; k += chunk) {
    mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
    copy_strided<kRows>(b.stage(at.stage) + r * padded(chunk), padded(chunk), from + k, depth * 2,
                        min(chunk, depth - k) * 2, b.full(at.stage));
    at.advance(b.a.stages);
  }
}

__device__ void load_weights(const Block& b) {
  Cursor at;
  const auto load_runs = [&](int product) {
    for_each_run(b.units, b.a.tiles(product), [&](int u, int first, int end) {
      for (int tile = first; tile < end; ++tile) load_tile(b, product, b.unit(u).expert, tile, at);
    });
  };
  load_runs(0);
  if (b.a.few) for_each_few(b, [&](int u, int tile) { load_tile(b, 1, b.unit(u).expert, tile, at); });
  else load_runs(1);
}

/// Waits until all blocks have written the unit's activations.
__device__ __forceinline__ void wait_for_unit(const Block& b, int u) {
  while (load_acquire(b.flags + 1 + u) < static_cast<uint32_t>(b.a.tiles(0))) {
  }
  fence_async_proxy();
}

/// Loads the rows of each unit: token rows, then activations as soon as they are there.
__device__ void load_rows(const Block& b) {
  uint32_t parity = 1;
  const auto load = [&](int product, int first, int rows) {
    mbarrier_wait(b.rows_empty(), parity);
    parity ^= 1;
    copy_rows(b.smem + b.l.rows, b.row_stride(product), rows, b.a.depth(product) * 2, b.rows_full(), [&](int r) {
      const uint32_t slot = b.slot(first + r);
      return product == 0 ? b.a.x + static_cast<size_t>(slot / b.a.top_k) * b.a.hidden
                          : b.a.act + static_cast<size_t>(slot) * b.a.inter;
    });
  };
  for_each_run(b.units, b.a.tiles(0), [&](int u, int, int) { load(0, b.unit(u).first, b.unit(u).rows); });
  if (!b.a.few) {
    for_each_run(b.units, b.a.tiles(1), [&](int u, int, int) {
      wait_for_unit(b, u);
      load(1, b.unit(u).first, b.unit(u).rows);
    });
  } else if (b.units > 0) {
    for (int u = 0; u < b.units; ++u) wait_for_unit(b, u);
    const Unit last = b.unit(b.units - 1);
    load(1, 0, last.first + last.rows);
  }
}

}  // namespace moe::stream
