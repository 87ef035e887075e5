// Force-balance: the experts of every row and layer of a step are the start of a random permutation, which depends only
// on seed, step, layer and row. One launch at the beginning of a step computes them, so that the launches that route
// only need to read.
//
// Floor: 4 K bytes written per row and layer. A thread samples a row's K ids one after the other, as the CPU does: of
// Qwen3's 48 layers and 256 rows 12,288 threads, predicted 4 us of a step of 10 ms.
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "router/args.cuh"
#include "sampling/philox.cuh"

namespace moe {
namespace {

constexpr int kThreads = 128;
constexpr uint32_t kStream = 2u << 28;  // number of this stream among moe-router's random numbers

/// The number with this rank among the numbers that are not among the first `count` ids. It grows until the count of
/// smaller ids is right.
__device__ __forceinline__ uint32_t absent(const uint32_t* ids, int count, uint32_t rank) {
  uint32_t x = rank;
  for (;;) {
    uint32_t next = rank;
    for (int i = 0; i < count; ++i) next += ids[i] <= x;
    if (next == x) return x;
    x = next;
  }
}

__global__ void balance_ids(const __grid_constant__ BalanceIdsArgs a) {
  pdl_wait();
  const int at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= a.rows * a.layers) return;
  const uint32_t row = a.first_row + at / a.layers, layer = a.first_layer + at % a.layers, step = *a.step;
  uint32_t* ids = a.ids + static_cast<size_t>(at) * a.top_k;
  Philox block = {};
  for (int k = 0; k < a.top_k; ++k) {
    if (k % 4 == 0) block = philox(a.seed, k / 4, row, (layer & 0x0fffffffu) | kStream, step);
    const uint32_t word = k % 4 == 0   ? block.word[0]
                          : k % 4 == 1 ? block.word[1]
                          : k % 4 == 2 ? block.word[2]
                                       : block.word[3];
    ids[k] = absent(ids, k, __umulhi(word, static_cast<uint32_t>(a.experts - k)));
  }
}

}  // namespace
}  // namespace moe

/// Fills ids [rows, layers, K]. It refuses K > E. It does not overlap the launch before it, which may still read the
/// ids.
extern "C" int moe_balance_ids(const moe::BalanceIdsArgs* args, void* stream) {
  using namespace moe;
  const BalanceIdsArgs& c = *args;
  if (c.rows < 0 || c.layers < 0 || c.top_k <= 0 || c.top_k > c.experts) return cudaErrorInvalidValue;
  if (static_cast<int64_t>(c.rows) * c.layers > INT_MAX - kThreads) return cudaErrorInvalidValue;
  if (c.rows == 0 || c.layers == 0) return cudaSuccess;
  Launch l = {dim3(ceil_div(c.rows * c.layers, kThreads)), dim3(kThreads), stream};
  l.overlap = false;
  return launch(balance_ids, l, c);
}
