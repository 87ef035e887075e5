// Causal convolution of each channel over the last rows of its sequence, with SiLU.
//
// Rows that see the state and rows that do not are computed by different blocks. A block of the first kind takes the
// first width - 1 rows of a sequence. It alone reads the state, and it replaces it: by the sequence's last rows before
// the convolution, which no block changes. A block of the second kind takes 16 rows of the step, whatever their
// sequences are, and computes those that see only rows of the step. It also writes the zeros of padding.
//
// A thread has 4 channels (1 if their number or an address is not a multiple of 4) and keeps the rows that the next
// one sees in registers, so each input row is read once, and width - 1 rows more for each 16. Floor: 8 bytes per row
// and channel, and 8 (width - 1) bytes per sequence and channel for the state.
#include "delta/args.cuh"
#include "delta/vectors.cuh"
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {
namespace {

constexpr int kThreads = 128;
/// Rows of a block of the second kind.
constexpr int kTile = 16;

/// The last kWidth rows of a sequence before the convolution, in some channels, and their weights.
template <int kWidth, int kVec>
struct Window {
  using Values = Columns<kVec>;
  static constexpr int kKept = kWidth - 1;

  Values weight[kWidth];
  Values row[kWidth];  // oldest first; the last place is for the row to be computed

  __device__ __forceinline__ Window(const CausalConvArgs& a, int channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) weight[i] = Values::load(a.weight + static_cast<size_t>(i) * a.channels + channel);
  }

  /// Adds a row: the others become one row older.
  __device__ __forceinline__ void push(const Values& x) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) row[i] = row[i + 1];
    row[kKept] = x;
  }

  /// The result for the last row that was added.
  __device__ __forceinline__ Values result() const {
    Values sum = Values::zeros();
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
#pragma unroll
      for (int c = 0; c < kVec; ++c) sum.at[c] = fmaf(weight[i].at[c], row[i].at[c], sum.at[c]);
#pragma unroll
    for (float& x : sum.at) x = silu(x);
    return sum;
  }
};

/// The first width - 1 rows of a sequence, and its state.
template <int kWidth, int kVec>
__device__ __forceinline__ void first_rows(const CausalConvArgs& a, int sequence, int channel) {
  using Values = Columns<kVec>;
  constexpr int kKept = kWidth - 1;
  const int begin = static_cast<int>(min(a.query_start_loc[sequence], static_cast<uint32_t>(a.tokens)));
  const int end = static_cast<int>(min(a.query_start_loc[sequence + 1], static_cast<uint32_t>(a.tokens)));
  if (begin >= end || channel >= a.channels) return;
  const auto input = [&](int row) { return a.projected + static_cast<size_t>(row) * a.stride + channel; };
  const auto output = [&](int row) { return a.out + static_cast<size_t>(row) * a.channels + channel; };
  const uint32_t number = a.numbers[sequence];
  if (number >= static_cast<uint32_t>(a.num_states)) {
    for (int row = begin; row < min(begin + kKept, end); ++row) Values::zeros().store(output(row));
    return;
  }
  float* state = a.states + static_cast<size_t>(number) * kKept * a.channels + channel;
  const bool empty = a.positions[begin] == 0;
  Window<kWidth, kVec> window(a, channel);
  window.row[0] = Values::zeros();
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    window.row[i + 1] = empty ? Values::zeros() : Values::load(state + static_cast<size_t>(i) * a.channels);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (begin + i < end) {
      window.push(Values::load(input(begin + i)));
      window.result().store(output(begin + i));
    }
  }
  // The window ends with the last row that was added, and with more rows than were added the state is these rows alone.
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const Values kept = end - begin > kKept ? Values::load(input(end - kKept + i)) : window.row[i + 1];
    kept.store(state + static_cast<size_t>(i) * a.channels);
  }
}

/// The rows from `first` on that see only rows of the step, and padding.
template <int kWidth, int kVec>
__device__ __forceinline__ void later_rows(const CausalConvArgs& a, int first, int channel) {
  using Values = Columns<kVec>;
  constexpr int kKept = kWidth - 1;
  __shared__ int start;          // of the sequence that the first row belongs to
  __shared__ int begins[kTile];  // whether a sequence begins with the row
  const int stop = min(first + kTile, a.tokens);
  if (threadIdx.x == 0) start = 0;
  if (threadIdx.x < kTile) begins[threadIdx.x] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < a.sequences; s += kThreads) {
    const int row = static_cast<int>(min(a.query_start_loc[s], static_cast<uint32_t>(a.tokens)));
    if (row <= first) atomicMax(&start, row);
    else if (row < stop) begins[row - first] = 1;
  }
  const int total = static_cast<int>(min(a.query_start_loc[a.sequences], static_cast<uint32_t>(a.tokens)));
  __syncthreads();
  bool some = false;
  int begin = start;
  for (int row = first; row < stop; ++row) {
    if (begins[row - first] != 0) begin = row;
    some |= row >= total || row - begin >= kKept;
  }
  if (!some || channel >= a.channels) return;
  const auto input = [&](int row) { return a.projected + static_cast<size_t>(row) * a.stride + channel; };
  Window<kWidth, kVec> window(a, channel);
  begin = start;
  window.row[0] = Values::zeros();
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int row = first - kKept + i;
    window.row[i + 1] = row >= begin && row < total ? Values::load(input(row)) : Values::zeros();
  }
#pragma unroll 4
  for (int row = first; row < stop; ++row) {
    if (begins[row - first] != 0) begin = row;
    const bool is_padding = row >= total;
    window.push(is_padding ? Values::zeros() : Values::load(input(row)));
    if (is_padding || row - begin >= kKept) {
      const Values out = is_padding ? Values::zeros() : window.result();
      out.store(a.out + static_cast<size_t>(row) * a.channels + channel);
    }
  }
}

/// Blocks of the first kind, then blocks of the second. `parts`: blocks that share the channels.
template <int kWidth, int kVec>
__global__ void __launch_bounds__(kThreads) causal_conv(const CausalConvArgs a, int parts, int firsts) {
  pdl_launch_dependents();
  pdl_wait();
  const int block = blockIdx.x / parts;
  const int channel = (static_cast<int>(blockIdx.x % parts) * kThreads + static_cast<int>(threadIdx.x)) * kVec;
  if constexpr (kWidth > 1) {
    if (block < firsts) {
      first_rows<kWidth, kVec>(a, block, channel);
      return;
    }
  }
  later_rows<kWidth, kVec>(a, (block - firsts) * kTile, channel);
}

template <int kWidth, int kVec>
cudaError_t launch_conv(const CausalConvArgs& a, void* stream) {
  const int parts = ceil_div(a.channels, kThreads * kVec);
  const int firsts = kWidth > 1 ? a.sequences : 0;
  const int64_t blocks = (static_cast<int64_t>(firsts) + ceil_div(a.tokens, kTile)) * parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(causal_conv<kWidth, kVec>, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream}, a, parts,
                firsts);
}

template <int kVec>
cudaError_t launch_width(const CausalConvArgs& a, void* stream) {
  switch (a.width) {
    case 1: return launch_conv<1, kVec>(a, stream);
    case 2: return launch_conv<2, kVec>(a, stream);
    case 3: return launch_conv<3, kVec>(a, stream);
    case 4: return launch_conv<4, kVec>(a, stream);
    case 5: return launch_conv<5, kVec>(a, stream);
    case 6: return launch_conv<6, kVec>(a, stream);
    case 7: return launch_conv<7, kVec>(a, stream);
    case 8: return launch_conv<8, kVec>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace moe

/// Computes `out` and replaces the states of the sequences that have rows.
extern "C" int moe_causal_conv(const moe::CausalConvArgs* args, void* stream) {
  using namespace moe;
  const CausalConvArgs& a = *args;
  constexpr int kMost = INT32_MAX - kThreads * 4;
  if (a.tokens < 0 || a.tokens > kMost || a.sequences < 0 || a.num_states < 0 || a.channels < 0 || a.channels > kMost ||
      a.stride < a.channels)
    return cudaErrorInvalidValue;
  if (a.tokens == 0 || a.channels == 0) return cudaSuccess;
  const bool vectors = a.channels % 4 == 0 && a.stride % 4 == 0 && is_aligned(a.projected) && is_aligned(a.weight) &&
                       is_aligned(a.states) && is_aligned(a.out);
  return vectors ? launch_width<4>(a, stream) : launch_width<1>(a, stream);
}
