// The warps of the weight-streaming expert kernel that bring weights and rows to shared memory.
#pragma once

#include "experts_stream_block.cuh"

namespace moe::stream {

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
      const int expert = b.unit(u).expert;
      for (int tile = first; tile < end; ++tile) load_tile(b, product, expert, tile, at);
    });
  };
  load_runs(0);
  if (b.a.few) for_each_few(b, [&](int u, int tile) { load_tile(b, 1, b.unit(u).expert, tile, at); });
  else load_runs(1);
}

/// Loads the rows of each run, and tells other blocks which activations are written: the consumers, who
/// release a run's rows after their last write, need not wait for that.
__device__ void load_rows(const Block& b) {
  const Args& a = b.a;
  if (b.one_row()) {
    if (b.units > 0) copy_rows(b.smem + b.l.rows, b.row_stride(0), min(a.pass, a.slots()), a.hidden * 2, b.rows_full(), [&](int) { return a.x; });
    return;
  }
  const Flags flags(a, b.left);
  uint32_t parity = 1;
  int written = -1, tiles = 0;  // unit and number of tiles that are written but not announced
  const auto wait_for_consumers = [&] {
    mbarrier_wait(b.rows_empty(), parity);
    parity ^= 1;
  };
  const auto announce = [&] {
    if (written >= 0 && !a.few && threadIdx.x % 32 == 0) {
      fence_async_proxy();
      add_release(flags.unit(written), tiles);
    }
    written = -1;
  };
  for_each_run(b.units, a.tiles(0), [&](int u, int first, int end) {
    wait_for_consumers();
    const Unit unit = b.unit(u);
    copy_rows(b.smem + b.l.rows, b.row_stride(0), unit.rows, a.hidden * 2, b.rows_full(), [&](int r) {
      return a.x + static_cast<size_t>(b.slot(unit.first + r) / a.top_k) * a.hidden;
    });
    announce();
    written = u, tiles = end - first;
  });
  if (a.few) return;
  wait_for_consumers();
  announce();
  bool free = true;
  for_each_run(b.units, a.tiles(1), [&](int u, int, int) {
    if (!free) wait_for_consumers();
    free = false;
    while (load_acquire(flags.unit(u)) < static_cast<uint32_t>(a.tiles(0))) {
    }
    fence_async_proxy();
    const Unit unit = b.unit(u);
    copy_rows(b.smem + b.l.rows, b.row_stride(1), unit.rows, a.inter * 2, b.rows_full(), [&](int r) {
      return a.act + static_cast<size_t>(b.slot(unit.first + r)) * a.inter;
    });
  });
}

}  // namespace moe::stream
