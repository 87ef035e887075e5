// The choice of a token's experts by one warp, and its outputs.
#pragma once

#include "ptx/predicated.cuh"
#include "router/copies.cuh"
#include "router/groups.cuh"

namespace moe {

/// A lane's part of a token's experts, e = 32 j + lane, the best one first. Up to four experts are sorted. With more,
/// the lane searches for its best one each time.
template <int N>
struct LaneKeys {
  static constexpr bool kSorted = N <= 4;
  uint32_t key[N], id[N];
  float score[N];

  __device__ __forceinline__ LaneKeys(const uint32_t (&keys)[N], const float (&scores)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) key[j] = keys[j], id[j] = j * 32 + threadIdx.x % 32, score[j] = scores[j];
    // Neighbours are exchanged if the later one is larger: equal keys keep their order.
#pragma unroll
    for (int end = kSorted ? N - 1 : 0; end > 0; --end) {
#pragma unroll
      for (int j = 0; j < end; ++j) {
        if (key[j] >= key[j + 1]) continue;
        const uint32_t k = key[j], i = id[j];
        const float f = score[j];
        key[j] = key[j + 1], id[j] = id[j + 1], score[j] = score[j + 1];
        key[j + 1] = k, id[j + 1] = i, score[j + 1] = f;
      }
    }
  }

  __device__ __forceinline__ uint32_t best() const {
    uint32_t top = key[0];
    if constexpr (!kSorted) {
#pragma unroll
      for (int j = 1; j < N; ++j) top = max(top, key[j]);
    }
    return top;
  }

  /// Removes and returns the best one, whose key is `top`, if `takes`.
  __device__ __forceinline__ Choice take(uint32_t top, bool takes) {
    Choice c = {id[0], score[0]};
    if constexpr (kSorted) {
#pragma unroll
      for (int j = 0; j + 1 < N; ++j)
        if (takes) key[j] = key[j + 1], id[j] = id[j + 1], score[j] = score[j + 1];
      if (takes) key[N - 1] = 0;
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (takes && key[j] == top) c = {id[j], score[j]}, key[j] = 0, takes = false;
    }
    return c;
  }

  /// The lowest of the experts with this key.
  __device__ __forceinline__ uint32_t lowest(uint32_t of) const {
    uint32_t lowest = kNoExpert;
#pragma unroll
    for (int j = N - 1; j >= 0; --j)
      if (key[j] == of) lowest = id[j];
    return lowest;
  }
};

/// Chooses among the E <= 32 N logits of a token; this lane passes e = 32 j + lane as `score[j]` (-inf from E on). All
/// lanes of one warp call it; `chosen` is shared memory of this warp for K slots. Returns this lane's slot; shared
/// experts come after the chosen ones. A NaN is never chosen unless it is forced. All lanes call `on_choice(k, id,
/// mine)` together, where `mine` is true for the lane that has the choice; the id of the others is undefined. `routing`
/// may force experts on the token, row `row` of the step; absent ones then move after the others.
///
/// Each round is a chain of dependent instructions whose latency nothing hides, so it contains only what it must: a
/// reduction over the lanes' best keys, the test whether several lanes have the best key, and the next key of the lane
/// that had it. A choice is announced while the next reduction runs. A branch handles two rare cases: keys of two lanes
/// tie (a second reduction then finds the lower id), or no keys are left.
template <Rule kRule, int N, class OnChoice>
__device__ __forceinline__ Choice choose(const RouteArgs& args, const StepRoutingArgs& routing, int row,
                                         float (&score)[N], Choice* chosen, OnChoice on_choice) {
  constexpr bool kPlain = kIsSoftmax<kRule>;
  const RouteArgs a = with_rule<kRule>(args);
  const uint32_t lane = threadIdx.x % 32, lowest = sort_key(-INFINITY);
  uint32_t key[N];
  score_logits(a, score, key);
  if constexpr (kRule == Rule::kGroups) keep_best_groups(a, key);
  if constexpr (!kPlain) force_keys(routing, a.top_k, row, key);
  LaneKeys<N> keys(key, score);
  uint32_t found = 0;
  bool takes = false;
  Choice own = {};
  const auto tell = [&] {
    store_shared_if(takes, chosen + found - 1, uint2{own.id, __float_as_uint(own.weight)});
    if constexpr (kPlain) on_choice(found - 1, own.id, takes);
    else if (found > 0) on_choice(found - 1, balanced(routing, row, found - 1, own.id), takes);
  };
#pragma unroll 1
  while (found < static_cast<uint32_t>(a.top_k)) {
    const uint32_t best = keys.best(), top = __reduce_max_sync(0xffffffffu, best);
    tell();
    takes = best == top;
    const uint32_t tied = __ballot_sync(0xffffffffu, takes);
    if ((tied & (tied - 1)) != 0) {
      if (top < lowest) {
        takes = false;
        break;
      }
      const uint32_t id = keys.lowest(top);
      takes = id == __reduce_min_sync(0xffffffffu, id);
    }
    own = keys.take(top, takes);
    ++found;
  }
  tell();
  __syncwarp();
  own = lane < found ? chosen[lane] : Choice{kNoExpert, 0.0f};
  const float weight = weigh(a, lane < found, own.weight, score);
  const uint32_t after = lane - a.top_k;
  if (after < static_cast<uint32_t>(a.shared)) return {a.experts + after, a.shared_weight};
  const bool replaced = !kPlain && lane < found;
  return {replaced ? balanced(routing, row, lane, own.id) : own.id, weight};
}

/// The slot of a row's expert, of `experts`. It is not inline, like `score_alone`: most models have no copies.
static __device__ __noinline__ uint32_t chosen_slot(const int32_t* log2phy, int experts, int width, uint32_t row,
                                                    uint32_t id, bool hashed) {
  return slot_of_row(log2phy, experts, width, row, id, hashed);
}

/// Routes `token`, whose logits are `logits[0 .. E]` in shared memory; `chosen` is the same as in `choose`.
template <Rule kRule, int N>
__device__ __forceinline__ void route_row(const RouteArgs& a, const StepRoutingArgs& routing, const CopiesArgs& copies,
                                          const float* logits, Choice* chosen, int token) {
  const int lane = threadIdx.x % 32;
  float score[N];
#pragma unroll
  for (int j = 0; j < N; ++j) score[j] = j * 32 + lane < a.experts ? logits[j * 32 + lane] : -INFINITY;
  Choice c = choose<kRule>(a, routing, token, score, chosen, [](uint32_t, uint32_t, bool) {});
  if (lane < a.top_k) leave(routing, a.experts, token, lane, c.id);
  if (copies.log2phy != nullptr)
    c.id = chosen_slot(copies.log2phy, a.experts + a.shared, copies.width, copies.first_row + token, c.id,
                       copies.hashed != 0);
  if (lane < a.slots()) {
    a.topk_ids[static_cast<size_t>(token) * a.slots() + lane] = c.id;
    a.topk_weights[static_cast<size_t>(token) * a.slots() + lane] = c.weight;
    if (a.counts != nullptr && c.id != kNoExpert) {
      const int local = a.expert_map == nullptr ? static_cast<int>(c.id) : a.expert_map[c.id];
      if (local >= 0) {
        const uint32_t place = atomicAdd(a.counts + local, 1);
        a.buckets[static_cast<size_t>(local) * a.tokens + place] = token * a.slots() + lane;
      }
    }
  }
}

}  // namespace moe
