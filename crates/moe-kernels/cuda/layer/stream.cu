// A sub-layer of a decode step for 1 to 4 tokens in one launch: RMSNorm, router, experts and their weighted sum, from
// the residual stream back to it.
//
// Floor: 6 H I bytes for each expert chosen (75.5 MB for one token of Qwen3-30B-A3B: 16.4 us at 4.59 TB/s). Everything
// else is latency: norm, logits, choice, two products and a sum depend on each other across all SMs. Here there is no
// launch in between and no barrier. Logits and activations travel as words that carry the launch's number: a reader
// polls the word itself, one way there, one way back, no fence.
//   - Router: every block computes an expert's logit, reads all of them, and makes the same choice. Meanwhile memory
//     already brings the block a tile of the experts that were chosen first, or of shared ones, which need no choice.
//   - Gate and up: tiles of 8 outputs (64 KB, two copies), one expert after the other. Half of the tiles are assigned
//     to blocks in turn, the rest by ticket, because SMs get unequal shares of a saturated memory. The consumer warps
//     leave their sums to a warp that adds and activates them, and go on.
//   - Down: a block owns columns of the output for all experts, so that the weighted sum stays in its registers. It
//     begins with the first expert, whose activations came while the last one's were still computed: it waits for
//     memory only.
//
// Copies are long (24 to 32 KB: whole rows, unpadded), because one producer thread issues them. Only two are on their
// way at a time, because words that blocks wait for queue behind them. Weights are the 16 rows of mma.sync, and a lane
// uses each 16 bytes for two products. Warps split K and are added in warp order, active experts in ascending order: a
// token's bits do not depend on the tokens beside it.
//
// Measured, one H200, one token: 23.6 us, 21.0 with given ids (docs/kernels.md). Blocks wait for each other, so the
// launch is cooperative.
#include "layer/stream_act.cuh"
#include "layer/stream_load.cuh"
#include "layer/stream_route.cuh"

namespace moe::layer {
namespace {

#if MOE_SM90

/// The multiplying warps' side of the ring.
struct Consumer {
  const Args& a;
  const Shared& s;

  __device__ __forceinline__ void wait(int product, const Cursor& at) const {
    mbarrier_wait(s.full(product, at.stage), at.parity);
  }
  __device__ __forceinline__ void release(int product, const Cursor& at) const {
    release_to_copies(s.empty(product, at.stage));
  }

  /// The steps of a stage that are this warp's. Rows g of `low` (and 8 + g of `high`) are a lane's weights, `x` is its
  /// token's row.
  ///
  /// In memory rows lie a multiple of 128 bytes apart, so two rows in the same 64 bytes of 128 would meet in the banks.
  /// Therefore odd rows take the two halves of a step in the other order, and so do odd columns: token t is in columns
  /// 2t and 2t + 1, and row g's sum for it in the column of g's parity.
  __device__ __forceinline__ void multiply(const uint8_t* low, const uint8_t* high, const uint8_t* x, int warp,
                                           int elements, float (&acc)[4][4]) const {
    const uint32_t lane = threadIdx.x % 32, first = lane / 4 % 2 * 64 + lane % 4 * 16, second = first ^ 64;
    const auto load = [](const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); };
#pragma unroll 2
    for (int i = warp; i < elements / kStep; i += kConsumers) {
      const int at = i * kStep * 2;
      const uint4 p = load(low + at + first), r = load(low + at + second), q = load(x + at + first),
                  y = load(x + at + second);
      const uint4 h = load(high + at + first), j = load(high + at + second);
      mma_bf16(acc[0], {p.x, h.x, p.y, h.y}, q.x, q.y);
      mma_bf16(acc[1], {p.z, h.z, p.w, h.w}, q.z, q.w);
      mma_bf16(acc[2], {r.x, j.x, r.y, j.y}, y.x, y.y);
      mma_bf16(acc[3], {r.z, j.z, r.w, j.w}, y.z, y.w);
    }
  }

  /// This lane's sum of row g (`high`: 8 + g) for token t.
  static __device__ __forceinline__ float sum(const float (&acc)[4][4], int high) {
    const bool odd = threadIdx.x / 4 % 2 != 0;
    const int c = 2 * high;
    const float even_sum = (acc[0][c] + acc[1][c]) + (acc[2][c] + acc[3][c]);
    const float odd_sum = (acc[0][c + 1] + acc[1][c + 1]) + (acc[2][c + 1] + acc[3][c + 1]);
    return odd ? odd_sum : even_sum;
  }

  /// Sums of tiles, for the warp that activates them. Returns the first stage of the second product.
  __device__ __forceinline__ int gate_up() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % 4, g = lane / 4;
    const uint8_t* x = s.rows() + min(lane / 8, a.tokens - 1) * a.hidden * 2;
    mbarrier_wait(s.active_full(), 0);
    Cursor at;
    for (int i = 0;; ++i) {
      wait(0, at);
      const Tile tile = *s.tile(at.stage);
      float acc[4][4] = {};
      for (int k = 0; k < a.hidden && tile.pairs > 0; k += a.chunk[0]) {
        if (k > 0) wait(0, at);
        const uint8_t* w = s.stage(0, at.stage) + g * a.chunk[0] * 2;
        multiply(w, w + kPairs * a.chunk[0] * 2, x + k * 2, warp, min(a.chunk[0], a.hidden - k), acc);
        release(0, at);
        at.advance(a.stages[0]);
      }
      const int buffer = i % kParts;
      mbarrier_wait(s.parts_empty(buffer), i / kParts % 2 ^ 1);
      float* parts = s.parts(buffer) + warp * 2 * kPairs * a.tokens + token;
      if (token < a.tokens) {
        parts[g * a.tokens] = sum(acc, 0);
        parts[(kPairs + g) * a.tokens] = sum(acc, 1);
      }
      if (threadIdx.x == 0) *s.parts_tile(buffer) = tile;
      warp_arrive(s.parts_full(buffer));
      if (tile.pairs == 0) {
        release(0, at);
        return tile.row;
      }
    }
  }

  template <Output kOutput>
  __device__ __forceinline__ void down(int num_active, int first, int last, int stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % 4, g = lane / 4;
    const int my_row = threadIdx.x % kDownRows, my_token = threadIdx.x / kDownRows;
    Cursor at = {stage};
    int refills = ceil_div(last - first, kDownRows) * num_active * ceil_div(a.inter, a.chunk[1]) - a.stages[1];
    for (int top = first; top < last; top += kDownRows) {
      // Results of the other rows, and of tokens that did not choose the expert, are not used.
      const int rows = min(kDownRows, last - top);
      const bool mine = my_token < a.tokens && my_row < rows;
      const size_t to = static_cast<size_t>(my_token) * a.hidden + top + my_row;
      float value = mine ? before<kOutput>(a.out, to) : 0.0f;
      float low = 0, high = 0;
      for (int u = 0; u < num_active; ++u) {
        const uint32_t* slots = s.active_slot(u);
        uint32_t slot = slots[min(lane / 8, a.tokens - 1)], any = slot;
        for (int t = 0; t < a.tokens; ++t) any = min(any, slots[t]);
        const uint8_t* act = s.act() + (slot == kNoSlot ? any : slot) * a.inter * 2;
        const bool uses = token < a.tokens && slots[token] != kNoSlot;
        const float weight = uses ? s.active_weight(u)[token] : 0;
        mbarrier_wait(s.act_full(u), 0);
        float acc[4][4] = {};
        for (int k = 0; k < a.inter; k += a.chunk[1]) {
          wait(1, at);
          const uint8_t *w = s.stage(1, at.stage), *low = w + min(g, rows - 1) * a.chunk[1] * 2;
          // 12 steps are 8 and 4: with other experts the other warps take the 4.
          multiply(low, w + min(g + kDownRows / 2, rows - 1) * a.chunk[1] * 2, act + k * 2,
                   warp ^ s.expert()[u] % 2 * 4, min(a.chunk[1], a.inter - k), acc);
          if (refills-- > 0) release(1, at);
          at.advance(a.stages[1]);
        }
        if (uses) low = fmaf(weight, sum(acc, 0), low), high = fmaf(weight, sum(acc, 1), high);
      }
      float* parts = s.partial();
      if (token < a.tokens) {
        parts[(warp * kDownRows + g) * a.tokens + token] = low;
        parts[(warp * kDownRows + kDownRows / 2 + g) * a.tokens + token] = high;
      }
      consumers_sync();
      if (mine) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kConsumers; ++w) sum += parts[(w * kDownRows + my_row) * a.tokens + my_token];
        store<kOutput>(a.out, to, value + sum);
      }
      if (top + kDownRows < last) consumers_sync();
    }
  }
};

/// By one lane of each warp: one after the other they take a microsecond.
__device__ __forceinline__ void init_barriers(const Args& a, const Shared& s, int warp) {
  if (!elect_one()) return;
#pragma unroll 1
  for (int product = 0; product < 2; ++product) {
#pragma unroll 1
    for (int i = warp; i < a.stages[product]; i += kThreads / 32) {
      mbarrier_init(s.full(product, i), 1);
      mbarrier_init(s.empty(product, i), kConsumers * kWarpArrivals);
    }
  }
#pragma unroll 1
  for (int u = warp; u < a.slots(); u += kThreads / 32) mbarrier_init(s.act_full(u), kWarpArrivals);
  if (warp < kParts) {
    mbarrier_init(s.parts_full(warp), kConsumers * kWarpArrivals);
    mbarrier_init(s.parts_empty(warp), kWarpArrivals);
  }
  if (warp == kParts) mbarrier_init(s.active_full(), kWarpArrivals);
  mbarrier_fence_init();
}

#endif  // MOE_SM90

/// kPerLane: logits of a token that a lane of its warp holds; 0: ids and weights are given. kPlain: is_plain.
template <int kPerLane, bool kPlain, Output kOutput>
__global__ __launch_bounds__(kThreads, 1) void layer_kernel(const __grid_constant__ Args a) {
#if MOE_SM90
  extern __shared__ __align__(128) uint8_t smem[];
  const Shared s(smem, a);
  const int warp = threadIdx.x / 32, at = threadIdx.x * 8;
  constexpr bool kRoutes = kPerLane > 0;
  Vec16 norm_weight = {}, gate = {};
  if (warp < kConsumers && at < a.hidden) {
    if (a.norm != nullptr) norm_weight = load_const(a.norm + at);
    if (kRoutes && static_cast<int>(blockIdx.x) < a.route.experts)
      gate = load_const(a.gate + static_cast<size_t>(blockIdx.x) * a.hidden + at);
  }
  Choice choice = {kNoExpert, 0.0f};
  if (!kRoutes) {
    // At once: a cooperative launch begins when the kernel ahead has left all SMs, and barriers can be made while
    // the ids are on their way.
    pdl_wait();
    if (warp == kConsumers) choice = given_choice(a);
  }
  init_barriers(a, s, warp);
  const Slot slot(a);
  if (warp == kConsumers) clear_active(a, s);
  __syncthreads();
  const int first = a.first_column(blockIdx.x), last = a.first_column(blockIdx.x + 1);
  if (kRoutes) pdl_wait();
  const Turn turn(a);
  if (warp < kConsumers) {
    // Where `out` is `x`, another block may add to rows before a block without a tile has read them: it uses none of
    // them.
    stage_rows(a, s, norm_weight);
    if constexpr (kRoutes) publish_logits(a, s, gate, turn);
    const Consumer c = {a, s};
    const int stage = c.gate_up();  // all warps have read the turn by now
    if (threadIdx.x == 0) turn.end(a);
    c.down<kOutput>(*s.num_active(), first, last, stage);
    return;
  }
  const int router = warp - kConsumers;
  int heads = 0;
  if constexpr (kRoutes) {
    const Head head(a);
    if (router < a.tokens) route<kPerLane, kPlain>(a, s, router, turn, head);
    routers_sync();
    if (router == 0) {
      choice = chosen(s);
      const int active = build_active<false>(a, s, slot, choice);
      heads = head.declare(a, s, active, choice.id != kNoExpert);
    }
  } else if (router == 0) {
    build_active<true>(a, s, slot, choice);
  }
  if (router == 0) warp_arrive(s.active_full());
  mbarrier_wait(s.active_full(), 0);
  if (router == kRouters - 1) {
    activate(a, s, turn.number());
  } else if (router > 0) {
    fetch_activations(a, s, router - 1, turn.number());
  } else if (elect_one()) {
    Loader l = {a, s, static_cast<int>(*s.num_active())};
    l.load_gate_up(a.state->tickets + turn.parity(), heads);
    l.load_down(first, last);
    pdl_launch_dependents();  // earlier, blocks that find no room yet cost 2 us
  }
#endif
}

template <int kPerLane, bool kPlain>
cudaError_t run(const Launch& l, Output output, const Args& a) {
  switch (output) {
    case Output::kF32: return launch(layer_kernel<kPerLane, kPlain, Output::kF32>, l, a);
    case Output::kBf16: return launch(layer_kernel<kPerLane, kPlain, Output::kBf16>, l, a);
    default: return launch(layer_kernel<kPerLane, kPlain, Output::kAddF32>, l, a);
  }
}

template <int kPerLane>
cudaError_t run_routed(const Launch& l, Output output, const Args& a) {
  return is_plain(a.route) ? run<kPerLane, true>(l, output, a) : run<kPerLane, false>(l, output, a);
}

/// Divides what the rows leave of shared memory into stages of each product, of whole rows where they fit.
bool divide_ring(Args* a, int block_smem) {
  const int room = block_smem - static_cast<int>(layout(*a).total);
  for (int product = 0; product < 2; ++product) {
    int& chunk = a->chunk[product];
    chunk = a->depth(product) < kMaxChunk[product] ? a->depth(product) : kMaxChunk[product];
    while (room / a->stage_bytes(product) < kMinStages && chunk % (2 * kStep) == 0 && chunk > kMinChunk) chunk /= 2;
    const int fit = room / a->stage_bytes(product);
    if (fit < kMinStages) return false;
    a->stages[product] = fit < kMaxStages ? fit : kMaxStages;
    const int bytes = a->stages[product] * a->stage_bytes(product);
    if (bytes > a->ring) a->ring = bytes;
  }
  return true;
}

bool valid(const Args& a) {
  const int top_k = a.route.slots();
  return a.tokens >= 0 && a.tokens <= kMaxTokens && top_k > 0 && top_k <= kMaxTopK && a.slots() <= kMaxSlots &&
         a.hidden > 0 && a.hidden % kStep == 0 && a.inter > 0 && a.inter % kStep == 0 && a.num_local > 0 &&
         a.num_local <= 1024 && a.route.experts > 0;
}

cudaError_t run(Args a, Output output, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  if (!divide_ring(&a, limits.block_smem)) return cudaErrorInvalidValue;
  a.share = a.hidden / limits.sms, a.longer = a.hidden % limits.sms;
  Launch l = {dim3(limits.sms), dim3(kThreads), stream, layout(a).total};
  l.cooperative = true;
  if (a.gate == nullptr) return run<0, false>(l, output, a);
  return a.route.experts <= 128 ? run_routed<4>(l, output, a) : run_routed<16>(l, output, a);
}

}  // namespace
}  // namespace moe::layer

/// Bytes of the zeroed `state` buffer of launches with up to this many experts and intermediate columns.
extern "C" size_t moe_layer_stream_state(int experts, int inter) {
  using namespace moe::layer;
  return sizeof(State) +
         sizeof(uint64_t) * (static_cast<size_t>(kMaxTokens) * experts + static_cast<size_t>(kMaxSlots) * inter / 2);
}

/// Whether moe_layer_stream takes these sizes where a block may ask for `block_smem` bytes of shared memory: 1 or 0. A
/// pure function: the host makes the same choice from the same rule (plan/experts.rs), and a test compares the two.
extern "C" int moe_layer_stream_fits(int tokens, int hidden, int inter, int num_ids, int num_local, int top_k,
                                     int block_smem) {
  using namespace moe;
  using namespace moe::layer;
  Args a = {};
  a.tokens = tokens, a.hidden = hidden, a.inter = inter, a.num_local = num_local;
  a.route.experts = num_ids, a.route.top_k = top_k;
  return valid(a) && num_ids <= 512 && top_k <= num_ids && divide_ring(&a, block_smem);
}

/// out[t] (+)= sum over k of topk_weights[t, k] * w2[e] (silu(gate) * up), gate and up from w13[e] y[t], e =
/// topk_ids[t, k], y = x or its RMSNorm, ids and weights from the router logits y gate^T or given.
///
/// Refuses what moe_layer_stream_fits denies: T > 4, T K > 32, E > 512, H or I that are no multiple of 64 or too large
/// for shared memory.
extern "C" int moe_layer_stream(const moe::LayerStreamArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::layer;
  const LayerStreamArgs& c = *args;
  Args a = {};
  a.tokens = c.tokens, a.num_local = c.num_local, a.hidden = c.hidden, a.inter = c.inter;
  a.x = c.x, a.norm = c.norm, a.eps = c.eps, a.gate = c.gate, a.gate_bias = c.gate_bias, a.valid = c.valid;
  a.route = {
      c.correction_bias, c.topk_ids, c.topk_weights, c.num_ids - c.shared, c.top_k - c.shared, c.scoring, c.raw_logits,
      c.renormalize,     c.scale,    c.softcap};
  a.route.shared = c.shared, a.route.shared_weight = c.shared_weight;
  a.w13 = c.w13, a.w2 = c.w2, a.expert_map = c.expert_map, a.out = c.out, a.state = static_cast<State*>(c.state);
  if (!valid(a) || !is_code(c.output, Output::kAddF32) || c.shared < 0 || c.shared >= c.top_k)
    return cudaErrorInvalidValue;
  if (c.gate == nullptr && c.shared != 0) return cudaErrorInvalidValue;
  if (c.gate != nullptr && (c.num_ids > 512 || c.top_k > c.num_ids || !is_code(c.scoring, Scoring::kSqrtSoftplus)))
    return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return moe::layer::run(a, c.output, stream);
}
