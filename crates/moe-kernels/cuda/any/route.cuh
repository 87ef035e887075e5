// One token's routing by one warp, with any method of moe-router. The result has the bits of the CPU's: the same
// functions, sums in the same order, descending key with ties to the lower id.
#pragma once

#include "any/any.cuh"
#include "router/exact_math.cuh"
#include "router/route.cuh"

namespace moe {

enum class Selection : int { kTopK = 0, kGroupedMax = 1, kGroupedTopTwo = 2, kRawLogits = 3, kHash = 4, kGiven = 5 };

/// What a warp stores of its token.
struct RouteScratch {
  float* scores;     // [L]
  uint32_t* keys;    // [L] order of the candidates; 0 = can no longer be chosen
  uint32_t* groups;  // [groups]
  uint32_t* ids;     // [K]
  float* weights;    // [K]

  static size_t bytes(const AnyRouteArgs& a) {
    return 4 * (2 * (static_cast<size_t>(a.experts) + a.zero_experts) + a.groups + 2 * static_cast<size_t>(a.top_k));
  }

  __device__ RouteScratch(float* smem, const AnyRouteArgs& a) {
    const int logits = a.experts + a.zero_experts;
    scores = smem;
    keys = reinterpret_cast<uint32_t*>(scores + logits);
    groups = keys + logits;
    ids = groups + a.groups;
    weights = reinterpret_cast<float*>(ids + a.top_k);
  }
};

/// Turns logits into scores, in place.
__device__ __forceinline__ void apply_scoring(Scoring scoring, float* v, int n) {
  const int lane = threadIdx.x % 32;
  if (scoring != Scoring::kSoftmax) {
    for (int i = lane; i < n; i += 32)
      v[i] = scoring == Scoring::kSigmoid ? exact::sigmoid(v[i]) : exact::sqrt_softplus(v[i]);
    return;
  }
  float top = -INFINITY, sum = 0;
  for (int i = lane; i < n; i += 32) top = fmaxf(top, v[i]);
  top = warp_max(top);
  for (int i = lane; i < n; i += 32) {
    v[i] = top == -INFINITY ? 0.f : exact::exp(exact::sub(v[i], top));
    sum = exact::add(sum, v[i]);
  }
  sum = warp_sum(sum);
  if (top == -INFINITY) return;
  for (int i = lane; i < n; i += 32) v[i] = exact::div(v[i], sum);
}

constexpr uint32_t kTakenGroup = 0xffffffffu;

/// The index of the largest key, ties to the lower index; kNoExpert if all are 0 or taken. All lanes of the warp get
/// it.
__device__ __forceinline__ uint32_t best_key(const uint32_t* keys, int n) {
  uint32_t best = 0, at = kNoExpert;
  for (int i = threadIdx.x % 32; i < n; i += 32)
    if (keys[i] > best && keys[i] != kTakenGroup) best = keys[i], at = i;
  const uint32_t top = __reduce_max_sync(0xffffffffu, best);
  return __reduce_min_sync(0xffffffffu, top != 0 && best == top ? at : kNoExpert);
}

/// Excludes the experts of all but the best groups.
__device__ __forceinline__ void keep_best_groups(const AnyRouteArgs& a, const RouteScratch& s) {
  const int lane = threadIdx.x % 32, size = a.experts / a.groups;
  const bool two = static_cast<Selection>(a.selection) == Selection::kGroupedTopTwo;
  for (int g = lane; g < a.groups; g += 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      const float key = a.bias == nullptr ? s.scores[i] : exact::add(s.scores[i], a.bias[i]);
      if (key > first) second = first, first = key;
      else if (key > second) second = key;
    }
    s.groups[g] = sort_key(two ? exact::add(first, second) : first);
  }
  __syncwarp();
  for (int j = 0; j < a.topk_group; ++j) {
    const uint32_t g = best_key(s.groups, a.groups);
    if (lane == 0 && g != kNoExpert) s.groups[g] = kTakenGroup;
    __syncwarp();
  }
  for (int i = lane; i < a.experts; i += 32)
    if (s.groups[i / size] != kTakenGroup) s.keys[i] = 0;
  __syncwarp();
}

/// Chooses by key: fills the ids.
__device__ __forceinline__ void choose(const AnyRouteArgs& a, const RouteScratch& s) {
  const int lane = threadIdx.x % 32, logits = a.experts + a.zero_experts;
  for (int i = lane; i < logits; i += 32)
    s.keys[i] = sort_key(a.bias == nullptr ? s.scores[i] : exact::add(s.scores[i], a.bias[i]));
  __syncwarp();
  const auto selection = static_cast<Selection>(a.selection);
  if (selection == Selection::kGroupedMax || selection == Selection::kGroupedTopTwo) keep_best_groups(a, s);
  for (int k = 0; k < a.top_k; ++k) {
    const uint32_t id = best_key(s.keys, logits);
    if (lane == 0) {
      s.ids[k] = id;
      if (id != kNoExpert) s.keys[id] = 0;
    }
    __syncwarp();
  }
}

/// Copies the K ids of a row of `from`. Returns whether any of them is an expert.
__device__ __forceinline__ bool copy_ids(const uint32_t* from, const AnyRouteArgs& a, const RouteScratch& s) {
  bool some = false;
  for (int k = threadIdx.x % 32; k < a.top_k; k += 32) {
    s.ids[k] = from == nullptr ? kNoExpert : from[k];
    some |= s.ids[k] != kNoExpert;
  }
  __syncwarp();
  return __any_sync(0xffffffffu, some);
}

/// The weights of the chosen ids: gather, score (raw logits only), renormalise, scale.
__device__ __forceinline__ void weigh(const AnyRouteArgs& a, const RouteScratch& s) {
  const int lane = threadIdx.x % 32;
  const bool raw = static_cast<Selection>(a.selection) == Selection::kRawLogits;
  const uint32_t logits = a.experts + a.zero_experts;
  for (int k = lane; k < a.top_k; k += 32)
    s.weights[k] = s.ids[k] < logits ? s.scores[s.ids[k]] : raw ? -INFINITY : 0.f;
  __syncwarp();
  if (raw) apply_scoring(a.scoring, s.weights, a.top_k);
  __syncwarp();
  float sum = 0;
  if (a.renormalize) {
    for (int k = 0; k < a.top_k; ++k) sum = exact::add(sum, s.weights[k]);
    sum = fmaxf(sum, kMinScoreSum);
  }
  __syncwarp();
  for (int k = lane; k < a.top_k; k += 32) {
    float w = s.weights[k];
    if (a.renormalize) w = exact::div(w, sum);
    if (a.scale != 1.f) w = exact::mul(w, a.scale);
    s.weights[k] = w;
  }
  __syncwarp();
}

}  // namespace moe
