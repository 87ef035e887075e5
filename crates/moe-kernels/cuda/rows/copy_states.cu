// Copies of some rows of several arrays in one launch: the states of sequences, of all layers.
//
// The list of arrays and rows is a parameter of the kernel, so it needs no memory on the device and no copy. A block
// copies a part of one row of one array. Floor: the bytes of the rows, read and written.
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"
#include "rows/args.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;
/// Arrays and rows of a launch; parameters have at most 4 KiB.
constexpr int kArrays = 96;
constexpr int kCopies = 96;
/// Blocks that share a row, and elements of a thread that are on their way at the same time.
constexpr int kParts = 16;
constexpr int kUnroll = 4;

struct CopyArray {
  const uint8_t* from;
  uint8_t* to;
  size_t bytes;  // of a row
};

struct CopyList {
  CopyArray arrays[kArrays];
  uint32_t rows[kCopies][2];  // from, to
};

static_assert(sizeof(CopyList) <= 4096, "parameters of a kernel");

/// T: 16 bytes where all rows begin and end at multiples of 16 bytes.
template <class T>
__global__ void __launch_bounds__(kThreads) copy_states(const CopyList list) {
  pdl_wait();
  const CopyArray& array = list.arrays[blockIdx.y];
  const T* from = reinterpret_cast<const T*>(array.from + list.rows[blockIdx.z][0] * array.bytes);
  T* to = reinterpret_cast<T*>(array.to + list.rows[blockIdx.z][1] * array.bytes);
  const size_t count = array.bytes / sizeof(T), step = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t at = blockIdx.x * kThreads + threadIdx.x; at < count; at += step * kUnroll) {
    T x[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (at + i * step < count) x[i] = from[at + i * step];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (at + i * step < count) to[at + i * step] = x[i];
  }
}

}  // namespace
}  // namespace moe

/// Copies rows[i][0] of each array to rows[i][1] of the array that belongs to it. Copies do not see each other.
extern "C" int moe_copy_states(const moe::CopyStatesArgs* args, void* stream) {
  using namespace moe;
  const CopyStatesArgs& a = *args;
  if (a.arrays < 0 || a.copies < 0) return cudaErrorInvalidValue;
  for (int first = 0; first < a.arrays; first += kArrays) {
    for (int row = 0; row < a.copies; row += kCopies) {
      CopyList list = {};
      bool vectors = true;
      const int arrays = a.arrays - first < kArrays ? a.arrays - first : kArrays;
      const int copies = a.copies - row < kCopies ? a.copies - row : kCopies;
      for (int i = 0; i < arrays; ++i) {
        const uint64_t* array = a.list + (first + i) * 3;
        vectors &= (array[0] | array[1] | array[2]) % 16 == 0;
        list.arrays[i] = {reinterpret_cast<const uint8_t*>(array[0]), reinterpret_cast<uint8_t*>(array[1]), array[2]};
      }
      std::memcpy(list.rows, a.rows + static_cast<size_t>(row) * 2, sizeof(uint32_t[2]) * static_cast<size_t>(copies));
      const Launch l = {dim3(kParts, static_cast<unsigned>(arrays), static_cast<unsigned>(copies)), dim3(kThreads),
                        stream};
      const cudaError_t e = vectors ? launch(copy_states<uint4>, l, list) : launch(copy_states<uint8_t>, l, list);
      if (e != cudaSuccess) return e;
    }
  }
  return cudaSuccess;
}
