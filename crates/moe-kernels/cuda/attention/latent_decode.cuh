// Latent attention of one new row of each of a few sequences: shared memory of a block, and what it works on
// (latent_decode.cu).
#pragma once

#include "attention/latent.cuh"

namespace moe::attention_latent::decode {

constexpr int kStages = 2;                          // tiles in shared memory
constexpr int kHeads = 16;                          // of a row: columns of the products
constexpr int kGroup = 8;                           // rows of one copy
constexpr int kGroupBytes = kParts * kGroup * 128;  // bytes of 64 columns of a group's rows
constexpr int kGroups = kTile / kGroup;             // groups of a tile
constexpr int kThreads = 256;                       // two warpgroups
constexpr int kWarps = kThreads / 32;
constexpr int kSteps = 2;               // k-steps of each 64 columns whose scores a warpgroup computes
constexpr int kColumns = kValue / 2;    // of a warpgroup's values
constexpr int kEach = kHeads / kWarps;  // heads of a warp's softmax
constexpr int kPitch = kTile + 4;       // floats between the scores of two heads, without bank conflicts

/// Shared memory of a block. It is more than half of an SM's, so that two blocks do not share an SM while others are
/// idle.
struct Block {
  static constexpr int kHeader = 1024;
  static constexpr int kQuery = kHeader + kStages * kTileBytes;
  static constexpr int kWeights = kQuery + kHeads / kGroup * kGroupBytes;
  static constexpr int kScores = kWeights + kHeads * kTile * 2;
  static constexpr int kBytes = kScores + 2 * kHeads * kPitch * 4;
  static_assert(kWeights % 1024 == 0 && kGroups * kGroupBytes == kTileBytes);
  static_assert(kBytes == 177664, "the plan has this size, too: src/plan/attention.rs");

  uint8_t* smem;

  __device__ __forceinline__ uint64_t* tile_full(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* query_full() const { return tile_full(kStages); }
  /// [kHeads] factors by which a new maximum scales the sums.
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(smem + 64); }
  __device__ __forceinline__ uint8_t* tile(int s) const { return smem + kHeader + s * kTileBytes; }
  __device__ __forceinline__ uint8_t* query() const { return smem + kQuery; }
  /// [kHeads, kTile] bf16, swizzled.
  __device__ __forceinline__ uint8_t* weights() const { return smem + kWeights; }
  /// [warpgroups, kHeads, kPitch]
  __device__ __forceinline__ float* scores() const { return reinterpret_cast<float*>(smem + kScores); }
};

/// A split's positions of one row: `tiles` from `begin` on, of which the row sees [from, end).
struct Range {
  int begin, tiles, from, end;
  int used;  // splits that have positions
};

/// Every split has the same number of tiles; if there are fewer positions, the first splits have them. A captured
/// launch serves any length.
__device__ __forceinline__ Range range_of(int position, int window, int split, int splits) {
  Range r;
  r.end = position + 1;
  r.from = window > 0 ? max(0, r.end - window) : 0;
  const int first = r.from / kTile, all = ceil_div(r.end, kTile) - first, each = ceil_div(all, splits);
  r.begin = (first + split * each) * kTile;
  r.tiles = max(0, min(each, all - split * each));
  r.used = ceil_div(all, each);
  return r;
}

}  // namespace moe::attention_latent::decode
