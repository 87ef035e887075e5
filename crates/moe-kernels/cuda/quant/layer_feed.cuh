// A warp's own stream of weights in the quantised layer kernel: its steps of 128 columns, one after the other through
// all its tiles of both products, come to a ring that no other warp uses. So no barrier stands between a copy and a
// product, and each warp asks for its own.
#pragma once

#include "quant/layer_shared.cuh"

namespace moe::quant_layer {

#if MOE_SM90

/// The tiles of a warp, in passes: first those of gate and up, of which it takes a half, with the warp beside it; then,
/// for each row of tiles of the output that the block owns, halves of the active experts' ones.
struct Tiles {
  int first_tile, total;  // of gate and up, of the block's pairs of warps
  int units;              // halves of active experts
  int first, last;        // rows of tiles of the output

  __device__ __forceinline__ Tiles(const Args& a, int num_active) {
    // The first warps choose the experts and come last.
    const int pair = (threadIdx.x / 64 + kPairs - 2) % kPairs;
    first_tile = blockIdx.x + gridDim.x * pair;
    total = num_active * (a.inter / kOutputs);
    units = 2 * num_active;
    first = a.first_unit(blockIdx.x), last = a.first_unit(blockIdx.x + 1);
  }
  __device__ __forceinline__ bool down(int pass) const { return pass >= first; }
  __device__ __forceinline__ int begin(int pass) const {
    return down(pass) ? static_cast<int>(threadIdx.x / 32) : first_tile;
  }
  __device__ __forceinline__ int end(int pass) const { return down(pass) ? units : total; }
  __device__ __forceinline__ int each(int pass) const {
    return down(pass) ? kWarps : kPairs * static_cast<int>(gridDim.x);
  }
};

/// Asks for a warp's steps, one after the other through its tiles.
template <class Kind>
struct Feed {
  static constexpr int kDepth = depth(Kind::kFormat);

  const Args& a;
  const Shared& s;
  const Tiles& tiles;
  quant::WarpRing<Kind, kDepth> ring;
  int pass, at;          // of the next tile
  int k = 0, end = 0;    // of the tile that is being asked for
  quant::TileRows rows;  // of the product of this pass
  quant::TileRow row;

  __device__ __forceinline__ Feed(const Args& a, const Shared& s, const Tiles& tiles)
      : a(a),
        s(s),
        tiles(tiles),
        ring(s.base + s.l.ring + threadIdx.x / 32 * quant::WarpRing<Kind, kDepth>::kBytes),
        pass(tiles.first - 1),
        at(tiles.first_tile),
        rows(a.w13, Kind::kFormat) {}

  /// The next tile of which this warp has a part, if there is one.
  __device__ __forceinline__ void open() {
    while (pass < tiles.last) {
      if (at >= tiles.end(pass)) {
        if (++pass >= tiles.last) return;
        at = tiles.begin(pass);
        if (pass == tiles.first) rows = quant::TileRows(a.w2, Kind::kFormat);
        continue;
      }
      const bool down = tiles.down(pass);
      const int per_expert = a.inter / kOutputs, active = down ? at / 2 : at / per_expert;
      const int of_expert = down ? pass : at - active * per_expert;
      at += tiles.each(pass);
      const int2 columns = half_of(down ? a.inter : a.hidden, threadIdx.x / 32 % 2);
      if (columns.x == columns.y) continue;
      mbarrier_wait(a.early() ? s.expert_full(active) : s.active_full(), 0);
      const uint32_t expert = s.expert()[active];
      if (expert == kNone) continue;
      row = rows.at(expert * (down ? a.w2.n_tiles : a.w13.n_tiles) + of_expert);
      k = columns.x, end = columns.y;
      return;
    }
  }

  /// Asks for the next step, if there is one.
  __device__ __forceinline__ void ask() {
    if (k == end) open();
    if (k == end) return ring.skip();
    const int columns = min(quant::kWideStep, end - k);
    ring.copy(rows, row, k, columns);
    k += columns;
  }
};

#endif  // MOE_SM90

}  // namespace moe::quant_layer
