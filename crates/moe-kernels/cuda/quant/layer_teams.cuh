// The work of the warps of teams that do not multiply, after the experts are chosen: they add the shares of gate and up
// and of the output that the other warps leave.
#pragma once

#include "quant/layer_products.cuh"

namespace moe::quant_layer {

#if MOE_HAS_TMA

/// Adds a team's shares of its tiles of gate and up in the order of a pair's sums, and activates the sums.
template <class E>
__device__ __forceinline__ void activate_all(const WithEpilogue<E>& a, const Shared& s, const Tiles<Teams>& tiles,
                                             int team) {
  const int lane = threadIdx.x % 32, row = lane / 2;
  int turn = 0;  // of the team's tiles
#pragma unroll 1
  for (Tile t = tiles.start; tiles.has(t); t = tiles.behind(t)) {
    mbarrier_wait(a.early() ? s.expert_full(t.active) : s.active_full(), 0);
    if (s.expert()[t.active] == kNone) continue;
    const int buffer = team * Teams::kBuffers + turn % Teams::kBuffers;
    const uint32_t parity = turn / Teams::kBuffers % 2;
    const uint2 slots = *reinterpret_cast<const uint2*>(s.slot_of(t.active));
    const auto biases = a.epilogue.gate_up(s.expert()[t.active], a.inter, t.row * kOutputs + row % kOutputs);
    if (turn == 0) mbarrier_wait(a.early() ? s.expert_full(0) : s.active_full(), 0);
    const uint32_t number = *s.number();
    const float2 scales = *reinterpret_cast<const float2*>(s.scale());
    mbarrier_wait(s.shares_full(buffer), parity);
#pragma unroll
    for (int token = 0; token < Teams::kMost; ++token) {
      const uint32_t slot = token == 0 ? slots.x : slots.y;
      if (slot == kNone) continue;
      // A lane has half of the shares of a row; gate and up of an output are 8 rows apart.
      const float4 v = *reinterpret_cast<const float4*>(s.shares(buffer, token) + row * Teams::kPitch + lane % 2 * 4);
      float sum = 0.0f + v.x + v.y + v.z + v.w;
      sum = (sum + __shfl_xor_sync(0xffffffffu, sum, 1)) * (token == 0 ? scales.x : scales.y);
      const float value = a.epilogue.activate(sum, __shfl_down_sync(0xffffffffu, sum, 16), biases);
      const float next = __shfl_down_sync(0xffffffffu, value, 2);
      if (lane % 4 == 0 && lane < 16) store_pair(a, slot, t.row, lane / 4, pack_bf16(value, next), number);
    }
    warp_arrive(s.shares_free(buffer));
    ++turn;
  }
}

/// Stores the block's rows of the output.
__device__ __forceinline__ void store_all(const Args& a, const Shared& s, const Tiles<Teams>& tiles) {
#pragma unroll 1
  for (int pass = tiles.first; pass < tiles.last; ++pass) {
    const Result result(a, pass, threadIdx.x % 32);
    named_barrier(kPartsThere, kWorkers + 32);
    result.store(a, s);
    if (pass + 1 < tiles.last) named_barrier_arrive(kPartsRead, kWorkers + 32);
  }
}

#endif  // MOE_HAS_TMA

}  // namespace moe::quant_layer
