// One token's routing by one warp: logits -> scores -> top-k ids and weights, all in f32.
//
// The rules are moe-router's: descending key (score + correction bias), ties to the lower id; weights come
// from the unbiased scores, then renormalised over the chosen, then scaled.
#pragma once

#include "common.cuh"

namespace moe {

enum class Scoring : int { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

struct RouteArgs {
  const float* correction_bias;  // [E] or null
  uint32_t* topk_ids;            // [T, K]
  float* topk_weights;           // [T, K]
  int experts, top_k;
  Scoring scoring;
  int raw_logits;     // choose by logits and score the chosen only
  int renormalize;
  float scale;
  float softcap;      // 0 = none
  uint32_t* counts = nullptr;   // [local experts], or null: slots are also listed by expert, buckets[e][0 .. counts[e]], in any order
  uint32_t* buckets = nullptr;  // [local experts, tokens]
  const int32_t* expert_map = nullptr;  // [E], of the buckets: expert to local one, -1 = elsewhere; null = all are here
  int tokens = 0;
};

/// Most slots per token: a lane holds one.
constexpr int kMaxTopK = 32;
/// Sums of scores below this count as this, so that all-zero scores give zero weights.
constexpr float kMinScoreSum = 1e-20f;

/// Sigmoid and sqrt(softplus) of a logit, without overflow at either end.
__device__ __forceinline__ float score_alone(Scoring scoring, float x) {
  const float e = expf(-fabsf(x));
  if (scoring == Scoring::kSigmoid) return (x >= 0 ? 1.0f : e) / (1.0f + e);
  return sqrtf(fmaxf(x, 0.0f) + log1pf(e));
}

/// An integer in the order of the floats, above 0; 0 for NaN. Both zeros are equal.
__device__ __forceinline__ uint32_t sort_key(float x) {
  if (x != x) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Softmax over a warp's values, N per lane; -inf scores 0, also where there is nothing else.
template <int N>
__device__ __forceinline__ void warp_softmax(float (&v)[N]) {
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < N; ++j) top = fmaxf(top, v[j]);
  top = warp_max(top);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    v[j] = top == -INFINITY ? 0.0f : expf(v[j] - top);
    sum += v[j];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = top == -INFINITY ? 0.0f : v[j] / sum;
}

/// Writes that a token chose nothing.
__device__ __forceinline__ void route_nothing(const RouteArgs& a, int token) {
  const int lane = threadIdx.x % 32;
  if (lane < a.top_k) {
    a.topk_ids[static_cast<size_t>(token) * a.top_k + lane] = kNoExpert;
    a.topk_weights[static_cast<size_t>(token) * a.top_k + lane] = 0;
  }
}

/// A lane's share of a token's choice: lane k < K has the k-th expert; the other lanes have none.
struct Choice {
  uint32_t id;
  float weight;
};

/// Logits of a token, of which this lane brings e = 32 j + lane as `score[j]` (-inf beyond E), to scores and to keys in the
/// order of choice. One whole warp. A NaN has the key 0.
template <int N>
__device__ __forceinline__ void score_logits(const RouteArgs& a, float (&score)[N], uint32_t (&key)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (a.softcap > 0 && j * 32 + lane < a.experts) score[j] = a.softcap * tanhf(score[j] / a.softcap);
  if (!a.raw_logits && a.scoring == Scoring::kSoftmax) warp_softmax(score);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int e = j * 32 + lane;
    if (!a.raw_logits && a.scoring != Scoring::kSoftmax) score[j] = score_alone(a.scoring, score[j]);
    key[j] = e < a.experts ? sort_key(score[j] + (a.correction_bias == nullptr ? 0.0f : a.correction_bias[e])) : 0;
  }
}

/// The score of a slot that no expert has, as `weigh` takes it.
__device__ __forceinline__ float no_score(const RouteArgs& a) { return a.raw_logits ? -INFINITY : 0.0f; }

/// Weights of the chosen from their scores, a lane per slot. One whole warp.
__device__ __forceinline__ Choice weigh(const RouteArgs& a, uint32_t id, float score) {
  float own[1] = {score};
  if (a.raw_logits) {
    if (a.scoring == Scoring::kSoftmax) warp_softmax(own);
    else own[0] = id == kNoExpert ? 0.0f : score_alone(a.scoring, own[0]);
  }
  if (a.renormalize) own[0] /= fmaxf(warp_sum(own[0]), kMinScoreSum);
  return {id, own[0] * a.scale};
}

/// Chooses among the E <= 32 N logits of a token, of which this lane brings e = 32 j + lane as `score[j]` (-inf beyond
/// E). One whole warp. A NaN is never chosen.
template <int N>
__device__ __forceinline__ Choice choose(const RouteArgs& a, float (&score)[N]) {
  const int lane = threadIdx.x % 32;
  uint32_t key[N], own_id = kNoExpert;
  score_logits(a, score, key);
  float own = no_score(a);
  for (int k = 0; k < a.top_k; ++k) {
    uint32_t best = 0, best_id = kNoExpert;
    float best_score = 0;
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (key[j] > best) best = key[j], best_id = j * 32 + lane, best_score = score[j];
    const uint32_t top = __reduce_max_sync(0xffffffffu, best);
    const uint32_t id = __reduce_min_sync(0xffffffffu, best == top ? best_id : kNoExpert);
    best_score = __shfl_sync(0xffffffffu, best_score, id % 32);
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (static_cast<uint32_t>(j * 32 + lane) == id) key[j] = 0;  // taken
    if (lane == k && top != 0) own_id = id, own = best_score;
  }
  return weigh(a, own_id, own);
}

/// Routes `token`, whose logits are `logits[0 .. E]` in shared memory.
template <int N>
__device__ __forceinline__ void route_row(const RouteArgs& a, const float* logits, int token) {
  const int lane = threadIdx.x % 32;
  float score[N];
#pragma unroll
  for (int j = 0; j < N; ++j) score[j] = j * 32 + lane < a.experts ? logits[j * 32 + lane] : -INFINITY;
  const Choice c = choose<N>(a, score);
  if (lane < a.top_k) {
    a.topk_ids[static_cast<size_t>(token) * a.top_k + lane] = c.id;
    a.topk_weights[static_cast<size_t>(token) * a.top_k + lane] = c.weight;
    if (a.counts != nullptr && c.id != kNoExpert) {
      const int local = a.expert_map == nullptr ? static_cast<int>(c.id) : a.expert_map[c.id];
      if (local >= 0) {
        const uint32_t place = atomicAdd(a.counts + local, 1);
        a.buckets[static_cast<size_t>(local) * a.tokens + place] = token * a.top_k + lane;
      }
    }
  }
}

}  // namespace moe
