// The gated delta rule with the state in memory, for heads of more key dimensions than registers hold. No published
// model has such heads. A thread has one column of a value head and alone reads and writes it, twice for each row.
#include "any/any.cuh"
#include "delta/rule.cuh"

namespace moe {
namespace {

/// 1 / sqrt(|x|^2 + eps), computed by all threads of the block.
__device__ __forceinline__ float inverse_length(const float* x, int dim) {
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kAnyThreads) squares = fmaf(x[i], x[i], squares);
  return 1.f / sqrtf(any_block_sum(squares) + kUnitEps);
}

__global__ void __launch_bounds__(kAnyThreads) gated_delta(const GatedDeltaArgs a, int parts, unsigned blocks) {
  pdl_wait();
  const DeltaSizes sizes(a);
  if (blockIdx.x >= blocks) {
    zero_padding(a, sizes.value_width, blockIdx.x - blocks);
    return;
  }
  const DeltaBlock at = DeltaBlock::numbered(a, blockIdx.x, parts, kAnyThreads);
  if (at.begin >= at.end) return;
  if (!at.has_state) {
    zero_rows(a, at, sizes.value_width, kAnyThreads);
    return;
  }
  const int column = at.column + static_cast<int>(threadIdx.x);
  const bool valid = column < a.value_dim;
  const DeltaGates gates(a, at.head);
  const float scale = 1.f / sqrtf(static_cast<float>(a.key_dim));
  for (int row = at.begin; row < at.end; ++row) {
    const DeltaRow from = at.row(a, sizes, row);
    const float q_scale = inverse_length(from.q, a.key_dim) * scale, k_scale = inverse_length(from.k, a.key_dim);
    if (!valid) continue;
    const float decay = gates.decay(*from.a), beta = DeltaGates::beta(*from.b);
    const bool is_empty = at.is_empty && row == at.begin;
    float* const state = at.state + column;
    const auto old = [&](int i) { return is_empty ? 0.f : decay * state[static_cast<size_t>(i) * a.value_dim]; };
    float held = 0;
    for (int i = 0; i < a.key_dim; ++i) held = fmaf(old(i), from.k[i] * k_scale, held);
    const float delta = (from.v[column] - held) * beta;
    float sum = 0;
    for (int i = 0; i < a.key_dim; ++i) {
      const float s = fmaf(from.k[i] * k_scale, delta, old(i));
      state[static_cast<size_t>(i) * a.value_dim] = s;
      sum = fmaf(s, from.q[i] * q_scale, sum);
    }
    a.out[static_cast<size_t>(row) * sizes.value_width + at.head * a.value_dim + column] = sum;
  }
}

}  // namespace

cudaError_t gated_delta_memory(const GatedDeltaArgs& a, void* stream) {
  const int parts = ceil_div(a.value_dim, kAnyThreads);
  const int64_t blocks = static_cast<int64_t>(a.sequences) * a.value_heads * parts;
  if (blocks > INT32_MAX - kPaddingBlocks) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks) + kPaddingBlocks);
  return launch(gated_delta, {grid, dim3(kAnyThreads), stream}, a, parts, static_cast<unsigned>(blocks));
}

}  // namespace moe
