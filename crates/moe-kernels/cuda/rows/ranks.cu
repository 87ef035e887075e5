// Kernels, other than layers, for ranks that share a model: lookups in a part of a vocabulary, and parts of random
// weights.
#include "any/any.cuh"
#include "sampling/sampling.cuh"

namespace moe {
namespace {

/// out[r] = table[ids[r] - first]; zeros if the rank with another range of rows has the id. Each element is read and
/// written once.
template <class T, class S>
__global__ void embed_part(const T* table, const uint32_t* ids, S* out, int width, uint32_t first, uint32_t count) {
  const uint32_t row = ids[blockIdx.x] - first;  // wraps around below `first`, beyond any count
  const T* from = table + static_cast<size_t>(row) * width;
  S* to = out + static_cast<size_t>(blockIdx.x) * width;
  for (int i = column_start(); i < width; i += column_step()) to[i] = narrow<S>(row < count ? widen(from[i]) : 0.f);
}

/// out[r, c] for row r = blockIdx.x. The blocks of the ranks follow each other; the first `width % ranks` of them are
/// one column wider. Floor: 8 bytes per element.
__global__ void join_columns(const float* parts, float* out, int rows, int width, int ranks) {
  pdl_wait();
  const int base = width / ranks, wider = width % ranks, row = blockIdx.x;
  float* to = out + static_cast<size_t>(row) * width;
  for (int c = column_start(); c < width; c += column_step()) {
    const int split = wider * (base + 1);
    const int rank = c < split ? c / (base + 1) : wider + (c - split) / base;
    const int start = rank * base + min(rank, wider), columns = base + (rank < wider);
    to[c] = parts[static_cast<size_t>(rows) * start + static_cast<size_t>(row) * columns + (c - start)];
  }
}

/// The elements of a box of the numbers that fill_random gives a whole tensor. Four elements share a hash, and each
/// thread computes it.
__global__ void fill_random_box(bf16* out, int64_t count, int64_t columns, int64_t rows, uint64_t start,
                                uint64_t row_stride, uint64_t matrix_stride, uint64_t seed, float bound) {
  for (int64_t i = element_start(); i < count; i += element_step()) {
    const int64_t row = i / columns;
    const uint64_t at = start + row / rows * matrix_stride + row % rows * row_stride + i % columns;
    const int value = static_cast<int16_t>(random_bits(seed, at / 4) >> 16 * (at % 4));
    out[i] = __float2bfloat16_rn(static_cast<float>(value) * (bound / 32768.f));
  }
}

}  // namespace
}  // namespace moe

using namespace moe;

/// out [rows, width] (`out_dtype`: that of the table, or f32) = rows ids [rows] u32 of a whole table, of which `table`
/// [count, width] contains the rows from `first` on; zeros for ids outside of it. Does not overlap the launch before
/// it.
extern "C" int moe_embed_part(const void* table, const uint32_t* ids, void* out, moe::Dtype dtype, moe::Dtype out_dtype,
                              int rows, int width, int first, int count, void* stream) {
  if (rows < 0 || width < 0 || first < 0 || count < 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  Launch l = over_rows(rows, width, stream);
  l.overlap = false;
  return with_stream(dtype, out_dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    return launch(embed_part<T, S>, l, static_cast<const T*>(table), ids, static_cast<S*>(out), width,
                  static_cast<uint32_t>(first), static_cast<uint32_t>(count));
  });
}

/// out [rows, width] f32 from `parts`: for each of `ranks` ranks [rows, its columns] f32, one after the other. The
/// ranks have equal shares of the columns, and the first width % ranks ranks one column more.
extern "C" int moe_join_columns(const float* parts, float* out, int rows, int width, int ranks, void* stream) {
  if (rows < 0 || width < 0 || ranks <= 0) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0) return cudaSuccess;
  return launch(join_columns, over_rows(rows, width, stream), parts, out, rows, width, ranks);
}

/// out [matrices, rows, columns] bf16: elements start + m * matrix_stride + r * row_stride + c of the numbers that
/// moe_fill_random generates with stream_id 0.
extern "C" int moe_fill_random_box(moe::bf16* out, int64_t matrices, int64_t rows, int64_t columns, uint64_t start,
                                   uint64_t matrix_stride, uint64_t row_stride, uint64_t seed, float bound,
                                   void* stream) {
  if (matrices < 0 || rows < 0 || columns < 0) return cudaErrorInvalidValue;
  const int64_t count = matrices * rows * columns;
  if (count == 0) return cudaSuccess;
  Launch l = over_elements(count, stream);
  l.overlap = false;
  return launch(fill_random_box, l, out, count, columns, rows, start, row_stride, matrix_stride, seed, bound);
}
