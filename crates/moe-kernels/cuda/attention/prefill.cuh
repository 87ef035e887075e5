// What the two prompt kernels share: their arguments, and which rows a block takes.
//
// The rows of a tile are (token, head) pairs of one sequence under one KV head, token by token, so that a group's heads
// share every key: with 8 heads per KV head a tile of 128 is 16 tokens. Which tile a block takes is found on the device
// from query_start_loc: one captured launch serves any division of its rows into sequences.
#pragma once

#include "attention/head.cuh"
#include "quant/fp8_row.cuh"

namespace moe::attention_prefill {

struct Args {
  const bf16* q;
  KvCache cache;
  const uint32_t* query_start_loc;
  const uint32_t* positions;
  const uint32_t* block_tables;
  int max_blocks;
  bf16* out;
  int tokens, sequences, heads;
  float scale;  // the scale times log2 e
  int window;
  // The numbers of (token, head) rows of the sequences that this launch takes; another launch takes the other
  // sequences.
  int least, most;
  uint32_t* counters;            // [2] zero before and after a launch
  bool heads_together;           // whether blocks that run together share rows instead of a KV head
  int blocks;                    // most blocks of the launch, to leave SMs for the next kernel; 0: all SMs
  fp8::RowsOut fp8;              // used instead of `out` if it has scales: heads of 128
  const float* sinks = nullptr;  // [heads]: a term of each row's denominator, or none
  Gates gates = {};              // with heads of 256
};

/// What a block works on. For blocks after the last tile, `sequence` is -1 and `tile` is the number of the block among
/// them.
struct Tile {
  int sequence, tile, extra;  // extra: the number of blocks after the last tile
};

/// Finds tile `wanted` of kRows rows. One warp goes through the sequences, 32 at a time.
template <int kRows>
__device__ __forceinline__ Tile find_tile(const Args& a, int group, int wanted) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < a.sequences; first += 32) {
    const int s = first + lane;
    int tiles = 0;
    if (s < a.sequences) {
      const int rows = static_cast<int>(a.query_start_loc[s + 1] - a.query_start_loc[s]) * group;
      if (rows >= a.least && rows <= a.most) tiles = ceil_div(rows, kRows);
    }
    uint32_t total;
    const int start = before + static_cast<int>(warp_exclusive_sum(tiles, &total));
    const uint32_t hit = __ballot_sync(0xffffffffu, wanted >= start && wanted < start + tiles);
    if (hit != 0) {
      const int at = __ffs(hit) - 1;
      return {first + at, wanted - __shfl_sync(0xffffffffu, start, at), 0};
    }
    before += static_cast<int>(total);
  }
  return {-1, wanted - before, static_cast<int>(gridDim.x) - before};
}

/// The number of tiles of kRows rows. One warp counts them.
template <int kRows>
__device__ __forceinline__ int count_tiles(const Args& a, int group) {
  int tiles = 0;
  for (int s = threadIdx.x % 32; s < a.sequences; s += 32) {
    const int rows = static_cast<int>(a.query_start_loc[s + 1] - a.query_start_loc[s]) * group;
    if (rows >= a.least && rows <= a.most) tiles += ceil_div(rows, kRows);
  }
  return static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(tiles)));
}

/// Zeros in every `step`-th padding row from the `first` on, `width` columns of it. All threads.
__device__ __forceinline__ void zero_padding(const Args& a, int first, int step, int column, int width, int row_width) {
  for (int token = a.query_start_loc[a.sequences] + first; token < a.tokens; token += step) {
    if (a.fp8.scales != nullptr) {
      uint8_t* q = a.fp8.q + static_cast<size_t>(token) * row_width + column;
      for (int i = threadIdx.x; i < width; i += blockDim.x) {
        q[i] = 0;
        if (i % fp8::kGroup == 0) *a.fp8.scale(token, (column + i) / fp8::kGroup) = 0.f;
      }
      continue;
    }
    bf16* row = a.out + static_cast<size_t>(token) * row_width + column;
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = __float2bfloat16_rn(0.f);
  }
}

/// The largest number of tiles of kRows rows: one tile of each sequence may not be full. One more block is for padding
/// rows.
inline int64_t max_tiles(const Args& a, int rows) {
  return static_cast<int64_t>(a.tokens) * (a.heads / a.cache.heads) / rows + a.sequences + 1;
}

/// The launch on warpgroup products (prefill_wgmma.cu).
cudaError_t launch_wgmma(const Args& a, int head_dim, int num_blocks, void* stream);

/// The launch for keys of 192 and values of 128, [kv_heads, all, ..] each: sequence s begins at row bases[s].
cudaError_t launch_expanded(const Args& a, int all, const uint32_t* bases, void* stream);

}  // namespace moe::attention_prefill
