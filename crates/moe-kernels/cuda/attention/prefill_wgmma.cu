// Causal attention of prompts over the paged KV cache on Hopper's warpgroup products (FlashAttention-3, arXiv
// 2407.08608).
//
// Floor: 4 D FLOP per query head and visible position over 790 TFLOP/s. A tile of 128 rows reads KV again from L2, 64
// KB for 8.4 MFLOP: at 600 TFLOP/s that is 4.7 TB/s for a block alone, and half of that for a pair of blocks.
//
// Design: two warpgroups have 64 rows each, and one warp loads tiles of 128 positions page by page (TMA, 128-byte
// swizzle). There are three stages of K and of V, which the two blocks of a pair share (prefill_wgmma.cuh). A warpgroup
// issues the scores of a tile, then the values of the tile before it, and computes the softmax of the first while the
// second runs. The warpgroups take turns, so that the softmax of one runs at the same time as the products of the
// other. The tiles go from the last position to the first, so that tiles with a mask come first. Tiles begin at
// multiples of 128 and a row's sums do not depend on its neighbours, so its bits do not depend on how a prompt is
// divided. Measured on an H200: docs/lessons/attention.md.
//
// Heads of 256: a thread has 128 sums of values, 32 scores and 16 words of weights. So tiles have 64 positions, there
// are two stages, and products read q from shared memory, which a product of 64 x 64 x 16 uses as long as the tensor
// cores.
#include "attention/prefill_softmax.cuh"

namespace moe::attention_prefill {
namespace {

#if MOE_HAS_WGMMA

// Named barriers; 0 is the block's own.
constexpr int kOwn = 1;   // 1 and 2: all warps of the first and of the second warpgroup
constexpr int kTurn = 3;  // 3 and 4: the first and the second warpgroup may issue products

/// The weights as the A operand of the second product: of every 16 positions four words.
template <int kCount>
__device__ __forceinline__ void round_weights(uint32_t (&p)[kCount], const float (&s)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

/// values += weights x a tile of values.
template <class D>
__device__ __forceinline__ void issue_values(float (&values)[D::kValue / 2], const uint32_t (&p)[D::kTile / 4],
                                             const uint8_t* v) {
  const uint64_t b = transposed_descriptor(v, D::kHalfBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < D::kTile / 16; ++step)
    wgmma<D::kValue, 1>(values, {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]},
                        b + step * (16 * 128 >> 4));
  wgmma_commit();
}

/// Zeros the values of positions that no row sees: a weight of zero does not hide a value that is NaN or infinite. One
/// warpgroup calls it; both may write the same zeros.
template <class D>
__device__ __forceinline__ void zero_unseen(uint8_t* v, int at, const Work& w) {
  const int thread = threadIdx.x % 128;
  for (int i = thread; i < D::kTile * (D::kValue / 8); i += 128) {
    const int half = i / (D::kTile * 8), row = i / 8 % D::kTile, chunk = i % 8;
    if (at + row >= w.from && at + row < w.end) continue;
    *reinterpret_cast<uint4*>(v + half * D::kHalfBytes + row * 128 + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_async_shared();
  named_barrier(kOwn + threadIdx.x / 128, 128);
}

/// The address of row r and 16-byte column c of a warp's rows of q, or of its results, in shared memory.
template <class D, int kColumns>
__device__ __forceinline__ uint32_t q_at(int r, int c) {
  if (D::kSharedQueries) return c / 8 * kSlabBytes + r * 128 + ((c % 8 ^ (r & 7)) << 4);
  return r * kColumns * 2 + ((c ^ (r & 7)) << 4);
}

/// The rows of a warp and their offset in the output, in heads.
struct WarpRows {
  const Args& a;
  const Work& w;
  int group, first;  // first row of the warp in the sequence

  __device__ __forceinline__ bool has(int r) const { return first + r <= w.last; }
  __device__ __forceinline__ int token(int r) const { return w.first_token + min(first + r, w.last) / group; }
  __device__ __forceinline__ int head(int r) const { return w.kv_head * group + min(first + r, w.last) % group; }
  __device__ __forceinline__ size_t at(int r) const { return static_cast<size_t>(token(r)) * a.heads + head(r); }
};

/// A warpgroup's 64 rows of q as the A operand: each warp has its 16 rows in registers, or all are in shared memory.
template <class D>
struct Query {
  static constexpr int kSteps = D::kKey / 16;
  uint8_t* warp_rows;
  uint8_t* group_rows;
  uint32_t words[D::kSharedQueries ? 1 : kSteps][4];

  __device__ __forceinline__ void load(const WarpRows& rows) {
    constexpr int kChunks = D::kKey / 8;
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the results of the tile before have left
#pragma unroll
    for (int i = lane; i < 16 * kChunks; i += 32)
      cp_async16(warp_rows + q_at<D, D::kKey>(i / kChunks, i % kChunks),
                 rows.a.q + rows.at(i / kChunks) * D::kKey + i % kChunks * 8);
    cp_async_commit();
    cp_async_wait<0>();
    if constexpr (D::kSharedQueries) {
      fence_async_shared();  // products read them by another path
      meet();
    } else {
      __syncwarp();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) read(step, words[step]);
    }
  }

  /// 16 columns of the warp's rows.
  __device__ __forceinline__ void operand(int step, uint32_t (&a)[4]) const {
    if constexpr (D::kSharedQueries) {
      read(step, a);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = words[step][i];
    }
  }

  /// s = 64 rows of q x a tile of keys.
  __device__ __forceinline__ void issue_scores(float (&s)[D::kTile / 2], const uint8_t* k) const {
    const uint64_t b = tile_descriptor(k);
    wgmma_fence();
    if constexpr (D::kSharedQueries) {
      const uint64_t a = tile_descriptor(group_rows);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        wgmma<D::kTile>(s, a + step / 4 * (kSlabBytes >> 4) + step % 4 * 2,
                        b + step / 4 * (D::kHalfBytes >> 4) + step % 4 * 2, step != 0);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        wgmma<D::kTile, 0>(s, words[step], b + step / 4 * (D::kHalfBytes >> 4) + step % 4 * 2, step != 0);
    }
    wgmma_commit();
  }

  /// No warp of the warpgroup reads q any more, so that results may take its place.
  __device__ __forceinline__ void end() const {
    if constexpr (D::kSharedQueries) meet();
  }

 private:
  __device__ __forceinline__ void read(int step, uint32_t (&a)[4]) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, warp_rows + q_at<D, D::kKey>(lane % 16, 2 * step + lane / 16));
  }

  static __device__ __forceinline__ void meet() { named_barrier(kOwn + threadIdx.x / 128, 128); }
};

/// Eight rounded values with their gates.
__device__ __forceinline__ uint4 gated(uint4 values, const float* gates) {
  const float4 low = *reinterpret_cast<const float4*>(gates), high = *reinterpret_cast<const float4*>(gates + 4);
  const auto scaled = [](uint32_t word, float first, float second) {
    const float2 x = unpack_bf16(word);
    return pack_bf16(Gates::scaled(x.x, first), Gates::scaled(x.y, second));
  };
  return {scaled(values.x, low.x, low.y), scaled(values.y, low.z, low.w), scaled(values.z, high.x, high.y),
          scaled(values.w, high.z, high.w)};
}

/// Stores a warp's 16 rows of results through shared memory, 16 bytes at a time.
template <class D>
__device__ __forceinline__ void store_rows(const float (&values)[D::kValue / 2], uint8_t* smem, const WarpRows& rows) {
  constexpr int kChunks = D::kValue / 8, kEach = 32 / kChunks;  // rows that a warp stores at once
  static_assert(32 % kChunks == 0, "a warp stores whole rows");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < D::kValue / 16; ++c) {
    const float* x = values + 8 * c;
    const uint32_t word[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                              pack_bf16(x[6], x[7])};
    stmatrix_x4(smem + q_at<D, D::kValue>(lane % 16, 2 * c + lane / 16), word);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 / kEach; ++i) {
    const int r = i * kEach + lane / kChunks, c = lane % kChunks;
    if (!rows.has(r)) continue;
    uint4 columns = *reinterpret_cast<const uint4*>(smem + q_at<D, D::kValue>(r, c));
    if (D::kValue == kGatedHead && rows.a.gates.any())
      columns = gated(columns, rows.a.gates.at(rows.token(r), rows.head(r) * D::kValue + c * 8));
    *reinterpret_cast<uint4*>(rows.a.out + rows.at(r) * D::kValue + c * 8) = columns;
  }
}

/// Stores rows of results in FP8: four lanes have a row's 128 columns.
__device__ __forceinline__ void store_fp8_rows(const float (&values)[fp8::kGroup / 2], const WarpRows& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = threadIdx.x % 32 / 4 + 8 * h;
    uint32_t word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = pack_bf16(values[4 * i + 2 * h], values[4 * i + 2 * h + 1]);
    const fp8::RowsOut& out = rows.a.fp8;
    fp8::store_fragments(out.q + rows.at(r) * fp8::kGroup, out.scale(rows.token(r), rows.head(r)), word, rows.has(r),
                         out.quads);
  }
}

/// Tells all blocks that load into this block's stage that the warp has read it. One arrival is enough: only products
/// read a stage, and they have ended. If lanes touch it, `raise` and `zero_unseen` fence, and the lanes meet
/// afterwards.
template <class D>
__device__ __forceinline__ void leave(uint64_t* empty) {
  const int lane = threadIdx.x % 32;
  if (D::kBlocks == 1) {
    if (lane == 0) mbarrier_arrive(empty);
  } else if (lane < D::kBlocks) {
    cluster_arrive_at(empty, lane);
  }
}

/// Computes a work tile; `at` is the place in the rings.
template <class D>
__device__ __forceinline__ void compute(const Block<D>& b, const Args& a, const Work& w, Cursor<D>& at) {
  const int warp = threadIdx.x / 32, warpgroup = warp / 4, lane = threadIdx.x % 32;
  const WarpRows mine = {a, w, a.heads / a.cache.heads, w.first + warp * 16};
  Query<D> q = {b.q(warp), b.q_group(warpgroup)};
  q.load(mine);
  Rows<D> rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.position[h] = a.positions[mine.token(lane / 4 + 8 * h)];

  // Computes the weights of the i-th tile and gives the stage of its keys back. Returns whether the bases of some rows
  // changed.
  const auto softmax = [&](float (&s)[D::kTile / 2], int i) {
    const int begin = w.template tile_at<D>(i);
    const bool masked = begin + D::kTile > w.lowest || (a.window > 0 && begin < w.end - a.window);
    float part[2];
    if (masked) rows.template weigh<true>(s, part, begin, a.scale, a.window);
    else rows.template weigh<false>(s, part, begin, a.scale, a.window);
    const bool raised = i > 0 && __any_sync(0xffffffffu, part[0] > kLimit || part[1] > kLimit);
    if (raised) rows.raise(s, part, q, b.k(at.stage), begin, a.scale, a.window);
    leave<D>(b.empty_k(at.stage));
#pragma unroll
    for (int h = 0; h < 2; ++h) rows.sum[h] += part[h];
    return raised;
  };
  const auto await_values = [&](const Cursor<D>& cursor, int i) {
    mbarrier_wait(b.full_v(cursor.stage), cursor.parity);
    const int begin = w.template tile_at<D>(i);
    if (begin < w.from || begin + D::kTile > w.end) zero_unseen<D>(b.v(cursor.stage), begin, w);
  };

  float s[D::kTile / 2];
  uint32_t p[D::kTile / 4];
  mbarrier_wait(b.full_k(at.stage), at.parity);
  q.issue_scores(s, b.k(at.stage));
  wgmma_wait<0>();
  wgmma_hold(s);
  softmax(s, 0);
  round_weights(p, s);
  for (int i = 1; i < w.tiles; ++i) {
    const Cursor<D> before = at;
    at.advance();
    mbarrier_wait(b.full_k(at.stage), at.parity);
    named_barrier(kTurn + warpgroup, kConsumers * 32);
    q.issue_scores(s, b.k(at.stage));
    await_values(before, i - 1);
    issue_values<D>(rows.values, p, b.v(before.stage));
    named_barrier_arrive(kTurn + 1 - warpgroup, kConsumers * 32);
    wgmma_wait<1>();
    wgmma_hold(s);
    const bool raised = softmax(s, i);
    wgmma_wait<0>();
    wgmma_hold(rows.values);
    leave<D>(b.empty_v(before.stage));
    if (raised) rows.rescale();
    round_weights(p, s);
  }
  await_values(at, w.tiles - 1);
  issue_values<D>(rows.values, p, b.v(at.stage));
  wgmma_wait<0>();
  wgmma_hold(rows.values);
  leave<D>(b.empty_v(at.stage));
  at.advance();
  float sinks[2] = {-INFINITY, -INFINITY};
  if (a.sinks != nullptr) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sinks[h] = a.sinks[mine.head(lane / 4 + 8 * h)] * kLog2E;
  }
  rows.divide(sinks);
  if constexpr (D::kKey == fp8::kGroup) {
    if (a.fp8.scales != nullptr) return store_fp8_rows(rows.values, mine);
  }
  q.end();
  store_rows<D>(rows.values, b.q(warp), mine);
}

template <class D>
__device__ __forceinline__ void consume(const Block<D>& b, const Args& a) {
  // The first turn belongs to the other warpgroup.
  if (threadIdx.x / 128 == 1) named_barrier_arrive(kTurn, kConsumers * 32);
  Cursor<D> at;
  for (int i = 0;; ++i) {
    mbarrier_wait(b.work_full(i), i / kWorkSlots & 1);
    const Work w = *b.work(i);
    warp_arrive(b.work_empty(i));
    if (w.tiles == 0) return;
    compute<D>(b, a, w, at);
  }
}

#endif  // MOE_HAS_WGMMA

template <class D, class Source>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_wgmma(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ CUtensorMap v, const __grid_constant__ Source source) {
#if MOE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t smem[];
  const Block<D> b = {smem};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&k);
    prefetch_tensor_map(&v);
    for (int i = 0; i < D::kStages; ++i) {
      mbarrier_init(b.full_k(i), 1);
      mbarrier_init(b.full_v(i), 1);
      mbarrier_init(b.empty_k(i), D::kBlocks * kConsumers);
      mbarrier_init(b.empty_v(i), D::kBlocks * kConsumers);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      mbarrier_init(b.work_full(i), 1);
      mbarrier_init(b.work_empty(i), kConsumers * kWarpArrivals);
      mbarrier_init(b.mail_full(i), 1);
      mbarrier_init(b.mail_empty(i), 1);
    }
    mbarrier_fence_init();
  }
  if (D::kBlocks > 1) cluster_sync();
  else __syncthreads();
  if (a.blocks == 0) pdl_launch_dependents();
  pdl_wait();
  // The inputs of the kernel that runs at the same time are there.
  if (a.blocks > 0) pdl_launch_dependents();
  zero_padding(a, blockIdx.x, gridDim.x, 0, a.heads * D::kValue, a.heads * D::kValue);
  if (threadIdx.x >= kConsumers * 32) {
    give_registers<24>();
    if (threadIdx.x < (kConsumers + 1) * 32) Loader<D, Source>{b, a, source, &k, &v}.run();
  } else {
    take_registers<240>();
    consume<D>(b, a);
  }
  if (D::kBlocks > 1) cluster_sync();  // until then the other block sends to this one's shared memory
#endif
}

template <class D, class Source>
cudaError_t run(const Args& a, const Source& source, int rows, void* stream) {
  CUtensorMap k, v;
  cudaError_t e = make_tensor_map(&k, a.cache.k, rows, D::kKey, source.rows);
  if (e == cudaSuccess) e = make_tensor_map(&v, a.cache.v, rows, D::kValue, source.rows);
  DeviceLimits limits;
  if (e == cudaSuccess) e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const int64_t tickets = max_tiles(a, D::kBlocks * kRows) * a.cache.heads;
  if (tickets > 0x7fffffff - limits.sms) return cudaErrorInvalidValue;
  const int sms = a.blocks > 0 && a.blocks < limits.sms ? a.blocks : limits.sms;
  const int most = sms < D::kBlocks ? 1 : sms / D::kBlocks;
  const int clusters = tickets < most ? static_cast<int>(tickets) : most;
  Launch l = {dim3(clusters * D::kBlocks), dim3(kThreads), stream, D::kSmem};
  l.cluster = D::kBlocks;
  return launch(prefill_wgmma<D, Source>, l, a, k, v, source);
}

/// Whether blocks work in pairs: if most tiles of the sequences are full, because both tiles of a pair are computed
/// even if one has no rows. A row's bits are the same.
template <int D>
cudaError_t run_paged(const Args& a, int num_blocks, void* stream) {
  constexpr int kTile = Dims<D, D, 1>::kTile;
  const Paged pages = {a.cache.block_size < kTile ? a.cache.block_size : kTile};
  const int rows = num_blocks * a.cache.heads * a.cache.block_size;
  const int64_t all = static_cast<int64_t>(a.tokens) * (a.heads / a.cache.heads);
  if (all < static_cast<int64_t>(a.sequences) * kPairRows) return run<Dims<D, D, 1>>(a, pages, rows, stream);
  return run<Dims<D, D, 2>>(a, pages, rows, stream);
}

}  // namespace

cudaError_t launch_wgmma(const Args& a, int head_dim, int num_blocks, void* stream) {
  switch (head_dim) {
    case 256: return run_paged<256>(a, num_blocks, stream);
    case 128: return run_paged<128>(a, num_blocks, stream);
    default: return run_paged<64>(a, num_blocks, stream);
  }
}

cudaError_t launch_expanded(const Args& a, int all, const uint32_t* bases, void* stream) {
  using Expanded = Dims<192, 128, 1>;
  return run<Expanded>(a, Contiguous{Expanded::kTile, all, bases}, a.cache.heads * all, stream);
}

}  // namespace moe::attention_prefill
