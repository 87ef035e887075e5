// Which copy of an expert computes a row.
#pragma once

#include "ptx/common.cuh"

namespace moe {

/// The number of the copy, of `copies`, that computes a row. The rule is Spread::copy of the CPU.
__device__ __forceinline__ uint32_t copy_of_row(uint32_t row, uint32_t expert, uint32_t copies, bool hashed) {
  uint32_t number = row + expert;
  if (hashed) {
    const uint32_t mixed = (row + 0x9e3779b9u) * 0x85ebca6bu ^ expert * 0xc2b2ae35u;
    number = (mixed ^ mixed >> 15) * 0x2c1b3c6du >> 8;
  }
  return number % copies;
}

/// The slot that computes expert `id` of a row; kNoExpert for ids without a slot. log2phy is [experts, width], padded
/// with -1.
__device__ __forceinline__ uint32_t slot_of_row(const int32_t* log2phy, int experts, int width, uint32_t row,
                                                uint32_t id, bool hashed) {
  if (id >= static_cast<uint32_t>(experts)) return kNoExpert;
  const int32_t* copies = log2phy + static_cast<size_t>(id) * width;
  uint32_t n = 0;
  while (n < static_cast<uint32_t>(width) && copies[n] >= 0) ++n;
  return n == 0 ? kNoExpert : copies[copy_of_row(row, id, n, hashed)];
}

}  // namespace moe
