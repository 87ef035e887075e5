// Causal attention over latent rows (DeepSeek's absorbed form): one row of 576 values per position is the key of every
// head, and its first 512 values are the value. Decoding and prompts alike, on Hopper's warpgroup products.
//
// Floors: a decoded token reads 1,152 bytes per position at 4.0 TB/s; a prompt computes 2 (576 + 512) FLOP per query
// head and visible position at 790 TFLOP/s.
//
// Design: a tile of 64 positions is copied to shared memory once (TMA, 128-byte swizzle, page by page) and is both
// operands, K and V, for 64 (token, head) rows. The first warpgroup computes scores, softmax and the first 128 columns
// of the result. It passes the weights through shared memory to the second, which computes the remaining 384 columns.
// So the scores of the next tile are computed while the products of the second warpgroup run. With 16 heads a decoded
// token fills a quarter of the 64 rows. That costs no time: the products of a tile (1.3 us) take less than its share of
// the memory's bandwidth (2.4 us). Few sequences are split over their positions, and a second launch merges the splits
// (latent_merge.cu).
#include "attention/latent.cuh"

#include <cmath>

namespace moe::attention_latent {

namespace {

#if MOE_HAS_WGMMA

// Named barriers; 0 is the block's own.
constexpr int kOwn = 1;    // of the warpgroup that computes scores
constexpr int kReady = 2;  // weights and factors have been stored
constexpr int kTaken = 3;  // weights and factors have been read

constexpr int kLeft = 128;                    // columns of the first warpgroup
constexpr int kRight = (kValue - kLeft) / 2;  // columns of each of the two products of the second warpgroup

/// A thread's two rows of the 64: g and g + 8 of its warp's 16.
struct Softmax {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores, before the scale
  float sum[2] = {};
  float factor[2];  // the factor by which the last tile's maximum scales the sums
  int position[2];

  /// Turns scores into weights, which are not yet divided by their sum.
  template <bool kMasked>
  __device__ __forceinline__ void add(float (&s)[kTile / 2], int begin, float scale, int window) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = max[h];
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        if (kMasked) {
          const int at = begin + i / 2 * 8 + 2 * t + i % 2;
          if (at > position[h] || (window > 0 && at <= position[h] - window)) x = -INFINITY;
        }
        top = fmaxf(top, x);
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = top == -INFINITY ? 0.f : top * scale;
      factor[h] = exp2_approx(fmaf(max[h], scale, -base));
      max[h] = top;
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        x = exp2_approx(fmaf(x, scale, -base));
        part += x;
      }
      sum[h] = fmaf(sum[h], factor[h], part);
    }
  }

  /// Adds the sums over the threads of a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (float& x : sum) {
      x += __shfl_xor_sync(0xffffffffu, x, 1);
      x += __shfl_xor_sync(0xffffffffu, x, 2);
    }
  }
};

/// s = 64 queries x the 64 keys of a tile.
__device__ __forceinline__ void issue_scores(float (&s)[kTile / 2], const uint8_t* query, const uint8_t* tile) {
  const uint64_t q = tile_descriptor(query), k = tile_descriptor(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKey / 16; ++step) {
    const int at = step / 4 * (kPartBytes >> 4) + step % 4 * 2;
    wgmma<kTile>(s, q + at, k + at, step != 0);
  }
  wgmma_commit();
}

/// values += weights x N columns of a tile.
template <int N>
__device__ __forceinline__ void issue_values(float (&values)[N / 2], const uint32_t (&p)[kTile / 16][4],
                                             const uint8_t* tile, int first_part) {
  const uint64_t v = transposed_descriptor(tile + first_part * kPartBytes, kPartBytes);
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) wgmma<N, 1>(values, p[step], v + step * (16 * 128 >> 4));
}

template <int N>
__device__ __forceinline__ void rescale(float (&values)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= factor[i / 2 % 2];
}

/// Zeros the values of positions that no row sees: a weight of zero does not hide a value that is NaN or infinite. The
/// warpgroup of the scores does it.
__device__ __forceinline__ void zero_unseen(uint8_t* tile, int begin, const Work& w) {
  for (int i = threadIdx.x; i < kTile * (kValue / 8); i += 128) {
    const int part = i / (kTile * 8), row = i / 8 % kTile, chunk = i % 8;
    if (begin + row >= w.from && begin + row < w.end) continue;
    *reinterpret_cast<uint4*>(tile + part * kPartBytes + row * 128 + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_async_shared();
  named_barrier(kOwn, 128);
}

/// Where a thread's results are stored: rounded in `out`, or in f32 in the part of its split.
struct Store {
  const Args& a;
  const Splits& splits;
  const Work& w;
  int first;  // row of the thread's warp in the work tile

  __device__ __forceinline__ bool has(int h) const { return w.first + row(h) <= w.last; }
  __device__ __forceinline__ int row(int h) const { return first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h; }
  /// Index of the result among the (token, head) rows of the step.
  __device__ __forceinline__ size_t at(int h) const {
    return static_cast<size_t>(w.first_token) * a.heads + w.first + row(h);
  }

  template <int N>
  __device__ __forceinline__ void columns(const float (&values)[N / 2], int column) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!has(h)) continue;
      if (splits.count == 1) {
        uint32_t* to = reinterpret_cast<uint32_t*>(a.out + at(h) * kValue + column) + t;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) to[j * 4] = pack_bf16(values[4 * j + 2 * h], values[4 * j + 2 * h + 1]);
      } else {
        float2* to = reinterpret_cast<float2*>(splits.values + (at(h) * splits.count + w.split) * kValue + column) + t;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) to[j * 4] = make_float2(values[4 * j + 2 * h], values[4 * j + 2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void softmax(const float (&max)[2], const float (&sum)[2], float scale) const {
    if (splits.count == 1 || threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (has(h)) splits.softmax[at(h) * splits.count + w.split] = make_float2(max[h] * scale, sum[h]);
  }
};

/// Computes scores, softmax and the first columns of a work tile. `queries` is the parity of their barrier.
__device__ __forceinline__ void compute_left(const Block& b, const Args& a, const Splits& splits, const Work& w,
                                             Cursor& at, uint32_t& queries) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Store store = {a, splits, w, warp * 16};
  Softmax rows;
  if (w.tiles == 0) return store.softmax(rows.max, rows.sum, a.scale);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    rows.position[h] = a.positions[w.first_token + min(w.first + store.row(h), w.last) / a.heads];
  float values[kLeft / 2] = {};
  mbarrier_wait(b.query_full(), queries);
  queries ^= 1;
  for (int i = 0; i < w.tiles; ++i, at.advance()) {
    const int begin = w.tile_at(i);
    uint8_t* tile = b.tile(at.stage);
    float s[kTile / 2];
    mbarrier_wait(b.full(at.stage), at.parity);
    if (begin < w.from || begin + kTile > w.end) zero_unseen(tile, begin, w);
    issue_scores(s, b.query(), tile);
    wgmma_wait<0>();
    wgmma_hold(s);
    // One lane's arrival is enough: only products read the queries, and the products have ended.
    if (i + 1 == w.tiles && lane == 0) mbarrier_arrive(b.query_empty());
    const bool masked = begin + kTile - 1 > w.lowest || (a.window > 0 && begin < w.end - a.window);
    if (masked) rows.template add<true>(s, begin, a.scale, a.window);
    else rows.template add<false>(s, begin, a.scale, a.window);
    uint32_t p[kTile / 16][4];
#pragma unroll
    for (int j = 0; j < kTile / 4; ++j) p[j / 4][j % 4] = pack_bf16(s[2 * j], s[2 * j + 1]);
    named_barrier(kTaken, kWarps * 32);
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j)
      b.weights()[j * 128 + threadIdx.x] = make_uint4(p[j][0], p[j][1], p[j][2], p[j][3]);
    b.factors()[threadIdx.x] = make_float2(rows.factor[0], rows.factor[1]);
    named_barrier_arrive(kReady, kWarps * 32);
    rescale(values, rows.factor);
    wgmma_fence();
    issue_values<kLeft>(values, p, tile, 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(values);
    // One lane's arrival is enough, because only products read the tile. If the lanes have written zeros, they have
    // fenced and met since (zero_unseen).
    if (lane == 0) mbarrier_arrive(b.empty(at.stage));
  }
  rows.finish();
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.factor[h] = splits.count == 1 ? 1.f / rows.sum[h] : 1.f;
  named_barrier(kTaken, kWarps * 32);
  b.factors()[threadIdx.x] = make_float2(rows.factor[0], rows.factor[1]);
  named_barrier_arrive(kReady, kWarps * 32);
  rescale(values, rows.factor);
  store.columns<kLeft>(values, 0);
  store.softmax(rows.max, rows.sum, a.scale);
}

/// Computes the other columns.
__device__ __forceinline__ void compute_right(const Block& b, const Args& a, const Splits& splits, const Work& w,
                                              Cursor& at) {
  if (w.tiles == 0) return;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const Store store = {a, splits, w, thread / 32 * 16};
  float middle[kRight / 2] = {}, right[kRight / 2] = {};
  const auto take_factors = [&] {
    const float2 both = b.factors()[thread];
    named_barrier_arrive(kTaken, kWarps * 32);
    const float factor[2] = {both.x, both.y};
    rescale(middle, factor);
    rescale(right, factor);
  };
  for (int i = 0; i < w.tiles; ++i, at.advance()) {
    mbarrier_wait(b.full(at.stage), at.parity);
    named_barrier(kReady, kWarps * 32);
    uint32_t p[kTile / 16][4];
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j) {
      const uint4 x = b.weights()[j * 128 + thread];
      p[j][0] = x.x, p[j][1] = x.y, p[j][2] = x.z, p[j][3] = x.w;
    }
    take_factors();
    wgmma_fence();
    issue_values<kRight>(middle, p, b.tile(at.stage), kLeft / kTileColumns);
    issue_values<kRight>(right, p, b.tile(at.stage), (kLeft + kRight) / kTileColumns);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(middle);
    wgmma_hold(right);
    // One lane's arrival is enough, because only products read the tile.
    if (lane == 0) mbarrier_arrive(b.empty(at.stage));
  }
  named_barrier(kReady, kWarps * 32);
  take_factors();
  store.columns<kRight>(middle, kLeft);
  store.columns<kRight>(right, kLeft + kRight);
}

/// Writes zeros to the padding rows, by the warps that compute.
__device__ __forceinline__ void zero_padding(const Args& a) {
  const int width = a.heads * kValue / 8;
  for (int token = a.query_start_loc[a.sequences] + blockIdx.x; token < a.tokens; token += gridDim.x) {
    uint4* row = reinterpret_cast<uint4*>(a.out) + static_cast<size_t>(token) * width;
    for (int i = threadIdx.x; i < width; i += kWarps * 32) row[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void consume(const Block& b, const Args& a, const Splits& splits) {
  const bool is_left = threadIdx.x < 128;
  if (!is_left) named_barrier_arrive(kTaken, kWarps * 32);
  Cursor at;
  uint32_t queries = 0;
  for (int i = 0;; ++i) {
    mbarrier_wait(b.work_full(i), i / kWorkSlots & 1);
    const Work w = *b.work(i);
    warp_arrive(b.work_empty(i));
    if (w.sequence < 0) break;
    if (is_left) compute_left(b, a, splits, w, at, queries);
    else compute_right(b, a, splits, w, at);
  }
  if (is_left) named_barrier(kTaken, kWarps * 32);  // so that every arrival is waited for
}

#endif  // MOE_HAS_WGMMA

__global__ void __launch_bounds__(kThreads, 1)
    latent_kernel(const __grid_constant__ Args a, const __grid_constant__ Splits splits,
                  const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap rows, int page_rows) {
#if MOE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t smem[];
  const Block b = {smem};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query);
    prefetch_tensor_map(&rows);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(b.full(i), 1);
      mbarrier_init(b.empty(i), kWarps);
    }
    mbarrier_init(b.query_full(), 1);
    mbarrier_init(b.query_empty(), kWarps / 2);
    for (int i = 0; i < kWorkSlots; ++i) {
      mbarrier_init(b.work_full(i), 1);
      mbarrier_init(b.work_empty(i), kWarps * kWarpArrivals);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();
  if (threadIdx.x >= kWarps * 32) {
    give_registers<24>();
    if (threadIdx.x < (kWarps + 1) * 32) Loader{b, a, splits, &query, &rows, page_rows}.run();
  } else {
    take_registers<240>();
    pdl_wait();
    consume(b, a, splits);
    // Padding comes last, when nothing waits for it.
    zero_padding(a);
  }
#endif
}

bool valid(const PagedAttentionArgs& c) {
  const bool pages = c.block_size % kTile == 0 || (c.block_size >= 8 && kTile % c.block_size == 0);
  return is_latent(c) && pages && c.counters != nullptr && (c.splits == 1 || c.partials != nullptr);
}

/// `w_uv` is null if the results are latents.
cudaError_t run(const PagedAttentionArgs& c, const bf16* w_uv, bf16* values, void* stream) {
  if (!valid(c)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const Args a = args_of(c);
  const int rows = c.tokens * c.heads, page_rows = c.block_size < kTile ? c.block_size : kTile;
  const Splits splits = splits_of(c, false);
  CUtensorMap query, latent;
  cudaError_t e = moe::make_tensor_map(&query, a.q, rows, kKey, kQueryBox);
  if (e == cudaSuccess) e = moe::make_tensor_map(&latent, a.cache.k, c.num_blocks * c.block_size, kKey, page_rows);
  moe::DeviceLimits limits;
  if (e == cudaSuccess) e = moe::device_limits(&limits);
  if (e != cudaSuccess) return e;
  const int64_t tickets = moe::attention_prefill::max_tiles(a, kRows) * c.splits;
  if (tickets > 0x7fffffff - limits.sms) return cudaErrorInvalidValue;
  const unsigned blocks = tickets < limits.sms ? static_cast<unsigned>(tickets) : limits.sms;
  e = moe::launch(latent_kernel, {dim3(blocks), dim3(kThreads), stream, kSmem}, a, splits, query, latent, page_rows);
  if (e != cudaSuccess) return e;
  if (w_uv != nullptr) return launch_merge_values(a, splits, w_uv, values, stream);
  return c.splits == 1 ? cudaSuccess : launch_merge(a, splits, stream);
}

}  // namespace
}  // namespace moe::attention_latent

/// The number of parts of the positions that fill the SMs when every sequence has one row: 1, or a power of two up to
/// 64. More parts are faster for one sequence of 32,768 positions (24.3 against 29.4 us), but slower for 8,192 (14.9
/// against 14.2).
extern "C" int moe_attention_latent_splits(int tokens, int sequences, int heads, int sms) {
  using namespace moe::attention_latent;
  if (tokens <= 0 || heads <= 0 || sms <= 0 || tokens > sequences) return 1;
  const int64_t tiles = static_cast<int64_t>(tokens) * moe::ceil_div(heads, kRows);
  constexpr int kMost = 64;
  for (int splits = 1; splits < kMost; splits *= 2) {
    const int64_t work = tiles * splits, waves = moe::ceil_div(work, sms);
    if (work * 8 >= waves * sms * 7) return splits;  // seven eighths of the SMs have work until the end
  }
  return kMost;
}

/// out = attention of q over latent rows, bf16. There is one KV head, head_dim is 576, value_dim is 512, and values are
/// in the rows of their keys; block_size is 8, 16, 32 or a multiple of 64. Hopper.
extern "C" int moe_attention_latent(const moe::PagedAttentionArgs* args, void* stream) {
  return moe::attention_latent::run(*args, nullptr, nullptr, stream);
}

/// The same as moe_attention_latent followed by a product: values [tokens, heads, 128] = w_uv [heads, 128, 512] times
/// the latents. Only the latents of padding rows are written to `out`. It needs several splits. w_uv begins at a
/// multiple of 16 bytes.
extern "C" int moe_attention_latent_values(const moe::PagedAttentionArgs* args, const void* w_uv, void* values,
                                           void* stream) {
  if (args->splits <= 1 || w_uv == nullptr) return cudaErrorInvalidValue;
  return moe::attention_latent::run(*args, static_cast<const moe::bf16*>(w_uv), static_cast<moe::bf16*>(values),
                                    stream);
}
