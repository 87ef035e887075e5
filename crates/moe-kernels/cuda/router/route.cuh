// One token's routing by one warp: logits -> scores -> top-k ids and weights, all in f32. The choice itself is in
// router/choose.cuh.
//
// The rules are moe-router's: descending key (score + correction bias), ties to the lower id; weights come
// from the unbiased scores, then renormalised over the chosen, then scaled.
#pragma once

#include "ptx/common.cuh"
#include "router/args.cuh"

namespace moe {

struct RouteArgs {
  const float* correction_bias;  // [E] or null
  uint32_t* topk_ids;            // [T, K + shared]
  float* topk_weights;           // [T, K + shared]
  int experts, top_k;
  Scoring scoring;
  int raw_logits;  // choose by logits, and compute scores of the chosen ones only
  int renormalize;
  float scale;
  float softcap;  // 0 = none
  uint32_t* counts =
      nullptr;  // [local experts], or null: slots are also listed by expert, buckets[e][0 .. counts[e]], in any order
  uint32_t* buckets = nullptr;  // [local experts, tokens]
  const int32_t* expert_map =
      nullptr;  // of the buckets, by the ids that are left: local expert, -1 = elsewhere; null = all are here
  int tokens = 0;
  int shared = 0;              // experts E, E + 1, .. that every token gets in its last slots
  float shared_weight = 1.0f;  // their weight, neither renormalised nor scaled
  // `groups` equal groups of consecutive experts, of which the best `kept_groups` may be chosen from (groups.cuh); 0:
  // there are no groups. With 16 bits each they are in the padding at the end of the struct, so that no other field
  // moves.
  int16_t groups = 0, kept_groups = 0;

  /// The number of slots of a token.
  __host__ __device__ int slots() const { return top_k + shared; }
};

/// What is known of a kernel's rule at compile time. Instructions of other rules would be fetched before they are
/// skipped, in a chain that nothing hides: 1.3 us of a layer's 42.
enum class Rule : int {
  kPlain,      // most models: softmax over all experts, weights that add up to `scale`, no forced choice
  kRawLogits,  // gpt-oss: softmax over the chosen experts alone, no forced choice
  kAny,        // every rule without groups
  kGroups,     // every rule with groups
};

/// A launch's rule.
__host__ __device__ inline Rule rule_of(const RouteArgs& a, const StepRoutingArgs& routing) {
  if (a.groups > 0) return Rule::kGroups;
  const bool softmax =
      routing.forced == nullptr && a.scoring == Scoring::kSoftmax && a.correction_bias == nullptr && !(a.softcap > 0);
  if (softmax && a.raw_logits) return Rule::kRawLogits;
  return softmax && a.renormalize ? Rule::kPlain : Rule::kAny;
}

/// Whether a rule is a softmax without correction and without forced choices.
template <Rule kRule>
constexpr bool kIsSoftmax = kRule == Rule::kPlain || kRule == Rule::kRawLogits;

/// `a`, in which the fields that the rule fixes are constants at compile time.
template <Rule kRule>
__device__ __forceinline__ RouteArgs with_rule(RouteArgs a) {
  if constexpr (kIsSoftmax<kRule>) {
    a.scoring = Scoring::kSoftmax, a.raw_logits = kRule == Rule::kRawLogits, a.renormalize = 1;
    a.correction_bias = nullptr, a.softcap = 0;
  }
  return a;
}

/// The largest number of slots per token: a lane holds one.
constexpr int kMaxTopK = 32;
/// Smaller sums of scores are replaced by this, so that scores that are all zero give zero weights.
constexpr float kMinScoreSum = 1e-20f;

/// Sigmoid and sqrt(softplus) of a logit, without overflow at either end. It is not inline, and neither is `soft_cap`:
/// instructions that other rules skip would be fetched from memory first.
static __device__ __noinline__ float score_alone(Scoring scoring, float x) {
  const float e = expf(-fabsf(x));
  if (scoring == Scoring::kSigmoid) return (x >= 0 ? 1.0f : e) / (1.0f + e);
  return sqrtf(fmaxf(x, 0.0f) + log1pf(e));
}

static __device__ __noinline__ float soft_cap(float x, float cap) { return cap * tanhf(x / cap); }

/// An integer above 0 with the order of the floats; 0 for NaN. Both zeros are equal.
__device__ __forceinline__ uint32_t sort_key(float x) {
  if (x != x) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// The float of a key above 0; -inf for 0.
__device__ __forceinline__ float from_sort_key(uint32_t key) {
  if (key == 0) return -INFINITY;
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/// Softmax over a warp's values, N per lane; -inf has score 0, even if there is nothing else.
template <int N>
__device__ __forceinline__ void warp_softmax(float (&v)[N]) {
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < N; ++j) top = fmaxf(top, v[j]);
  top = from_sort_key(__reduce_max_sync(0xffffffffu, sort_key(top)));
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
  if (lane < a.slots()) {
    a.topk_ids[static_cast<size_t>(token) * a.slots() + lane] = kNoExpert;
    a.topk_weights[static_cast<size_t>(token) * a.slots() + lane] = 0;
  }
}

/// An expert of a token and its weight.
struct alignas(8) Choice {
  uint32_t id;
  float weight;
};

/// Whether scores have the same order as logits: then only the chosen ones need scores. (If two logits of a softmax
/// round to the same score, the rule chooses the lower id first, and this chooses the larger logit.)
__device__ __forceinline__ bool chosen_by_logit(const RouteArgs& a) {
  return a.raw_logits || (a.scoring == Scoring::kSoftmax && a.correction_bias == nullptr);
}

/// Turns logits of a token into scores (with chosen_by_logit they stay logits) and into keys in the order of choice.
/// This lane passes e = 32 j + lane as `score[j]` (-inf from E on). All lanes of one warp call it. A NaN has the key 0,
/// and so has everything if a softmax would be NaN.
template <int N>
__device__ __forceinline__ void score_logits(const RouteArgs& a, float (&score)[N], uint32_t (&key)[N]) {
  const int lane = threadIdx.x % 32;
  if (a.softcap > 0) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j * 32 + lane < a.experts) score[j] = soft_cap(score[j], a.softcap);
  }
  bool finite = true;
  if (a.scoring == Scoring::kSoftmax && !a.raw_logits) {
#pragma unroll
    for (int j = 0; j < N; ++j) finite = finite && score[j] < INFINITY;
    finite = __all_sync(0xffffffffu, finite);
  }
  if (!chosen_by_logit(a)) {
    if (a.scoring == Scoring::kSoftmax) {
      warp_softmax(score);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) score[j] = score_alone(a.scoring, score[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) key[j] = finite && j * 32 + lane < a.experts ? sort_key(score[j]) : 0;
  if (a.correction_bias != nullptr) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (key[j] != 0) key[j] = sort_key(score[j] + a.correction_bias[j * 32 + lane]);
  }
}

/// The sum over a token's slots; lane k < K has the k-th. Only these lanes get it.
__device__ __forceinline__ float sum_of_slots(const RouteArgs& a, float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (step < a.top_k) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

/// The weight of this lane's slot from its expert's score. `has`: whether the slot has an expert. `score`: the scores
/// of all experts. All lanes of one warp call it.
template <int N>
__device__ __forceinline__ float weigh(const RouteArgs& a, bool has, float own, const float (&score)[N]) {
  if (chosen_by_logit(a) && a.scoring == Scoring::kSoftmax) {
    const float best = from_sort_key(__reduce_max_sync(0xffffffffu, has ? sort_key(own) : 0));
    own = has && best > -INFINITY ? expf(own - best) : 0.0f;
    float sum = 0;
    if (a.raw_logits || a.renormalize) {
      sum = sum_of_slots(a, own);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) sum += best > -INFINITY ? expf(score[j] - best) : 0.0f;
      sum = warp_sum(sum);
    }
    return own / fmaxf(sum, kMinScoreSum) * a.scale;
  }
  if (!has) own = 0;
  else if (a.raw_logits) own = score_alone(a.scoring, own);
  if (a.renormalize) own /= fmaxf(sum_of_slots(a, own), kMinScoreSum);
  return own * a.scale;
}

/// Records a choice, slot `slot` of a row, for observers of the step. There are E experts; an id that is no expert is
/// not counted.
__device__ __forceinline__ void leave(const StepRoutingArgs& r, int experts, int row, int slot, uint32_t id) {
  if (r.routed != nullptr) r.routed[static_cast<size_t>(row) * r.stride + slot] = id;
  if (r.heat != nullptr && id < static_cast<uint32_t>(experts)) atomicAdd(r.heat + id, 1u);
}

/// The choices that are forced on a row, or null.
__device__ __forceinline__ const uint32_t* forced_row(const StepRoutingArgs& r, int row) {
  return r.forced + static_cast<size_t>(row) * r.stride;
}

/// If experts are forced on a row, gives them the best keys in the order of their slots, and gives all others no key.
/// All lanes of one warp call it.
template <int N>
__device__ __forceinline__ void force_keys(const StepRoutingArgs& r, int top_k, int row, uint32_t (&key)[N]) {
  if (r.forced == nullptr || r.keep_weights) return;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t own = static_cast<int>(lane) < top_k ? forced_row(r, row)[lane] : kNoExpert;
  if (!__any_sync(0xffffffffu, own != kNoExpert)) return;
#pragma unroll
  for (int j = 0; j < N; ++j) key[j] = 0;
  for (int k = 0; k < top_k; ++k) {
    const uint32_t id = __shfl_sync(0xffffffffu, own, k);
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (id == j * 32 + lane) key[j] = 0xffffffffu - k;  // above the key of infinity
  }
}

/// The choice that replaces `id`, a row's own choice in a slot.
__device__ __forceinline__ uint32_t balanced(const StepRoutingArgs& r, int row, int slot, uint32_t id) {
  return r.forced != nullptr && r.keep_weights ? forced_row(r, row)[slot] : id;
}

}  // namespace moe
