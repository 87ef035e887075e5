// The quantised layer kernel from rows to active experts: norm, logits, the choice of experts, and which tokens each
// active expert serves.
#pragma once

#include "quant/layer_shared.cuh"

namespace moe::quant_layer {

#if MOE_HAS_TMA

constexpr int kRowsFinished = 4;      // barrier
constexpr int kWidth = kWorkers * 4;  // columns that the block's threads take at a time

__device__ __forceinline__ uint2 load4_const(const bf16* from) { return __ldg(reinterpret_cast<const uint2*>(from)); }

/// Adds the products of two words of two bf16 each to `sum`.
__device__ __forceinline__ float dot4(uint2 p, uint2 q, float sum) {
  const float2 a = unpack_bf16(p.x), b = unpack_bf16(q.x), c = unpack_bf16(p.y), d = unpack_bf16(q.y);
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(c.x, d.x, fmaf(c.y, d.y, sum))));
}

/// A thread's first columns of all tokens' rows, of the norm's weight and of the block's first gate row.
template <int kTokens>
struct FirstColumns {
  uint2 norm = {}, gate = {};
  float4 x[kTokens];   // with a norm
  uint2 row[kTokens];  // without a norm

  /// Called before pdl_wait: no launch writes these.
  __device__ __forceinline__ void load_weights(const Args& a, bool routes) {
    const int column = threadIdx.x * 4;
    if (column >= a.hidden) return;
    if (a.norm != nullptr) norm = load4_const(a.norm + column);
    if (routes) gate = load4_const(a.gate + static_cast<size_t>(blockIdx.x) * a.hidden + column);
  }
  /// Called right after pdl_wait. The launch before leaves no room for blocks of this one, so nothing but these loads
  /// hides the latency of what a block does first.
  __device__ __forceinline__ void load_rows(const Args& a) {
    const int column = threadIdx.x * 4;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= a.tokens) break;
      if (column < a.hidden) load_row(a, t, column, x[t], row[t]);
      else x[t] = {}, row[t] = {};
    }
  }

  static __device__ __forceinline__ void load_row(const Args& a, int token, int column, float4& x, uint2& row) {
    const uint32_t from = static_cast<uint32_t>(token * a.hidden + column);
    if (a.norm != nullptr) x = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + from));
    else row = __ldcg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(a.x) + from));
  }
};

/// Stores rows of up to kTokens tokens in shared memory as bf16. With a norm, rows are f32 and are multiplied by the
/// norm's weight here; 1 / rms multiplies sums later. Each warp leaves its sums of squares and of the products with the
/// block's first gate row.
template <class Kind, int kTokens, int kMost>
__device__ __forceinline__ void stage_rows(const Args& a, const Shared& s, const FirstColumns<kMost>& columns,
                                           bool routes) {
  using Rows = RowSteps<Kind>;
  const int warp = threadIdx.x / 32, end = Rows::kDigits ? round_up(a.hidden, quant::kWideStep) : a.hidden;
  float squares[kTokens] = {}, logit[kTokens] = {};
#pragma unroll 1
  for (int at = threadIdx.x * 4; at < end; at += kWidth) {
    uint2 norm = columns.norm, gate = columns.gate, row[kTokens];
    float4 x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) x[t] = columns.x[t], row[t] = columns.row[t];
    if (at >= kWidth) {
      const bool is_there = !Rows::kDigits || at < a.hidden;  // else zeros
      if (is_there && a.norm != nullptr) norm = load4_const(a.norm + at);
      if (is_there && routes) gate = load4_const(a.gate + static_cast<size_t>(blockIdx.x) * a.hidden + at);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        x[t] = {}, row[t] = {};
        if (is_there && t < a.tokens) columns.load_row(a, t, at, x[t], row[t]);
      }
    }
    const float2 g = unpack_bf16(norm.x), h = unpack_bf16(norm.y);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= a.tokens) break;
      if (a.norm != nullptr) {
        squares[t] += quant::sum_of_squares(x[t]);
        row[t] = {pack_bf16(x[t].x * g.x, x[t].y * g.y), pack_bf16(x[t].z * h.x, x[t].w * h.y)};
      }
      logit[t] = dot4(row[t], gate, logit[t]);
      Rows::keep(s.rows() + t * a.pitch(Kind::kFormat), at, row[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) squares[t] = warp_sum(squares[t]), logit[t] = warp_sum(logit[t]);
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= a.tokens) break;
    s.sums(t)[warp] = squares[t];
    s.sums(a.tokens + t)[warp] = logit[t];
  }
}

/// Turns the rows that `stage_rows` left into the form that products take. Each warp converts the columns that it
/// stored, while all blocks wait for logits.
template <class Kind>
__device__ __forceinline__ void finish_rows(const Args& a, const Shared& s) {
  using Rows = RowSteps<Kind>;
  if constexpr (Rows::kDigits) {
#pragma unroll 1
    for (int t = 0; t < a.tokens; ++t) {
      uint8_t* row = s.rows() + t * a.pitch(Kind::kFormat);
#pragma unroll 1
      for (int at = threadIdx.x * 4; at < round_up(a.hidden, quant::kWideStep); at += kWidth) {
        const uint2 words = Rows::kept(row, at);
        __syncwarp();
        Rows::store(row, at, words);
      }
    }
    named_barrier(kRowsFinished, kWorkers);
  }
}

/// Gives a token's 1 / rms to all lanes of a warp. Sends the logit of expert e, if there is that expert, to all blocks;
/// it carries the launch's number, by which they know that it belongs to this launch.
__device__ __forceinline__ float publish_logit(const Args& a, const Shared& s, int token, int e,
                                               const layer::Turn& turn) {
  const int lane = threadIdx.x % 32;
  float v = lane < kWarps ? s.sums(token)[lane] : s.sums(a.tokens + token)[lane - kWarps];
#pragma unroll
  for (int step = kWarps / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  const float squares = __shfl_sync(0xffffffffu, v, 0);
  const float scale = a.norm == nullptr ? 1.0f : rsqrtf(squares * a.mean + a.eps);
  if (lane != kWarps || e >= a.route.experts || a.gate == nullptr) return scale;
  float logit = v * scale;
  if (a.gate_bias != nullptr) logit += __bfloat162float(a.gate_bias[e]);
  const uint64_t word = static_cast<uint64_t>(turn.number()) << 32 | __float_as_uint(logit);
  store_relaxed(a.logits() + static_cast<size_t>(token) * a.route.experts + e, word);
  return scale;
}

/// Computes the logits of expert e, which is not the block's first one. All warps take part.
template <class Kind>
__device__ __forceinline__ void sum_logits(const Args& a, const Shared& s, int e) {
  for (int t = 0; t < a.tokens; ++t) {
    float sum = 0;
    for (int at = threadIdx.x * 4; at < a.hidden; at += kWidth) {
      const uint2 row = RowSteps<Kind>::kept(s.rows() + t * a.pitch(Kind::kFormat), at);
      sum = dot4(row, load4_const(a.gate + static_cast<size_t>(e) * a.hidden + at), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) s.sums(a.tokens + t)[threadIdx.x / 32] = sum;
  }
}

/// The slot of an active expert when each expert is used as soon as it is chosen. The shared experts, which every token
/// has, come first.
__device__ __forceinline__ int early_slot(const Args& a, int active) {
  return active < a.route.shared ? a.route.top_k + active : active - a.route.shared;
}

/// Initialises barriers and flags before the first barrier of the block. Lanes of one warp would initialise barriers
/// one after the other, 50 cycles each, and the block would wait for that warp; so one lane of each warp initialises
/// some. The barrier of the first expert also counts the arrival of the launch's number and the scale.
template <class Form>
__device__ __forceinline__ void prepare(const Args& a, const Shared& s, bool early) {
  constexpr int kAll = Form::kThreads / 32;
  const int warp = threadIdx.x / 32, active = threadIdx.x;
  if (active < a.slots()) {
    *reinterpret_cast<uint4*>(s.slot_of(active)) = {early ? early_slot(a, active) : kNone, kNone, kNone, kNone};
    s.expert()[active] = kUnknown;
  }
  if (threadIdx.x % 32 != 0) return;
  for (int i = warp; i < Form::kBarriers; i += kAll)
    mbarrier_init(s.shares_full(i), (i < Form::kBarriers / 2 ? Form::kTeam : 1) * kWarpArrivals);
  if (!early && warp == 0) mbarrier_init(s.active_full(), kWarpArrivals * a.tokens);
#pragma unroll 1
  for (int i = warp; early && i < a.slots(); i += kAll) mbarrier_init(s.expert_full(i), i == 0 ? 2 : 1);
}

/// Announces one expert of the only token; lanes that have an expert call it with `mine`.
__device__ __forceinline__ void announce(const Args& a, const Shared& s, int active, uint32_t id, bool mine) {
  const int local = local_expert(id, nullptr, a.num_ids(), a.num_local);
  store_shared_if(mine, s.expert() + active, static_cast<uint32_t>(local));
  mbarrier_arrive_if(mine, s.expert_full(active));
}

/// Chooses a token's experts with one warp. Every block makes the same choice.
template <int kPerLane, Rule kRule>
__device__ __forceinline__ void route(const Args& a, const Shared& s, int token, uint32_t number, float scale) {
  const int lane = threadIdx.x % 32, slot = token * a.route.slots() + lane;
  const bool early = a.early();
  Choice c = {kNoExpert, 0.0f};
  if (early && lane == 0) {  // the launch's number and the scale arrive with the first expert
    *s.number() = number, *s.scale() = scale;
    mbarrier_arrive(s.expert_full(0));
  }
  if (a.valid == nullptr || static_cast<uint32_t>(token) < __ldcg(a.valid)) {
    if (early) announce(a, s, lane, a.route.experts + lane, lane < a.route.shared);
    float score[kPerLane];
    layer::await_logits(a, token, number, score);
    Choice* slots = s.chosen() + token * a.route.slots();
    c = choose<kRule>(a.route, a.routing, token, score, slots, [&](int rank, uint32_t id, bool mine) {
      announce(a, s, a.route.shared + rank, id, early && mine);
    });
    __syncwarp();
    const int active = a.route.shared + lane;  // place of the lane's choice, empty if no expert was left to choose
    const bool left = early && lane < a.route.top_k && s.expert()[min(active, a.route.slots() - 1)] == kUnknown;
    announce(a, s, active, kNoExpert, left);
  } else {
    announce(a, s, lane, kNoExpert, early && lane < a.route.slots());
  }
  if (lane >= a.route.slots()) return;
  s.chosen()[slot] = c;
  if (early) s.part_of()[lane] = local_expert(c.id, nullptr, a.num_ids(), a.num_local) < 0 ? kNoPart : lane;
  if (blockIdx.x != 0) return;
  a.route.topk_ids[slot] = c.id, a.route.topk_weights[slot] = c.weight;
  if (lane < a.route.top_k) leave(a.routing, a.route.experts, token, lane, c.id);
}

/// The choice of a lane's slot: from the given experts, or from the ones that the routing warps chose.
__device__ __forceinline__ Choice own_choice(const Args& a, const Shared& s) {
  const int lane = threadIdx.x % 32;
  if (lane >= a.slots()) return {kNoExpert, 0.0f};
  if (a.gate == nullptr) s.chosen()[lane] = {__ldcg(a.route.topk_ids + lane), __ldcg(a.route.topk_weights + lane)};
  return s.chosen()[lane];
}

/// Lists the active experts in the order of their first slots, and which tokens they serve. One warp does it. If a
/// token names an expert more than once, all these slots share the part of the first one.
__device__ __forceinline__ void build_active(const Args& a, const Shared& s) {
  const int lane = threadIdx.x % 32, local = local_expert(own_choice(a, s).id, a.expert_map, a.num_ids(), a.num_local);
  const uint32_t before = (1u << lane) - 1, same = __match_any_sync(0xffffffffu, local);
  const bool leads = local >= 0 && (same & before) == 0;
  const uint32_t leaders = __ballot_sync(0xffffffffu, leads);
  const int leader = __ffs(same) - 1, active = __popc(leaders & ((1u << leader) - 1));
  if (leads) s.expert()[active] = local;
  if (lane == 0) *s.num_active() = __popc(leaders);
  // The first of the token's slots with this expert.
  const int token = lane / a.route.slots(), first = token * a.route.slots();
  const uint32_t own = same & (0xffffffffu >> (32 - a.route.slots())) << first;
  const int part = __ffs(own) - 1;
  if (lane >= a.slots()) return;
  s.part_of()[lane] = local < 0 ? kNoPart : static_cast<uint8_t>(part);
  if (local >= 0 && part == lane) s.slot_of(active)[token] = lane;
}

#endif  // MOE_HAS_TMA

}  // namespace moe::quant_layer
