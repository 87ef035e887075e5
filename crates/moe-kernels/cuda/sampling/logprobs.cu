// Computes values from the model's logits from which the host computes how likely tokens were (sampled tokens or tokens
// of a prompt): sums and keys with the CPU's bits (model-runtime, `sampling::logprobs`). The host computes the
// logarithms.
//
// Floor: the logits are read once, 4 V bytes per row that needs them; the blocks of other rows return at once.
#include "sampling/row.cuh"
#include "sampling/search.cuh"

namespace moe {
namespace {

constexpr int kMaxTop = 32;
constexpr int kHeader = 8;  // words before the keys
constexpr int kRowWords = kHeader + 2 * kMaxTop;

enum Status : uint32_t { kOk = 0, kNotFinite = 1, kEmpty = 2 };

/// The number of keys above `own`, and the sum of all weights, for this block.
__device__ __forceinline__ void weigh(const Row& row, const Weights& weights, uint64_t own, uint64_t* sum,
                                      uint64_t* above) {
  for (int i = threadIdx.x; i < row.count; i += kRowThreads) {
    const float x = row.logits[i];
    if (!weights.none(x)) *sum += weights.of_plain(x);
    *above += token_key(x, row.first + i) > own;
  }
}

/// Writes the keys that the edge keeps, in any order; all blocks call it. The keys go through `all`, because the other
/// blocks may still read `own`, which the search has written.
__device__ __forceinline__ void write_top(Row& row, Edge edge, uint32_t* out) {
  __syncthreads();
  if (threadIdx.x == 0) row.s.gathered = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < row.count; i += kRowThreads) {
    const float x = row.logits[i];
    const uint32_t id = row.first + i;
    if (!edge.keeps(x, id)) continue;
    const uint32_t at = atomicAdd(&row.s.gathered, 1u);
    if (at < kMaxTop) row.s.all[at] = token_key(x, id);
  }
  __syncthreads();
  uint64_t all[2][kRowCluster];
  row.exchange(row.s.gathered, 0, all);
  uint32_t offset = 0;
#pragma unroll
  for (int r = 0; r < kRowCluster; ++r) offset += r < static_cast<int>(cluster_rank()) ? all[0][r] : 0;
  if (threadIdx.x >= row.s.gathered || offset + threadIdx.x >= kMaxTop) return;
  const uint64_t key = row.s.all[threadIdx.x];
  out[2 * (offset + threadIdx.x)] = static_cast<uint32_t>(key);
  out[2 * (offset + threadIdx.x) + 1] = static_cast<uint32_t>(key >> 32);
}

__global__ void __launch_bounds__(kRowThreads, 2)
    logprobs_kernel(const float* logits, const uint32_t* params, int stride, const uint32_t* tokens, int vocab,
                    uint32_t* out) {
  extern __shared__ __align__(16) float buffer[];
  __shared__ RowShared s;
  const uint32_t asked = params[static_cast<size_t>(blockIdx.y) * stride + stride - 1];
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t token = tokens[blockIdx.y];
  if (asked == 0 || token >= static_cast<uint32_t>(vocab)) return;
  out += static_cast<size_t>(blockIdx.y) * kRowWords;
  const float* from = logits + static_cast<size_t>(blockIdx.y) * vocab;
  Row row(s, buffer, vocab);
  const Row::Top top = row.top(row.load(from), false);
  const float largest = key_logit(top.key), own = from[token];
  const bool writes = cluster_rank() == 0 && threadIdx.x == 0;
  if (top.bad != 0 || !(largest > -INFINITY)) {
    if (writes) out[0] = top.bad != 0 ? kNotFinite : kEmpty, out[1] = ~static_cast<uint32_t>(top.bad);
    return;
  }
  const Weights weights(largest, 1.f, 0.f);
  uint64_t sum = 0, above = 0, all[2][kRowCluster];
  weigh(row, weights, token_key(own, token), &sum, &above);
  sum = row.block_sum(sum);
  above = row.block_sum(above);
  row.exchange(sum, above, all);
  sum = above = 0;
#pragma unroll
  for (int r = 0; r < kRowCluster; ++r) sum += all[0][r], above += all[1][r];
  if (writes) {
    out[0] = kOk;
    out[1] = static_cast<uint32_t>(above) + 1;
    out[2] = __float_as_uint(largest);
    out[3] = __float_as_uint(own);
    out[4] = static_cast<uint32_t>(sum);
    out[5] = static_cast<uint32_t>(sum >> 32);
  }
  const uint32_t wanted = asked - 1;
  if (wanted == 0) return;
  const Edge edge = wanted < static_cast<uint32_t>(vocab) ? top_k_edge(row, largest, wanted, weights) : kKeepAll;
  write_top(row, edge, out + kHeader);
}

}  // namespace
}  // namespace moe

/// out [rows, 72] u32 for rows of logits [rows, vocab] f32 whose last word of `params` [rows, stride] u32 is n + 1,
/// with n at most 32, and for one token of each row, tokens [rows]. The words: status (0; 1 = a logit is NaN or +inf,
/// with the first such id; 2 = every logit is -inf), rank of the token, bits of the largest logit and of the token's,
/// sum of the weights at temperature 1 (2 words), 2 unused, then the keys of the top min(n, vocab) tokens (2 words
/// each, low word first) in any order.
extern "C" int moe_logprobs(const float* logits, const uint32_t* params, int stride, const uint32_t* tokens, int rows,
                            int vocab, uint32_t* out, void* stream) {
  using namespace moe;
  if (rows < 0 || rows > 65535 || vocab <= 0 || stride <= 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const cudaError_t e = row_fits(vocab);
  if (e != cudaSuccess) return e;
  Launch l = {dim3(kRowCluster, rows), dim3(kRowThreads), stream, row_smem(vocab)};
  l.cluster = kRowCluster;
  return launch(logprobs_kernel, l, logits, params, stride, tokens, vocab, out);
}
