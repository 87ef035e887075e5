// out [M, N] = x [M, K] w[N, K]^T for 1 to 8 rows and quantised weights.
//
// Floor: K / 2 bytes a row at 4 bits (5.2 MB for qkv of Qwen3-30B-A3B, 4.2 MB for o_proj: 1.2 and 1.0 us). So latency
// is the bound, and the warps of a block exchange nothing before its end. Each of 16 warps owns every 16th step of 128
// columns, in all the block's rows of tiles. It copies its weights to its own ring (warp_ring.cuh), for most sizes all
// of them before x is there. It stores its columns of x, multiplied by the norm's weight, in shared memory that no
// other warp reads. So there is one barrier, before the warps' sums are added; the norm's factor multiplies the sums
// then.
//
// With integer weights in groups of 128 and more, a single row of x is multiplied as digits (digits.cuh). With more
// rows, making digits takes longer than they save.
//
// The sums of warps are added in the order of the warps. The bits of an output depend on its rows of x and w and on K,
// and on M only in whether M is 1. The norm in the prologue and the addition in the epilogue are the same as in
// linear/stream.cu.
#include "linear/linear.cuh"
#include "quant/warp_ring.cuh"

namespace moe::quant {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kTokens = 8;                 // the columns of an mma
constexpr int kBatch = 3;                  // rows of tiles whose sums are added together
constexpr int kHeld = 2;                   // own steps for which a lane loads the norm's weights before x
constexpr size_t kSoleBlock = 116 * 1024;  // shared memory that keeps two blocks of a launch from sharing an SM

struct Args {
  const void* x;     // [m, k]: f32 with `norm`, else bf16
  const bf16* norm;  // [k] weight of the RMS norm of x, or null
  float eps;
  float mean;          // what a row's sum of squares is multiplied by to get its mean
  int each, one_more;  // rows of tiles of a block, and how many blocks have one more
  int per_token;       // 2^16 / m, rounded up: multiplying by it divides a number of threads by m
  int m, k;
  Matrix w;
  const bf16* bias;
  void* out;
  Output output;
  int n;
};

/// The largest number of steps that a warp owns in a row of tiles.
__host__ __device__ int own_steps(int k) { return ceil_div(ceil_div(k, kWideStep), kWarps); }

__host__ __device__ constexpr bool takes_digits(int m, QuantFormat format) { return m == 1 && has_digits(format); }

/// Bytes between a warp's rows of x.
__host__ __device__ int pitch(int k, bool digits) { return row_pitch(own_steps(k) * kWideStep, digits); }

__host__ __device__ constexpr int depth(QuantFormat format) { return code_bits(format) == 4 ? 4 : 3; }

/// Shared memory: rings, rows of x, sums of the warps, partial sums of squares.
struct Layout {
  int x, sums, squares, total;
};
__host__ __device__ Layout layout(int m, int k, QuantFormat format) {
  Layout l;
  l.x = kWarps * depth(format) * step_bytes(format);
  l.sums = l.x + kWarps * m * pitch(k, takes_digits(m, format));
  l.squares = l.sums + 4 * kBatch * kWarps * kTileRows * m;
  l.total = l.squares + 4 * kWarps * m;
  return l;
}

/// Four columns of a row of x: f32 with a norm, else bf16.
template <bool kNormed>
struct Quad {
  float4 value;
  uint2 word;

  __device__ __forceinline__ void load(const void* x, size_t at) {
    if constexpr (kNormed) value = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(x) + at));
    else word = __ldcg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(x) + at));
  }
  /// Multiplies by the norm's weight and rounds to bf16. Returns the sum of the squares before that.
  __device__ __forceinline__ float round(uint2 weight) {
    if constexpr (!kNormed) return 0.f;
    const float2 g = unpack_bf16(weight.x), h = unpack_bf16(weight.y);
    word = {pack_bf16(value.x * g.x, value.y * g.y), pack_bf16(value.z * h.x, value.w * h.y)};
    return sum_of_squares(value);
  }
};

/// Stores a warp's own columns of x in shared memory, kRows rows and kSteps steps at a time. `gain` holds this lane's
/// part of the norm's weight for the first kHeld own steps. `meanwhile` is called once, when the first loads are in
/// flight.
template <class Rows, bool kNormed, int kRows, int kSteps, class Meanwhile>
__device__ __forceinline__ void stage_columns(const Args& a, const uint2 (&gain)[kHeld], uint8_t* to, float* squares,
                                              Meanwhile meanwhile) {
  static_assert(kSteps == kHeld || (kSteps == 1 && kHeld == 2), "the steps that are held are those of one turn or two");
  const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * kWideStep + 4 * lane, turn = kWarps * kWideStep;
  // The column whose existence decides whether this lane stores a step. Digits are made by whole warps, so for digits
  // it is the first column of the step.
  const int making = Rows::kDigits ? begin - 4 * lane : begin;
#pragma unroll 1
  for (int first = 0; first < a.m; first += kRows) {
    float sum[kRows] = {};
#pragma unroll 1
    for (int j = 0; begin - 4 * lane + j * turn < a.k; j += kSteps) {
      Quad<kNormed> x[kSteps][kRows];
      uint2 weight[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (Rows::kDigits) x[i][0] = {}, weight[i] = {};
        const int column = begin + (j + i) * turn;
        if (column >= a.k) break;
        if constexpr (kNormed) {
          if (j >= kHeld) weight[i] = __ldg(reinterpret_cast<const uint2*>(a.norm + column));
          else weight[i] = j == 0 ? gain[i] : gain[kHeld - kSteps + i];
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) x[i][r].load(a.x, static_cast<size_t>(min(first + r, a.m - 1)) * a.k + column);
      }
      if (first == 0 && j == 0) meanwhile();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (making + (j + i) * turn >= a.k) break;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (first + r >= a.m) break;
          sum[r] += x[i][r].round(weight[i]);
          Rows::store(to + (first + r) * pitch(a.k, Rows::kDigits) + (j + i) * Rows::kBytes, 4 * lane, x[i][r].word);
        }
      }
    }
    if constexpr (kNormed) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0 && first + r < a.m) squares[(first + r) * kWarps + threadIdx.x / 32] = sum[r];
      }
    }
  }
  __syncwarp();
}

/// The factor for sums of a row that `stage_columns` stored.
__device__ __forceinline__ float norm_factor(const Args& a, const float* squares, int row) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += squares[row * kWarps + i];
  return rsqrtf(sum * a.mean + a.eps);
}

/// The rows of tiles of this block.
struct Tiles {
  int first, last;

  __device__ __forceinline__ explicit Tiles(const Args& a) {
    const int block = blockIdx.x;
    first = block * a.each + min(block, a.one_more);
    last = first + a.each + (block < a.one_more ? 1 : 0);
  }
};

/// Starts the copies of a warp's own steps, one row of tiles of the block after the other.
template <class Ring>
struct Loader {
  const Args& a;
  Ring& ring;
  TileRows rows = {};
  int tile = 0, last = 0, k = threadIdx.x / 32 * kWideStep;  // the next ones to copy
  TileRow row = {};

  /// Finds the first rows of tiles, before anything is copied.
  __device__ __forceinline__ void begin() {
    const Tiles tiles(a);
    rows = TileRows(a.w, Ring::kFormat);
    row = rows.at(tiles.first);
    tile = tiles.first, last = k < a.k ? tiles.last : tiles.first;  // some warps own none of the steps
  }

  __device__ __forceinline__ void ask() {
    if (tile >= last) return ring.skip();
    ring.copy(rows, row, k, min(kWideStep, a.k - k));
    k += kWarps * kWideStep;
    if (k < a.k) return;
    k = threadIdx.x / 32 * kWideStep;
    if (++tile < last) row = rows.at(tile);
  }
};

template <class Kind, bool kNormed, bool kDigits>
__global__ void __launch_bounds__(kThreads, 1) quant_stream_kernel(const __grid_constant__ Args a) {
  constexpr int kDepth = depth(Kind::kFormat);
  using Ring = WarpRing<Kind, kDepth>;
  using Rows = RowSteps<kDigits>;
  extern __shared__ __align__(128) uint8_t smem[];
  const Layout at = layout(a.m, a.k, Kind::kFormat);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp * kWideStep;
  float* sums = reinterpret_cast<float*>(smem + at.sums);
  float* squares = reinterpret_cast<float*>(smem + at.squares);
  uint8_t* x = smem + at.x + warp * a.m * pitch(a.k, kDigits);
  pdl_launch_dependents();
  // These loads come before the copies of weights: a load after them would wait until they have come.
  uint2 gain[kHeld] = {};
  if constexpr (kNormed) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int column = own + i * kWarps * kWideStep + 4 * lane;
      if (column < a.k) gain[i] = __ldg(reinterpret_cast<const uint2*>(a.norm + column));
    }
  }
  Ring ring(smem + warp * Ring::kBytes);
  Loader<Ring> loader = {a, ring};
  // The addresses of a warp's weights are computed while the launch before ends.
  loader.begin();
  // With a norm, the launch before leaves no room for this one on an SM, so no weights can be in flight before it has
  // ended. Therefore the rows are requested first, and the weights while the rows come. Weights of other products do
  // not wait for rows.
  const auto ask_all = [&] {
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) loader.ask();
  };
  if (!kNormed) ask_all();
  pdl_wait();
  const auto meanwhile = [&] {
    if (kNormed) ask_all();
  };
  if (kDigits || a.m == 1) stage_columns<Rows, kNormed, 1, kHeld>(a, gain, x, squares, meanwhile);
  else if constexpr (!kDigits) stage_columns<Rows, kNormed, 4, 1>(a, gain, x, squares, meanwhile);
  if (kNormed && own >= a.k) ask_all();  // a warp without columns of its own
  // Lanes without a token repeat the last one: their results are not stored.
  const LaneScales scales(a.w, Kind::kFormat);
  const uint8_t* own_x = x + min(Rows::operand_token(), a.m - 1) * pitch(a.k, kDigits);
  const auto [first, last] = Tiles(a);
#pragma unroll 1
  for (int batch = first; batch < last; batch += kBatch) {
    const int tiles = min(kBatch, last - batch), thread = threadIdx.x;
    const int row = thread * a.per_token >> 16, token = thread - row * a.m;
    const bool mine = row < min(tiles * kTileRows, a.n - batch * kTileRows);
    const size_t to = static_cast<size_t>(token) * a.n + batch * kTileRows + row;
    float value = mine ? before(a.output, a.out, to) : 0.f;
    if (mine && a.bias != nullptr) value += __bfloat162float(a.bias[batch * kTileRows + row]);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      float sum[4] = {};
      const uint8_t* from = own_x;
#pragma unroll 1
      for (int k = own; k < a.k; k += kWarps * kWideStep, from += Rows::kBytes) {
        ring.template multiply<Rows>(scales, a.k - k, from, 0, sum);
        loader.ask();
      }
      float* part = sums + (tile * kWarps + warp) * kTileRows * a.m;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i % 2 >= Rows::kEach) continue;
        const int of = Rows::result_token(i % 2);
        if (of < a.m) part[(lane / 4 + i / 2 * 8) * a.m + of] = sum[i];
      }
    }
    __syncthreads();
    if (mine) {
      const int each = kTileRows * a.m;
      const float* from = sums + (row / kTileRows * kWarps * kTileRows + row % kTileRows) * a.m + token;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += from[w * each];
      store(a.output, a.out, to, value + (kNormed ? sum * norm_factor(a, squares, token) : sum));
    }
    if (batch + kBatch < last) __syncthreads();  // the sums have been read
  }
}

template <class Kind, bool kNormed>
int run(Args a, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const int blocks = a.w.n_tiles < limits.sms ? a.w.n_tiles : limits.sms;
  a.each = a.w.n_tiles / blocks, a.one_more = a.w.n_tiles % blocks;
  const size_t smem = layout(a.m, a.k, Kind::kFormat).total, most = limits.block_smem;
  if (smem > most) return cudaErrorInvalidValue;
  const size_t sole = most < kSoleBlock ? most : kSoleBlock;
  const Launch l = {dim3(blocks), dim3(kThreads), stream, smem > sole ? smem : sole};
  if constexpr (kTakesDigits<Kind>)
    if (takes_digits(a.m, Kind::kFormat)) return launch(quant_stream_kernel<Kind, kNormed, true>, l, a);
  return launch(quant_stream_kernel<Kind, kNormed, false>, l, a);
}

template <class Kind>
int run(const Args& a, void* stream) {
  return a.norm ? run<Kind, true>(a, stream) : run<Kind, false>(a, stream);
}

}  // namespace
}  // namespace moe::quant

/// Whether moe_quant_linear_stream has room for m rows of k columns, as in moe_layer_stream_fits.
extern "C" int moe_quant_linear_stream_fits(moe::QuantFormat format, int m, int k, int block_smem) {
  return m >= 0 && m <= moe::quant::kTokens && moe::quant::layout(m, k, format).total <= block_smem;
}

/// out = x w^T (+ bias), m <= 8. Shared memory must have room for the rows of x and the rings:
/// moe_quant_linear_stream_fits.
extern "C" int moe_quant_linear_stream(const moe::QuantLinearStreamArgs* args, void* stream) {
  using namespace moe;
  const QuantLinearStreamArgs& c = *args;
  quant::Args a = {};
  if (c.m < 0 || c.m > quant::kTokens || !is_code(c.output, Output::kAddF32) || c.w.gate_up != 0 || c.w.experts != 1 ||
      !quant::make_matrix(c.w, &a.w))
    return cudaErrorInvalidValue;
  if (c.m == 0) return cudaSuccess;
  a.x = c.x, a.norm = c.norm, a.eps = c.eps, a.m = c.m, a.k = a.w.k, a.mean = 1.f / a.k;
  a.per_token = ceil_div(1 << 16, a.m);
  a.bias = c.bias, a.out = c.out, a.output = c.output, a.n = static_cast<int>(c.w.n);
  return quant::with_step_kind(c.w.format, quant::has_wide_groups(a.w),
                               [&](auto kind) { return quant::run<decltype(kind)>(a, stream); });
}
