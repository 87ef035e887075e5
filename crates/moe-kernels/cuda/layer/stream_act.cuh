// Activations of the layer kernels: they are made from sums, written as words to L2, and read into the shared memory of
// all blocks.
#pragma once

#include "layer/stream.cuh"

namespace moe::layer {

#if MOE_HAS_TMA

/// One warp writes the activations of this block's tiles to L2: a lane for each pair and token, two pairs in a word.
template <class Weights>
__device__ __forceinline__ void activate(const Weighted<Weights>& a, const Shared& s, uint32_t number) {
  const int lane = threadIdx.x % 32, pair = lane % kPairs, token = min(lane / kPairs, a.tokens - 1);
  for (int i = 0;; ++i) {
    const int buffer = i % kParts;
    mbarrier_wait(s.parts_full(buffer), i / kParts % 2);
    const Tile tile = *s.parts_tile(buffer);
    if (tile.pairs == 0) return;
    const float scale = s.scale()[token];
    const auto biases = a.w.epilogue.gate_up(s.expert()[tile.active], a.inter, tile.row + pair);
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
      const float* part = s.parts(buffer) + (w * 2 * kPairs + pair) * a.tokens + token;
      gate += part[0], up += part[kPairs * a.tokens];
    }
    warp_arrive(s.parts_empty(buffer));
    gate *= scale, up *= scale;
    const float value = a.w.epilogue.activate(gate, up, biases), next = __shfl_down_sync(0xffffffffu, value, 1);
    const uint32_t slot = s.active_slot(tile.active)[token];
    if (lane % 2 == 0 && lane / kPairs < a.tokens && slot != kNoSlot) {
      const uint64_t word = static_cast<uint64_t>(number) << 32 | pack_bf16(value, next);
      store_relaxed(a.act() + (static_cast<size_t>(slot) * a.inter + tile.row + pair) / 2, word);
    }
  }
}

/// One of kFetchers warps copies the activations of active experts to shared memory. In L2 they are words that show
/// whether they belong to this launch. A waiting lane polls only the last one of its words, so that it reads little.
__device__ __forceinline__ void fetch_activations(const Args& a, const Shared& s, int fetcher, uint32_t number) {
  const int lane = threadIdx.x % 32, pieces = a.inter / 4, num_active = *s.num_active();
  const auto is_there = [=](const uint4& v) { return v.y == number && v.w == number; };
  for (int u = fetcher; u < num_active; u += kFetchers) {
    for (int t = 0; t < a.tokens; ++t) {
      const uint32_t slot = s.active_slot(u)[t];
      if (slot == kNoSlot) continue;
      const uint64_t* from = a.act() + static_cast<size_t>(slot) * a.inter / 2;
      uint2* to = reinterpret_cast<uint2*>(s.act() + slot * a.inter * 2);
      const int last = lane + (pieces - 1 - lane) / 32 * 32;
      if (lane < pieces)
        while (!is_there(load_relaxed_pair(from + 2 * last))) __nanosleep(kPollNs);
      for (int first = lane; first < pieces; first += 32 * kPieces) {
        uint4 v[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (first + i * 32 < pieces) v[i] = load_relaxed_pair(from + 2 * (first + i * 32));
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int at = first + i * 32;
          if (at >= pieces) break;
          while (!is_there(v[i])) v[i] = load_relaxed_pair(from + 2 * at);
          to[at] = {v[i].x, v[i].z};
        }
      }
    }
    warp_arrive(s.act_full(u));
  }
}

#endif  // MOE_HAS_TMA

}  // namespace moe::layer
