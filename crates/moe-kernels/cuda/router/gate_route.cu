// Router in one launch: gate product, scoring and top-k.
//
// Floor: 2 E H + 2 T H bytes (Qwen3-30B-A3B: 0.5 MB, 0.1 us), 2 T E H FLOPs. At decode sizes all of the time is
// latency, so the design avoids it. Operands are loaded from memory straight to mma registers with all loads in flight
// at once, the gate's before pdl_wait(). The blocks of a cluster share 8 tokens, and store their logits in the shared
// memory of the block that routes the token: this needs a cluster barrier instead of a fence, a ticket and a reload.
// Predicted at T = 64: x 0.7 us, product and reduction 0.5, barrier 0.7, choice 1.5, launch 1.5: 5 us. Measured, one
// H200: 4.4 us, 7.2 at 256, 26.2 at 1,024 (9.3, 11.6 and 21.2 with tickets and a longer choice). A block computes 16
// experts x 8 tokens; its 8 warps split H. An mma adds over k in any order that both operands share, so a lane reads 16
// consecutive bytes of a row, the operands of two mma. Products of bf16 are exact in f32 and sums are f32: the logits
// are never rounded.
//
// With hundreds of tokens that is slow, because each cluster reads the gate for a few tokens: 26.2 us at 1,024 becomes
// 210 at 8,192, whose x takes 8 us to read. From kApart tokens on, on Hopper, a dense product computes the logits, and
// another launch chooses with a warp for each token: predicted 15 + 6 us at 8,192.
#include "linear/args.cuh"
#include "ptx/cluster.cuh"
#include "ptx/ptx.cuh"
#include "router/choose.cuh"

namespace moe {
namespace {

constexpr int kWarps = 8;
constexpr int kExperts = 16;   // experts of a product: one mma
constexpr int kTokens = 8;     // tokens of a product
constexpr int kMaxGroups = 8;  // products of a cluster, one after the other with the gate in registers
constexpr int kCluster = 8;    // blocks of a cluster on Hopper
constexpr int kBlockK = 32;    // elements of H that a warp takes per step
constexpr int kSteps = 8;      // steps whose loads are in flight together
constexpr int kBatch = kSteps * kWarps * kBlockK;
constexpr int kApart = 512;  // tokens from which on product and choice are separate launches

struct GateArgs {
  const bf16* x;               // [T, H]
  const bf16* gate;            // [E, H]
  const bf16* gate_bias;       // [E] or null
  const uint32_t* valid;       // [1] number of rows that are not padding, or null
  float* logits;               // [T, E]
  int tokens, hidden, groups;  // groups of 8 tokens for each cluster
  RouteArgs route;
  StepRoutingArgs routing;
  CopiesArgs copies;
};

/// Operands of this warp's steps of a batch along H: 16 bytes of one row for each step.
struct Operand {
  Vec16 v[kSteps];

  __device__ __forceinline__ void load(const bf16* row, int first, int hidden) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = first + (s * kWarps + static_cast<int>(threadIdx.x) / 32) * kBlockK;
      if (k >= hidden) continue;
      const bf16* from = row + k + threadIdx.x % 4 * 8;
      v[s] = load_const(from);
    }
  }
};

/// Rows of the gate for two halves of an mma. Rows after the last one read the last one; their results are not stored.
struct GateRows {
  Operand low, high;

  __device__ __forceinline__ void load(const GateArgs& a, int expert0, int first) {
    const int g = threadIdx.x % 32 / 4, last = a.route.experts - 1;
    low.load(a.gate + static_cast<size_t>(min(expert0 + g, last)) * a.hidden, first, a.hidden);
    high.load(a.gate + static_cast<size_t>(min(expert0 + g + 8, last)) * a.hidden, first, a.hidden);
  }
};

/// acc += this warp's part of a batch of 16 experts x 8 tokens.
__device__ __forceinline__ void multiply(const GateRows& gate, const Operand& x, int first, int hidden,
                                         float (&acc)[4]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (first + (s * kWarps + static_cast<int>(threadIdx.x) / 32) * kBlockK >= hidden) break;
    const uint32_t *lo = gate.low.v[s].word, *hi = gate.high.v[s].word, *v = x.v[s].word;
    mma_bf16(acc, {lo[0], hi[0], lo[1], hi[1]}, v[0], v[1]);
    mma_bf16(acc, {lo[2], hi[2], lo[3], hi[3]}, v[2], v[3]);
  }
}

// Logits are sent to the block that routes their token as words that its barrier counts. A cluster barrier after
// ordinary stores would also wait for everything else that the block has stored to memory.

__device__ __forceinline__ void expect_logits([[maybe_unused]] uint64_t* arrived, [[maybe_unused]] int count) {
#if MOE_HAS_CLUSTERS
  if (threadIdx.x != 0) return;
  mbarrier_init(arrived, 1);
  mbarrier_fence_init();
  arrive_expecting(arrived, count * sizeof(float));
#endif
}

__device__ __forceinline__ void send_logit(float* to, [[maybe_unused]] uint32_t rank, float logit,
                                           [[maybe_unused]] uint64_t* arrived) {
#if MOE_HAS_CLUSTERS
  cluster_send(reinterpret_cast<uint32_t*>(to), __float_as_uint(logit), arrived, rank);
#else
  *to = logit;
#endif
}

/// Called after the block's own last product, whose barrier orders the logits if the block is a cluster of its own.
__device__ __forceinline__ void await_logits([[maybe_unused]] uint64_t* arrived) {
#if MOE_HAS_CLUSTERS
  mbarrier_wait(arrived, 0);
#endif
}

template <int kPerLane, Rule kRule>
__global__ __launch_bounds__(kWarps * 32, 1) void gate_route(const __grid_constant__ GateArgs a) {
  __shared__ float partial[kWarps][kExperts][kTokens + 1];
  __shared__ float logits[kTokens][kPerLane * 32];  // logits of the tokens that this block routes
  __shared__ Choice chosen[kTokens][kMaxTopK];
  __shared__ uint64_t arrived;  // barrier for the logits of these tokens
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = cluster_rank(), blocks = cluster_size();
  const int begin = blockIdx.y * kTokens * a.groups, end = min(begin + kTokens * a.groups, a.tokens);
  expect_logits(&arrived, ceil_div(max(end - begin - rank, 0), blocks) * a.route.experts);
  GateRows gate;
  int held = rank * kExperts, held_first = 0;  // the part of the gate that is in registers
  gate.load(a, held, held_first);
  cluster_arrive();
  pdl_launch_dependents();
  pdl_wait();
  const auto load_rows = [&](Operand& x, int token0, int first) {
    x.load(a.x + static_cast<size_t>(min(token0 + lane / 4, a.tokens - 1)) * a.hidden, first, a.hidden);
  };
  Operand x;
  load_rows(x, begin, 0);
  cluster_wait();  // every block of the cluster runs: its shared memory may be written

  const auto store = [&](int expert0, int token0) {
    const int r = threadIdx.x % kExperts, e = expert0 + r, t = token0 + threadIdx.x / kExperts, own = t - begin;
    if (threadIdx.x >= kExperts * kTokens || e >= a.route.experts || t >= end) return;
    float sum = a.gate_bias == nullptr ? 0.0f : __bfloat162float(a.gate_bias[e]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][r][threadIdx.x / kExperts];
    send_logit(&logits[own / blocks][e], own % blocks, sum, &arrived);
    a.logits[static_cast<size_t>(t) * a.route.experts + e] = sum;
  };
  for (int expert0 = rank * kExperts; expert0 < a.route.experts; expert0 += blocks * kExperts) {
    for (int token0 = begin; token0 < end; token0 += kTokens) {
      float acc[4] = {0, 0, 0, 0};
      for (int first = 0; first < a.hidden; first += kBatch) {
        if (first > 0) load_rows(x, token0, first);
        if (held != expert0 || held_first != first) gate.load(a, held = expert0, held_first = first);
        multiply(gate, x, first, a.hidden, acc);
      }
      // The rows of the next product are in flight while the sums of this one are exchanged.
      const bool more_tokens = token0 + kTokens < end, more_experts = expert0 + blocks * kExperts < a.route.experts;
      if (more_tokens || more_experts) load_rows(x, more_tokens ? token0 + kTokens : begin, 0);
#pragma unroll
      for (int c = 0; c < 4; ++c) partial[warp][lane / 4 + c / 2 * 8][lane % 4 * 2 + c % 2] = acc[c];
      __syncthreads();
      store(expert0, token0);
      __syncthreads();
    }
  }
  const int t = begin + warp * blocks + rank;
  if (t >= end) return;
  await_logits(&arrived);
  if (a.valid == nullptr || static_cast<uint32_t>(t) < *a.valid)
    route_row<kRule, kPerLane>(a.route, a.routing, a.copies, logits[warp], chosen[warp], t);
  else route_nothing(a.route, t);
}

/// The logits of a lane if experts are in groups. Models with groups have 160 experts and more, so there are fewer
/// kernels.
template <int kPerLane>
constexpr int kGrouped = kPerLane < 8 ? 8 : kPerLane;

template <int kPerLane>
cudaError_t run(const Launch& l, const GateArgs& a) {
  switch (rule_of(a.route, a.routing)) {
    case Rule::kPlain: return launch(gate_route<kPerLane, Rule::kPlain>, l, a);
    case Rule::kGroups: return launch(gate_route<kGrouped<kPerLane>, Rule::kGroups>, l, a);
    default: return launch(gate_route<kPerLane, Rule::kAny>, l, a);
  }
}

cudaError_t launch_gate(GateArgs a, const DeviceLimits& limits, void* stream) {
  static_assert(kMaxGroups * kTokens / kCluster <= kTokens && kTokens == kWarps && kExperts * kTokens <= kWarps * 32,
                "without clusters a warp routes one token");
  // One product per cluster as long as all clusters can run at once; some groups of SMs have no room for a cluster.
  // With more tokens a cluster keeps its gate.
  const int groups = ceil_div(a.tokens, kTokens), together = limits.sms / kCluster - 3;
  if (limits.major >= 9) a.groups = together < 1 ? kMaxGroups : min(ceil_div(groups, together), kMaxGroups);
  Launch l = {dim3(1, ceil_div(groups, a.groups)), dim3(kWarps * 32), stream};
  if (limits.major >= 9) l.cluster = l.grid.x = kCluster;
  if (a.route.experts <= 128) return run<4>(l, a);
  if (a.route.experts <= 256) return run<8>(l, a);
  if (a.route.experts <= 512) return run<16>(l, a);
  return run<32>(l, a);
}

/// One warp for each token, whose logits another launch has written.
template <int kPerLane, Rule kRule>
__global__ __launch_bounds__(kWarps * 32) void route_logits(const __grid_constant__ GateArgs a) {
  __shared__ Choice chosen[kWarps][kMaxTopK];
  const int warp = threadIdx.x / 32, t = blockIdx.x * kWarps + warp;
  pdl_launch_dependents();
  pdl_wait();
  if (t >= a.tokens) return;
  if (a.valid == nullptr || static_cast<uint32_t>(t) < *a.valid)
    route_row<kRule, kPerLane>(a.route, a.routing, a.copies, a.logits + static_cast<size_t>(t) * a.route.experts,
                               chosen[warp], t);
  else route_nothing(a.route, t);
}

template <int kPerLane>
cudaError_t run_logits(const Launch& l, const GateArgs& a) {
  switch (rule_of(a.route, a.routing)) {
    case Rule::kPlain: return launch(route_logits<kPerLane, Rule::kPlain>, l, a);
    case Rule::kGroups: return launch(route_logits<kGrouped<kPerLane>, Rule::kGroups>, l, a);
    default: return launch(route_logits<kPerLane, Rule::kAny>, l, a);
  }
}

cudaError_t launch_apart(const GateArgs& a, void* stream) {
  const int experts = a.route.experts;
  const LinearTensorArgs product = {a.x, a.gate, a.gate_bias, a.logits, Output::kF32, a.tokens, experts, a.hidden, 0};
  const int e = moe_linear_tensor(&product, stream);
  if (e != cudaSuccess) return static_cast<cudaError_t>(e);
  const Launch l = {dim3(ceil_div(a.tokens, kWarps)), dim3(kWarps * 32), stream};
  if (experts <= 128) return run_logits<4>(l, a);
  if (experts <= 256) return run_logits<8>(l, a);
  if (experts <= 512) return run_logits<16>(l, a);
  return run_logits<32>(l, a);
}

bool valid(const GateRouteArgs& c) {
  return c.tokens >= 0 && c.tokens <= 65535 * kTokens && c.hidden > 0 && c.hidden % 64 == 0 && c.experts > 0 &&
         c.experts <= 1024 && c.top_k > 0 && c.shared >= 0 && c.top_k + c.shared <= kMaxTopK && c.top_k <= c.experts &&
         (c.copies.log2phy == nullptr || c.copies.width >= 1) && is_code(c.scoring, Scoring::kSqrtSoftplus) &&
         are_groups(c.groups, c.kept_groups, c.experts);
}

GateArgs gate_args(const GateRouteArgs& c) {
  return {c.x,
          c.gate,
          c.gate_bias,
          c.valid,
          c.logits,
          c.tokens,
          c.hidden,
          1,
          {c.correction_bias, c.topk_ids, c.topk_weights, c.experts, c.top_k, c.scoring, c.raw_logits, c.renormalize,
           c.scale, c.softcap, c.counts, c.buckets, c.expert_map, c.tokens, c.shared, c.shared_weight,
           static_cast<int16_t>(c.groups), static_cast<int16_t>(c.kept_groups)},
          c.routing,
          c.copies};
}

}  // namespace
}  // namespace moe

/// logits = x gate^T (+ gate_bias), and the top K of their scores, as experts or as slots of their copies. It refuses H
/// that is not a multiple of 64, E > 1024, K + S > 32, K > E, groups that do not divide E or are more than 32, copies
/// without a column, and more tokens than a grid holds (524,280).
extern "C" int moe_gate_route(const moe::GateRouteArgs* args, void* stream) {
  using namespace moe;
  const GateRouteArgs& c = *args;
  if (!valid(c)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const bool apart = c.tokens >= kApart && !c.invariant && limits.major >= 9;
  return apart ? launch_apart(gate_args(c), stream) : launch_gate(gate_args(c), limits, stream);
}
