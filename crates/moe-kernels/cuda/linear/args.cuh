// Arguments of the dense products of bf16 weights.
#pragma once

#include <cuda_bf16.h>

#include "codes.cuh"

namespace moe {

struct LinearStreamArgs {
  const void* x;              // [m, k] bf16; f32 where `norm` is given
  const __nv_bfloat16* norm;  // [k] weight of the RMS norm of x, or null: no norm
  float eps;                  // of the norm
  const __nv_bfloat16* w;     // [n, k]
  const __nv_bfloat16* bias;  // [n] or null
  void* out;                  // [m, n]
  Output output;
  int m, n, k;
};

struct LinearTensorArgs {
  const __nv_bfloat16* x;     // [m, k]
  const __nv_bfloat16* w;     // [n, k]
  const __nv_bfloat16* bias;  // [n] or null
  void* out;                  // [m, n]
  Output output;
  int m, n, k;
  // Number of parts of k, 1 .. 8. 0: the number that measurements showed to be best. -1: the number that is best for
  // few rows, so that a row's bits do not depend on m.
  int splits;
};

}  // namespace moe

extern "C" int moe_linear_stream(const moe::LinearStreamArgs* args, void* stream);
extern "C" int moe_linear_tensor(const moe::LinearTensorArgs* args, void* stream);
