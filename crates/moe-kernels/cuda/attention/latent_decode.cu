// Attention of one new row of each of a few sequences over latent rows, with up to 16 heads (latent.cu computes
// everything else).
//
// Floor: 1,152 bytes a position at 4.0 TB/s, 2.4 us for one sequence of 8,192. So latency is what counts. A block has a
// tile of 64 positions and issues all its loads at once; all but the loads of rows that this step writes are issued
// before the launch ahead has computed the queries. More positions go through two stages. There are no clusters,
// because a cluster waits for room on several SMs: splits are merged in the launch that follows (latent_merge.cu),
// which has a product to compute anyway.
//
// The positions are the rows (M) of the warpgroup products and the heads are the columns (N). One copy loads eight rows
// of all columns. With one instruction for every 64 columns of 16 rows, the 36 instructions of a tile would take longer
// to issue than the memory takes to answer.
#include "attention/latent_decode.cuh"

#include <cmath>

namespace moe::attention_latent::decode {
namespace {

#if MOE_HAS_WGMMA

/// Stores a warpgroup's part of the products of a tile's keys and the queries in shared memory.
__device__ __forceinline__ void score(const Block& b, int stage) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const uint64_t k = tile_descriptor(b.tile(stage), kGroupBytes) + group * kSteps * 2;
  const uint64_t q = tile_descriptor(b.query(), kGroupBytes) + group * kSteps * 2;
  float s[kHeads / 2];
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) wgmma<kHeads>(s, k + part * 64 + i * 2, q + part * 64 + i * 2, part + i != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(s);
  float* to = b.scores() + (group * kHeads + lane % 4 * 2) * kPitch + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(j * 8 + i % 2) * kPitch + i / 2 * 8] = s[4 * j + i];
  }
}

/// Running maxima of a warp's heads, warp and warp + 8, the same in every lane, and sums over a lane's positions.
struct Softmax {
  float max[kEach] = {-INFINITY, -INFINITY}, sum[kEach] = {};

  /// Turns the scores of rows [from, end) of a tile into weights in shared memory, which are not yet divided by their
  /// sum. A lane has two rows.
  __device__ __forceinline__ void add(const Block& b, int from, int end, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = 2 * lane;
    float2 x[kEach];
    float top[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float2* part = reinterpret_cast<const float2*>(b.scores() + (i * kWarps + warp) * kPitch) + lane;
      const float2 left = part[0], right = part[kHeads * kPitch / 2];
      x[i].x = at < from || at >= end ? -INFINITY : (left.x + right.x) * scale;
      x[i].y = at + 1 < from || at + 1 >= end ? -INFINITY : (left.y + right.y) * scale;
      top[i] = fmaxf(max[i], fmaxf(x[i].x, x[i].y));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {  // both heads in one loop: half the latency
#pragma unroll
      for (float& v : top) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int head = i * kWarps + warp;
      const float base = top[i] == -INFINITY ? 0.f : top[i], factor = exp2_approx(max[i] - base);
      x[i].x = exp2_approx(x[i].x - base), x[i].y = exp2_approx(x[i].y - base);
      *reinterpret_cast<uint32_t*>(b.weights() + head * 128 + (lane / 4 ^ head % 8) * 16 + lane % 4 * 4) =
          pack_bf16(x[i].x, x[i].y);
      if (lane == 0) b.factors()[head] = factor;
      max[i] = top[i];
      sum[i] = fmaf(sum[i], factor, x[i].x + x[i].y);
    }
    fence_async_shared();
  }
};

/// A warpgroup's columns of the values, [columns, heads], 64 columns a product.
struct Values {
  float part[kColumns / 64][kHeads / 2] = {};

  /// Multiplies heads by their factors.
  __device__ __forceinline__ void rescale(const float* factors) {
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
      const float2 f = reinterpret_cast<const float2*>(factors)[j * 4 + threadIdx.x % 4];
#pragma unroll
      for (auto& x : part) x[4 * j] *= f.x, x[4 * j + 1] *= f.y, x[4 * j + 2] *= f.x, x[4 * j + 3] *= f.y;
    }
  }

  /// Adds a tile's values times their weights.
  __device__ __forceinline__ void add(const Block& b, int stage) {
    const int group = threadIdx.x / 128;
    const uint64_t p = tile_descriptor(b.weights());
    const uint64_t v = transposed_descriptor(b.tile(stage), 1024, kGroupBytes) + group * (kColumns / 64) * 64;
    hold();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
      for (int m = 0; m < kColumns / 64; ++m)
        wgmma_transposed(part[m], v + m * 64 + step * (2 * kGroupBytes >> 4), p + step * 2);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold();
  }

  __device__ __forceinline__ void hold() {
#pragma unroll
    for (auto& x : part) wgmma_hold(x);
  }
};

/// A tile whose loads have been issued: a lane's row in the cache, the number of groups of rows, and how many of them
/// are in flight.
struct Asked {
  int row, groups, early;
};

/// Computes a split of rows. Each sequence usually has one row, but any number is allowed.
struct Worker {
  Block b;
  const Args& a;
  const Splits& splits;
  const CUtensorMap *query, *rows;
  int sequence, split;
  uint32_t tiles = 0, queries = 0;  // how many have been waited for

  __device__ __forceinline__ int stage_of(int ahead) const { return (tiles + ahead) % kStages; }

  /// Loads a lane's group of rows of a tile if it is one of [first, last).
  __device__ __forceinline__ void load_rows(int stage, int row, int first, int last) const {
    const int group = threadIdx.x;
    if (group < first || group >= last) return;
    load_box(b.tile(stage) + group * kGroupBytes, rows, row, b.tile_full(stage));
  }

  /// Loads the rows before `old` of tile `i` of a range. The tile comes `ahead` tiles after the last one that has been
  /// waited for. The first warp does it.
  __device__ __forceinline__ Asked ask(const Range& r, int i, int ahead, int old) const {
    const int begin = r.begin + i * kTile, position = begin + threadIdx.x * kGroup, block_size = a.cache.block_size;
    Asked t;
    t.groups = min(kGroups, ceil_div(r.end - begin, kGroup));
    t.early = max(0, min(t.groups, (old - begin) / kGroup));
    t.row = 0;
    if (static_cast<int>(threadIdx.x) < t.groups) {
      const uint32_t page = a.block_tables[static_cast<size_t>(sequence) * a.max_blocks + position / block_size];
      t.row = static_cast<int>(page) * block_size + position % block_size;
    }
    if (threadIdx.x == 0) arrive_expecting(b.tile_full(stage_of(ahead)), t.groups * kGroupBytes);
    __syncwarp();
    load_rows(stage_of(ahead), t.row, 0, t.early);
    return t;
  }

  __device__ __forceinline__ void load_queries(int token) const {
    const int groups = ceil_div(a.heads, kGroup), group = threadIdx.x;
    if (group == 0) arrive_expecting(b.query_full(), groups * kGroupBytes);
    __syncwarp();
    if (group < groups)
      load_box(b.query() + group * kGroupBytes, query, token * a.heads + group * kGroup, b.query_full());
  }

  /// Loads a row's first tiles and its queries. Rows before `old` are there already; the others and the queries are
  /// there when the launch ahead has ended.
  __device__ __forceinline__ void start(const Range& r, int token, int old, bool wait) const {
    Asked asked[kStages];
    if (threadIdx.x < 32) {
#pragma unroll
      for (int i = 0; i < kStages; ++i)
        if (i < r.tiles) asked[i] = ask(r, i, i, wait ? old : INT32_MAX);
    }
    if (wait) pdl_wait();
    if (threadIdx.x >= 32) return;
    load_queries(token);
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      if (i < r.tiles) load_rows(stage_of(i), asked[i].row, asked[i].early, asked[i].groups);
  }

  /// Zeros the values of rows of the tile outside of [from, end), which the row does not see: a weight of zero does not
  /// hide a value that is NaN or infinite.
  __device__ __forceinline__ void zero_unseen(int stage, int from, int end) const {
    for (int i = threadIdx.x; i < kTile * (kValue / 8); i += kThreads) {
      const int row = i / (kValue / 8), chunk = i % (kValue / 8);
      if (row >= from && row < end) continue;
      uint8_t* group = b.tile(stage) + row / kGroup * kGroupBytes;
      *reinterpret_cast<uint4*>(group + chunk / 8 * 1024 + row % kGroup * 128 + chunk % 8 * 16) = {0, 0, 0, 0};
    }
    fence_async_shared();
    __syncthreads();
  }

  __device__ __forceinline__ void store(const Softmax& softmax, const Values& values, int token) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = warp / 4 * kColumns + warp % 4 * 16 + lane / 4;
    const size_t row = static_cast<size_t>(token) * a.heads;
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i) {  // (j, odd): of a lane's heads 2t and 2t + 1 of every eight
      const int head = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (head >= a.heads) continue;
      float* to = splits.values + ((row + head) * splits.count + split) * kValue + column;
#pragma unroll
      for (int m = 0; m < kColumns / 64; ++m) {
        to[m * 64] = values.part[m][i / 2 * 4 + i % 2];
        to[m * 64 + 8] = values.part[m][i / 2 * 4 + 2 + i % 2];
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int head = i * kWarps + warp;
      const float sum = warp_sum(softmax.sum[i]);
      if (lane == 0 && head < a.heads)
        splits.softmax[(row + head) * splits.count + split] = make_float2(softmax.max[i], sum);
    }
  }

  __device__ __forceinline__ void row(const Range& r, int token) {
    Softmax softmax;
    Values values;
    mbarrier_wait(b.query_full(), queries++ % 2);
    for (int i = 0; i < r.tiles; ++i) {
      const int stage = stage_of(0), from = r.from - r.begin - i * kTile, end = r.end - r.begin - i * kTile;
      mbarrier_wait(b.tile_full(stage), tiles++ / kStages % 2);
      if (from > 0 || end < kTile) zero_unseen(stage, from, end);
      score(b, stage);
      __syncthreads();
      softmax.add(b, from, end, a.scale);
      __syncthreads();
      if (i > 0) values.rescale(b.factors());
      values.add(b, stage);
      if (i + kStages >= r.tiles) continue;
      __syncthreads();
      if (threadIdx.x < 32) ask(r, i + kStages, kStages - 1, INT32_MAX);
    }
    store(softmax, values, token);
  }

  __device__ __forceinline__ void run() {
    const int begin = a.query_start_loc[sequence], end = a.query_start_loc[sequence + 1];
    const int old = begin < end ? static_cast<int>(a.positions[begin]) : 0;
    bool waits = true;
    for (int token = begin; token < end; ++token) {
      const Range r = range_of(a.positions[token], a.window, split, splits.count);
      if (r.tiles == 0) continue;
      start(r, token, old, waits);
      waits = false;
      row(r, token);
      __syncthreads();
    }
    if (split != 0) return;
    // The end of this launch must imply that the launches before it have ended, even if it had no work.
    if (waits) pdl_wait();
    const int width = a.heads * kValue / 8;
    for (int token = a.query_start_loc[a.sequences] + sequence; token < a.tokens; token += a.sequences) {
      uint4* to = reinterpret_cast<uint4*>(a.out) + static_cast<size_t>(token) * width;
      for (int i = threadIdx.x; i < width; i += kThreads) to[i] = make_uint4(0, 0, 0, 0);
    }
  }
};

#endif  // MOE_HAS_WGMMA

// The launch uses half of the registers, so that blocks of the launches before and after it have some.
__global__ void __launch_bounds__(kThreads, 2)
    latent_decode(const __grid_constant__ Args a, const __grid_constant__ Splits splits,
                  const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap rows) {
#if MOE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t smem[];
  pdl_launch_dependents();
  Worker worker = {{smem}, a, splits, &query, &rows, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query);
    prefetch_tensor_map(&rows);
    for (int i = 0; i < kStages; ++i) mbarrier_init(worker.b.tile_full(i), 1);
    mbarrier_init(worker.b.query_full(), 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  worker.run();
#endif
}

cudaError_t run(const PagedAttentionArgs& c, const bf16* w_uv, bf16* values, void* stream) {
  if (!is_latent(c) || c.heads > kHeads || c.block_size % kGroup != 0 || c.partials == nullptr)
    return cudaErrorInvalidValue;
  if (c.tokens == 0 || c.sequences == 0) return cudaSuccess;
  const Args a = args_of(c);
  const Splits splits = splits_of(c, true);
  CUtensorMap query, latent;
  cudaError_t e = make_rows_map(&query, a.q, a.tokens * a.heads, kKey, 8);
  if (e == cudaSuccess) e = make_rows_map(&latent, a.cache.k, c.num_blocks * c.block_size, kKey, 8);
  if (e != cudaSuccess) return e;
  // The sequence is the first dimension of the grid, so that the blocks that have work come first.
  const dim3 grid(static_cast<unsigned>(c.sequences), static_cast<unsigned>(c.splits));
  e = launch(latent_decode, {grid, dim3(kThreads), stream, Block::kBytes}, a, splits, query, latent);
  if (e != cudaSuccess) return e;
  return w_uv != nullptr ? launch_merge_values(a, splits, w_uv, values, stream) : launch_merge(a, splits, stream);
}

}  // namespace
}  // namespace moe::attention_latent::decode

/// The number of parts of the positions that gives every SM a block.
extern "C" int moe_attention_latent_decode_splits(int sequences, int sms) {
  using namespace moe::attention_latent;
  if (sequences <= 0 || sms <= 0) return 1;
  const int splits = sms / sequences;
  return splits < 1 ? 1 : splits < kMaxSplits ? splits : kMaxSplits;
}

/// The same as moe_attention_latent, or as moe_attention_latent_values if `w_uv` is not null, for up to 16 heads. It is
/// meant for one new row of each of a few sequences, and its results are right for any number. block_size is a multiple
/// of 8. Hopper.
extern "C" int moe_attention_latent_decode(const moe::PagedAttentionArgs* args, const void* w_uv, void* values,
                                           void* stream) {
  return moe::attention_latent::decode::run(*args, static_cast<const moe::bf16*>(w_uv), static_cast<moe::bf16*>(values),
                                            stream);
}
