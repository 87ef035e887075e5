// Routing with any method, number of experts and top-k, from f32 logits: a warp per token.
//
// A token's scores and keys are in shared memory, and each of its K choices goes through all keys: K E / 32 steps of a
// warp. gate_route (router/gate_route.cu) keeps them in registers, for the methods and sizes that it supports.
#include "any/route.cuh"

namespace moe {
namespace {

/// Fills the ids and weights of row t.
__device__ __forceinline__ void route_row(const AnyRouteArgs& a, const RouteScratch& s, int t) {
  const int lane = threadIdx.x % 32, logits = a.experts + a.zero_experts;
  const size_t first = static_cast<size_t>(t) * a.top_k;
  const StepRoutingArgs& r = a.routing;
  const bool forced = r.forced != nullptr && !r.keep_weights && copy_ids(forced_row(r, t), a, s);
  const auto selection = static_cast<Selection>(a.selection);
  if (selection == Selection::kGiven) {
    if (!forced) copy_ids(a.given_ids + first, a, s);
    for (int k = lane; k < a.top_k; k += 32)
      s.weights[k] = a.given_weights == nullptr || s.ids[k] == kNoExpert ? 0.f : a.given_weights[first + k];
    __syncwarp();
    return;
  }
  for (int i = lane; i < logits; i += 32) {
    const float x = a.logits[static_cast<size_t>(t) * logits + i];
    s.scores[i] = a.softcap > 0 ? exact::mul(a.softcap, exact::tanh(exact::div(x, a.softcap))) : x;
  }
  if (selection != Selection::kRawLogits) apply_scoring(a.scoring, s.scores, logits);
  __syncwarp();
  if (!forced) {
    if (selection == Selection::kHash) {
      const uint32_t token = a.token_ids[t];
      const bool known = token < static_cast<uint32_t>(a.vocab);
      copy_ids(known ? a.table + static_cast<size_t>(token) * a.top_k : nullptr, a, s);
    } else {
      choose(a, s);
    }
  }
  weigh(a, s);
}

/// Writes what observers of the step read, zero experts and shared slots of row t, and then its outputs.
__device__ __forceinline__ void finish_row(const AnyRouteArgs& a, const RouteScratch& s, int t, bool padding) {
  const int lane = threadIdx.x % 32, slots = a.top_k + a.shared_slots;
  const auto experts = static_cast<uint32_t>(a.experts);
  const auto is_zero_expert = [&](int k) { return s.ids[k] != kNoExpert && s.ids[k] >= experts; };
  if (lane == 0 && a.zero_weights != nullptr) {
    float sum = 0;
    for (int k = 0; k < a.top_k; ++k)
      if (is_zero_expert(k)) sum = exact::add(sum, s.weights[k]);
    a.zero_weights[t] = sum;
  }
  for (int k = lane; k < slots; k += 32) {
    const size_t at = static_cast<size_t>(t) * slots + k;
    if (k >= a.top_k) {
      a.topk_ids[at] = padding ? kNoExpert : experts + k - a.top_k;
      a.topk_weights[at] = padding ? 0.f : a.shared_weight;
      continue;
    }
    leave(a.routing, a.experts, t, k, s.ids[k]);
    a.topk_ids[at] = is_zero_expert(k) ? kNoExpert : s.ids[k];
    a.topk_weights[at] = is_zero_expert(k) ? 0.f : s.weights[k];
  }
}

__global__ void __launch_bounds__(32) route_any(const __grid_constant__ AnyRouteArgs a) {
  extern __shared__ float smem[];
  pdl_wait();
  const RouteScratch s(smem, a);
  const int t = blockIdx.x;
  const bool padding = a.valid != nullptr && static_cast<uint32_t>(t) >= *a.valid;
  if (padding) {
    for (int k = threadIdx.x; k < a.top_k; k += 32) s.ids[k] = kNoExpert, s.weights[k] = 0;
    __syncwarp();
  } else {
    route_row(a, s, t);
    for (int k = threadIdx.x; k < a.top_k; k += 32)
      if (s.ids[k] != kNoExpert) s.ids[k] = balanced(a.routing, t, k, s.ids[k]);
    __syncwarp();
  }
  finish_row(a, s, t, padding);
}

/// Whether the sizes and pointers are consistent with each other for the method.
bool is_valid(const AnyRouteArgs& a) {
  const auto selection = static_cast<Selection>(a.selection);
  const bool grouped = selection == Selection::kGroupedMax || selection == Selection::kGroupedTopTwo;
  if (a.tokens < 0 || a.experts <= 0 || a.zero_experts < 0 || a.top_k <= 0 || a.shared_slots < 0 || a.vocab < 0 ||
      a.groups < 0 || a.selection < 0 || a.selection > 5 || !is_code(a.scoring, Scoring::kSqrtSoftplus))
    return false;
  if (grouped && (a.groups == 0 || a.experts % a.groups != 0 || a.topk_group <= 0 || a.topk_group > a.groups))
    return false;
  if (selection == Selection::kHash && (a.table == nullptr || a.token_ids == nullptr)) return false;
  return selection == Selection::kGiven ? a.given_ids != nullptr : a.logits != nullptr;
}

}  // namespace
}  // namespace moe

/// Routes rows. A NaN logit is never chosen, and makes all scores of a softmax NaN. A slot without a choice gets
/// u32::MAX and weight 0, and so does every slot of a padding row. Forced and given ids must be below L or absent, and
/// distinct. It refuses more experts than shared memory has room for (about 28,000).
extern "C" int moe_any_route(const moe::AnyRouteArgs* args, void* stream) {
  using namespace moe;
  if (args == nullptr || !is_valid(*args)) return cudaErrorInvalidValue;
  if (args->tokens == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const size_t smem = RouteScratch::bytes(*args);
  if (smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  return launch(route_any, {dim3(args->tokens), dim3(32), stream, smem}, *args);
}
