// Products x * w^T of any dtype and shape, for one matrix or for a matrix per expert, in f32.
//
// Two kernels over tiles of grouped rows:
// - `product_rows`: up to 8 rows and one output column per warp; it streams the weights, so few rows cost their bytes.
// - `product_tile`: 64 rows x 64 columns per block from shared memory, 4 x 4 outputs per thread. Per step of K a thread
//   loads 8 floats for 16 multiply-adds, so shared memory bounds it at about half of the f32 peak.
// An epilogue defines what is done with the sums of a row and a column.
#pragma once

#include "any/any.cuh"

namespace moe {

/// Which rows a matrix multiplies. Grouped rows are numbered 0..rows; expert e has the rows offsets[e]..offsets[e + 1].
struct Groups {
  const uint32_t* offsets;  // [experts + 1], or null: one group of all rows
  const uint32_t* in_rows;  // [rows] row of x that a grouped row reads, or null: row i reads row i
  int experts, rows;
  uint32_t x_rows;  // rows of x: an in_row from this number on reads zeros
  bool invariant;   // one kernel for any number of rows, so that a row's bits do not depend on it
  // Not 0: every expert has this number of rows, and its i-th is row i * experts + expert of x. There are no arrays
  // then.
  int each = 0;
};

template <class T>
struct Product {
  const T* x;  // [x_rows, k]
  const T* w;  // [experts, matrices, n, k]
  Groups groups;
  int n, k;
};

/// Up to kRows consecutive grouped rows of one expert; none where `count` is 0.
struct Tile {
  int expert;
  uint32_t first, count;
};

/// Tile number `index`; every warp of a block finds the same tile.
template <int kRows>
__device__ __forceinline__ Tile find_tile(const Groups& g, uint32_t index) {
  const uint32_t rows = g.rows;
  if (g.each > 0) {
    const uint32_t each = g.each, tiles = ceil_div(each, kRows), first = index % tiles * kRows;
    return {static_cast<int>(index / tiles), index / tiles * each + first,
            min(each - first, static_cast<uint32_t>(kRows))};
  }
  if (g.offsets == nullptr) {
    const uint32_t first = index * kRows;
    return {0, first, first < rows ? min(rows - first, static_cast<uint32_t>(kRows)) : 0};
  }
  uint32_t before = 0;
  for (int base = 0; base < g.experts; base += 32) {
    const int e = base + static_cast<int>(threadIdx.x % 32);
    const uint32_t begin = e < g.experts ? min(g.offsets[e], rows) : 0;
    const uint32_t end = e < g.experts ? min(g.offsets[e + 1], rows) : 0;
    const uint32_t tiles = end > begin ? ceil_div(end - begin, kRows) : 0;
    uint32_t total;
    const uint32_t own = before + warp_exclusive_sum(tiles, &total);
    const uint32_t hit = __ballot_sync(0xffffffffu, index >= own && index < own + tiles);
    if (hit != 0) {
      const int lane = __ffs(static_cast<int>(hit)) - 1;
      const uint32_t first = __shfl_sync(0xffffffffu, begin + (index - own) * kRows, lane);
      const uint32_t stop = __shfl_sync(0xffffffffu, end, lane);
      return {base + lane, first, min(stop - first, static_cast<uint32_t>(kRows))};
    }
    before += total;
  }
  return {0, 0, 0};
}

/// The largest number of tiles that the groups can make.
inline int64_t max_tiles(const Groups& g, int tile_rows) {
  if (g.each > 0) return static_cast<int64_t>(g.experts) * ceil_div(g.each, tile_rows);
  if (g.offsets == nullptr) return ceil_div(g.rows, tile_rows);
  return static_cast<int64_t>(g.rows < g.experts ? g.rows : g.experts) + g.rows / tile_rows;
}

/// The index of a grouped row among rows whose experts alternate (`Groups::each`).
__device__ __forceinline__ uint32_t alternating_row(uint32_t row, uint32_t each, uint32_t experts) {
  return row % each * experts + row / each;
}

/// The row of x that a grouped row reads; null if there is none.
template <class T>
__device__ __forceinline__ const T* input_row(const Product<T>& p, uint32_t row) {
  const Groups& g = p.groups;
  const uint32_t at = g.each > 0             ? alternating_row(row, g.each, g.experts)
                      : g.in_rows == nullptr ? row
                                             : g.in_rows[row];
  return at < p.groups.x_rows ? p.x + static_cast<size_t>(at) * p.k : nullptr;
}

template <class T>
__device__ __forceinline__ const T* weight_row(const Product<T>& p, int matrix, int column) {
  return p.w + (static_cast<size_t>(matrix) * p.n + column) * p.k;
}

// ---- few rows

constexpr int kStreamWarps = 8;
constexpr int kStreamRows = 8;

/// Loads kVector consecutive elements, with one 16-byte load if that is more than one.
template <int kVector, class T>
__device__ __forceinline__ void load_elements(const T* from, float (&x)[kVector]) {
  if constexpr (kVector == 1) {
    x[0] = widen(*from);
  } else {
    static_assert(kVector * sizeof(T) == sizeof(uint4), "a vector is 16 bytes");
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    const T* values = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = widen(values[i]);
  }
}

template <int kMatrices, int kVector, class T, class Epilogue>
__global__ void __launch_bounds__(kStreamWarps * 32) product_rows(const Product<T> p, const Epilogue epilogue) {
  pdl_wait();
  const Tile tile = find_tile<kStreamRows>(p.groups, blockIdx.x);
  const int lane = threadIdx.x % 32, column = blockIdx.y * kStreamWarps + threadIdx.x / 32;
  if (tile.count == 0 || column >= p.n) return;
  const T* rows[kStreamRows];
#pragma unroll
  for (uint32_t r = 0; r < kStreamRows; ++r) rows[r] = r < tile.count ? input_row(p, tile.first + r) : nullptr;
  float sum[kStreamRows][kMatrices] = {};
#pragma unroll 2
  for (int at = lane * kVector; at < p.k; at += 32 * kVector) {
    float w[kMatrices][kVector];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
      load_elements<kVector>(weight_row(p, tile.expert * kMatrices + m, column) + at, w[m]);
#pragma unroll
    for (int r = 0; r < kStreamRows; ++r) {
      if (rows[r] == nullptr) continue;
      float x[kVector];
      load_elements<kVector>(rows[r] + at, x);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[r][m] = fmaf(x[i], w[m][i], sum[r][m]);
    }
  }
#pragma unroll
  for (uint32_t r = 0; r < kStreamRows; ++r) {
    if (r >= tile.count) break;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) sum[r][m] = warp_sum(sum[r][m]);
    if (lane == 0) epilogue(tile.expert, tile.first + r, column, sum[r]);
  }
}

// ---- many rows

constexpr int kTile = 64;      // rows and columns of a block
constexpr int kTileStep = 32;  // elements of K in shared memory
constexpr int kTilePitch = kTile + 4;
constexpr int kTileThreads = 256;
constexpr int kTileShare = kTile / (kTileThreads / 32);  // rows that a warp loads

template <int kMatrices, class T, class Epilogue>
__global__ void __launch_bounds__(kTileThreads) product_tile(const Product<T> p, const Epilogue epilogue) {
  // Rows and columns are K-major, so that a thread's four neighbours are one load.
  __shared__ __align__(16) float xs[kTileStep][kTilePitch], ws[kMatrices][kTileStep][kTilePitch];
  pdl_wait();
  const Tile tile = find_tile<kTile>(p.groups, blockIdx.x);
  if (tile.count == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column0 = blockIdx.y * kTile;
  const T* rows[kTileShare];
#pragma unroll
  for (int i = 0; i < kTileShare; ++i) {
    const uint32_t r = warp * kTileShare + i;
    rows[i] = r < tile.count ? input_row(p, tile.first + r) : nullptr;
  }
  const int row4 = threadIdx.x / 16 * 4, column4 = threadIdx.x % 16 * 4;
  float sum[kMatrices][4][4] = {};
  for (int k0 = 0; k0 < p.k; k0 += kTileStep) {
    const int k = k0 + lane;
#pragma unroll
    for (int i = 0; i < kTileShare; ++i) {
      const int r = warp * kTileShare + i;
      xs[lane][r] = rows[i] != nullptr && k < p.k ? widen(rows[i][k]) : 0.f;
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
        ws[m][lane][r] =
            column0 + r < p.n && k < p.k ? widen(weight_row(p, tile.expert * kMatrices + m, column0 + r)[k]) : 0.f;
    }
    __syncthreads();
#pragma unroll 8
    for (int kk = 0; kk < kTileStep; ++kk) {
      const float4 a = *reinterpret_cast<const float4*>(&xs[kk][row4]);
      const float x[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const float4 b = *reinterpret_cast<const float4*>(&ws[m][kk][column4]);
        const float w[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[m][i][j] = fmaf(x[i], w[j], sum[m][i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (static_cast<uint32_t>(row4 + i) >= tile.count || column0 + column4 + j >= p.n) continue;
      float sums[kMatrices];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) sums[m] = sum[m][i][j];
      epilogue(tile.expert, tile.first + row4 + i, column0 + column4 + j, sums);
    }
  }
}

// ---- launch

/// The largest number of rows per expert for which weights are streamed once per 8 rows; more rows are computed in
/// tiles. The two kernels add in different orders.
constexpr int kStreamMost = 32;
constexpr int kMaxGridY = 65535;

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Computes kMatrices products per expert and gives the sums of each row and column to the epilogue.
template <int kMatrices, class T, class Epilogue>
cudaError_t launch_product(const Product<T>& p, const Epilogue& epilogue, void* stream) {
  const Groups& g = p.groups;
  if (g.rows < 0 || g.experts < 0 || p.n < 0 || p.k < 0) return cudaErrorInvalidValue;
  if (g.rows == 0 || g.experts == 0 || p.n == 0) return cudaSuccess;
  const int stream_columns = ceil_div(p.n, kStreamWarps), tile_columns = ceil_div(p.n, kTile);
  if (tile_columns > kMaxGridY) return cudaErrorInvalidValue;
  if (g.invariant || g.rows / g.experts > kStreamMost || stream_columns > kMaxGridY) {
    const dim3 grid(static_cast<unsigned>(max_tiles(g, kTile)), tile_columns);
    return launch(product_tile<kMatrices, T, Epilogue>, {grid, dim3(kTileThreads), stream}, p, epilogue);
  }
  const Launch l = {dim3(static_cast<unsigned>(max_tiles(g, kStreamRows)), stream_columns), dim3(kStreamWarps * 32),
                    stream};
  constexpr int kVector = 16 / sizeof(T);
  if (is_aligned(p.x) && is_aligned(p.w) && p.k % kVector == 0)
    return launch(product_rows<kMatrices, kVector, T, Epilogue>, l, p, epilogue);
  return launch(product_rows<kMatrices, 1, T, Epilogue>, l, p, epilogue);
}

/// out[out_rows[row]] = round(sum + bias[expert]).
template <class T, class O>
struct StoreRow {
  const T* bias;             // [experts, n] or null
  const uint32_t* out_rows;  // or null: grouped row i writes row i
  O* out;                    // [num_out, n]
  int n;
  uint32_t num_out;  // an out_row from this number on is not written

  __device__ __forceinline__ void operator()(int expert, uint32_t row, int column, const float (&sum)[1]) const {
    const uint32_t to = out_rows == nullptr ? row : out_rows[row];
    const float b = bias == nullptr ? 0.f : widen(bias[static_cast<size_t>(expert) * n + column]);
    if (to < num_out) out[static_cast<size_t>(to) * n + column] = narrow<O>(sum[0] + b);
  }
};

}  // namespace moe
