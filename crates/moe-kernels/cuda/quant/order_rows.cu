// Rows of x with their columns in the order of a pack (act-order): out[s][i] = x[s / top_k][perm[i]]. All rows have one
// order, or each slot of a list has its expert's order. The products that follow then read the pack like any other.
//
// Floor: bytes. Qwen3-30B-A3B's experts at 8,192 tokens: 65,536 rows of 4 KB out, 268 MB, 62 us at 4.3 TB/s (the 34 MB
// of x come out of L2).
//
// Design: a block takes two rows of the same order at a time, and four of long lists. It stores them interleaved in
// shared memory, so that a word holds the same column of both rows and one read finds two values: columns are in any
// order, so about 3.5 reads of a warp are in the same bank. A thread has 8 columns of the result and keeps their
// numbers for all rows. It reads the numbers before pdl_wait, because no launch writes them.
#include <type_traits>

#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "quant/args.cuh"

namespace moe::quant {
namespace {

constexpr int kEach = 8;  // columns of a thread, 16 bytes of a row
constexpr int kMaxThreads = 1024;
constexpr int kMaxParts = 64;  // blocks that share a list
constexpr int kLong = 128;     // mean rows of a list from which on four rows at a time are faster than two

/// The columns of x for 8 columns of the result.
struct Columns {
  uint32_t x[kEach];
};

__device__ __forceinline__ Columns columns_at(const uint32_t* perm, int chunk) {
  const Vec16 low = load_const(perm + chunk * kEach), high = load_const(perm + chunk * kEach + kEach / 2);
  return {{low.word[0], low.word[1], low.word[2], low.word[3], high.word[0], high.word[1], high.word[2], high.word[3]}};
}

/// The low halves of two words as one word, and the high halves.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

/// Stores 8 columns of two rows as 8 words. Threads whose stores would conflict in a bank begin with the other half.
__device__ __forceinline__ void store_pair(uint32_t* to, const uint4& v, const uint4& w) {
  const uint4 half[2] = {{low_halves(v.x, w.x), high_halves(v.x, w.x), low_halves(v.y, w.y), high_halves(v.y, w.y)},
                         {low_halves(v.z, w.z), high_halves(v.z, w.z), low_halves(v.w, w.w), high_halves(v.w, w.w)}};
  const bool second = threadIdx.x & 4;
  reinterpret_cast<uint4*>(to)[second] = second ? half[1] : half[0];
  reinterpret_cast<uint4*>(to)[!second] = second ? half[0] : half[1];
}

/// Stores 8 columns of a row.
template <class T>
__device__ __forceinline__ auto* columns_of(T* rows, int row, int columns, int chunk) {
  using Words = std::conditional_t<std::is_const_v<T>, const uint4, uint4>;
  return reinterpret_cast<Words*>(rows + static_cast<size_t>(row) * columns + chunk * kEach);
}

/// kPairs: pairs of rows that a block has at a time.
template <int kPairs>
__global__ void __launch_bounds__(kMaxThreads) order_rows(const __grid_constant__ OrderRowsArgs a) {
  constexpr int kRows = 2 * kPairs;
  extern __shared__ __align__(16) uint32_t words[];  // [kPairs, columns]
  const int list = blockIdx.x, chunks = a.columns / kEach, own = threadIdx.x;
  const uint32_t* perm = a.perm + static_cast<size_t>(list) * a.columns;
  const Columns mine = columns_at(perm, min(own, chunks - 1));
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t* slots = a.slots == nullptr ? nullptr : a.slots + static_cast<size_t>(list) * a.bucket;
  const int count =
      slots == nullptr ? a.tokens : static_cast<int>(min(a.counts[list], static_cast<uint32_t>(a.bucket)));
  for (int first = blockIdx.y * kRows; first < count; first += gridDim.y * kRows) {
    int slot[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Rows after the end of the list are replaced by its last row.
      const int at = min(first + i, count - 1);
      slot[i] = slots == nullptr ? at : static_cast<int>(slots[at]);
    }
    for (int chunk = own; chunk < chunks; chunk += blockDim.x) {
      uint4 row[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) row[i] = *columns_of(a.x, slot[i] / a.top_k, a.columns, chunk);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) store_pair(words + p * a.columns + chunk * kEach, row[2 * p], row[2 * p + 1]);
    }
    __syncthreads();
    for (int chunk = own; chunk < chunks; chunk += blockDim.x) {
      const Columns columns = chunk == own ? mine : columns_at(perm, chunk);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t v[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const uint32_t column = columns.x[i];
          v[i] = column < static_cast<uint32_t>(a.columns) ? words[p * a.columns + column] : 0;
        }
        const uint4 low = {low_halves(v[0], v[1]), low_halves(v[2], v[3]), low_halves(v[4], v[5]),
                           low_halves(v[6], v[7])};
        const uint4 high = {high_halves(v[0], v[1]), high_halves(v[2], v[3]), high_halves(v[4], v[5]),
                            high_halves(v[6], v[7])};
        if (first + 2 * p < count) *columns_of(a.out, slot[2 * p], a.columns, chunk) = low;
        if (first + 2 * p + 1 < count) *columns_of(a.out, slot[2 * p + 1], a.columns, chunk) = high;
      }
    }
    __syncthreads();  // the rows have been read
  }
}

template <int kPairs>
cudaError_t run(const OrderRowsArgs& a, const DeviceLimits& limits, void* stream) {
  const size_t smem = static_cast<size_t>(a.columns) * kPairs * sizeof(uint32_t);
  if (smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  const int runs = ceil_div(a.tokens * a.top_k, 2 * kPairs), most = a.slots == nullptr ? 65535 : kMaxParts;
  const int parts = min(ceil_div(runs, a.experts), most), chunks = a.columns / kEach;
  const dim3 threads(chunks < kMaxThreads ? round_up(chunks, 32) : kMaxThreads);
  return launch(order_rows<kPairs>, {dim3(a.experts, parts), threads, stream, smem}, a);
}

}  // namespace
}  // namespace moe::quant

/// The number of columns is a multiple of 8, and each takes 8 bytes of shared memory. A column that x does not have is
/// zero. Rows of slots that are in no list are not written.
extern "C" int moe_order_rows(const moe::OrderRowsArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::quant;
  const OrderRowsArgs& c = *args;
  if (c.columns <= 0 || c.columns % kEach != 0 || c.tokens < 0 || c.top_k <= 0 || c.tokens > INT32_MAX / c.top_k ||
      c.experts < 0 || c.bucket < 0 || (c.slots == nullptr) != (c.counts == nullptr) ||
      (c.slots == nullptr && (c.experts != 1 || c.top_k != 1)))
    return cudaErrorInvalidValue;
  if (c.tokens == 0 || c.experts == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const bool is_long = c.slots != nullptr && c.tokens * c.top_k / c.experts >= kLong;
  return is_long ? run<2>(c, limits, stream) : run<1>(c, limits, stream);
}
