// The gated delta rule with the state in registers: each row of a sequence multiplies it, reads from it, and adds to
// it.
//
// A block has 32 columns of one value head of one sequence, and all rows of the sequence. So the state is read once and
// written once, whatever the number of rows, and a row's bits do not depend on how its prompt was cut. A warp has 8 of
// these columns. Two lanes hold the 8 columns (32 bytes, a sector) of a row of the state, and 16 such pairs share the
// Dk rows. So sums over Dk are sums over a warp, and warps never wait for each other's sums.
//
// The state is loaded while the launch ahead, the convolution, still runs: a step changes the state of a layer once, so
// it was there before the step (rows/elementwise.cu says why such data may be read).
//
// q, k, v and the gates of the next rows are on their way to shared memory while a row is computed. q and k enter the
// sums as they are. Their lengths are computed at the same time, and divide the sums.
//
// Floor for one row per sequence: 8 Dk Dv bytes per head. A row of a prompt costs the latency of two sums over a warp.
#include "delta/rule.cuh"

namespace moe {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
/// Columns of a lane.
constexpr int kVec = 4;
/// Lanes that share a row of the state, and groups of lanes that share the rows.
constexpr int kLanes = 2;
constexpr int kGroups = 32 / kLanes;
/// Columns of a block.
constexpr int kColumns = kWarps * kLanes * kVec;
/// Rows of the step that are in shared memory or on their way.
constexpr int kStages = 4;

/// The inputs of a row in shared memory. kRows: rows of the state of each lane.
template <int kRows>
struct Stage {
  static constexpr int kDim = kGroups * kRows;
  alignas(16) float q[kDim];
  alignas(16) float k[kDim];
  alignas(16) float v[kColumns];
  alignas(16) float gates[4];  // b, a
};

/// Starts to copy `count` elements by the lanes of a warp; with kVectors, `from` is 16-byte aligned and `count` a
/// multiple of 4.
template <bool kVectors>
__device__ __forceinline__ void copy_elements(float* to, const float* from, int count) {
  const int lane = threadIdx.x % 32;
  if constexpr (kVectors) {
    for (int i = lane * 4; i < count; i += 32 * 4) cp_async16(to + i, from + i);
  } else {
    for (int i = lane; i < count; i += 32) cp_async4(to + i, from + i);
  }
}

/// Starts to copy the inputs of a row: a warp for each array.
template <bool kVectors, int kRows>
__device__ __forceinline__ void fetch(Stage<kRows>& stage, const GatedDeltaArgs& a, const DeltaRow& from, int column) {
  switch (threadIdx.x / 32) {
    case 0: copy_elements<kVectors>(stage.q, from.q, a.key_dim); break;
    case 1: copy_elements<kVectors>(stage.k, from.k, a.key_dim); break;
    case 2: copy_elements<kVectors>(stage.v, from.v + column, min(kColumns, a.value_dim - column)); break;
    default:
      if (threadIdx.x % 32 == 0) cp_async4(stage.gates, from.b);
      if (threadIdx.x % 32 == 1) cp_async4(stage.gates + 1, from.a);
  }
}

/// kRows consecutive elements of shared memory.
template <int kRows>
__device__ __forceinline__ void read(float (&to)[kRows], const float* from) {
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

/// The sum over the groups of lanes; every lane gets it.
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// The part of a state that a lane holds: kVec columns of kRows rows. What is beyond its sizes is 0 and stays 0.
template <bool kVectors, int kRows>
struct State {
  float at[kRows][kVec];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kVec; ++c) at[i][c] = 0.f;
  }

  /// `from`: the first row and column of the lane, of which it has `rows` and `columns`.
  __device__ __forceinline__ void load(const float* from, int stride, int rows, int columns) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float* row = from + static_cast<size_t>(i) * stride;
      if constexpr (kVectors) {
        const bool valid = i < rows && columns > 0;
        const Columns<kVec> x = valid ? Columns<kVec>::load(row) : Columns<kVec>::zeros();
#pragma unroll
        for (int c = 0; c < kVec; ++c) at[i][c] = x.at[c];
      } else {
#pragma unroll
        for (int c = 0; c < kVec; ++c) at[i][c] = i < rows && c < columns ? row[c] : 0.f;
      }
    }
  }

  __device__ __forceinline__ void store(float* to, int stride, int rows, int columns) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float* row = to + static_cast<size_t>(i) * stride;
      if constexpr (kVectors) {
        if (i < rows && columns > 0)
          *reinterpret_cast<float4*>(row) = make_float4(at[i][0], at[i][1], at[i][2], at[i][3]);
      } else {
#pragma unroll
        for (int c = 0; c < kVec; ++c)
          if (i < rows && c < columns) row[c] = at[i][c];
      }
    }
  }

  /// One row of the rule: S = decay S; S += k (x) beta (v - k S); returns q S, the sums of this lane's rows alone.
  /// `k` and `q` are not divided by their lengths; `q_length` is set to 1 / |q|.
  __device__ __forceinline__ Columns<kVec> advance(const float (&q)[kRows], const float (&k)[kRows], const float* v,
                                                   float decay, float beta, float& q_length) {
    float held[kVec] = {}, k_squares = 0, q_squares = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      k_squares = fmaf(k[i], k[i], k_squares);
      q_squares = fmaf(q[i], q[i], q_squares);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        at[i][c] *= decay;
        held[c] = fmaf(at[i][c], k[i], held[c]);
      }
    }
#pragma unroll
    for (float& x : held) x = group_sum(x);
    const float k_length = 1.f / sqrtf(group_sum(k_squares) + kUnitEps);
    q_length = 1.f / sqrtf(group_sum(q_squares) + kUnitEps);
    float delta[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) delta[c] = (v[c] - held[c] * k_length) * beta * k_length;
    Columns<kVec> sum = Columns<kVec>::zeros();
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        at[i][c] = fmaf(k[i], delta[c], at[i][c]);
        sum.at[c] = fmaf(at[i][c], q[i], sum.at[c]);
      }
    return sum;
  }
};

template <bool kVectors, int kRows>
__global__ void __launch_bounds__(kThreads) gated_delta(const GatedDeltaArgs a, int most, int parts, unsigned blocks) {
  __shared__ Stage<kRows> ring[kStages];
  pdl_launch_dependents();
  const DeltaSizes sizes(a);
  // The blocks of padding always wait, so this launch does not end before the one ahead.
  if (blockIdx.x >= blocks) {
    pdl_wait();
    zero_padding(a, sizes.value_width, blockIdx.x - blocks);
    return;
  }
  const DeltaBlock at = DeltaBlock::numbered(a, blockIdx.x, parts, kColumns);
  if (at.begin >= at.end) return;
  if (!at.has_state) {
    pdl_wait();
    zero_rows(a, at, sizes.value_width, kColumns);
    return;
  }
  if (at.end - at.begin >= most) return;
  // Copies never write beyond the sizes of a head, where q, k and v must be 0.
  float* const words = reinterpret_cast<float*>(ring);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(ring) / sizeof(float)); i += kThreads) words[i] = 0.f;
  __syncthreads();
  const int lane = threadIdx.x % 32, group = lane / kLanes;
  const int own = (threadIdx.x / 32 * kLanes + lane % kLanes) * kVec;  // this lane's first column in the block
  const int columns = min(kVec, a.value_dim - at.column - own);
  const int rows = a.key_dim - group * kRows;
  float* const place = at.state + static_cast<size_t>(group) * kRows * a.value_dim + at.column + own;
  State<kVectors, kRows> state;
  if (at.is_empty) state.clear();
  else state.load(place, a.value_dim, rows, columns);
  const DeltaGates gates(a, at.head);
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (at.begin + i < at.end) fetch<kVectors>(ring[i], a, at.row(a, sizes, at.begin + i), at.column);
    cp_async_commit();
  }
  const float scale = 1.f / sqrtf(static_cast<float>(a.key_dim));
  float* out = a.out + static_cast<size_t>(at.begin) * sizes.value_width + at.head * a.value_dim + at.column + own;
  int slot = 0;
  for (int row = at.begin; row < at.end; ++row, out += sizes.value_width) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // everyone's copies of this row are there, and the stage of the row before is free
    const int next = row + kStages - 1;
    if (next < at.end) fetch<kVectors>(ring[(slot + kStages - 1) % kStages], a, at.row(a, sizes, next), at.column);
    cp_async_commit();
    const Stage<kRows>& stage = ring[slot];
    slot = (slot + 1) % kStages;
    float q[kRows], k[kRows], v[kVec];
    read(k, stage.k + group * kRows);
    read(q, stage.q + group * kRows);
    read(v, stage.v + own);
    const float decay = gates.decay(stage.gates[1]), beta = DeltaGates::beta(stage.gates[0]);
    float q_length;
    Columns<kVec> sum = state.advance(q, k, v, decay, beta, q_length);
#pragma unroll
    for (float& x : sum.at) x = group_sum(x) * (q_length * scale);
    if (group == 0) {
      if constexpr (kVectors) {
        if (columns > 0) sum.store(out);
      } else {
#pragma unroll
        for (int c = 0; c < kVec; ++c)
          if (c < columns) out[c] = sum.at[c];
      }
    }
  }
  state.store(place, a.value_dim, rows, columns);
}

template <bool kVectors, int kRows>
cudaError_t launch_delta(const GatedDeltaArgs& a, int most, void* stream) {
  const int parts = ceil_div(a.value_dim, kColumns);
  const int64_t blocks = static_cast<int64_t>(a.sequences) * a.value_heads * parts;
  if (blocks > INT32_MAX - kPaddingBlocks) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks) + kPaddingBlocks);
  return launch(gated_delta<kVectors, kRows>, {grid, dim3(kThreads), stream}, a, most, parts,
                static_cast<unsigned>(blocks));
}

template <bool kVectors>
cudaError_t launch_rows(const GatedDeltaArgs& a, int most, void* stream) {
  if (a.key_dim <= 4 * kGroups) return launch_delta<kVectors, 4>(a, most, stream);
  if (a.key_dim <= 8 * kGroups) return launch_delta<kVectors, 8>(a, most, stream);
  if (a.key_dim <= 16 * kGroups) return launch_delta<kVectors, 16>(a, most, stream);
  return gated_delta_memory(a, stream);
}

}  // namespace

cudaError_t gated_delta_registers(const GatedDeltaArgs& a, int most, void* stream) {
  // The offsets of heads in a row are then multiples of 4, too.
  const bool vectors =
      a.key_dim % 4 == 0 && a.value_dim % 4 == 0 && is_aligned(a.mixed) && is_aligned(a.states) && is_aligned(a.out);
  return vectors ? launch_rows<true>(a, most, stream) : launch_rows<false>(a, most, stream);
}

}  // namespace moe

/// Computes `out` and the states of the sequences that have rows.
extern "C" int moe_gated_delta(const moe::GatedDeltaArgs* args, void* stream) {
  using namespace moe;
  const GatedDeltaArgs& a = *args;
  if (!is_valid(a)) return cudaErrorInvalidValue;
  if (a.tokens == 0) return cudaSuccess;
  return gated_delta_registers(a, INT32_MAX, stream);
}
