// Groups of experts in a token's choice: only experts of its best groups may be chosen (DeepSeek-V2's
// group_limited_greedy, DeepSeek-V3's noaux_tc).
//
// The specification is `grouped_top_k` of moe-router. DeepSeek-V3's 8 groups of 32 experts take about 16 reductions of
// a warp, which depend only on the keys, and then one reduction for each group that is kept.
#pragma once

#include "router/route.cuh"

namespace moe {

/// Most groups: a lane holds the key of one.
constexpr int kMaxExpertGroups = 32;

/// Whether a launcher supports `groups` groups, of which `kept` are kept.
__host__ __device__ inline bool are_groups(int groups, int kept, int experts) {
  if (groups == 0) return true;
  return groups > 0 && groups <= kMaxExpertGroups && experts % groups == 0 && kept > 0 && kept <= groups;
}

/// The key of the group of the experts first .. first + size - 1: their best key, or, with a correction bias, the sum
/// of their two best keys; -inf if none of them can be chosen. All lanes of the warp get it.
template <int N>
__device__ __forceinline__ uint32_t group_key(const RouteArgs& a, const uint32_t (&key)[N], int first, int size) {
  const int lane = threadIdx.x % 32;
  uint32_t best = 0, second = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const bool is_member = static_cast<uint32_t>(j * 32 + lane - first) < static_cast<uint32_t>(size);
    const uint32_t own = is_member ? key[j] : 0;
    second = max(second, min(best, own));
    best = max(best, own);
  }
  const uint32_t top = __reduce_max_sync(0xffffffffu, best);
  if (a.correction_bias == nullptr) return max(top, sort_key(-INFINITY));
  // One of the lanes with the best key passes its second key.
  const int leader = __ffs(__ballot_sync(0xffffffffu, best == top)) - 1;
  const uint32_t next = __reduce_max_sync(0xffffffffu, lane == leader ? second : best);
  return sort_key(from_sort_key(top) + from_sort_key(next));
}

/// Excludes the experts of all but a token's best groups, ties to the lower group. All lanes of one warp call it. The
/// keys come from score_logits.
template <int N>
__device__ __forceinline__ void keep_best_groups(const RouteArgs& a, uint32_t (&key)[N]) {
  const int lane = threadIdx.x % 32, size = a.experts / a.groups;
  uint32_t of_group = 0, kept = 0;  // lane g: the key of group g
#pragma unroll 1
  for (int g = 0; g < a.groups; ++g) {
    const uint32_t found = group_key(a, key, g * size, size);
    if (lane == g) of_group = found;
  }
#pragma unroll 1
  for (int i = 0; i < a.kept_groups; ++i) {
    const uint32_t top = __reduce_max_sync(0xffffffffu, of_group);
    if (top == 0) break;
    const int g = __ffs(__ballot_sync(0xffffffffu, of_group == top)) - 1;
    kept |= 1u << g;
    if (lane == g) of_group = 0;
  }
  // The division is exact: (expert + 0.5) / size is never within rounding error of an integer.
  const float groups_each = 1.0f / size;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int g = static_cast<int>((j * 32 + lane + 0.5f) * groups_each);
    if (g >= kMaxExpertGroups || (kept >> g & 1) == 0) key[j] = 0;
  }
}

}  // namespace moe
