// Causal paged attention of any dtype, head size, head grouping, window and block size, for any mix of rows.
//
// A block takes up to kQ (row, query head) pairs that share a KV head: the heads of a group, and neighbouring rows if
// sequences have several rows. It goes through the positions in chunks, and each chunk's keys and values are read once
// for all pairs. A warp computes the scores of a key, a warp computes the softmax of a pair in the chunk (online, as on
// the CPU), and a thread adds the values of one element. KV is not split over blocks, so one long sequence uses few
// SMs.
#include "any/any.cuh"
#include "attention/args.cuh"

namespace moe {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kChunk = 128;

struct Meta {
  const uint32_t* starts;     // [sequences + 1]
  const uint32_t* positions;  // [rows]
  const uint32_t* tables;     // [sequences, max_blocks]
  int rows, sequences, max_blocks;
  float scale;
  int window;          // positions that a row sees; 0 = all
  const float* sinks;  // [heads], or null
};

struct Shape {
  int heads, kv_heads, head_dim, value_dim, value_row, num_blocks, block_size;
  int pair_heads;  // query heads of a block
  int pair_rows;   // rows of a block
};

template <class T, class S>
struct Arrays {
  const S* q;  // [rows, heads, head_dim]
  const T* k;  // [num_blocks, kv_heads, block_size, head_dim]
  const T* v;  // [num_blocks, kv_heads, block_size, value_row]
  T* out;      // [rows, heads * value_dim]
};

/// Shared memory of a block.
template <int kQ>
struct Smem {
  float* q;         // [kQ, head_dim]
  float* out;       // [kQ, value_dim], not yet divided
  float* score;     // [kChunk, kQ]
  size_t* kv_row;   // [kChunk] row of the position in the cache, or kNowhere
  float* top;       // [kQ] largest score so far
  float* sum;       // [kQ]
  float* factor;    // [kQ] factor of what was summed before this chunk
  uint32_t* begin;  // [kQ] positions that the pair sees
  uint32_t* end;

  static size_t bytes(const Shape& shape) {
    const size_t dims = static_cast<size_t>(shape.head_dim) + shape.value_dim;
    return kChunk * sizeof(size_t) + sizeof(float) * kQ * (dims + kChunk + 5);
  }

  __device__ Smem(uint8_t* base, const Shape& shape) {
    kv_row = reinterpret_cast<size_t*>(base);
    score = reinterpret_cast<float*>(kv_row + kChunk);
    q = score + kChunk * kQ;
    out = q + kQ * shape.head_dim;
    top = out + kQ * shape.value_dim;
    sum = top + kQ;
    factor = sum + kQ;
    begin = reinterpret_cast<uint32_t*>(factor + kQ);
    end = begin + kQ;
  }
};

constexpr size_t kNowhere = ~static_cast<size_t>(0);

/// Sums each of N values over the warp, with about N shuffles. A lane gets the sum of value number lane % N.
template <int N>
__device__ __forceinline__ float warp_sum_each(float (&v)[N]) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + half], half);
      v[i] = (upper ? v[i + half] : v[i]) + other;
    }
  }
  float sum = v[0];
#pragma unroll
  for (int step = N; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

/// The sequence of a row, or -1.
__device__ __forceinline__ int sequence_of(const Meta& m, uint32_t row) {
  if (m.sequences == 0 || row >= m.starts[m.sequences]) return -1;
  int low = 0, high = m.sequences;  // starts[low] <= row < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (m.starts[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

/// Computes the scores of the chunk's keys with all pairs: a warp per key.
template <int kQ, class T>
__device__ __forceinline__ void chunk_scores(const Smem<kQ>& s, const T* keys, int head_dim, uint32_t first, int count,
                                             float scale) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < count; i += kWarps) {
    float dot[kQ] = {};
    const size_t row = s.kv_row[i];
    if (row != kNowhere) {
      for (int d = lane; d < head_dim; d += 32) {
        const float x = widen(keys[row * head_dim + d]);
#pragma unroll
        for (int p = 0; p < kQ; ++p) dot[p] = fmaf(x, s.q[p * head_dim + d], dot[p]);
      }
    }
    const float sum = warp_sum_each(dot);
    if (lane < kQ) {
      const uint32_t position = first + i;
      const bool seen = row != kNowhere && position >= s.begin[lane] && position < s.end[lane];
      s.score[i * kQ + lane] = seen ? sum * scale : -INFINITY;
    }
  }
}

/// Turns scores into weights under the running maximum: a warp per pair.
template <int kQ>
__device__ __forceinline__ void chunk_softmax(const Smem<kQ>& s, int count) {
  const int lane = threadIdx.x % 32;
  for (int p = threadIdx.x / 32; p < kQ; p += kWarps) {
    float top = s.top[p];
    for (int i = lane; i < count; i += 32) top = fmaxf(top, s.score[i * kQ + p]);
    top = warp_max(top);
    float sum = 0;
    for (int i = lane; i < count; i += 32) {
      const float score = s.score[i * kQ + p];
      const float weight = score == -INFINITY ? 0.f : expf(score - top);
      s.score[i * kQ + p] = weight;
      sum += weight;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      const float factor = s.top[p] == -INFINITY ? 0.f : expf(s.top[p] - top);
      s.factor[p] = factor;
      s.sum[p] = s.sum[p] * factor + sum;
      s.top[p] = top;
    }
  }
}

/// Adds the chunk's weighted values: a thread per element, all pairs at once.
template <int kQ, class T>
__device__ __forceinline__ void chunk_values(const Smem<kQ>& s, const T* values, const Shape& shape, int count) {
  const int dims = shape.value_dim;
  for (int d = threadIdx.x; d < dims; d += kThreads) {
    float sum[kQ];
#pragma unroll
    for (int p = 0; p < kQ; ++p) sum[p] = s.out[p * dims + d] * s.factor[p];
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const size_t row = s.kv_row[i];
      const float v = row == kNowhere ? 0.f : widen(values[row * shape.value_row + d]);
#pragma unroll
      for (int p = 0; p < kQ; ++p) sum[p] = fmaf(s.score[i * kQ + p], v, sum[p]);
    }
#pragma unroll
    for (int p = 0; p < kQ; ++p) s.out[p * dims + d] = sum[p];
  }
}

/// Computes rows `row`..`end` of one sequence, for `heads` query heads from `head` on.
template <int kQ, class T, class S>
__device__ __forceinline__ void attend(const Smem<kQ>& s, const Meta& m, const Shape& shape, const Arrays<T, S>& a,
                                       int sequence, int row, int end, int head, int heads, int kv_head) {
  const int pairs = (end - row) * heads, d = shape.head_dim, dv = shape.value_dim;
  const auto place = [&](int pair) {  // place of a pair's query and output, in heads
    return static_cast<size_t>(row + pair / heads) * shape.heads + head + pair % heads;
  };
  if (threadIdx.x < kQ) {
    const int pair = threadIdx.x;
    const uint32_t stop = pair < pairs ? m.positions[row + pair / heads] + 1 : 0;
    const uint32_t window = static_cast<uint32_t>(m.window);
    s.begin[pair] = window > 0 && stop > window ? stop - window : 0;
    s.end[pair] = stop;
    s.top[pair] = -INFINITY;
    s.sum[pair] = 0;
  }
  for (int i = threadIdx.x; i < kQ * d; i += kThreads) {
    const int pair = i / d;
    s.q[i] = pair < pairs ? widen(a.q[place(pair) * d + i % d]) : 0.f;
  }
  for (int i = threadIdx.x; i < kQ * dv; i += kThreads) s.out[i] = 0;
  __syncthreads();
  uint32_t first = 0xffffffffu, last = 0;
  for (int pair = 0; pair < pairs; ++pair) first = min(first, s.begin[pair]), last = max(last, s.end[pair]);
  const uint32_t* table = m.tables + static_cast<size_t>(sequence) * m.max_blocks;
  // Chunks begin at multiples of their size, independent of the rows of a block. So a row's sums do not depend on its
  // neighbours.
  for (uint32_t base = first / kChunk * kChunk; base < last; base += kChunk) {
    const int count = static_cast<int>(min(last - base, static_cast<uint32_t>(kChunk)));
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t at = (base + i) / shape.block_size, offset = (base + i) % shape.block_size;
      const uint32_t block = at < static_cast<uint32_t>(m.max_blocks) ? table[at] : kNoExpert;
      s.kv_row[i] = block < static_cast<uint32_t>(shape.num_blocks)
                        ? (static_cast<size_t>(block) * shape.kv_heads + kv_head) * shape.block_size + offset
                        : kNowhere;
    }
    __syncthreads();
    chunk_scores(s, a.k, d, base, count, m.scale);
    __syncthreads();
    chunk_softmax(s, count);
    __syncthreads();
    chunk_values(s, a.v, shape, count);
    __syncthreads();
  }
  for (int i = threadIdx.x; i < pairs * dv; i += kThreads) {
    const int pair = i / dv;
    const float sink = m.sinks != nullptr ? expf(m.sinks[head + pair % heads] - s.top[pair]) : 0.f;
    const float sum = s.sum[pair] + sink;
    a.out[place(pair) * dv + i % dv] = narrow<T>(s.sum[pair] == 0 ? 0.f : s.out[i] / sum);
  }
  __syncthreads();
}

template <int kQ, class T, class S>
__global__ void __launch_bounds__(kThreads, 4) attention(const Meta m, const Shape shape, const Arrays<T, S> a) {
  extern __shared__ __align__(16) uint8_t smem[];
  pdl_wait();
  const Smem<kQ> s(smem, shape);
  const int group = shape.heads / shape.kv_heads;
  const int splits = ceil_div(group, shape.pair_heads);
  const int kv_head = blockIdx.y / splits, split = blockIdx.y % splits;
  const int head = kv_head * group + split * shape.pair_heads;
  const int heads = min(shape.pair_heads, group - split * shape.pair_heads);
  const int stop = min(m.rows, static_cast<int>(blockIdx.x + 1) * shape.pair_rows);
  for (int row = blockIdx.x * shape.pair_rows; row < stop;) {
    const int sequence = sequence_of(m, row);
    if (sequence < 0) {  // padding, and so are all rows after it
      const size_t width = static_cast<size_t>(heads) * shape.value_dim;
      for (; row < stop; ++row)
        for (size_t i = threadIdx.x; i < width; i += kThreads)
          a.out[(static_cast<size_t>(row) * shape.heads + head) * shape.value_dim + i] = narrow<T>(0.f);
      return;
    }
    const int end = static_cast<int>(min(static_cast<uint32_t>(stop), m.starts[sequence + 1]));
    attend(s, m, shape, a, sequence, row, end, head, heads, kv_head);
    row = end;
  }
}

template <int kQ, class T, class S>
cudaError_t launch_attention(const Meta& m, Shape shape, const Arrays<T, S>& a, void* stream) {
  const int group = shape.heads / shape.kv_heads;
  shape.pair_heads = group < kQ ? group : kQ;
  // Rows of one sequence share its keys. Rows of different sequences would only wait for each other.
  shape.pair_rows = m.rows > 2 * m.sequences ? kQ / shape.pair_heads : 1;
  const int columns = shape.kv_heads * ceil_div(group, shape.pair_heads);
  const size_t smem = Smem<kQ>::bytes(shape);
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (columns > 65535 || smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  return launch(attention<kQ, T, S>, {dim3(ceil_div(m.rows, shape.pair_rows), columns), dim3(kThreads), stream, smem},
                m, shape, a);
}

}  // namespace
}  // namespace moe

/// out = softmax(scale * q * k^T) * v, causal, computed in f32 and rounded once; a head's sink adds to its
/// denominators. `q_dtype` is `dtype` or f32. A position outside of its table or of the cache is not seen. It refuses a
/// head_dim and a value_dim above about 1,600 (shared memory).
extern "C" int moe_any_attention(const moe::PagedAttentionArgs* args, void* stream) {
  using namespace moe;
  const PagedAttentionArgs& c = *args;
  if (c.tokens < 0 || c.sequences < 0 || c.max_blocks < 0 || c.heads <= 0 || c.kv_heads <= 0 ||
      c.heads % c.kv_heads != 0 || c.head_dim <= 0 || c.value_dim < 0 || c.value_row < c.value_dim ||
      c.num_blocks < 0 || c.block_size <= 0 || c.window < 0)
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const Meta m = {c.query_start_loc, c.positions, c.block_tables, c.tokens, c.sequences,
                  c.max_blocks,      c.scale,     c.window,       c.sinks};
  const Shape shape = {c.heads, c.kv_heads, c.head_dim, c.value_dim, c.value_row, c.num_blocks, c.block_size, 0, 0};
  return with_stream(c.dtype, c.q_dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    const Arrays<T, S> a = {static_cast<const S*>(c.q), static_cast<const T*>(c.k_cache),
                            static_cast<const T*>(c.v_cache), static_cast<T*>(c.out)};
    // The order in which a warp adds depends on the number of pairs.
    const bool few = c.invariant == 0 && c.heads / c.kv_heads <= 4 && c.tokens <= 2 * c.sequences;
    return few ? launch_attention<4, T, S>(m, shape, a, stream) : launch_attention<16, T, S>(m, shape, a, stream);
  });
}
