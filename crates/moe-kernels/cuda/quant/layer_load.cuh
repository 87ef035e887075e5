// A warp's own stream of weights in the quantised layer kernel. The warp goes through all its tiles of both products in
// steps of 128 columns, and copies them to a ring that no other warp uses. So there is no barrier between a copy and a
// product, and each warp starts its own copies.
#pragma once

#include "quant/layer_shared.cuh"

namespace moe::quant_layer {

#if MOE_HAS_TMA

/// A row of tiles of an active expert.
struct Tile {
  int active, row;
};

/// The tiles of a warp, in passes. First come the tiles of gate and up: teams take the block's tiles in turn, and a
/// warp has its share of their columns. Then, for each row of tiles of the output that the block owns, come halves of
/// the active experts' tiles.
template <class Form>
struct Tiles {
  const Args& a;
  Tile start;  // the first tile of gate and up
  int num_active;
  int first, last;  // rows of tiles of the output

  __device__ __forceinline__ Tiles(const Args& a, int team, int num_active) : a(a), num_active(num_active) {
    const int at = blockIdx.x + gridDim.x * ((team + Form::kTurn) % Form::kTeams);
    start.active = at / a.per_expert, start.row = at - start.active * a.per_expert;
    first = a.first_unit(blockIdx.x), last = a.first_unit(blockIdx.x + 1);
  }
  __device__ __forceinline__ bool down(int pass) const { return pass >= first; }
  __device__ __forceinline__ Tile begin(int pass) const {
    return down(pass) ? Tile{static_cast<int>(threadIdx.x / 64), pass} : start;
  }
  __device__ __forceinline__ bool has(Tile t) const { return t.active < num_active; }
  /// The team's next tile of gate and up after `t`.
  __device__ __forceinline__ Tile behind(Tile t) const {
    t.active += a.next_experts, t.row += a.next_row;
    if (t.row >= a.per_expert) t.row -= a.per_expert, ++t.active;
    return t;
  }
  __device__ __forceinline__ Tile next(Tile t, bool down) const {
    return down ? Tile{t.active + kWarps / 2, t.row} : behind(t);
  }
  /// The columns of a tile that belong to this warp.
  __device__ __forceinline__ int2 columns(bool down) const {
    const int warp = threadIdx.x / 32;
    return down ? share_of<2>(a.inter, warp % 2) : share_of<Form::kTeam>(a.hidden, warp % Form::kTeam);
  }
};

/// Starts the copies of a warp's steps, in the order of its tiles.
template <class Kind, class Form>
struct Loader {
  static constexpr int kDepth = depth(Kind::kFormat);

  const Args& a;
  const Shared& s;
  const Tiles<Form>& tiles;
  quant::WarpRing<Kind, kDepth> ring;
  int pass;
  Tile tile;             // the next one
  int k = 0, end = 0;    // of the tile whose columns are being requested
  quant::TileRows rows;  // the rows of tiles of this pass's product
  quant::TileRow row;

  __device__ __forceinline__ Loader(const Args& a, const Shared& s, const Tiles<Form>& tiles)
      : a(a),
        s(s),
        tiles(tiles),
        ring(s.base + s.l.ring + threadIdx.x / 32 * quant::WarpRing<Kind, kDepth>::kBytes),
        pass(tiles.first - 1),
        tile(tiles.begin(pass)),
        rows(a.w13, Kind::kFormat) {}

  /// Moves to the next tile of which this warp has a part, if there is one.
  __device__ __forceinline__ void open() {
    while (pass < tiles.last) {
      if (!tiles.has(tile)) {
        if (++pass >= tiles.last) return;
        tile = tiles.begin(pass);
        if (pass == tiles.first) rows = quant::TileRows(a.w2, Kind::kFormat);
        continue;
      }
      const bool down = tiles.down(pass);
      const Tile t = tile;
      tile = tiles.next(t, down);
      const int2 columns = tiles.columns(down);
      if (columns.x == columns.y) continue;
      mbarrier_wait(a.early() ? s.expert_full(t.active) : s.active_full(), 0);
      const uint32_t expert = s.expert()[t.active];
      if (expert == kNone) continue;
      row = rows.at(expert * (down ? a.w2.n_tiles : a.w13.n_tiles) + t.row);
      k = columns.x, end = columns.y;
      return;
    }
  }

  /// Starts the copy of the next step, if there is one.
  __device__ __forceinline__ void ask() {
    if (k == end) open();
    if (k == end) return ring.skip();
    const int columns = min(quant::kWideStep, end - k);
    ring.copy(rows, row, k, columns);
    k += columns;
  }
};

#endif  // MOE_HAS_TMA

}  // namespace moe::quant_layer
