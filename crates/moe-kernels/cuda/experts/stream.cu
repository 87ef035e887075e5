// Experts for few rows per expert: gate and up products with SwiGLU, down product and weighted sum over k. One launch
// computes token rows from topk_ids and streams every touched weight once.
//
// Floor: touched experts * 6 H I bytes. 6 T K H I FLOPs take far less (T = 256 on 128 experts, top 8: 16 rows per
// expert, 16 FLOP per byte). So only the number of bytes in flight counts.
//
// Design: one persistent block per SM takes consecutive 16-row weight tiles of both products (stream_block.cuh says
// which). Two warps only copy weights into a ring that fills shared memory, through both products without a pause:
// while the down product waits for the activations of other blocks, its weights are already in flight. The weights are
// the mma's 16 rows and the slots its 8 columns, so one token costs as much as eight. The eight consumer warps split K,
// which keeps the tile small enough to spread 8 experts over 132 SMs. Their partial sums are added in warp order: a
// slot's bits depend on its own row and on the length of a stage, not on the rest of the batch.
//
// Measured, one H200 (141 GB), Qwen3-30B-A3B: 2.58 TB/s at T = 1, 3.85 at 8, 4.10 at 32, 3.83 at 128; docs/kernels.md
// has the rest.
//
// Blocks wait for each other (flags per group), so the launch is cooperative. There are two sets of flags: a launch
// uses one and clears the other. So clearing costs no time, and one buffer that was zeroed once serves all launches.
#include "experts/stream_kernel.cuh"

namespace moe::stream {
namespace {

template <int kRows>
struct RowCount {
  static constexpr int value = kRows;
};

/// Weights in bf16: a stage holds 8 rows of w13 or 16 of w2.
template <class Epilogue>
struct Rows {
  const bf16* w13;  // [num_local, 2 I, H]
  const bf16* w2;   // [num_local, H, I]
  Epilogue epilogue;

  int set_chunks(const Args& a) const {
    const int half = kTileRows / 2 * padded(a.chunk[0]), whole = kTileRows * padded(a.chunk[1]);
    return half > whole ? half : whole;
  }

  /// Loads this warp's rows of one tile, stage by stage. A stage is one consecutive piece of memory if K fits: 8 gate
  /// rows, then 8 up rows; or 16 rows of w2.
  __device__ __forceinline__ void load_tile(const Block<Rows>& b, int product, int expert, int tile, Cursor& at) const {
    const int depth = b.a.depth(product), chunk = b.a.chunk[product];
    const int loader = threadIdx.x / 32 - kConsumers;
    const auto load = [&](auto rows, size_t row, const bf16* w, int k) {
      constexpr int kRows = decltype(rows)::value / kLoaders;
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      copy_strided<kRows>(b.stage(at.stage) + loader * kRows * padded(chunk), padded(chunk),
                          w + (row + loader * kRows) * depth + k, depth * 2, min(chunk, depth - k) * 2,
                          b.full(at.stage));
      at.advance(b.a.stages);
    };
    for (int k = 0; k < depth; k += chunk) {
      if (product == 0) {
        const size_t gate = static_cast<size_t>(expert) * 2 * b.a.inter + tile * (kTileRows / 2);
        load(RowCount<kTileRows / 2>{}, gate, w13, k);
        load(RowCount<kTileRows / 2>{}, gate + b.a.inter, w13, k);
      } else {
        load(RowCount<kTileRows>{}, static_cast<size_t>(expert) * b.a.hidden + tile * kTileRows, w2, k);
      }
    }
  }

  /// Multiplies one 16-row tile by the rows at `rows`: this warp's steps along K, from the ring to registers.
  template <int kPass>
  __device__ __forceinline__ void multiply(const Block<Rows>& b, int product, int, int, const uint8_t* rows, Cursor& at,
                                           float (&acc)[kPass / 8][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int depth = b.a.depth(product), chunk = b.a.chunk[product];
    // Gate and up rows are in two stages, rows of w2 are in one.
    const bool upper = product == 0 && lane % 16 >= 8;
    const uint32_t weight_at = (lane % 16 - (upper ? 8 : 0)) * padded(chunk) + lane / 16 * 16;
    // The matrices for ldmatrix: (columns 0-7, K 0-7), (0-7, 8-15), then the same of columns 8-15.
    const uint32_t stride = padded(depth);
    const uint8_t* row = rows + (lane % 8 + (kPass > 8 ? lane / 16 * 8 : 0)) * stride + lane / 8 % 2 * 16;
    // Two chains of sums, for every other step: an mma that waits for the one before takes twice as long.
    float odd[kPass / 8][4];
#pragma unroll
    for (int n = 0; n < kPass / 8; ++n)
      for (int c = 0; c < 4; ++c) acc[n][c] = odd[n][c] = 0;
    for (int k = 0; k < depth; k += chunk) {
      const Cursor first = at;
      mbarrier_wait(b.full(at.stage), at.parity);
      if (product == 0) {
        at.advance(b.a.stages);
        mbarrier_wait(b.full(at.stage), at.parity);
      }
      const uint8_t* weights = b.stage(upper ? at.stage : first.stage) + weight_at;
      const int steps = min(chunk, depth - k) / 16;
      const auto step = [&](int s, float (&sum)[kPass / 8][4]) {
        uint32_t w[4];
        ldmatrix_x4(w, weights + s * 32);
        if constexpr (kPass == 8) {
          uint32_t x[2];
          ldmatrix_x2(x, row + (k + s * 16) * 2);
          mma_bf16(sum[0], w, x[0], x[1]);
        } else {
#pragma unroll
          for (int n = 0; n < kPass / 16; ++n) {
            uint32_t x[4];
            ldmatrix_x4(x, row + n * 16 * stride + (k + s * 16) * 2);
            mma_bf16(sum[2 * n], w, x[0], x[1]);
            mma_bf16(sum[2 * n + 1], w, x[2], x[3]);
          }
        }
      };
#pragma unroll 2
      for (int s = warp; s < steps; s += 2 * kConsumers) {
        step(s, acc);
        if (s + kConsumers < steps) step(s + kConsumers, odd);
      }
      release_to_copies(b.empty(first.stage));
      if (product == 0) release_to_copies(b.empty(at.stage));
      at.advance(b.a.stages);
    }
#pragma unroll
    for (int n = 0; n < kPass / 8; ++n)
      for (int c = 0; c < 4; ++c) acc[n][c] += odd[n][c];
  }
};

/// The number of columns per pass: small enough that the ring stays deep, and large enough that most experts need one
/// pass.
int choose_pass(const Args& a) {
  const int mean = a.slots() / a.num_local;
  return mean <= 2 ? 8 : mean <= 8 ? 16 : 32;
}

template <class Epilogue>
cudaError_t run(Weighted<Rows<Epilogue>> a, int pass, int chunk_limit, void* stream) {
  if (kSetHeader + max_groups(a.slots(), a.num_local, 8) > a.flag_set) return cudaErrorInvalidValue;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (pass == 0) pass = choose_plan(&a, choose_pass(a), chunk_limit, limits.block_smem);
  else if (!plan(&a, pass, chunk_limit, limits.block_smem)) pass = 0;
  if (pass == 0) return cudaErrorInvalidValue;
  const Launch l = launch_of(a, pass, limits, stream);
  switch (pass) {
    case 8: return launch(experts_stream<8, Rows<Epilogue>>, l, a);
    case 16: return launch(experts_stream<16, Rows<Epilogue>>, l, a);
    case 32: return launch(experts_stream<32, Rows<Epilogue>>, l, a);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace moe::stream

/// The number of words of the zeroed `flags` buffer that launches with up to `slots` slots may share.
extern "C" int moe_experts_stream_flags(int slots, int num_local) {
  using namespace moe::stream;
  return kFlagHeader + 2 * (kSetHeader + max_groups(slots, num_local, 8));
}

/// The same as `moe_experts_stream`, with two choices that it makes itself otherwise: columns per pass (8, 16, 32; 0 =
/// choose), and elements along K of a stage of 16 rows. It is for tests and for tuning.
extern "C" int moe_experts_stream_planned(const moe::ExpertsStreamArgs* args, int pass, int chunk, void* stream) {
  using namespace moe;
  const ExpertsStreamArgs& c = *args;
  stream::Args a = stream::common_args(c);
  a.num_local = c.num_local, a.hidden = c.hidden, a.inter = c.inter;
  if (!stream::launchable(a, c.output) || chunk < 64) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return with_epilogue(c.epilogue, [&](auto epilogue) {
    using Rows = stream::Rows<decltype(epilogue)>;
    return stream::run(stream::Weighted<Rows>{a, Rows{c.w13, c.w2, epilogue}}, pass, chunk, stream);
  });
}

/// out[t] = sum over k of topk_weights[t, k] * w2[e] (silu(gate) * up), gate and up from w13[e] x[t], e = topk_ids[t,
/// k]; biases and another activation as `epilogue` says. Refuses T K > 2048, H or I that are no multiple of 64, and H
/// too large for shared memory.
extern "C" int moe_experts_stream(const moe::ExpertsStreamArgs* args, void* stream) {
  return moe_experts_stream_planned(args, 0, 1024, stream);
}
