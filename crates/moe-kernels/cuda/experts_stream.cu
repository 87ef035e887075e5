// Experts for few rows per expert: gate and up products with SwiGLU, down product and weighted sum over k,
// from topk_ids to token rows in one launch that streams every touched weight once.
//
// Floor: touched experts * 6 H I bytes; 6 T K H I FLOPs are far below it (T = 256 on 128 experts, top 8:
// 16 rows per expert, 16 FLOP per byte). So only bytes in flight count.
//
// Design: one persistent block per multiprocessor takes an equal, consecutive share of the 16-row weight tiles of
// both products. One warp does nothing but copy weights into a ring that fills shared memory, through
// both products without a pause: while the down product waits for the activations of other blocks, its
// weights are already on the way, so the memory never idles between the products. The weights are the mma's 16 rows, the
// slots its 8 columns; so one token costs no more than eight, and the eight consumer warps split K, which
// keeps the tile small enough to spread 8 experts evenly over 132 multiprocessors. Their partial sums are
// added in warp order: the result of a slot depends on its own row only, never on the batch.
//
// Blocks wait for each other (flags per unit, one grid barrier before the sum over k), so the launch is
// cooperative. Flags and barrier are left as they were found, so one zeroed buffer serves all launches.
#include "combine.cuh"
#include "experts_stream.cuh"

namespace moe::stream {
namespace {

/// Everything the roles of a block share.
struct Block {
  const Args& a;
  Layout l;
  uint8_t* smem;
  int units;

  __device__ uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(smem) + stage; }
  __device__ uint64_t* empty(int stage) const { return full(kMaxStages + stage); }
  __device__ uint64_t* rows_full() const { return full(2 * kMaxStages); }
  __device__ uint64_t* rows_empty() const { return full(2 * kMaxStages + 1); }
  __device__ uint8_t* stage(int i) const { return smem + l.stage + i * l.stage_bytes; }
  __device__ Unit unit(int u) const { return reinterpret_cast<const Unit*>(smem + l.units)[u]; }
  __device__ int slot(int place) const { return reinterpret_cast<const uint16_t*>(smem + l.sorted)[place]; }
  __device__ uint32_t* flag(int u) const { return a.flags + kFlagHeader + u; }
};

/// First element of row r of a weight tile.
__device__ __forceinline__ const bf16* weight_row(const Args& a, int product, int expert, int tile, int r) {
  if (product == 0) {
    const int row = tile * (kTileRows / 2) + r % (kTileRows / 2) + (r < kTileRows / 2 ? 0 : a.inter);
    return a.w13 + (static_cast<size_t>(expert) * 2 * a.inter + row) * a.hidden;
  }
  return a.w2 + (static_cast<size_t>(expert) * a.hidden + tile * kTileRows + r) * a.inter;
}

__device__ void load_weights(const Block& b) {
  Cursor at;
  for (int product = 0; product < 2; ++product) {
    const int depth = b.a.depth(product), chunk = b.a.chunk[product];
    for_each_run(b.units, b.a.tiles(product), [&](int u, int first, int end) {
      const int expert = b.unit(u).expert;
      for (int tile = first; tile < end; ++tile) {
        for (int k = 0; k < depth; k += chunk) {
          mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
          copy_rows(b.stage(at.stage), padded(chunk), kTileRows, min(chunk, depth - k) * 2, b.full(at.stage),
                    [&](int r) { return weight_row(b.a, product, expert, tile, r) + k; });
          at.advance(b.a.stages);
        }
      }
    });
  }
}

/// Loads the rows of each unit: token rows, then activations as soon as all blocks have written them.
__device__ void load_rows(const Block& b) {
  uint32_t parity = 1;
  for (int product = 0; product < 2; ++product) {
    for_each_run(b.units, b.a.tiles(product), [&](int u, int, int) {
      const Unit unit = b.unit(u);
      mbarrier_wait(b.rows_empty(), parity);
      parity ^= 1;
      if (product == 1) {
        while (load_acquire(b.flag(u)) < static_cast<uint32_t>(b.a.tiles(0))) __nanosleep(32);
        fence_async_proxy();
      }
      copy_rows(b.smem + b.l.rows, b.l.row_stride, unit.rows, b.a.depth(product) * 2, b.rows_full(), [&](int r) {
        const size_t slot = b.slot(unit.first + r);
        return product == 0 ? b.a.x + slot / b.a.top_k * b.a.hidden : b.a.act + slot * b.a.inter;
      });
    });
  }
}

/// One 16-row tile times the unit's rows: this warp's steps along K, from ring to registers.
template <int kPass>
__device__ __forceinline__ void multiply(const Block& b, int product, Cursor& at, float (&acc)[kPass / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int depth = b.a.depth(product), chunk = b.a.chunk[product];
  const uint32_t weight_at = lane % 16 * padded(chunk) + lane / 16 * 16;
  // Matrices for ldmatrix: (columns 0-7, K 0-7), (0-7, 8-15), then the same of columns 8-15.
  const uint8_t* row = b.smem + b.l.rows + (lane % 8 + (kPass > 8 ? lane / 16 * 8 : 0)) * b.l.row_stride +
                       lane / 8 % 2 * 16;
#pragma unroll
  for (auto& c : acc) c[0] = c[1] = c[2] = c[3] = 0;
  for (int k = 0; k < depth; k += chunk) {
    mbarrier_wait(b.full(at.stage), at.parity);
    const uint8_t* weights = b.stage(at.stage) + weight_at;
    const int steps = min(chunk, depth - k) / 16;
#pragma unroll 4
    for (int s = warp; s < steps; s += kConsumers) {
      uint32_t w[4];
      ldmatrix_x4(w, weights + s * 32);
      if constexpr (kPass == 8) {
        uint32_t x[2];
        ldmatrix_x2(x, row + (k + s * 16) * 2);
        mma_bf16(acc[0], w, x[0], x[1]);
      } else {
#pragma unroll
        for (int n = 0; n < kPass / 16; ++n) {
          uint32_t x[4];
          ldmatrix_x4(x, row + n * 16 * b.l.row_stride + (k + s * 16) * 2);
          mma_bf16(acc[2 * n], w, x[0], x[1]);
          mma_bf16(acc[2 * n + 1], w, x[2], x[3]);
        }
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(b.empty(at.stage));
    at.advance(b.a.stages);
  }
}

/// Adds the warps' partial sums in warp order and writes the tile's results.
template <int kPass>
__device__ __forceinline__ void finish(const Block& b, int product, const Unit& unit, int tile, int buffer,
                                       const float (&acc)[kPass / 8][4]) {
  constexpr int kStride = kPass + 4, kTile = kTileRows * kStride;
  float* partial = reinterpret_cast<float*>(b.smem + b.l.partial) + buffer * kConsumers * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* own = partial + warp * kTile + lane / 4 * kStride + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kPass / 8; ++n) {
    *reinterpret_cast<float2*>(own + n * 8) = {acc[n][0], acc[n][1]};
    *reinterpret_cast<float2*>(own + n * 8 + 8 * kStride) = {acc[n][2], acc[n][3]};
  }
  named_barrier(1, kConsumers * 32);
  const auto sum = [&](int r, int n) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) v += partial[w * kTile + r * kStride + n];
    return v;
  };
  const int rows = product == 0 ? kTileRows / 2 : kTileRows;
  for (int i = threadIdx.x; i < rows * unit.rows; i += kConsumers * 32) {
    const int r = i % rows, n = i / rows;
    const size_t slot = b.slot(unit.first + n);
    if (product == 0) {
      const float gate = sum(r, n), up = sum(r + rows, n);
      b.a.act[slot * b.a.inter + tile * rows + r] = __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
    } else {
      b.a.slot_rows[slot * b.a.hidden + tile * rows + r] = sum(r, n);
    }
  }
}

template <int kPass>
__device__ void consume(const Block& b) {
  Cursor at;
  uint32_t parity = 0;
  int buffer = 0;
  for (int product = 0; product < 2; ++product) {
    for_each_run(b.units, b.a.tiles(product), [&](int u, int first, int end) {
      const Unit unit = b.unit(u);
      mbarrier_wait(b.rows_full(), parity);
      parity ^= 1;
      for (int tile = first; tile < end; ++tile, buffer ^= 1) {
        float acc[kPass / 8][4];
        multiply<kPass>(b, product, at, acc);
        if (tile + 1 == end && threadIdx.x % 32 == 0) mbarrier_arrive(b.rows_empty());
        finish<kPass>(b, product, unit, tile, buffer, acc);
      }
      if (product == 0) {
        __threadfence();
        fence_async_proxy();
        named_barrier(1, kConsumers * 32);
        if (threadIdx.x == 0) add_acq_rel(b.flag(u), end - first);
      }
    });
  }
}

/// All blocks of the launch meet here; what they wrote before is visible to all after.
__device__ void grid_barrier(uint32_t* arrived, uint32_t* generation) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t before = load_acquire(generation);
    if (add_acq_rel(arrived, 1) == gridDim.x - 1) {
      *arrived = 0;
      store_release(generation, before + 1);
    } else {
      while (load_acquire(generation) == before) {
      }
    }
    __threadfence();
  }
  __syncthreads();
}

template <int kPass>
__global__ __launch_bounds__(kThreads, 1) void experts_stream(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t smem[];
  Block b = {a, layout(a, kPass), smem, 0};
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.stages; ++s) {
      mbarrier_init(b.full(s), copy_rows_arrivals());
      mbarrier_init(b.empty(s), kConsumers);
    }
    mbarrier_init(b.rows_full(), copy_rows_arrivals());
    mbarrier_init(b.rows_empty(), kConsumers);
    mbarrier_fence_init();
  }
  pdl_wait();
  b.units = build_units<kPass>(a, smem, b.l);
  const int warp = threadIdx.x / 32;
  if (warp < kConsumers) {
    consume<kPass>(b);
  } else if (warp == kConsumers) {
    load_weights(b);
  } else {
    load_rows(b);
  }
  pdl_launch_dependents();
  grid_barrier(a.flags, a.flags + 1);
  for (int u = blockIdx.x * kThreads + threadIdx.x; u < b.units; u += gridDim.x * kThreads) *b.flag(u) = 0;
  if (a.out == nullptr) return;
  combine_share({a.slot_rows, a.topk_ids, a.topk_weights, a.expert_map, a.out, a.tokens, a.top_k, a.num_ids,
                 a.num_local, a.hidden});
}

/// Elements per stage: `depth` in equal parts of at most `limit`, each a multiple of 64.
int even_chunk(int depth, int limit) { return round_up(ceil_div(depth, ceil_div(depth, limit)), 64); }

/// Columns per pass: few enough that the ring stays deep, enough that most experts need one pass.
int choose_pass(const Args& a) {
  const int mean = a.slots() / a.num_local;
  return mean <= 2 ? 8 : mean <= 8 ? 16 : 32;
}

/// Stages that fit beside everything else.
int stages_that_fit(Args a, int pass, int block_smem) {
  a.stages = 0;
  const Layout l = layout(a, pass);
  const int stages = (block_smem - static_cast<int>(l.total)) / static_cast<int>(l.stage_bytes);
  return stages < kMaxStages ? stages : kMaxStages;
}

/// Fills in chunks and stages for this many columns and this chunk limit; false if the ring would be too short.
bool plan(Args* a, int pass, int chunk_limit, int block_smem) {
  a->chunk[0] = even_chunk(a->hidden, chunk_limit);
  a->chunk[1] = even_chunk(a->inter, chunk_limit);
  a->stages = stages_that_fit(*a, pass, block_smem);
  return a->stages >= kMinStages && align_bytes(*a) <= a->stages * layout(*a, pass).stage_bytes;
}

cudaError_t run(Args a, int pass, int chunk_limit, bool cooperative, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  bool fits;
  if (pass != 0) {
    fits = plan(&a, pass, chunk_limit, limits.block_smem);
  } else {
    pass = choose_pass(a);
    fits = plan(&a, pass, chunk_limit, limits.block_smem);
    // Shorter stages keep the ring going before a second read of the weights is accepted.
    while (!fits && pass >= 8) {
      fits = plan(&a, pass, chunk_limit / 2, limits.block_smem);
      if (!fits) pass /= 2, fits = pass >= 8 && plan(&a, pass, chunk_limit, limits.block_smem);
    }
  }
  if (!fits) return cudaErrorInvalidValue;
  Launch l = {dim3(limits.sms), dim3(kThreads), stream, layout(a, pass).total};
  l.cooperative = cooperative;
  switch (pass) {
    case 8: return launch(experts_stream<8>, l, a);
    case 16: return launch(experts_stream<16>, l, a);
    case 32: return launch(experts_stream<32>, l, a);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace moe::stream

/// Words of the zeroed `flags` buffer that launches with up to `slots` slots share.
extern "C" int moe_experts_stream_flags(int slots, int num_local) {
  return moe::stream::kFlagHeader + (slots < num_local ? slots : num_local) + slots / 8;
}

/// As `moe_experts_stream`, with the choices that it makes itself: columns per pass (8, 16, 32; 0 = choose),
/// elements per pipeline stage, cooperative launch. For tests and for tuning.
extern "C" int moe_experts_stream_planned(const void* x, const void* w13, const void* w2, const void* topk_ids,
                                          const void* topk_weights, const void* expert_map, void* act,
                                          void* slot_rows, void* out, void* flags, int tokens, int top_k,
                                          int num_ids, int num_local, int hidden, int inter, int pass, int chunk,
                                          int cooperative, void* stream) {
  using namespace moe;
  if (tokens < 0 || top_k <= 0 || num_ids <= 0 || num_local <= 0 || num_local > INT16_MAX || hidden <= 0 ||
      inter <= 0 || hidden % 64 != 0 || inter % 64 != 0 || tokens > stream::kMaxSlots / top_k || chunk < 64)
    return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const stream::Args args = {static_cast<const bf16*>(x), static_cast<const bf16*>(w13),
                             static_cast<const bf16*>(w2), static_cast<const uint32_t*>(topk_ids),
                             static_cast<const float*>(topk_weights), static_cast<const int32_t*>(expert_map),
                             static_cast<bf16*>(act), static_cast<float*>(slot_rows), static_cast<bf16*>(out),
                             static_cast<uint32_t*>(flags), tokens, top_k, num_ids, num_local, hidden, inter,
                             {0, 0}, 0};
  return stream::run(args, pass, chunk, cooperative != 0, stream);
}

/// out[t] = sum over k of topk_weights[t, k] * w2[e] (silu(gate) * up), gate and up from w13[e] x[t], e = topk_ids[t, k].
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, H] bf16 |
/// | `w13`, `w2` | [E, 2 I, H] (gate rows, then up rows), [E, H, I] bf16 |
/// | `topk_ids`, `topk_weights` | [T, K] u32 (0xffffffff = none), f32 |
/// | `expert_map` | [num_ids] i32, physical id to local expert, -1 = elsewhere; null = identity |
/// | `act`, `slot_rows` | scratch [T K, I] bf16; [T K, H] f32, holds each slot's unweighted row afterwards |
/// | `out` | [T, H] bf16; null: stop at `slot_rows` |
/// | `flags` | [moe_experts_stream_flags] u32, zeroed once; launches that share it must not overlap |
///
/// Refuses T K > 2048, H or I that are no multiple of 64, and H too large for shared memory.
extern "C" int moe_experts_stream(const void* x, const void* w13, const void* w2, const void* topk_ids,
                                  const void* topk_weights, const void* expert_map, void* act, void* slot_rows,
                                  void* out, void* flags, int tokens, int top_k, int num_ids, int num_local,
                                  int hidden, int inter, void* stream) {
  return moe_experts_stream_planned(x, w13, w2, topk_ids, topk_weights, expert_map, act, slot_rows, out, flags,
                                    tokens, top_k, num_ids, num_local, hidden, inter, 0, 512, 1, stream);
}
