// Router in one launch: gate product, scoring and top-k.
//
// Floor: 2 E H + 2 T H bytes (Qwen3-30B-A3B: 0.5 MB, 0.1 us), 2 T E H FLOPs. At decode sizes all of it is latency, so the
// design spends none: operands go from memory straight to mma registers with every load in flight at once,
// and the block that finishes a group of tokens last routes it, which saves a launch.
// A block computes 16 experts x 8 tokens; its 8 warps split H. An mma does not care which k is which as
// long as both operands agree, so a lane reads 16 consecutive bytes of a row and feeds two mma with them.
// Products of bf16 are exact in f32 and sums are f32: the logits are never rounded.
#include "ptx.cuh"
#include "route.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;
constexpr int kExperts = 16;  // experts of a block: one mma
constexpr int kTokens = 8;    // tokens of a block; 32 were slower up to 1,024 tokens
constexpr int kBlockK = 32;   // elements of H that a warp takes per step
constexpr int kSteps = 4;     // steps whose loads are in flight together

struct GateArgs {
  const bf16* x;             // [T, H]
  const bf16* gate;          // [E, H]
  const bf16* gate_bias;     // [E] or null
  const uint32_t* valid;     // [1] rows that are no padding, or null
  float* logits;             // [T, E]
  uint32_t* tickets;         // [ceil(T / 8)]
  int tokens, hidden;
  RouteArgs route;
};

/// This warp's part of 16 experts x 8 tokens.
__device__ __forceinline__ void gate_product(const GateArgs& a, int expert0, int token0, float (&acc)[4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, k0 = lane % 4 * 8;
  // Rows beyond the last read the last: their results are not stored.
  const bf16* low = a.gate + static_cast<size_t>(min(expert0 + g, a.route.experts - 1)) * a.hidden + k0;
  const bf16* high = a.gate + static_cast<size_t>(min(expert0 + g + 8, a.route.experts - 1)) * a.hidden + k0;
  const bf16* row = a.x + static_cast<size_t>(min(token0 + g, a.tokens - 1)) * a.hidden + k0;
  for (int first = warp * kBlockK; first < a.hidden; first += kSteps * kWarps * kBlockK) {
    Vec16 lo[kSteps], hi[kSteps], x[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = first + s * kWarps * kBlockK;
      if (k >= a.hidden) break;
      lo[s] = load_const(low + k), hi[s] = load_const(high + k), x[s] = load_const(row + k);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (first + s * kWarps * kBlockK >= a.hidden) break;
      mma_bf16(acc, {lo[s].word[0], hi[s].word[0], lo[s].word[1], hi[s].word[1]}, x[s].word[0], x[s].word[1]);
      mma_bf16(acc, {lo[s].word[2], hi[s].word[2], lo[s].word[3], hi[s].word[3]}, x[s].word[2], x[s].word[3]);
    }
  }
}

template <int kPerLane>
__global__ __launch_bounds__(kWarps * 32, 1) void gate_route(const __grid_constant__ GateArgs a) {
  __shared__ float partial[kWarps][kExperts][kTokens + 1];
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert0 = blockIdx.x * kExperts, token0 = blockIdx.y * kTokens;
  pdl_launch_dependents();
  pdl_wait();
  float acc[4] = {0, 0, 0, 0};
  gate_product(a, expert0, token0, acc);
#pragma unroll
  for (int c = 0; c < 4; ++c) partial[warp][lane / 4 + c / 2 * 8][lane % 4 * 2 + c % 2] = acc[c];
  __syncthreads();
  if (threadIdx.x < kExperts * kTokens) {
    const int row = threadIdx.x % kExperts, column = threadIdx.x / kExperts;
    const int e = expert0 + row, t = token0 + column;
    if (e < a.route.experts && t < a.tokens) {
      float sum = a.gate_bias == nullptr ? 0.0f : __bfloat162float(a.gate_bias[e]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += partial[w][row][column];
      a.logits[static_cast<size_t>(t) * a.route.experts + e] = sum;
    }
  }

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    // Wraps to 0 at the last arrival: the buffer is ready for the next launch.
    last = atomicInc(a.tickets + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  const int t = token0 + warp;
  if (!last || t >= a.tokens) return;
  if (a.valid == nullptr || static_cast<uint32_t>(t) < *a.valid)
    route_row<kPerLane>(a.route, a.logits + static_cast<size_t>(t) * a.route.experts, t);
  else
    route_nothing(a.route, t);
}

cudaError_t launch_gate(const GateArgs& a, void* stream) {
  static_assert(kTokens == kWarps && kExperts * kTokens <= kWarps * 32, "a warp routes one token");
  const Launch l = {dim3(ceil_div(a.route.experts, kExperts), ceil_div(a.tokens, kTokens)), dim3(kWarps * 32),
                    stream};
  if (a.route.experts <= 128) return launch(gate_route<4>, l, a);
  if (a.route.experts <= 256) return launch(gate_route<8>, l, a);
  if (a.route.experts <= 512) return launch(gate_route<16>, l, a);
  return launch(gate_route<32>, l, a);
}

}  // namespace
}  // namespace moe

/// | argument | shape, dtype |
/// |---|---|
/// | `x`, `gate` | [T, H], [E, H] bf16 |
/// | `gate_bias` | [E] bf16, part of the logits; null = none |
/// | `correction_bias` | [E] f32, only part of the choice; null = none |
/// | `valid` | [1] u32 on the device: rows from there on are padding and get no expert; null = none are |
/// | `logits` | out [T, E] f32 |
/// | `topk_ids`, `topk_weights` | out [T, K] u32, f32, by descending key, ties to the lower id |
/// | `tickets` | [ceil(T / 8)] u32, zeroed once; launches that share it must not overlap |
///
/// `scoring`: 0 softmax, 1 sigmoid, 2 sqrt(softplus). `raw_logits`: choose by logits, score the chosen.
/// Refuses H that is no multiple of 64, E > 1024, K > 32, K > E, and more tokens than a grid holds (524,280).
extern "C" int moe_gate_route(const void* x, const void* gate, const void* gate_bias, const void* correction_bias,
                              const void* valid, void* logits, void* topk_ids, void* topk_weights, void* tickets,
                              int tokens, int hidden, int experts, int top_k, int scoring, int raw_logits,
                              int renormalize, float scale, float softcap, void* stream) {
  using namespace moe;
  if (tokens < 0 || tokens > 65535 * kTokens || hidden <= 0 || hidden % 64 != 0 || experts <= 0 || experts > 1024 || top_k <= 0 ||
      top_k > kMaxTopK || top_k > experts || scoring < 0 || scoring > 2)
    return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const GateArgs args = {static_cast<const bf16*>(x), static_cast<const bf16*>(gate),
                         static_cast<const bf16*>(gate_bias), static_cast<const uint32_t*>(valid),
                         static_cast<float*>(logits), static_cast<uint32_t*>(tickets), tokens, hidden,
                         {static_cast<const float*>(correction_bias), static_cast<uint32_t*>(topk_ids),
                          static_cast<float*>(topk_weights), experts, top_k, static_cast<Scoring>(scoring),
                          raw_logits, renormalize, scale, softcap}};
  return launch_gate(args, stream);
}
