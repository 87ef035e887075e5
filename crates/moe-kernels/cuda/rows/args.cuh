// Arguments of the kernels before and after the layers of a step.
#pragma once

#include <cstdint>

namespace moe {

/// Cosines and sines of the rotary embedding. Rows whose `rope_len` exceeds `max_len` use dynamic NTK.
struct RopeRowsArgs {
  const uint32_t* positions;     // [rows]
  const uint32_t* rope_len;      // [rows]
  const float* inv_freq;         // [half] in host memory
  int half;                      // at most 256
  float attention_factor;        // of cosines and sines of frequencies above 0
  float theta, factor, max_len;  // of dynamic NTK; factor 0 = none
  float* cos;                    // out [rows, half]
  float* sin;                    // out [rows, half]
  int rows;
};

/// Copies of some rows of several arrays, all of them in host memory but the arrays.
struct CopyStatesArgs {
  const uint64_t* list;  // [arrays, 3]: the address of an array, of the one that gets its rows, and the bytes of a row
  const uint32_t* rows;  // [copies, 2]: a row, and its place
  int arrays, copies;
};

}  // namespace moe

extern "C" int moe_rope_rows(const moe::RopeRowsArgs* args, void* stream);
extern "C" int moe_copy_states(const moe::CopyStatesArgs* args, void* stream);
