// What the chunks of the gated delta rule need that does not depend on a state (chunks.cuh): a block for each chunk,
// key head, and two of the value heads that share it. The first of them stores the keys and queries.
//
// A warp has 16 rows of the chunk. The inverse of a unit triangle is computed in f32 by columns: a thread has a column
// in registers and eliminates it, two warps a value head. No sum of it is large, for the product of the steps of the
// rule between two rows makes no vector longer.
//
// Floor: 8 bytes read per row and column of q and k, and the operands written: 6 bytes per row and column of a key head
// and 328 per row of a value head.
#include "delta/chunks.cuh"

namespace moe::delta_chunks {
namespace {

/// Elements from one row of q or k to the next in shared memory: the 8 rows of a matrix then are in different banks.
constexpr int kStride = kKeyDim + 8;
/// The same for a triangle in f32, whose columns are 16-byte aligned.
constexpr int kColumn = kRows + 4;
/// Value heads of a block.
constexpr int kHeads = kWarps / 2;

/// Gates of the rows of a chunk: the sums of the logarithms of their decays to base 2, as two numbers, and beta.
struct Gates {
  float high[kRows], low[kRows], beta[kRows];

  /// G_i - G_j.
  __device__ __forceinline__ float between(int i, int j) const { return high[i] - high[j] + (low[i] - low[j]); }
};

struct alignas(16) Shared {
  union {
    struct {
      bf16 k[kRows][kStride], q[kRows][kStride];
    };
    float triangles[kHeads][kRows][kColumn];  // A by columns, then T by rows
  };
  Gates gates[kHeads];
};

/// The rows of a chunk.
struct Chunk {
  int first;  // row of the step
  int rows;   // the others are zeros
};

/// The 16 rows of q or k of a warp, four columns a lane.
struct Rows {
  Columns<4> at[16];

  __device__ __forceinline__ void load(const float* from, int stride, int rows) {
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      at[i] = tile + i < rows ? Columns<4>::load(from + static_cast<size_t>(tile + i) * stride + lane * 4)
                              : Columns<4>::zeros();
  }

  /// Divides them by their lengths and rounds them.
  __device__ __forceinline__ void store_units(bf16 (*to)[kStride]) const {
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const Columns<4>& x = at[i];
      float squares = 0;
#pragma unroll
      for (const float v : x.at) squares = fmaf(v, v, squares);
      const float unit = 1.f / sqrtf(warp_sum(squares) + kUnitEps);
      const uint2 words = {pack_bf16(x.at[0] * unit, x.at[1] * unit), pack_bf16(x.at[2] * unit, x.at[3] * unit)};
      *reinterpret_cast<uint2*>(&to[tile + i][lane * 4]) = words;
    }
  }
};

/// The transposed keys: a warp stores two tiles of 16 key dimensions.
__device__ __forceinline__ void store_columns(const bf16 (*k)[kStride], Vec16 (*to)[kRows / 16][32]) {
  const int lane = threadIdx.x % 32, i = lane / 8, r = lane % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile = threadIdx.x / 32 * 2 + half;
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      Vec16 columns;
      ldmatrix_x4_trans(columns.word, &k[step * 16 + i / 2 * 8 + r][tile * 16 + i % 2 * 8]);
      to[tile][step][lane] = columns;
    }
  }
}

/// Products of the 16 rows of a warp with the keys of the chunk: lane 4g + t holds columns 8n + 2t and 8n + 2t + 1 of
/// row g, then of row g + 8. Keys after the warp's rows are left out.
struct Products {
  float k[kRows / 8][4] = {};
  float q[kRows / 8][4] = {};

  /// `to`: where these rows are stored as first operands, or null.
  __device__ __forceinline__ void add(const bf16 (*keys)[kStride], const bf16 (*queries)[kStride], KeyPart* to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = lane / 8, r = lane % 8;
#pragma unroll
    for (int step = 0; step < kKeyDim / 16; ++step) {
      Vec16 k_rows, q_rows;
      ldmatrix_x4(k_rows.word, &keys[warp * 16 + lane % 16][step * 16 + lane / 16 * 8]);
      ldmatrix_x4(q_rows.word, &queries[warp * 16 + lane % 16][step * 16 + lane / 16 * 8]);
      if (to != nullptr) {
        to->k[warp][step][lane] = k_rows;
        to->q[warp][step][lane] = q_rows;
      }
#pragma unroll
      for (int pair = 0; pair < kRows / 16; ++pair) {
        if (pair > warp) break;
        uint32_t b[4];
        ldmatrix_x4(b, &keys[pair * 16 + i / 2 * 8 + r][step * 16 + i % 2 * 8]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mma_bf16(k[2 * pair + half], k_rows.word, b[2 * half], b[2 * half + 1]);
          mma_bf16(q[2 * pair + half], q_rows.word, b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }
};

/// Gates of a value head, by one warp. Rows after the end neither decay nor write.
__device__ __forceinline__ void compute_gates(Gates& gates, ValuePart& part, const GatedDeltaArgs& a, int head,
                                              const Chunk& chunk) {
  const DeltaSizes sizes(a);
  const DeltaGates rates(a, head);
  const int lane = threadIdx.x % 32;
  const float* from = a.projected + sizes.channels + sizes.value_width + head;
  // e^-104 is 0 in f32. Without a limit, the differences of what follows one such row would lose their digits.
  constexpr float kLeast = -104.f;
  double sum[2];  // of this lane's rows, 2 lane and 2 lane + 1
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    float step = 0, beta = 0;
    if (row < chunk.rows) {
      const float* row_gates = from + static_cast<size_t>(chunk.first + row) * sizes.projected;
      step = rates.log_decay(row_gates[a.value_heads]);
      beta = DeltaGates::beta(row_gates[0]);
    }
    sum[i] = step < kLeast ? kLeast : step;
    gates.beta[row] = beta;
  }
  sum[1] += sum[0];
  double before = sum[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane >= distance) before += other;
  }
  constexpr double kLog2 = 1.4426950408889634;  // of e
  const double last = __shfl_sync(0xffffffffu, before, 31);
  before -= sum[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const double all = (before + sum[i]) * kLog2;
    const int row = 2 * lane + i;
    const float high = static_cast<float>(all);
    gates.high[row] = high;
    gates.low[row] = static_cast<float>(all - high);
    part.decay[row] = exp2_approx(high);
    part.rest[row] = exp2_approx(static_cast<float>(last * kLog2 - all));
  }
}

/// A by columns to shared memory, and P to the workspace.
__device__ __forceinline__ void scale_products(const Products& products, const Gates& gates,
                                               float (*triangle_a)[kColumn], ValuePart& part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int pair = 0; pair < kRows / 16; ++pair) {
    if (pair > warp) break;
    Vec16 scores[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * pair + half;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = warp * 16 + g + 8 * h;
        float score[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = n * 8 + 2 * t + e;
          const float decay = j <= i ? exp2_approx(gates.between(i, j)) : 0.f;
          triangle_a[j][i] = j < i ? gates.beta[i] * products.k[n][2 * h + e] * decay : 0.f;
          score[e] = j <= i ? products.q[n][2 * h + e] * (decay * kScale) : 0.f;
        }
        const Split split(score[0], score[1]);
        scores[0].word[2 * half + h] = split.high;
        scores[1].word[2 * half + h] = split.low;
      }
    }
#pragma unroll
    for (int digits = 0; digits < 2; ++digits) part.scores[digits][triangle(warp, pair)][lane] = scores[digits];
  }
}

/// Column `own` of (I + A)^-1, which is at least kFirst. `by_columns` has A below the diagonal.
template <int kFirst>
__device__ __forceinline__ void invert(float (&x)[kRows], const float (*by_columns)[kColumn], int own) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) x[i] = i == own ? 1.f : 0.f;
#pragma unroll
  for (int j = kFirst; j < kRows - 1; ++j) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < kRows; i += 4) {
      const float4 column = *reinterpret_cast<const float4*>(&by_columns[j][i]);
      const float at[4] = {column.x, column.y, column.z, column.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (i + e > j) x[i + e] = fmaf(-at[e], x[j], x[i + e]);
    }
  }
}

/// Replaces A of `count` value heads by T = (I + A)^-1 diag(beta), by rows. Two warps have a head.
__device__ __forceinline__ void replace_by_inverses(Shared& shared, int count) {
  const int head = threadIdx.x / 64, own = threadIdx.x % 64;
  float x[kRows] = {};
  if (head < count) {
    if (own < kRows / 2) invert<0>(x, shared.triangles[head], own);
    else invert<kRows / 2>(x, shared.triangles[head], own);
  }
  __syncthreads();  // A has been read
  if (head >= count) return;
  const float beta = shared.gates[head].beta[own];
#pragma unroll
  for (int i = 0; i < kRows; ++i) shared.triangles[head][i][own] = x[i] * beta;
}

/// The 16 rows of a warp of T to the workspace.
__device__ __forceinline__ void store_inverse(const float (*rows)[kColumn], ValuePart& part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kRows / 16; ++tile) {
    if (tile > warp) break;
    Vec16 words[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x =
          *reinterpret_cast<const float2*>(&rows[warp * 16 + g + i % 2 * 8][tile * 16 + i / 2 * 8 + 2 * t]);
      const Split split(x.x, x.y);
      words[0].word[i] = split.high;
      words[1].word[i] = split.low;
    }
#pragma unroll
    for (int digits = 0; digits < 2; ++digits) part.inverse[digits][triangle(warp, tile)][lane] = words[digits];
  }
}

/// `groups`: blocks that share a key head and chunk.
__global__ void __launch_bounds__(kThreads, 4) delta_prepare_chunks(const GatedDeltaArgs a, int first, int groups) {
  __shared__ Shared shared;
  pdl_wait();
  const int group = static_cast<int>(blockIdx.x) % groups;
  const int key_head = static_cast<int>(blockIdx.x) / groups % a.key_heads;
  const int number = static_cast<int>(blockIdx.x) / groups / a.key_heads;
  const ChunkedSequence sequence = find_sequence<true>(a, first + number);
  if (sequence.number < 0) return;
  const DeltaSizes sizes(a);
  const int heads = a.value_heads / a.key_heads, count = min(kHeads, heads - group * kHeads);
  const int head = key_head * heads + group * kHeads;
  const DeltaBlock at(a, sequence.number, head, 0);
  const int ahead = (first + number - sequence.before) * kRows;
  const Chunk chunk = {at.begin + ahead, min(kRows, at.end - at.begin - ahead)};
  KeyPart* const keys = group == 0 ? key_part(a, number, key_head) : nullptr;
  const auto part = [&](int i) { return value_part(a, number, head + i); };
  const int warp = threadIdx.x / 32;
  const DeltaRow from = at.row(a, sizes, chunk.first);
  {
    Rows rows;
    rows.load(from.k, sizes.channels, chunk.rows);
    if (warp < count) compute_gates(shared.gates[warp], *part(warp), a, head + warp, chunk);
    rows.store_units(shared.k);
    rows.load(from.q, sizes.channels, chunk.rows);
    rows.store_units(shared.q);
  }
  __syncthreads();
  Products products;
  products.add(shared.k, shared.q, keys);
  if (keys != nullptr) store_columns(shared.k, keys->k_columns);
  __syncthreads();  // q and k have been read
  for (int i = 0; i < count; ++i) scale_products(products, shared.gates[i], shared.triangles[i], *part(i));
  __syncthreads();
  replace_by_inverses(shared, count);
  __syncthreads();
  for (int i = 0; i < count; ++i) store_inverse(shared.triangles[i], *part(i));
}

}  // namespace

cudaError_t prepare_chunks(const GatedDeltaArgs& a, int first, void* stream) {
  const int groups = ceil_div(a.value_heads / a.key_heads, kHeads);
  const int64_t blocks = static_cast<int64_t>(a.chunks) * a.key_heads * groups;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(delta_prepare_chunks, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream}, a, first, groups);
}

}  // namespace moe::delta_chunks
