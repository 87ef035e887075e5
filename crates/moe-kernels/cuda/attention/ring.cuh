// Copies cached keys and values for a warp of the decode kernel, in tiles of 16 positions; no other warp waits for
// them. A place is filled again as soon as it has been read: a tile's values are in flight while its keys are
// multiplied, and the next tile's keys while its values are multiplied.
//
// A tile is in shared memory in the order of the copy engine's 128-byte swizzle: 64 dimensions of its 16 rows, then the
// other dimensions.
#pragma once

#include "attention/head.cuh"
#include "ptx/tensor_map.cuh"

namespace moe {
namespace {

constexpr int kWarps = 4;
constexpr int kKvTile = 16;              // positions of a warp's turn, the rows of a tile
constexpr int kTurn = kKvTile * kWarps;  // positions from one tile of a warp to its next one
constexpr int kMapRows = 0x7fffffff;     // rows are numbers from block tables, so a map needs no end

template <int D>
constexpr int kTileBytes = kKvTile * D * 2;

/// 16-byte chunk `c` of row `r` of a tile.
__device__ __forceinline__ uint32_t tile_at(uint32_t r, uint32_t c) {
  return c / 8 * (kKvTile * 128) + r * 128 + ((c ^ r) % 8 << 4);
}

/// The cached positions that a block takes, and where they are.
struct Span {
  const KvCache& cache;
  const uint32_t* table;
  int kv_head, begin, end;
  int visible;  // positions before this one are outside of the window

  /// The row of a position in the cache.
  __device__ __forceinline__ uint32_t row(int position) const {
    return static_cast<uint32_t>(cache.row(table, position, kv_head));
  }
};

struct KvMaps {
  CUtensorMap k, v;
};

/// A ring that cp.async fills: for blocks of the cache of any size, on every card.
template <int D>
struct CopyRing {
  uint8_t* places;
  const Span& span;
  int tile;      // the tile whose keys are fetched next
  uint32_t row;  // the cache row of its position lane % 16

  __device__ CopyRing(uint8_t* smem, uint64_t*, const KvMaps&, const Span& s)
      : places(smem), span(s), tile(first()), row(0) {}

  __device__ __forceinline__ int first() const { return span.begin + static_cast<int>(threadIdx.x) / 32 * kKvTile; }

  __device__ __forceinline__ void find_row() {
    // For positions that are not visible, a block table may hold anything.
    const int position = max(span.visible, min(tile + static_cast<int>(threadIdx.x) % kKvTile, span.end - 1));
    if (tile < span.end) row = span.row(position);
  }

  /// Each call commits one group, even if there is nothing to fetch, so that the number of groups is the number of
  /// copies.
  __device__ __forceinline__ void load(uint8_t* to, const bf16* from) {
    constexpr int kChunks = D / 8;  // 16-byte chunks of a row
    const int lane = threadIdx.x % 32;
    if (tile < span.end) {
#pragma unroll
      for (int i = 0; i < kKvTile * kChunks / 32; ++i) {
        const int r = i * (32 / kChunks) + lane / kChunks, c = lane % kChunks;
        const size_t source = static_cast<size_t>(__shfl_sync(0xffffffffu, row, r)) * D + c * 8;
        cp_async16_or_zero(to + tile_at(r, c), from + source, tile + r < span.end && tile + r >= span.visible);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void start() {
    find_row();
    load(places, span.cache.k);
    next_values();
  }

  /// The keys and the values of the oldest tile, when they are there.
  __device__ __forceinline__ const uint8_t* keys() const {
    cp_async_wait<1>();
    __syncwarp();
    return places;
  }
  __device__ __forceinline__ const uint8_t* values(int) const {
    cp_async_wait<1>();
    __syncwarp();
    return places + kTileBytes<D>;
  }

  /// The keys have been read: fetches the next ones to their place.
  __device__ __forceinline__ void next_keys() {
    __syncwarp();
    load(places, span.cache.k);
  }
  __device__ __forceinline__ void next_values() {
    __syncwarp();
    load(places + kTileBytes<D>, span.cache.v);
    tile += kTurn;
    find_row();
  }

  /// Waits for the last copies.
  __device__ __forceinline__ void end() const { cp_async_wait<0>(); }
};

#if MOE_HAS_TMA
/// A ring that the copy engine fills: for blocks of the cache that hold whole tiles. One instruction of one lane loads
/// a tile, where cp.async takes eight instructions and eight addresses in each lane.
template <int D>
struct TileRing {
  uint8_t* places;  // keys, values
  uint64_t* full;   // keys, values
  const KvMaps& maps;
  const Span& span;
  int tile;      // the tile whose keys are fetched next
  uint32_t row;  // the cache row of its first position
  uint32_t parity = 0;

  __device__ TileRing(uint8_t* smem, uint64_t* barriers, const KvMaps& m, const Span& s)
      : places(smem), full(barriers), maps(m), span(s), tile(first()), row(0) {}

  /// Tiles with no visible position are not looked up: their entries of a table may hold anything.
  __device__ __forceinline__ int first() const {
    const int own = span.begin + static_cast<int>(threadIdx.x) / 32 * kKvTile;
    return own + kKvTile <= span.visible ? own + kTurn : own;
  }

  __device__ __forceinline__ void load(int place, const CUtensorMap& map) {
    if (tile >= span.end || !elect_one()) return;
    arrive_expecting(full + place, kTileBytes<D>);
    load_box(places + place * kTileBytes<D>, &map, static_cast<int>(row), full + place);
  }

  __device__ __forceinline__ void start() {
    if (elect_one()) {
      prefetch_tensor_map(&maps.k), prefetch_tensor_map(&maps.v);
      mbarrier_init(full, 1), mbarrier_init(full + 1, 1);
      mbarrier_fence_init();
    }
    __syncwarp();
    if (tile < span.end) row = span.row(tile);
    load(0, maps.k);
    next_values(), parity = 0;
  }

  /// The keys of the oldest tile, when they are there.
  __device__ __forceinline__ const uint8_t* keys() const {
    mbarrier_wait(full, parity);
    return places;
  }
  /// Rows of the tile at `at` that are not visible may hold NaN, which no weight would hide: they are set to zero.
  __device__ __forceinline__ const uint8_t* values(int at) const {
    uint8_t* v = places + kTileBytes<D>;
    mbarrier_wait(full + 1, parity);
    if (at + kKvTile <= span.end && at >= span.visible) return v;
    for (int i = threadIdx.x % 32; i < kTileBytes<D> / 16; i += 32) {
      const int r = i % kKvTile;
      if (at + r >= span.end || at + r < span.visible) *reinterpret_cast<uint4*>(v + tile_at(r, i / kKvTile)) = uint4{};
    }
    fence_async_shared();  // the engine fills the place again
    __syncwarp();
    return v;
  }

  /// The keys have been read: fetches the next ones to their place.
  __device__ __forceinline__ void next_keys() {
    __syncwarp();
    load(0, maps.k);
  }
  __device__ __forceinline__ void next_values() {
    __syncwarp();
    load(1, maps.v);
    tile += kTurn, parity ^= 1;
    if (tile < span.end) row = span.row(tile);
  }

  __device__ __forceinline__ void end() const {}
};
#endif  // MOE_HAS_TMA

}  // namespace
}  // namespace moe
