// What the roles of a block of the weight-streaming expert kernel share: its tiles, flags and shared memory.
#pragma once

#include "experts_stream.cuh"

namespace moe::stream {

/// Calls f(unit, first tile, end tile) for each run of tiles of one unit in this block's share of a product;
/// tiles count within the unit. 32-bit arithmetic: it runs in one warp before the first load.
template <class F>
__device__ __forceinline__ void for_each_run(int units, int tiles, F f) {
  const Range range = share(units * tiles);
  int unit = range.begin / tiles, first = range.begin % tiles;
  for (int left = range.end - range.begin; left > 0; first = 0, ++unit) {
    const int end = min(tiles, first + left);
    f(unit, first, end);
    left -= end - first;
  }
}

/// This launch's flags in the shared buffer.
struct Flags {
  uint32_t* set;     // grid barrier, one flag per unit
  uint32_t* other;   // the set of the launches before and after
  uint64_t* act;     // few slots: [kFewSlots, I / 2] of two bf16 and the epoch
  uint32_t epoch;    // differs from one launch to the next and is never 0

  /// `left` is the first word pair of the buffer: how many blocks have left, over all launches. It grows by
  /// gridDim.x with each launch and cannot reach the next multiple while a block is here.
  __device__ Flags(const Args& a, uint64_t left) {
    const uint64_t launches = left / gridDim.x;
    uint32_t* sets = a.flags + kFlagHeader;
    set = sets + (launches % 2 == 0 ? 0 : a.flag_set);
    other = sets + (launches % 2 == 0 ? a.flag_set : 0);
    act = reinterpret_cast<uint64_t*>(sets + 2 * a.flag_set);
    epoch = static_cast<uint32_t>(launches % 0xffffffffu) + 1;
  }

  __device__ uint32_t* arrived() const { return set; }
  __device__ uint32_t* unit(int u) const { return set + kSetHeader + u; }
};

/// Everything the roles of a block share.
struct Block {
  const Args& a;
  Layout l;
  uint8_t* smem;
  uint64_t left;
  int units;

  __device__ uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(smem) + stage; }
  __device__ uint64_t* empty(int stage) const { return full(kMaxStages + stage); }
  __device__ uint64_t* rows_full() const { return full(2 * kMaxStages); }
  __device__ uint64_t* rows_empty() const { return full(2 * kMaxStages + 1); }
  __device__ uint8_t* stage(int i) const { return smem + l.stage + i * l.stage_bytes; }
  __device__ Unit unit(int u) const { return Routing(smem, l).units[u]; }
  __device__ int slot(int place) const { return Routing(smem, l).sorted[place]; }
  __device__ uint32_t row_stride(int product) const { return product == 1 && a.few ? padded(a.inter) : l.row_stride; }
  /// One token: every unit multiplies the same row, which is loaded once and stays.
  __device__ bool one_row() const { return a.few && a.tokens == 1; }
};

/// Calls f(unit, tile) for every tile of the down product's share where a block owns whole columns.
template <class F>
__device__ __forceinline__ void for_each_few(const Block& b, F f) {
  const Range columns = share(b.a.tiles(1));
  for (int tile = columns.begin; tile < columns.end; ++tile)
    for (int u = 0; u < b.units; ++u) f(u, tile);
}

}  // namespace moe::stream
