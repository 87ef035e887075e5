// Codes by which callers tell launchers what their arguments are. Rust has the same in src/cuda/args.rs.
#pragma once

#include <cstdint>

namespace moe {

/// Type of an array's elements.
enum class Dtype : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

/// What is done with a result, which every kernel has in f32.
enum class Output : int32_t {
  kF32 = 0,     // stored
  kBf16 = 1,    // rounded and stored
  kAddF32 = 2,  // added to the f32 that is there: the residual stream
};

/// How logits become scores.
enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

/// The number format of the weights of a quantised pack. kFp4 and kNvfp4 differ in their scales (quant/fp4.cuh). kQ4k
/// has integers with minima, and scales in two levels (quant/q4k.cuh).
enum class QuantFormat : int32_t { kInt4 = 0, kInt8 = 1, kFp8 = 2, kFp4 = 3, kNvfp4 = 4, kQ4k = 5 };
constexpr QuantFormat kLastFormat = QuantFormat::kQ4k;

/// Bits of a code.
__host__ __device__ constexpr int code_bits(QuantFormat format) {
  return format == QuantFormat::kInt8 || format == QuantFormat::kFp8 ? 8 : 4;
}
/// Whether codes are integers with a zero point.
__host__ __device__ constexpr bool is_integer(QuantFormat format) {
  return format == QuantFormat::kInt4 || format == QuantFormat::kInt8;
}
/// Whether codes are floats of 4 bits.
__host__ __device__ constexpr bool is_fp4(QuantFormat format) {
  return format == QuantFormat::kFp4 || format == QuantFormat::kNvfp4;
}

/// Whether codes are integers with scales and minima in two levels.
__host__ __device__ constexpr bool is_q4k(QuantFormat format) { return format == QuantFormat::kQ4k; }

/// Whether a code is one of an enum whose last value is `last`.
template <class Code>
constexpr bool is_code(Code code, Code last) {
  return static_cast<int32_t>(code) >= 0 && static_cast<int32_t>(code) <= static_cast<int32_t>(last);
}

}  // namespace moe
