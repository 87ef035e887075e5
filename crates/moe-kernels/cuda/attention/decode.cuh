// The pieces of attention/decode.cu, in the order in which the kernel uses them.
#pragma once

#include <cmath>

#include "attention/ring.cuh"
#include "ptx/cluster.cuh"
#include "quant/fp8_row.cuh"

namespace moe {
namespace {

constexpr int kThreads = kWarps * 32;
constexpr int kHeads = 8;       // query heads of a block: the columns of mma.sync
constexpr int kSplitStep = 64;  // splits begin at multiples of this
constexpr int kMaxCluster = 8;

struct DecodeArgs {
  const float* qkv;
  NormWeight q_norm, k_norm;
  float eps;
  Angles angles;
  const uint32_t* slots;
  uint32_t num_slots;  // slots from this one on are not in the cache
  const uint32_t* positions;
  const uint32_t* block_tables;
  int max_blocks;
  KvCache cache;
  bf16* out;
  uint32_t* partials;  // [rows][groups][kHeads][clusters][D + 2]: values, maximum, sum; zero between launches
  int heads;
  float scale;  // the scale times log2 e
  uint32_t window;
  int splits;
  bool overlapped;     // whether everything that this kernel reads was written before the previous kernel began
  fp8::RowsOut fp8;    // used instead of `out` if it has scales: heads of 128
  const float* sinks;  // [heads], or null
  int qkv_row;         // floats from one row of qkv to the next
  Gates gates;         // with heads of 256
};

/// What a block works on.
struct Place {
  int row, group, kv_head;
  int head;           // first query head
  int heads;          // query heads, at most kHeads
  bool writes_cache;  // one block per row and KV head does
  int split, cluster_first;
};

__device__ __forceinline__ Place place(const DecodeArgs& a) {
  Place p;
  p.row = blockIdx.z;
  p.group = blockIdx.y;
  const int per_kv = a.heads / a.cache.heads, groups = ceil_div(per_kv, kHeads);
  p.kv_head = p.group / groups;
  const int first = p.group % groups * kHeads;
  p.head = p.kv_head * per_kv + first;
  p.heads = min(kHeads, per_kv - first);
  p.split = blockIdx.x;
  p.cluster_first = p.split / kMaxCluster * kMaxCluster;
  p.writes_cache = first == 0 && p.split == 0;
  return p;
}

/// Cached positions of a split.
struct Range {
  bool padding;
  uint32_t slot, position;
  int active;         // splits of this sequence that hold positions, at least 1
  int begin, end;     // of this split
  int visible_begin;  // positions before this one are outside of the window
};

__device__ __forceinline__ Range split_range(const DecodeArgs& a, const Place& p) {
  Range r;
  // Both loads are issued together: after the launch ahead, which streams weights, each load takes a microsecond.
  const uint32_t position = a.positions[p.row];
  r.slot = a.slots[p.row];
  r.padding = r.slot >= a.num_slots;
  r.position = r.padding ? 0 : position;
  const int seen = static_cast<int>(r.position);
  r.visible_begin = a.window > 0 ? max(0, seen + 1 - static_cast<int>(a.window)) : 0;
  const int first = r.visible_begin / kSplitStep;
  const int steps = ceil_div(seen, kSplitStep) - first, per = max(1, ceil_div(steps, a.splits));
  r.active = max(1, ceil_div(steps, per));
  r.begin = (first + p.split * per) * kSplitStep;
  r.end = min(seen, r.begin + per * kSplitStep);
  return r;
}

/// The number of floats that a head's values take in shared memory, padded against bank conflicts.
template <int D>
constexpr int kValuePitch = D + 4;

template <int D>
struct Shared {
  static constexpr int kRing = 2 * kTileBytes<D>;  // bytes of a warp: a tile's keys and its values
  static constexpr int kMerged = kWarps * kRing;
  static constexpr int kStats = kMerged + kHeads * D * 4;
  static constexpr int kQ = kStats + (kWarps + 2) * kHeads * 2 * 4;
  static constexpr int kFull = kQ + kHeads * D * 2;
  static constexpr int kBytes = kFull + kWarps * 2 * 8;
  static_assert(kHeads * kValuePitch<D> * 4 <= kRing, "a warp's values take the place of its ring");

  uint8_t* base;
  __device__ explicit Shared(uint8_t* smem) : base(smem) {}
  __device__ uint8_t* ring(int warp) const { return base + warp * kRing; }
  /// [kHeads][kValuePitch] values of a warp.
  __device__ float* values(int warp) const { return reinterpret_cast<float*>(ring(warp)); }
  /// [kHeads][2] maximum and sum of a warp.
  __device__ float* stats(int warp) const { return reinterpret_cast<float*>(base + kStats) + warp * kHeads * 2; }
  /// What the blocks of the cluster send for this block's share of the heads: [blocks][share] of D values, and of
  /// maximum and sum.
  __device__ float* inbox() const { return reinterpret_cast<float*>(base + kMerged); }
  __device__ float* inbox_stats() const { return stats(kWarps); }
  /// Scores of the new token.
  __device__ float* scores() const { return stats(kWarps + 1); }
  __device__ uint8_t* q() const { return base + kQ; }
  /// Barriers of a warp's keys and values.
  __device__ uint64_t* full(int warp) const { return reinterpret_cast<uint64_t*>(base + kFull) + 2 * warp; }
};

template <int D>
__device__ __forceinline__ size_t out_at(const DecodeArgs& a, const Place& p, int head) {
  return (static_cast<size_t>(p.row) * a.heads + p.head + head) * D;
}

/// kCount gates of a head from dimension `d` on, if there are any; they are loaded before a merge waits.
template <int D, int kCount>
__device__ __forceinline__ void load_gates(float (&gate)[kCount], const DecodeArgs& a, const Place& p, int head, int d,
                                           int step = 1) {
  if constexpr (D == kGatedHead) {
    if (!a.gates.any() || head >= p.heads) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) gate[i] = __ldcg(a.gates.at(p.row, (p.head + head) * D + d) + i * step);
  }
}

/// A result as it is stored.
template <int D>
__device__ __forceinline__ float gated(const DecodeArgs& a, float x, float gate) {
  return D == kGatedHead && a.gates.any() ? Gates::scaled(x, gate) : x;
}

/// What the prologue needs and no kernel of this step writes; it is loaded before pdl_wait().
template <int D>
struct Constants {
  Head<D> q_norm_weight, k_norm_weight, angle;
  __device__ Constants(const DecodeArgs& a, int row)
      : q_norm_weight(load_norm_weight<D>(a.q_norm)),
        k_norm_weight(load_norm_weight<D>(a.k_norm)),
        angle(a.angles.load<D>(row)) {}
};

/// Which part of the merges and stores a thread does: one head, kPer consecutive dimensions.
template <int D>
struct ThreadSlice {
  static constexpr int kPer = kHeads * D / kThreads;
  int head, d;
  __device__ ThreadSlice() : head(threadIdx.x * kPer / D), d(threadIdx.x * kPer % D) {}
};

/// This thread's dimensions of the new token's value, in split 0.
template <int D>
struct NewToken {
  float value[ThreadSlice<D>::kPer] = {};
};

/// Rounds and stores kPer consecutive elements.
template <int kPer>
__device__ __forceinline__ void store_bf16(bf16* to, const float (&x)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; i += 4)
    *reinterpret_cast<uint2*>(to + i) = {pack_bf16(x[i], x[i + 1]), pack_bf16(x[i + 2], x[i + 3])};
}

/// Stores the rounded q of the block's heads in shared memory. Split 0 also stores the new key and value in the cache,
/// and the scores of the new key in shared memory.
template <int D, class Shared>
__device__ __forceinline__ NewToken<D> prologue(const DecodeArgs& a, const Place& p, uint32_t slot,
                                                const Constants<D>& c, const Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv = a.cache.heads;
  const float* qkv = a.qkv + static_cast<size_t>(p.row) * a.qkv_row;
  constexpr int kPerWarp = kHeads / kWarps;
  static_assert(kPerWarp == 2, "two query heads and the key per warp");
  const bool first = p.split == 0;
  Head<D> h[kPerWarp + 1] = {};  // two query heads and, in split 0, the new key
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    const int head = warp * kPerWarp + i;
    if (head < p.heads) h[i] = load_head<D>(qkv + static_cast<size_t>(p.head + head) * D);
  }
  const ThreadSlice<D> mine;
  NewToken<D> token;
  if (first) {
    h[kPerWarp] = load_head<D>(qkv + static_cast<size_t>(a.heads + p.kv_head) * D);
    const float* v = qkv + static_cast<size_t>(a.heads + kv + p.kv_head) * D + mine.d;
#pragma unroll
    for (int i = 0; i < ThreadSlice<D>::kPer; i += 4) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(v + i));
      token.value[i] = x.x, token.value[i + 1] = x.y, token.value[i + 2] = x.z, token.value[i + 3] = x.w;
    }
  }
  norm_heads<D, kPerWarp + 1>(h, {c.q_norm_weight, c.q_norm_weight, c.k_norm_weight},
                              {a.q_norm.data != nullptr, a.q_norm.data != nullptr, a.k_norm.data != nullptr}, a.eps);
#pragma unroll
  for (Head<D>& x : h) {
    rotate_head<D>(x, c.angle);
    round_head<D>(x);
  }
  const Head<D>& k = h[kPerWarp];
  float score[kPerWarp] = {};
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    const int head = warp * kPerWarp + i;
#pragma unroll
    for (int e = 0; e < Head<D>::kPairs; ++e) {
      const int at = lane * Head<D>::kPairs + e, high = at + D / 2;
      *reinterpret_cast<bf16*>(s.q() + swizzle<D>(head, at / 8) + at % 8 * 2) = __float2bfloat16_rn(h[i].low[e]);
      *reinterpret_cast<bf16*>(s.q() + swizzle<D>(head, high / 8) + high % 8 * 2) = __float2bfloat16_rn(h[i].high[e]);
      score[i] += h[i].low[e] * k.low[e] + h[i].high[e] * k.high[e];
    }
  }
  if (!first) return token;
#pragma unroll
  for (float& x : token.value) x = __bfloat162float(__float2bfloat16_rn(x));
  warp_sums(score);
  if (lane < kPerWarp) s.scores()[warp * kPerWarp + lane] = (lane == 0 ? score[0] : score[1]) * a.scale;
  if (p.writes_cache) {
    const size_t row = a.cache.slot_row(slot, p.kv_head) * D;
    if (warp == 0) store_head<D>(k, a.cache.k + row);
    if (mine.head == kHeads - 1) store_bf16(a.cache.v + row + mine.d, token.value);
  }
  return token;
}

/// q as the 8-column operand, two registers per 16 dimensions.
template <int D, class Shared>
__device__ __forceinline__ void load_q(const Shared& s, uint32_t (&q)[D / 8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    uint32_t r[4];
    ldmatrix_x4(r, s.q() + swizzle<D>(lane % 8, i * 4 + lane / 8));
#pragma unroll
    for (int j = 0; j < 4; ++j) q[i * 4 + j] = r[j];
  }
}

/// A warp's running softmax. Lane 4g + t holds heads 2t and 2t + 1; of the values, dimensions g and g + 8 of
/// each 16.
template <int D>
struct Partial {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // over this lane's positions
  float values[D / 16][4] = {};

  /// Stores the partial to shared memory: values [kHeads][kValuePitch], stats [kHeads][2].
  __device__ __forceinline__ void store(float* to, float* stats) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], step);
      if (g == 0) {
        stats[2 * (2 * t + h)] = max[h];
        stats[2 * (2 * t + h) + 1] = sum[h];
      }
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        to[(2 * t + h) * kValuePitch<D> + i * 16 + g] = values[i][h];
        to[(2 * t + h) * kValuePitch<D> + i * 16 + g + 8] = values[i][2 + h];
      }
    }
  }
};

/// Scores of the 16 positions from `tile` on: lane 4g + t holds positions g and g + 8 of heads 2t and 2t + 1.
template <int D>
__device__ __forceinline__ void score_tile(float (&weight)[4], const uint32_t (&q)[D / 8], const uint8_t* k, int tile,
                                           const Range& range, float scale) {
  const int lane = threadIdx.x % 32, g = lane / 4, i = lane / 8, r = lane % 8;
  float c[2][4] = {};  // two chains: half the latency
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t m[4];
    ldmatrix_x4(m, k + tile_at(i % 2 * 8 + r, step * 2 + i / 2));
    mma_bf16(c[step % 2], m, q[2 * step], q[2 * step + 1]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int position = tile + g + j / 2 * 8;
    const bool seen = position < range.end && position >= range.visible_begin;
    weight[j] = seen ? (c[0][j] + c[1][j]) * scale : -INFINITY;
  }
}

/// Turns a tile's scores into weights under the running maximum, which it raises.
template <int D>
__device__ __forceinline__ void update_softmax(Partial<D>& part, float (&weight)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = fmaxf(weight[h], weight[2 + h]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    top = fmaxf(part.max[h], top);
    // All positions so far are masked: 0 is subtracted instead of -inf, so that weights are 0 and not NaN.
    const float base = top == -INFINITY ? 0.f : top, old = exp2f(part.max[h] - base);
    part.max[h] = top;
    weight[h] = exp2f(weight[h] - base);
    weight[2 + h] = exp2f(weight[2 + h] - base);
    part.sum[h] = part.sum[h] * old + weight[h] + weight[2 + h];
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      part.values[d][h] *= old;
      part.values[d][2 + h] *= old;
    }
  }
}

/// Adds the weighted values of a tile.
template <int D>
__device__ __forceinline__ void add_values(Partial<D>& part, const float (&weight)[4], const uint8_t* v) {
  const int lane = threadIdx.x % 32, i = lane / 8, r = lane % 8;
  const uint32_t p0 = transpose_8x8(pack_bf16(weight[0], weight[1]));
  const uint32_t p1 = transpose_8x8(pack_bf16(weight[2], weight[3]));
#pragma unroll
  for (int d = 0; d < D / 16; ++d) {
    uint32_t m[4];
    ldmatrix_x4_trans(m, v + tile_at(i / 2 * 8 + r, d * 2 + i % 2));
    mma_bf16(part.values[d], m, p0, p1);
  }
}

}  // namespace
}  // namespace moe
