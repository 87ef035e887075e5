// Products with quantised weights of any scheme, dtype of activations and shape: dense, and grouped by expert. Another
// kernel writes the floats that a pack stands for.
//
// A block multiplies up to 8 grouped rows by a tile of 16 weight rows. Its warps take tiles along K in turn: each lane
// reads 16 bytes, converts them to f32 and multiplies the rows of x, which are in shared memory as f32. So weights are
// read once for 8 rows of x, whole sectors at a time. A row's sums are added in the same order for all numbers of rows.
#include "any/gated.cuh"
#include "any/product.cuh"
#include "quant/pack.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

struct QuantProduct {
  const void* x;  // [x_rows, w.k]
  Dtype dtype;    // of x
  QuantPack w;
  Groups groups;
};

__device__ __forceinline__ float widen_at(const void* values, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::kF32: return static_cast<const float*>(values)[i];
    case Dtype::kBf16: return widen(static_cast<const bf16*>(values)[i]);
    default: return widen(static_cast<const __half*>(values)[i]);
  }
}

__device__ __forceinline__ void narrow_at(void* values, Dtype dtype, int64_t i, float x) {
  switch (dtype) {
    case Dtype::kF32: static_cast<float*>(values)[i] = x; break;
    case Dtype::kBf16: static_cast<bf16*>(values)[i] = narrow<bf16>(x); break;
    default: static_cast<__half*>(values)[i] = narrow<__half>(x); break;
  }
}

/// out[out_rows[row]] = round(sum + bias[expert]). With a gate and up pack, all gates come first, then all ups.
struct Store {
  static constexpr bool kGateUp = false;
  const void* bias;          // [experts, n] of `dtype` or null
  const uint32_t* out_rows;  // or null: grouped row i writes row i
  void* out;                 // [num_out, n] of `out_dtype`
  Dtype dtype, out_dtype;
  int64_t n;
  uint32_t num_out;  // an out_row from this number on is not written

  __device__ __forceinline__ void operator()(int expert, uint32_t row, int64_t column, float sum, float) const {
    const uint32_t to = out_rows == nullptr ? row : out_rows[row];
    if (bias != nullptr) sum += widen_at(bias, dtype, expert * n + column);
    if (to < num_out) narrow_at(out, out_dtype, to * n + column, sum);
  }
};

/// out[row] = round(act(gate + bias, up + bias)).
struct StoreGated {
  static constexpr bool kGateUp = true;
  const void* bias;  // [experts, 2 n] of `dtype` or null
  void* out;         // [rows, n] of `dtype`
  Dtype dtype;
  int64_t n;
  Gated gated;

  __device__ __forceinline__ void operator()(int expert, uint32_t row, int64_t column, float gate, float up) const {
    if (bias != nullptr) {
      gate += widen_at(bias, dtype, expert * 2 * n + column);
      up += widen_at(bias, dtype, expert * 2 * n + n + column);
    }
    narrow_at(out, dtype, row * n + column, gated(gate, up));
  }
};

/// Loads the columns from `first` on of the tile's rows of x, in packed order; zeros for columns that x does not have.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_rows(const QuantProduct& p, const Tile& tile, int64_t first,
                                          float (&xs)[kRows][kColumns]) {
  const Groups& g = p.groups;
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    const uint32_t r = i / kColumns;
    const int64_t packed = first + i % kColumns;
    float value = 0.f;
    if (r < tile.count && packed < p.w.k_packed) {
      const uint32_t row = g.in_rows == nullptr ? tile.first + r : g.in_rows[tile.first + r];
      const int64_t column = quant_column(p.w, tile.expert, packed);
      if (row < g.x_rows && column < p.w.k) value = widen_at(p.x, p.dtype, row * p.w.k + column);
    }
    xs[r][i % kColumns] = value;
  }
}

template <QuantFormat kFormat, int kRows, class Epilogue>
__global__ void __launch_bounds__(kThreads) quant_product(const QuantProduct p, const Epilogue epilogue) {
  constexpr int kColumns = quant_tile_columns(kFormat), kSteps = kColumns / kQuantStep, kWords = 4 / kSteps;
  __shared__ __align__(16) float xs[kRows][kWarps * kColumns];
  __shared__ float parts[kWarps][kRows][kQuantTileRows];
  pdl_wait();
  const Tile tile = find_tile<kRows>(p.groups, blockIdx.x);
  if (tile.count == 0) return;
  const QuantPack& w = p.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t n_tile = blockIdx.y, tile_row = tile.expert * w.n_tiles + n_tile;
  const uint4* tiles = reinterpret_cast<const uint4*>(w.q + tile_row * (w.k_packed / kColumns) * kQuantTileBytes);
  const TileScales<kFormat> scales(w, tile_row);
  float sum[kRows][2] = {};
  for (int64_t first = 0; first < w.k_packed; first += kWarps * kColumns) {
    const int64_t column = first + warp * kColumns;
    uint4 q = {};
    // Weights take the longest way, so they are asked for before the rows.
    if (column < w.k_packed) q = tiles[column / kColumns * 32 + lane];
    __syncthreads();  // the rows of the step before have been read
    load_rows(p, tile, first, xs);
    __syncthreads();
    if (column >= w.k_packed) continue;
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float weights[8];
      dequantised(scales, static_cast<uint32_t>(column + step * kQuantStep), lane, words + step * kWords, weights);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* row = &xs[r][warp * kColumns + step * kQuantStep + lane % 4 * 2];
        const float2 low = *reinterpret_cast<const float2*>(row), high = *reinterpret_cast<const float2*>(row + 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float s = sum[r][half];
          s = fmaf(low.x, weights[2 * half], s);
          s = fmaf(low.y, weights[2 * half + 1], s);
          s = fmaf(high.x, weights[2 * half + 4], s);
          sum[r][half] = fmaf(high.y, weights[2 * half + 5], s);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float s = sum[r][half];
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      if (lane % 4 == 0) parts[warp][r][lane / 4 + 8 * half] = s;
    }
  }
  __syncthreads();
  const auto total = [&](int r, int row) {
    float s = parts[0][r][row];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) s += parts[i][r][row];
    return s;
  };
  constexpr int kOutputs = Epilogue::kGateUp ? 8 : kQuantTileRows;
  for (int i = threadIdx.x; i < kRows * kOutputs; i += kThreads) {
    const int r = i / kOutputs, row = i % kOutputs;
    const int64_t column = Epilogue::kGateUp ? n_tile * kOutputs + row : quant_row(w, n_tile, row);
    if (static_cast<uint32_t>(r) >= tile.count || column >= epilogue.n) continue;
    const float other = Epilogue::kGateUp ? total(r, row + 8) : 0.f;
    epilogue(tile.expert, tile.first + r, column, total(r, row), other);
  }
}

template <class Epilogue>
cudaError_t launch_quant(const QuantProduct& p, const Epilogue& epilogue, void* stream) {
  constexpr int kMaxGridY = 65535;
  const Groups& g = p.groups;
  if (!is_pack(p.w) || g.rows < 0 || (Epilogue::kGateUp && p.w.gate_up == 0) || p.w.n_tiles > kMaxGridY)
    return cudaErrorInvalidValue;
  if (g.rows == 0 || g.experts == 0 || p.w.n == 0) return cudaSuccess;
  return with_format(p.w.format, [&](auto format) {
    constexpr QuantFormat kFormat = decltype(format)::value;
    const auto grid = [&](int rows) { return dim3(static_cast<unsigned>(max_tiles(g, rows)), p.w.n_tiles); };
    if (g.rows <= g.experts)
      return launch(quant_product<kFormat, 1, Epilogue>, {grid(1), dim3(kThreads), stream}, p, epilogue);
    return launch(quant_product<kFormat, 8, Epilogue>, {grid(8), dim3(kThreads), stream}, p, epilogue);
  });
}

/// Writes the floats of a tile of 16 rows, with all its columns.
template <QuantFormat kFormat>
__global__ void __launch_bounds__(kThreads) dequantise(const QuantPack w, void* out, Dtype dtype) {
  constexpr int kColumns = quant_tile_columns(kFormat), kSteps = kColumns / kQuantStep, kWords = 4 / kSteps;
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tile_row = blockIdx.x, expert = tile_row / w.n_tiles, n_tile = tile_row % w.n_tiles;
  const uint4* tiles = reinterpret_cast<const uint4*>(w.q + tile_row * (w.k_packed / kColumns) * kQuantTileBytes);
  const TileScales<kFormat> scales(w, tile_row);
  for (int64_t first = warp * kColumns; first < w.k_packed; first += kWarps * kColumns) {
    const uint4 q = tiles[first / kColumns * 32 + lane];
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t column = first + step * kQuantStep;
      float weights[8];
      dequantised(scales, static_cast<uint32_t>(column), lane, words + step * kWords, weights);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int64_t row = quant_row(w, n_tile, lane / 4 + i / 2 % 2 * 8);
        const int64_t to = quant_column(w, expert, column + lane % 4 * 2 + i % 2 + i / 4 * 8);
        if (row < w.n && to < w.k) narrow_at(out, dtype, (expert * w.n + row) * w.k + to, weights[i]);
      }
    }
  }
}

}  // namespace
}  // namespace moe

/// out = x w^T (+ bias). At most 1,048,560 rows of w.
extern "C" int moe_any_quant_linear(const moe::AnyQuantLinearArgs* args, void* stream) {
  using namespace moe;
  const AnyQuantLinearArgs& c = *args;
  if (c.w.experts != 1 || !is_code(c.dtype, Dtype::kF16) || !is_code(c.out_dtype, Dtype::kF16) || c.rows < 0)
    return cudaErrorInvalidValue;
  const auto count = static_cast<uint32_t>(c.rows);
  const Groups all = {nullptr, nullptr, 1, c.rows, count, true};
  const Store store = {c.bias, nullptr, c.out, c.dtype, c.out_dtype, c.w.n, count};
  return launch_quant(QuantProduct{c.x, c.dtype, c.w, all}, store, stream);
}

/// Gate and up products with the activation.
extern "C" int moe_any_quant_gate_up(const moe::AnyQuantGateUpArgs* args, void* stream) {
  using namespace moe;
  const AnyQuantGateUpArgs& c = *args;
  if (c.x_rows < 0 || c.activation < 0 || c.activation > 3 || c.offsets == nullptr || !is_code(c.dtype, Dtype::kF16))
    return cudaErrorInvalidValue;
  const Gated gated = {static_cast<Activation>(c.activation), c.alpha, c.limit};
  const Groups groups = {c.offsets, c.in_rows, static_cast<int>(c.w13.experts), c.rows, static_cast<uint32_t>(c.x_rows),
                         true};
  const StoreGated store = {c.bias, c.out, c.dtype, c.w13.n / 2, gated};
  return launch_quant(QuantProduct{c.x, c.dtype, c.w13, groups}, store, stream);
}

/// The down product.
extern "C" int moe_any_quant_down(const moe::AnyQuantDownArgs* args, void* stream) {
  using namespace moe;
  const AnyQuantDownArgs& c = *args;
  if (c.num_out < 0 || c.offsets == nullptr || !is_code(c.dtype, Dtype::kF16)) return cudaErrorInvalidValue;
  const Groups groups = {c.offsets, nullptr, static_cast<int>(c.w2.experts), c.rows, static_cast<uint32_t>(c.rows),
                         true};
  const Store store = {c.bias, c.out_rows, c.out, c.dtype, Dtype::kF32, c.w2.n, static_cast<uint32_t>(c.num_out)};
  return launch_quant(QuantProduct{c.x, c.dtype, c.w2, groups}, store, stream);
}

/// Writes the matrices [experts, n, k] that a pack stands for, rounded to `dtype`.
extern "C" int moe_any_dequantise(const moe::QuantPack* w, void* out, moe::Dtype dtype, void* stream) {
  using namespace moe;
  if (!is_pack(*w) || !is_code(dtype, Dtype::kF16) || w->experts * w->n_tiles >= (int64_t{1} << 31))
    return cudaErrorInvalidValue;
  if (w->experts * w->n_tiles == 0 || w->k_packed == 0) return cudaSuccess;
  const Launch l = {dim3(static_cast<unsigned>(w->experts * w->n_tiles)), dim3(kThreads), stream};
  return with_format(w->format,
                     [&](auto format) { return launch(dequantise<decltype(format)::value>, l, *w, out, dtype); });
}
