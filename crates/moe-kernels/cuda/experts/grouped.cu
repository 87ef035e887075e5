// Experts for many rows per expert before Hopper: one launch computes gate and up products with SwiGLU, a second one
// the down product. Both go through the tiles that moe_align_tokens made (tile_rows = 128).
//
// Floor: touched experts * 6 H I bytes, and 6 T K H I FLOPs (Qwen3-30B-A3B, T = 1024: 1.2 GB = 263 us at 4.59 TB/s, 77
// GFLOP = 98 us at 790 TFLOP/s). The weights are still the bound, so each is read once: by the one tile of 128 weight
// rows x all rows of its expert, up to 128.
//
// Design: weights are the mma's rows, and slots its columns, in steps of 16 columns. Only the filled steps are
// multiplied: an expert with 20 rows costs 32 columns, not 128. Two warps share a set of 32 weight rows and take every
// other step, so both have work in a half-filled tile. 8 gate and 8 up rows alternate in each mma, so a gate and its up
// value are in the same lane. There are three cp.async stages of 64 along K and two blocks per SM: the epilogue of one
// block runs while the other loads. Results are stored through shared memory in whole rows. The sum over K is one
// ascending chain per element, so a row's bits depend on that row only.
#include "experts/args.cuh"
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 128;  // weight rows of a block
constexpr int kCols = 128;  // slots of a block
constexpr int kDepth = 64;  // elements along K per stage: rows of 128 bytes
constexpr int kStages = 3;
constexpr int kStageBytes = (kRows + kCols) * kDepth * 2;
constexpr int kSmem = kStages * kStageBytes;
static_assert(kSmem == 98304, "the plan has this size, too: src/plan/experts.rs");

struct GroupedArgs {
  const bf16* x;  // [T, H], or [T K, I] for the down product
  const bf16* w;  // w13 or w2
  const uint32_t* offsets;
  const uint32_t* sorted;
  const uint32_t* tiles;
  const uint32_t* num_tiles;
  void* out;         // act [T K, I] bf16, or slot_rows [T K, H] f32
  int depth, width;  // K of the product, columns of out
  int top_k;
};

/// Byte offset of 16-byte column c of a row of a stage; the swizzle spreads ldmatrix over all banks.
__device__ __forceinline__ uint32_t swizzled(int row, int c) { return row * 128 + ((c ^ (row & 7)) << 4); }

/// The rows that this thread copies in each stage: every 32nd row, and one 16-byte column of each.
template <bool kDown>
struct Sources {
  static constexpr int kEach = kRows * 8 / kThreads;
  const bf16* weight[kEach];
  const bf16* x[kEach];

  __device__ __forceinline__ Sources(const GroupedArgs& a, int expert, int first, int rows) {
    const int c = threadIdx.x % 8 * 8;
    const bf16* base = a.w + static_cast<size_t>(expert) * a.width * (kDown ? 1 : 2) * a.depth + c;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int r = threadIdx.x / 8 + i * (kThreads / 8);
      // gate_up: 8 gate rows, then the 8 up rows of the same columns. Rows after the last one repeat it.
      const int row = kDown ? min(static_cast<int>(blockIdx.x) * kRows + r, a.width - 1)
                            : blockIdx.x * (kRows / 2) + r / 16 * 8 + r % 8 + (r % 16 < 8 ? 0 : a.width);
      weight[i] = base + static_cast<size_t>(row) * a.depth;
      const size_t slot = a.sorted[first + min(r, rows - 1)];
      x[i] = a.x + (kDown ? slot : slot / a.top_k) * a.depth + c;
    }
  }

  __device__ __forceinline__ void load_weights(uint8_t* stage, int k) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      cp_async16(stage + swizzled(threadIdx.x / 8 + i * (kThreads / 8), threadIdx.x % 8), weight[i] + k);
  }

  __device__ __forceinline__ void load_x(uint8_t* stage, int k, int rows) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int r = threadIdx.x / 8 + i * (kThreads / 8);
      if (r < rows) cp_async16(stage + kRows * 128 + swizzled(r, threadIdx.x % 8), x[i] + k);
    }
  }
};

/// acc[m][4 s' ..] += 32 weight rows x this warp's filled 16-column steps, over one stage.
__device__ __forceinline__ void multiply(const uint8_t* stage, int filled, float (&acc)[2][8][4]) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x / 64 * 32, step0 = threadIdx.x / 32 % 2;
  const uint8_t* x = stage + kRows * 128;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t w[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) ldmatrix_x4(w[m], stage + swizzled(row0 + m * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int step = 2 * s + step0;
      if (step >= filled) break;
      uint32_t v[4];
      ldmatrix_x4(v, x + swizzled(step * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_bf16(acc[m][2 * s], w[m], v[0], v[1]);
        mma_bf16(acc[m][2 * s + 1], w[m], v[2], v[3]);
      }
    }
  }
}

/// Stores results as whole rows of slots in shared memory: [kCols][kRows / 2 + 8] bf16, or [kCols][kRows + 4] f32.
template <bool kDown>
__device__ __forceinline__ void gather(uint8_t* smem, int filled, const float (&acc)[2][8][4]) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x / 64 * 32, step0 = threadIdx.x / 32 % 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int step = n / 2 * 2 + step0;
      if (step >= filled) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int col = step * 16 + n % 2 * 8 + lane % 4 * 2 + j;
        const float low = acc[m][n][j], high = acc[m][n][j + 2];
        if (kDown) {
          float* to = reinterpret_cast<float*>(smem) + col * (kRows + 4) + row0 + m * 16 + lane / 4;
          to[0] = low, to[8] = high;
        } else {
          bf16* to = reinterpret_cast<bf16*>(smem) + col * (kRows / 2 + 8) + row0 / 2 + m * 8 + lane / 4;
          *to = __float2bfloat16(low / (1.0f + __expf(-low)) * high);
        }
      }
    }
  }
}

template <bool kDown>
__device__ __forceinline__ void store(const GroupedArgs& a, const uint8_t* smem, int first, int rows) {
  constexpr int kWidth = kDown ? kRows : kRows / 2;  // columns of out that this block computes
  constexpr int kBytes = kDown ? 4 : 2;
  constexpr int kVecs = kWidth * kBytes / 16, kPitch = kWidth * kBytes + 16;
  const int col0 = blockIdx.x * kWidth;
  for (int i = threadIdx.x; i < rows * kVecs; i += kThreads) {
    const int r = i / kVecs, v = i % kVecs;
    if (col0 + v * (16 / kBytes) >= a.width) continue;
    uint8_t* row = static_cast<uint8_t*>(a.out) + (a.sorted[first + r] * static_cast<size_t>(a.width) + col0) * kBytes;
    reinterpret_cast<uint4*>(row)[v] = *reinterpret_cast<const uint4*>(smem + r * kPitch + v * 16);
  }
}

template <bool kDown>
__global__ __launch_bounds__(kThreads, 2) void experts_grouped(const __grid_constant__ GroupedArgs a) {
  extern __shared__ __align__(128) uint8_t smem[];
  // The kernel before the down product lets it start only after its own wait, so the tiles are there.
  if (!kDown) pdl_wait();
  if (blockIdx.y >= *a.num_tiles) return;
  const int expert = a.tiles[2 * blockIdx.y], first = a.tiles[2 * blockIdx.y + 1];
  const int rows = min(static_cast<int>(a.offsets[expert + 1]) - first, kCols);
  const int filled = ceil_div(rows, 16), steps = a.depth / kDepth;
  const Sources<kDown> sources(a, expert, first, rows);
  const auto stage = [&](int i) { return smem + i % kStages * kStageBytes; };

  const int ahead = min(kStages - 1, steps);
  for (int i = 0; i < ahead; ++i) sources.load_weights(stage(i), i * kDepth);
  if (kDown) pdl_wait();
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < ahead) sources.load_x(stage(i), i * kDepth, rows);
    cp_async_commit();
  }
  float acc[2][8][4] = {};
  for (int i = 0; i < steps; ++i) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (i + kStages - 1 < steps) {
      uint8_t* next = stage(i + kStages - 1);
      sources.load_weights(next, (i + kStages - 1) * kDepth);
      sources.load_x(next, (i + kStages - 1) * kDepth, rows);
    }
    cp_async_commit();
    multiply(stage(i), filled, acc);
  }
  pdl_launch_dependents();
  cp_async_wait<0>();
  __syncthreads();
  gather<kDown>(smem, filled, acc);
  __syncthreads();
  store<kDown>(a, smem, first, rows);
}

bool valid_sizes(int slots, int num_local, int depth, int width) {
  return slots >= 0 && num_local > 0 && depth > 0 && width > 0 && depth % 64 == 0 && width % 64 == 0;
}

template <bool kDown>
cudaError_t run(const GroupedArgs& a, int slots, int num_local, void* stream) {
  if (slots == 0) return cudaSuccess;
  const int tiles = (slots < num_local ? slots : num_local) + slots / kCols;
  const int blocks = kDown ? ceil_div(a.width, kRows) : a.width / (kRows / 2);
  static_assert(kCols * (kRows + 4) * 4 <= kSmem, "results must fit where the stages were");
  return launch(experts_grouped<kDown>, {dim3(blocks, tiles), dim3(kThreads), stream, kSmem}, a);
}

}  // namespace
}  // namespace moe

/// act[slot] = silu(gate) * up for each slot that has a local expert. slot_rows is not used.
extern "C" int moe_experts_grouped_gate_up(const moe::ExpertsGroupedArgs* args, void* stream) {
  using namespace moe;
  const ExpertsGroupedArgs& c = *args;
  if (!valid_sizes(c.slots, c.num_local, c.hidden, c.inter) || c.top_k <= 0) return cudaErrorInvalidValue;
  const GroupedArgs a = {c.x, c.w13, c.offsets, c.sorted, c.tiles, c.num_tiles, c.act, c.hidden, c.inter, c.top_k};
  return run<false>(a, c.slots, c.num_local, stream);
}

/// slot_rows[slot] = w2 act[slot] in f32 for each slot that has a local expert. x is not used. It must directly follow
/// moe_experts_grouped_gate_up on the stream, because it reads the tiles before that launch has ended.
extern "C" int moe_experts_grouped_down(const moe::ExpertsGroupedArgs* args, void* stream) {
  using namespace moe;
  const ExpertsGroupedArgs& c = *args;
  if (!valid_sizes(c.slots, c.num_local, c.inter, c.hidden)) return cudaErrorInvalidValue;
  const GroupedArgs a = {c.act, c.w2, c.offsets, c.sorted, c.tiles, c.num_tiles, c.slot_rows, c.inter, c.hidden, 1};
  return run<true>(a, c.slots, c.num_local, stream);
}
