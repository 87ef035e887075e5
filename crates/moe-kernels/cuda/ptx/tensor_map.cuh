// TMA tensor maps of row-major matrices, made by the launcher and passed by value.
#pragma once

#include <cuda.h>

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {

/// Columns of a tile: 128 bytes, the widest swizzle.
constexpr int kTileColumns = 64;

/// Makes a map of `data` with `rank` dims, innermost first; `strides` has the strides in bytes of all dims but the
/// first. Elements outside read as zero. There is no promotion in L2: with 256 bytes the experts' products read 3 %
/// slower (T = 64: 284 us against 275). The encoder comes from the driver that is loaded, so nothing links to libcuda.
inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                                     const void* data, int rank, const cuuint64_t* dims, const cuuint64_t* strides,
                                     const cuuint32_t* box) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t e =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (e != cudaSuccess) return e;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  const CUresult r =
      encode(map, type, rank, const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// A map whose tiles, `box`, are swizzled in shared memory.
inline cudaError_t make_tensor_map(CUtensorMap* map, const bf16* data, int rank, const cuuint64_t* dims,
                                   const cuuint64_t* strides, const cuuint32_t* box) {
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, data, rank, dims, strides,
                           box);
}

/// A swizzled map of a matrix [rows, columns], in tiles of `tile_rows` x 64.
inline cudaError_t make_tensor_map(CUtensorMap* map, const bf16* data, int rows, int columns, int tile_rows) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * sizeof(bf16)};
  const cuuint32_t box[2] = {kTileColumns, static_cast<cuuint32_t>(tile_rows)};
  return make_tensor_map(map, data, 2, dims, strides, box);
}

/// A swizzled map in boxes of `box_rows` rows of all columns, a multiple of 64. 64 columns of all rows are stored
/// together, so one instruction (`load_box`) loads what would otherwise take a tile for every 64 columns.
inline cudaError_t make_rows_map(CUtensorMap* map, const bf16* data, int rows, int columns, int box_rows) {
  const cuuint64_t dims[3] = {kTileColumns, static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(columns / kTileColumns)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns) * sizeof(bf16), kTileColumns * sizeof(bf16)};
  const cuuint32_t box[3] = {kTileColumns, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(columns / kTileColumns)};
  return make_tensor_map(map, data, 3, dims, strides, box);
}

/// A map of `rows` rows of `row_words` 8-byte words each. In shared memory, tiles have the same order as in the rows.
inline cudaError_t make_word_map(CUtensorMap* map, const void* data, int64_t rows, int64_t row_words, int tile_rows,
                                 int tile_words) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(row_words), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_words) * 8};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(tile_words), static_cast<cuuint32_t>(tile_rows)};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, CU_TENSOR_MAP_SWIZZLE_NONE, data, 2, dims, strides,
                           box);
}

#if MOE_HAS_TMA
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Loads the tile at (row, column) to shared memory (1,024-byte aligned). One thread calls it.
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, int row, int column, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(smem_addr(to)),
      "l"(map), "r"(column), "r"(row), "r"(smem_addr(bar))
      : "memory");
}

/// Loads the rows from `row` on, with all columns, by a map of `make_rows_map`.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, int row, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(smem_addr(to)),
      "l"(map), "r"(0), "r"(row), "r"(0), "r"(smem_addr(bar))
      : "memory");
}

/// `load_tile` with a policy for L2.
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, int row, int column, uint64_t* bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], "
      "[%4], %5;" ::"r"(smem_addr(to)),
      "l"(map), "r"(column), "r"(row), "r"(smem_addr(bar)), "l"(policy)
      : "memory");
}

/// Loads the tile at (row, column) to the same place of both blocks of a cluster, and counts its bytes at the same
/// barrier of each.
__device__ __forceinline__ void load_tile_to_both(void* to, const CUtensorMap* map, int row, int column,
                                                  uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3}], [%4], %5;" ::"r"(smem_addr(to)),
      "l"(map), "r"(column), "r"(row), "r"(smem_addr(bar)), "h"(static_cast<uint16_t>(3))
      : "memory");
}
#endif

}  // namespace moe
