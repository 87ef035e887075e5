// The layer kernel (layer/stream.cu explains the design and the order of the weights in memory).
//
// A kind of weights determines how much of them a stage holds, starts the copies that fill it, and multiplies it:
//   stage_bytes(args, product): bytes of a stage
//   load_head, load_gate_up, load_down: copies of a stage, by one thread
//   multiply_gate_up, multiply_down: add a warp's part of a stage to Sums; sum(Sums, high)
//   epilogue: biases and activation (experts/epilogue.cuh)
#pragma once

#include "layer/stream_act.cuh"
#include "layer/stream_load.cuh"
#include "layer/stream_route.cuh"

namespace moe::layer {

#if MOE_HAS_TMA

/// The side of the ring of the warps that multiply. Token t is in columns 2t and 2t + 1 of mma.sync; at the end, lane
/// 4g + t has its sums of rows g and 8 + g.
template <class Weights>
struct Consumer {
  const Weighted<Weights>& a;
  const Shared& s;

  __device__ __forceinline__ void wait(int product, const Cursor& at) const {
    mbarrier_wait(s.full(product, at.stage), at.parity);
  }
  __device__ __forceinline__ void release(int product, const Cursor& at) const {
    release_to_copies(s.empty(product, at.stage));
  }

  /// Computes sums of tiles for the warp that activates them. Returns the first stage of the second product.
  __device__ __forceinline__ int gate_up() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % 4, g = lane / 4;
    const uint8_t* x = s.rows() + min(lane / 8, a.tokens - 1) * a.row_bytes;
    mbarrier_wait(s.active_full(), 0);
    Cursor at;
    for (int i = 0;; ++i) {
      wait(0, at);
      const Tile tile = *s.tile(at.stage);
      typename Weights::Sums acc = {};
      for (int k = 0; k < a.hidden && tile.pairs > 0; k += a.chunk[0]) {
        if (k > 0) wait(0, at);
        a.w.multiply_gate_up(a, s.stage(0, at.stage), s.expert()[tile.active], tile.row, k, x, warp, acc);
        release(0, at);
        at.advance(a.stages[0]);
      }
      const int buffer = i % kParts;
      mbarrier_wait(s.parts_empty(buffer), i / kParts % 2 ^ 1);
      float* parts = s.parts(buffer) + warp * 2 * kPairs * a.tokens + token;
      if (token < a.tokens) {
        parts[g * a.tokens] = Weights::sum(acc, 0);
        parts[(kPairs + g) * a.tokens] = Weights::sum(acc, 1);
      }
      if (threadIdx.x == 0) *s.parts_tile(buffer) = tile;
      warp_arrive(s.parts_full(buffer));
      if (tile.pairs == 0) {
        release(0, at);
        return tile.row;
      }
    }
  }

  __device__ __forceinline__ void down(Output output, int num_active, int first, int last, int stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % 4, g = lane / 4;
    const int my_row = threadIdx.x % kDownRows, my_token = threadIdx.x / kDownRows;
    Cursor at = {stage};
    int refills = ceil_div(last - first, kDownRows) * num_active * ceil_div(a.inter, a.chunk[1]) - a.stages[1];
    for (int top = first; top < last; top += kDownRows) {
      // Results of the other rows, and of tokens that did not choose the expert, are not used.
      const int rows = min(kDownRows, last - top);
      const bool mine = my_token < a.tokens && my_row < rows;
      const size_t to = static_cast<size_t>(my_token) * a.hidden + top + my_row;
      float value = mine ? before(output, a.out, to) : 0.0f;
      float low = 0, high = 0;
      for (int u = 0; u < num_active; ++u) {
        const uint32_t* slots = s.active_slot(u);
        uint32_t slot = slots[min(lane / 8, a.tokens - 1)], any = slot;
        for (int t = 0; t < a.tokens; ++t) any = min(any, slots[t]);
        const uint8_t* act = s.act() + (slot == kNoSlot ? any : slot) * a.inter * 2;
        const bool uses = token < a.tokens && slots[token] != kNoSlot;
        const float weight = uses ? s.active_weight(u)[token] : 0;
        const uint32_t expert = s.expert()[u];
        // Each warp has a part of the sums, so only one warp adds the biases.
        typename Weights::Epilogue::Biases biases = {};
        if (warp == 0) biases = a.w.epilogue.down(expert, a.hidden, top + g);
        mbarrier_wait(s.act_full(u), 0);
        typename Weights::Sums acc = {};
        for (int k = 0; k < a.inter; k += a.chunk[1]) {
          wait(1, at);
          // The warps change halves from one expert to the next. If a stage has 12 steps, 8 warps take one step each
          // and 4 of them take a second one; which 4 alternates.
          a.w.multiply_down(a, s.stage(1, at.stage), expert, top, rows, k, act, warp ^ expert % 2 * 4, acc);
          if (refills-- > 0) release(1, at);
          at.advance(a.stages[1]);
        }
        if (uses) {
          low = fmaf(weight, a.w.epilogue.low(Weights::sum(acc, 0), biases), low);
          high = fmaf(weight, a.w.epilogue.high(Weights::sum(acc, 1), biases), high);
        }
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
        store(output, a.out, to, value + sum);
      }
      if (top + kDownRows < last) consumers_sync();
    }
  }
};

/// Initialises the barriers. One lane of each warp does it: one lane would take a microsecond for all of them.
template <class Weights>
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

#endif  // MOE_HAS_TMA

/// kPerLane: the number of a token's logits that a lane holds; 0: ids and weights are given. kRule: see rule_of.
template <int kPerLane, Rule kRule, Output kOutput, class Weights>
__global__ __launch_bounds__(kThreads, 1) void layer_kernel(const __grid_constant__ Weighted<Weights> a) {
#if MOE_HAS_TMA
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
    // This comes at once: a cooperative launch begins when the kernel before it has left all SMs, and barriers can be
    // initialised while the ids are in flight.
    pdl_wait();
    if (warp == kConsumers) choice = given_choice(a);
  }
  init_barriers<Weights>(a, s, warp);
  const Slot slot(a);
  if (warp == kConsumers) clear_active(a, s);
  __syncthreads();
  const int first = a.first_unit(blockIdx.x), last = a.first_unit(blockIdx.x + 1);
  if (kRoutes) pdl_wait();
  const Turn turn(a);
  if (warp < kConsumers) {
    // If `out` is `x`, another block may add to rows before a block without a tile has read them. Such a block does not
    // use them.
    stage_rows(a, s, norm_weight);
    if constexpr (kRoutes) publish_logits(a, s, gate, turn);
    const Consumer<Weights> c = {a, s};
    const int stage = c.gate_up();  // all warps have read the turn by now
    if (threadIdx.x == 0) turn.end(a);
    c.down(kOutput, *s.num_active(), first, last, stage);
    return;
  }
  const int router = warp - kConsumers;
  int heads = 0;
  if constexpr (kRoutes) {
    const Head head(a);
    if (router < a.tokens) route<kPerLane, kRule>(a, s, router, turn, head);
    named_barrier(2, kRouters * 32);
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
    Loader<Weights> l = {a, s, static_cast<int>(*s.num_active())};
    l.load_gate_up(a.state->tickets + turn.parity(), heads);
    l.load_down(first, last);
    pdl_launch_dependents();  // earlier, blocks that have no room yet cost 2 us
  }
#endif
}

/// Divides the shared memory that the rows leave into stages of each product. Stages hold whole rows if there is room.
template <class Weights>
bool divide_ring(Weighted<Weights>* a, int block_smem) {
  a->row_bytes = a->hidden * 2;
  const int room = block_smem - static_cast<int>(layout(*a).total);
  for (int product = 0; product < 2; ++product) {
    int& chunk = a->chunk[product];
    chunk = a->depth(product);
    // Tiles of gate and up have whole rows even above kMaxChunk if two of them fit: only such tiles can be requested
    // before all experts are chosen (Head), and each is only two copies.
    const bool whole = product == 0 && room / a->w.stage_bytes(*a, 0) >= kMinStages;
    if (!whole && chunk > kMaxChunk[product]) chunk = kMaxChunk[product];
    int stage = a->w.stage_bytes(*a, product);
    while (room / stage < kMinStages && chunk % (2 * kStep) == 0 && chunk > kMinChunk)
      chunk /= 2, stage = a->w.stage_bytes(*a, product);
    const int fit = room / stage;
    if (fit < kMinStages) return false;
    a->stages[product] = fit < kMaxStages ? fit : kMaxStages;
    const int bytes = a->stages[product] * stage;
    if (bytes > a->ring) a->ring = bytes;
  }
  return true;
}

inline bool valid(const Args& a) {
  const int top_k = a.route.slots();
  return a.tokens >= 0 && a.tokens <= kMaxTokens && top_k > 0 && top_k <= kMaxTopK && a.slots() <= kMaxSlots &&
         a.hidden > 0 && a.hidden % kStep == 0 && a.inter > 0 && a.inter % kStep == 0 && a.num_local > 0 &&
         a.num_local <= 1024 && a.route.experts > 0;
}

/// Launches with checked arguments; the caller gives the kernel and the arguments of its weights.
template <class Weights>
cudaError_t prepare(Weighted<Weights>* a, Launch* l, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  if (!divide_ring(a, limits.block_smem)) return cudaErrorInvalidValue;
  a->share = a->hidden / limits.sms, a->longer = a->hidden % limits.sms;
  *l = {dim3(limits.sms), dim3(kThreads), stream, layout(*a).total};
  l->cooperative = true;
  return cudaSuccess;
}

/// Whether a launcher accepts these arguments.
inline bool launchable(const Args& a) {
  const RouteArgs& r = a.route;
  const bool routes = a.num_ids() <= 512 && r.slots() <= a.num_ids() && is_code(r.scoring, Scoring::kSqrtSoftplus) &&
                      are_groups(r.groups, r.kept_groups, r.experts);
  const bool shares = r.shared >= 0 && r.top_k > 0 && (r.shared == 0 || a.gate != nullptr);
  return valid(a) && is_code(a.output, Output::kAddF32) && shares && (a.gate == nullptr || routes);
}

}  // namespace moe::layer
