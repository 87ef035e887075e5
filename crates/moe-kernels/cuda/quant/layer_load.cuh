// A warp's own stream of weights in the quantised layer kernel: its steps of 128 columns, one after the other through
// all its tiles of both products, come to a ring that no other warp uses. So no barrier stands between a copy and a
// product, and each warp asks for its own.
#pragma once

#include "quant/layer_shared.cuh"

namespace moe::quant_layer {

#if MOE_HAS_TMA

/// A row of tiles of an active expert.
struct Tile {
  int active, row;
};

/// The tiles of a warp, in passes: first the tiles of gate and up, where teams take the block's in turn and a warp has
/// its share of the columns; then, for each row of tiles of the output that the block owns, halves of the active
/// experts' tiles.
template <class Form>
struct Tiles {
  const Args& a;
  Tile start;  // of gate and up
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
  /// The team's next tile of gate and up.
  __device__ __forceinline__ Tile behind(Tile t) const {
    t.active += a.next_experts, t.row += a.next_row;
    if (t.row >= a.per_expert) t.row -= a.per_expert, ++t.active;
    return t;
  }
  __device__ __forceinline__ Tile next(Tile t, bool down) const {
    return down ? Tile{t.active + kWarps / 2, t.row} : behind(t);
  }
  /// A tile's columns that are this warp's.
  __device__ __forceinline__ int2 columns(bool down) const {
    const int warp = threadIdx.x / 32;
    return down ? share_of<2>(a.inter, warp % 2) : share_of<Form::kTeam>(a.hidden, warp % Form::kTeam);
  }
};

/// Asks for a warp's steps, one after the other through its tiles.
template <class Kind, class Form>
struct Loader {
  static constexpr int kDepth = depth(Kind::kFormat);

  const Args& a;
  const Shared& s;
  const Tiles<Form>& tiles;
  quant::WarpRing<Kind, kDepth> ring;
  int pass;
  Tile tile;             // the next one
  int k = 0, end = 0;    // of the tile that is being asked for
  quant::TileRows rows;  // of the product of this pass
  quant::TileRow row;

  __device__ __forceinline__ Loader(const Args& a, const Shared& s, const Tiles<Form>& tiles)
      : a(a),
        s(s),
        tiles(tiles),
        ring(s.base + s.l.ring + threadIdx.x / 32 * quant::WarpRing<Kind, kDepth>::kBytes),
        pass(tiles.first - 1),
        tile(tiles.begin(pass)),
        rows(a.w13, Kind::kFormat) {}

  /// The next tile of which this warp has a part, if there is one.
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

  /// Asks for the next step, if there is one.
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
