// What the kernels of the gated delta rule share: the sequence and head of a block, gates, and zeros.
#pragma once

#include "delta/args.cuh"
#include "delta/vectors.cuh"
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {

/// Added to the sum of squares of a head of q or k before its root is taken.
constexpr float kUnitEps = 1e-6f;

/// Blocks that write the zeros of padding.
constexpr int kPaddingBlocks = 32;

/// Sizes that follow from the arguments.
struct DeltaSizes {
  int channels;     // columns of a row of `mixed`
  int value_width;  // columns of a row of `out`
  int projected;    // columns of a row of `projected`

  __host__ __device__ explicit DeltaSizes(const GatedDeltaArgs& a)
      : channels(2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim),
        value_width(a.value_heads * a.value_dim),
        projected(channels + value_width + 2 * a.value_heads) {}
};

/// Whether the sizes are within what the kernels index.
inline bool is_valid(const GatedDeltaArgs& a) {
  if (a.tokens < 0 || a.sequences < 0 || a.num_states < 0 || a.key_heads <= 0 || a.value_heads <= 0 ||
      a.value_heads % a.key_heads != 0 || a.key_dim <= 0 || a.value_dim <= 0)
    return false;
  const int64_t keys = static_cast<int64_t>(a.key_heads) * a.key_dim;
  const int64_t values = static_cast<int64_t>(a.value_heads) * a.value_dim;
  return 2 * keys + 2 * values + 2 * static_cast<int64_t>(a.value_heads) <= INT32_MAX;
}

/// Where the inputs of one row are.
struct DeltaRow {
  const float* q;  // [key_dim] of the key head
  const float* k;
  const float* v;  // [value_dim] of the value head
  const float* b;  // one number each
  const float* a;
};

/// The rows, head and columns that a block computes, and its state.
struct DeltaBlock {
  int head;        // value head
  int column;      // the first column of the state
  int begin, end;  // rows of the sequence
  bool has_state;
  bool is_empty;  // whether the state is empty before the first row
  float* state;   // [key_dim, value_dim] of this head

  /// Block number `block` of those whose `columns` columns are `parts` to a head.
  __device__ __forceinline__ static DeltaBlock numbered(const GatedDeltaArgs& a, unsigned block, int parts,
                                                        int columns) {
    const unsigned head = block / parts;
    return {a, head / a.value_heads, static_cast<int>(head % a.value_heads), static_cast<int>(block % parts) * columns};
  }

  /// The columns of a sequence and value head from `column` on. There are rows if begin < end.
  __device__ __forceinline__ DeltaBlock(const GatedDeltaArgs& a, unsigned sequence, int head, int column)
      : head(head), column(column) {
    const uint32_t tokens = static_cast<uint32_t>(a.tokens);
    const uint32_t number = a.numbers[sequence];
    begin = static_cast<int>(min(a.query_start_loc[sequence], tokens));
    end = static_cast<int>(min(a.query_start_loc[sequence + 1], tokens));
    if (begin >= end) return;
    has_state = number < static_cast<uint32_t>(a.num_states);
    is_empty = a.positions[begin] == 0;
    const size_t at = static_cast<size_t>(number) * a.value_heads + head;
    state = a.states + at * a.key_dim * a.value_dim;
  }

  __device__ __forceinline__ DeltaRow row(const GatedDeltaArgs& a, const DeltaSizes& sizes, int row) const {
    const float* mixed = a.mixed + static_cast<size_t>(row) * sizes.channels;
    const float* gates =
        a.projected + static_cast<size_t>(row) * sizes.projected + sizes.channels + sizes.value_width + head;
    const int key_head = head / (a.value_heads / a.key_heads);
    const float* q = mixed + key_head * a.key_dim;
    const int key_width = a.key_heads * a.key_dim;
    return {q, q + key_width, mixed + 2 * key_width + head * a.value_dim, gates, gates + a.value_heads};
  }
};

/// Decay and beta of a row, from its numbers a and b.
struct DeltaGates {
  float rate;  // of decay, of this head
  float bias;  // added to a

  __device__ __forceinline__ DeltaGates(const GatedDeltaArgs& a, int head)
      : rate(expf(a.a_log[head])), bias(a.dt_bias[head]) {}

  __device__ __forceinline__ float decay(float a) const { return expf(log_decay(a)); }

  __device__ __forceinline__ float log_decay(float a) const {
    const float x = a + bias;
    // ln(1 + e^x), which is x where the rest is lost in rounding.
    const float step = x > 20.f ? x : log1pf(expf(x));
    return -rate * step;
  }

  __device__ __forceinline__ static float beta(float b) { return 1.f / (1.f + expf(-b)); }
};

/// Zeroes the rows of `out` that belong to no sequence, by the threads of kPaddingBlocks blocks.
__device__ __forceinline__ void zero_padding(const GatedDeltaArgs& a, int width, unsigned block) {
  for (uint32_t row = a.query_start_loc[a.sequences] + block; row < static_cast<uint32_t>(a.tokens);
       row += kPaddingBlocks)
    for (int i = threadIdx.x; i < width; i += blockDim.x) a.out[static_cast<size_t>(row) * width + i] = 0.f;
}

/// Zeroes the columns of a block in all rows of its sequence: its state does not exist.
__device__ __forceinline__ void zero_rows(const GatedDeltaArgs& a, const DeltaBlock& at, int width, int columns) {
  const int count = min(columns, a.value_dim - at.column);
  for (int row = at.begin; row < at.end; ++row)
    for (int i = threadIdx.x; i < count; i += blockDim.x)
      a.out[static_cast<size_t>(row) * width + at.head * a.value_dim + at.column + i] = 0.f;
}

/// The kernel whose state is in registers, for heads of at most 256 key dimensions. It leaves out sequences that have
/// states and at least `most` rows.
cudaError_t gated_delta_registers(const GatedDeltaArgs& a, int most, void* stream);

/// The kernel whose state stays in memory, for heads of any size.
cudaError_t gated_delta_memory(const GatedDeltaArgs& a, void* stream);

}  // namespace moe
