// Causal attention over the paged KV cache for any mix of prompt, chunk and decode rows; grouped heads.
//
// Floor: 4 D FLOP per query head and visible position over 790 TFLOP/s. This kernel is for sequences with few rows, for
// cards before Hopper and for odd block sizes: mma.sync on tiles of 64 rows x 64 positions (FlashAttention-2's loop),
// with two cp.async stages. It reads KV from L2 again for each 64 rows.
#include <cmath>

#include "attention/prefill.cuh"

namespace moe::attention_prefill {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kTile = 64;  // rows of a tile, and its positions
constexpr int kStages = 2;

/// Loads 64 positions of K and V to shared memory; positions from `end` on become zeros.
template <int D>
__device__ __forceinline__ void load_tile(const Args& a, const uint32_t* table, int kv_head, int begin, int from,
                                          int end, uint8_t* k) {
  constexpr int kChunks = D / 8;
  uint8_t* v = k + kTile * D * 2;
  const int c = threadIdx.x % kChunks;
#pragma unroll
  for (int r = threadIdx.x / kChunks; r < kTile; r += kThreads / kChunks) {
    const bool valid = begin + r >= from && begin + r < end;
    const size_t row = a.cache.row(table, max(from, min(begin + r, end - 1)), kv_head) * D + c * 8;
    cp_async16_or_zero(k + swizzle<D>(r, c), a.cache.k + row, valid);
    cp_async16_or_zero(v + swizzle<D>(r, c), a.cache.v + row, valid);
  }
}

/// A warp's 16 rows of q as operands of the scores. With heads of 256 there are no registers for them, so each step
/// reads them from shared memory again.
template <int D>
struct Query {
  static constexpr bool kInRegisters = D <= 128;
  const uint8_t* rows;  // of the warp
  uint32_t words[kInRegisters ? D / 16 : 1][4];

  __device__ __forceinline__ void read(int step, uint32_t (&w)[4]) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(w, rows + swizzle<D>(lane / 8 % 2 * 8 + lane % 8, step * 2 + lane / 16));
  }

  __device__ __forceinline__ void operand(int step, uint32_t (&w)[4]) const {
    if constexpr (!kInRegisters) {
      read(step, w);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = words[step][i];
    }
  }

  /// Called when q is in shared memory.
  __device__ __forceinline__ void load() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) read(step, words[step]);
    }
  }
};

/// A warp's 16 rows. Lane 4g + t holds rows g and g + 8.
template <int D>
struct Rows {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
  float values[D / 8][4] = {};
  int position[2];

  /// Adds a tile of 64 positions from `begin` on.
  __device__ __forceinline__ void add(const Query<D>& q, const uint8_t* k, int begin, float scale, int window) {
    const uint8_t* v = k + kTile * D * 2;
    const int lane = threadIdx.x % 32, i = lane / 8, r = lane % 8, t = lane % 4;
    float c[kTile / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t rows[4];
      q.operand(step, rows);
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
        uint32_t m[4];
        ldmatrix_x4(m, k + swizzle<D>(n * 16 + i / 2 * 8 + r, step * 2 + i % 2));
        mma_bf16(c[2 * n], rows, m[0], m[1]);
        mma_bf16(c[2 * n + 1], rows, m[2], m[3]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = max[h];
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = begin + n * 8 + 2 * t + e;
          const bool seen = at <= position[h] && (window == 0 || at > position[h] - window);
          c[n][2 * h + e] = seen ? c[n][2 * h + e] * scale : -INFINITY;
          top = fmaxf(top, c[n][2 * h + e]);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = top == -INFINITY ? 0.f : top, old = exp2f(max[h] - base);
      max[h] = top;
      sum[h] *= old;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[h] += c[n][2 * h + e] = exp2f(c[n][2 * h + e] - base);
      }
#pragma unroll
      for (int d = 0; d < D / 8; ++d) {
        values[d][2 * h] *= old;
        values[d][2 * h + 1] *= old;
      }
    }
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
      const uint32_t p[4] = {pack_bf16(c[2 * n][0], c[2 * n][1]), pack_bf16(c[2 * n][2], c[2 * n][3]),
                             pack_bf16(c[2 * n + 1][0], c[2 * n + 1][1]), pack_bf16(c[2 * n + 1][2], c[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        uint32_t m[4];
        ldmatrix_x4_trans(m, v + swizzle<D>(n * 16 + i % 2 * 8 + r, d * 2 + i / 2));
        mma_bf16(values[2 * d], p, m[0], m[1]);
        mma_bf16(values[2 * d + 1], p, m[2], m[3]);
      }
    }
  }
};

template <int D>
__global__ void __launch_bounds__(kThreads) prefill_kernel(Args a) {
  extern __shared__ __align__(128) uint8_t smem[];
  uint8_t *q_smem = smem, *ring = smem + kTile * D * 2;
  constexpr int kStageBytes = 2 * kTile * D * 2;
  if (a.blocks == 0) pdl_launch_dependents();
  pdl_wait();
  if (a.blocks > 0) pdl_launch_dependents();
  const int group = a.heads / a.cache.heads, kv_head = blockIdx.y;
  const Tile tile = find_tile<kTile>(a, group, blockIdx.x);
  if (tile.sequence < 0) return zero_padding(a, tile.tile, tile.extra, kv_head * group * D, group * D, a.heads * D);
  const int first_token = a.query_start_loc[tile.sequence];
  const int rows = static_cast<int>(a.query_start_loc[tile.sequence + 1] - first_token) * group;
  const int first = tile.tile * kTile;  // of the sequence's (token, head) rows
  const int last = min(first + kTile, rows) - 1;
  const auto row_of = [&](int i) {  // row i of the tile, in heads
    const int at = min(first + i, last);
    return static_cast<size_t>(first_token + at / group) * a.heads + kv_head * group + at % group;
  };
  constexpr int kChunks = D / 8;
  for (int i = threadIdx.x; i < kTile * kChunks; i += kThreads)
    cp_async16(q_smem + swizzle<D>(i / kChunks, i % kChunks), a.q + row_of(i / kChunks) * D + i % kChunks * 8);

  const uint32_t* table = a.block_tables + static_cast<size_t>(tile.sequence) * a.max_blocks;
  const int end = a.positions[first_token + last / group] + 1;
  const int lowest = a.positions[first_token + first / group];
  const int from = a.window > 0 ? max(0, lowest + 1 - a.window) : 0;
  const int begin = from / kTile * kTile;
  load_tile<D>(a, table, kv_head, begin, from, end, ring);
  cp_async_commit();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Rows<D> mine;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = min(first + warp * 16 + g + 8 * h, last);
    mine.position[h] = a.positions[first_token + at / group];
  }
  Query<D> q = {q_smem + warp * 16 * D * 2};
  int stage = 0;
  for (int at = begin; at < end; at += kTile) {
    const bool more = at + kTile < end;
    if (more) load_tile<D>(a, table, kv_head, at + kTile, from, end, ring + (stage ^ 1) * kStageBytes);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if (at == begin) q.load();
    mine.add(q, ring + stage * kStageBytes, at, a.scale, a.window);
    __syncthreads();
    stage ^= 1;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = mine.sum[h];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int i = warp * 16 + g + 8 * h;
    if (a.sinks != nullptr) {
      const int head = kv_head * group + min(first + i, last) % group;
      sum += exp2f(a.sinks[head] * kLog2E - mine.max[h]);
    }
    if constexpr (D == fp8::kGroup) {
      if (a.fp8.scales != nullptr) {
        uint32_t word[D / 8];
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
          word[d] = pack_bf16(mine.values[d][2 * h] / sum, mine.values[d][2 * h + 1] / sum);
        const size_t at = row_of(i);
        const int head = kv_head * group + min(first + i, last) % group;
        float* scale = a.fp8.scale(first_token + min(first + i, last) / group, head);
        fp8::store_fragments(a.fp8.q + at * D, scale, word, first + i <= last, a.fp8.quads);
        continue;
      }
    }
    if (first + i > last) continue;
    uint32_t* to = reinterpret_cast<uint32_t*>(a.out + row_of(i) * D);
    if constexpr (D == kGatedHead) {
      if (a.gates.any()) {
        const int at = first + i;
        const float* gates = a.gates.at(first_token + at / group, (kv_head * group + at % group) * D);
#pragma unroll
        for (int d = 0; d < D / 8; ++d) {
          const float2 gate = *reinterpret_cast<const float2*>(gates + d * 8 + 2 * t);
          to[d * 4 + t] = pack_bf16(Gates::scaled(mine.values[d][2 * h] / sum, gate.x),
                                    Gates::scaled(mine.values[d][2 * h + 1] / sum, gate.y));
        }
        continue;
      }
    }
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
      to[d * 4 + t] = pack_bf16(mine.values[d][2 * h] / sum, mine.values[d][2 * h + 1] / sum);
  }
}

template <int D>
cudaError_t run(const Args& a, void* stream) {
  const int64_t tiles = max_tiles(a, kTile);
  if (tiles > 0x7fffffff) return cudaErrorInvalidValue;
  const Launch l = {dim3(static_cast<unsigned>(tiles), a.cache.heads), dim3(kThreads), stream,
                    static_cast<size_t>(kTile * D * 2) * (1 + 2 * kStages)};
  return launch(prefill_kernel<D>, l, a);
}

static_assert((1 + 2 * kStages) * kTile * 128 * 2 == 81920, "the plan has this size for each 128 columns of a head");

cudaError_t launch_mma(const Args& a, int head_dim, void* stream) {
  switch (head_dim) {
    case 256: return run<256>(a, stream);
    case 128: return run<128>(a, stream);
    default: return run<64>(a, stream);
  }
}

bool valid(const PagedAttentionArgs& c) {
  return c.tokens >= 0 && c.sequences >= 0 && c.kv_heads > 0 && c.kv_heads <= 65535 && c.heads > 0 &&
         c.heads % c.kv_heads == 0 && (c.head_dim == 64 || c.head_dim == 128 || c.head_dim == 256) &&
         c.value_dim == c.head_dim && c.value_row == c.head_dim && c.block_size > 0 && c.window >= 0 &&
         c.dtype == Dtype::kBf16 && c.q_dtype == Dtype::kBf16 && fits_gates(c.gates, c.gate_row, c.heads, c.head_dim);
}

Args args_of(const PagedAttentionArgs& c) {
  return {static_cast<const bf16*>(c.q),
          cache_of(c.k_cache, c.v_cache, c.kv_heads, c.block_size),
          c.query_start_loc,
          c.positions,
          c.block_tables,
          c.max_blocks,
          static_cast<bf16*>(c.out),
          c.tokens,
          c.sequences,
          c.heads,
          c.scale * kLog2E,
          c.window,
          0,
          INT32_MAX,
          c.counters,
          false,
          0,
          {},
          c.sinks,
          gates_of(c.gates, c.gate_row, c.heads * c.value_dim)};
}

/// Runs `c` on Hopper; sequences with few rows use the kernel for few rows.
int run_wgmma(const PagedAttentionArgs& c, int blocks, const fp8::RowsOut& fp8, void* stream) {
  const bool pages = c.block_size % 128 == 0 || (c.block_size >= 8 && 128 % c.block_size == 0);
  if (!valid(c) || !pages || c.counters == nullptr ||
      static_cast<int64_t>(c.num_blocks) * c.kv_heads * c.block_size > INT32_MAX)
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  Args a = args_of(c);
  a.blocks = blocks;
  a.fp8 = fp8;
  // If the keys and values of this step fit into half of L2 (assuming that there are no others), all KV heads may use
  // it at once.
  a.heads_together = static_cast<int64_t>(c.tokens) * c.kv_heads * c.head_dim * 4 <= 24 << 20;
  const int group = c.heads / c.kv_heads;
  if (c.invariant || c.sequences <= 1) return launch_wgmma(a, c.head_dim, c.num_blocks, stream);
  if (static_cast<int64_t>(c.tokens) * group <= kTile) return launch_mma(a, c.head_dim, stream);
  a.most = kTile;
  const cudaError_t e = launch_mma(a, c.head_dim, stream);
  if (e != cudaSuccess) return e;
  a.least = kTile + 1, a.most = INT32_MAX;
  return launch_wgmma(a, c.head_dim, c.num_blocks, stream);
}

}  // namespace
}  // namespace moe::attention_prefill

/// out = attention of q over the cache, bf16. head_dim is 64, 128 or 256.
extern "C" int moe_attention_prefill(const moe::PagedAttentionArgs* args, void* stream) {
  using namespace moe::attention_prefill;
  if (!valid(*args)) return cudaErrorInvalidValue;
  if (args->tokens == 0) return cudaSuccess;
  return launch_mma(args_of(*args), args->head_dim, stream);
}

/// The same as moe_attention_prefill, on Hopper. block_size is 8, 16, 32, 64 or a multiple of 128, and the cache has
/// less than 2^31 rows. Sequences with few rows use the kernel of moe_attention_prefill, unless a row's bits must not
/// depend on the number of rows.
extern "C" int moe_attention_prefill_wgmma(const moe::PagedAttentionArgs* args, void* stream) {
  return moe_attention_prefill_wgmma_on_blocks(args, 0, stream);
}

/// The same as moe_attention_prefill_wgmma with `blocks` blocks. The next kernel on the stream may run at the same
/// time: it must read nothing of this one, and it may begin when everything before this one is there.
extern "C" int moe_attention_prefill_wgmma_on_blocks(const moe::PagedAttentionArgs* args, int blocks, void* stream) {
  return moe::attention_prefill::run_wgmma(*args, blocks, {}, stream);
}

/// The same as moe_attention_prefill_wgmma_on_blocks, followed by moe_fp8_quantise, bit for bit: `out` is [tokens,
/// heads 128] bytes, by quads or not, and scales are [heads, lines]. Heads of 128.
extern "C" int moe_attention_prefill_wgmma_fp8(const moe::PagedAttentionArgs* args, int blocks, float* scales,
                                               int lines, int quads, void* stream) {
  const moe::fp8::RowsOut fp8 = {static_cast<uint8_t*>(args->out), scales, lines, quads != 0};
  if (args->head_dim != moe::fp8::kGroup || !fp8.holds(args->tokens, args->head_dim)) return cudaErrorInvalidValue;
  return moe::attention_prefill::run_wgmma(*args, blocks, fp8, stream);
}
