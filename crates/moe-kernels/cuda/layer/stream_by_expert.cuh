// The down product of the layer kernels with an expert to a warp, where its weights are a few kilobytes.
//
// With all warps on one expert each takes one or two steps of 64 columns of it, and what surrounds them (slot, weight,
// two barriers, the first words of a stage, each some 30 clocks after the one before) takes longer than they do: 0.65
// us for an expert of Qwen3-30B-A3B at 4 bits, 5.2 us for eight, all of whose weights and activations were there. A
// warp that has an expert to itself pays for that once, and its steps overlap: 1 us less for one token, 6 for four.
//
// An expert's sum is a warp's, in the order of K, and a token's are added in ascending order of its experts: which warp
// takes which expert changes no bit.
#pragma once

#include "layer/stream.cuh"

namespace moe::layer {

#if MOE_SM90

template <class Weights>
struct DownByExpert {
  const Weighted<Weights>& a;
  const Shared& s;
  int tiles;  // that the first product has had: buffers of parts that may still be read

  /// Sums of this warp's experts for 16 rows of w2, [active expert, row, token], in the first product's buffers.
  __device__ __forceinline__ float* parts() const { return s.parts(0); }

  __device__ __forceinline__ void await_parts() const {
    for (int i = tiles + 1; i < tiles + kParts; ++i) mbarrier_wait(s.parts_empty(i % kParts), i / kParts % 2 ^ 1);
  }

  /// One active expert's sums, whose stages begin at `at`.
  __device__ __forceinline__ void multiply(int u, int top, Cursor at) const {
    const int lane = threadIdx.x % 32, token = lane % 4, g = lane / 4;
    const uint32_t* slots = s.active_slot(u);
    uint32_t slot = slots[min(lane / 8, a.tokens - 1)], any = slot;
    for (int t = 0; t < a.tokens; ++t) any = min(any, slots[t]);
    const uint8_t* act = s.act() + (slot == kNoSlot ? any : slot) * a.inter * 2;
    const uint32_t expert = s.expert()[u];
    mbarrier_wait(s.act_full(u), 0);
    typename Weights::Sums acc = {};
    for (int k = 0; k < a.inter; k += a.chunk[1], at.advance(a.stages[1])) {
      mbarrier_wait(s.full(1, at.stage), at.parity);
      a.w.multiply_all(a, s.stage(1, at.stage), expert, top, k, act, acc);
    }
    if (token >= a.tokens) return;
    float* to = parts() + (u * kDownRows + g) * a.tokens + token;
    to[0] = Weights::sum(acc, 0), to[kDownRows / 2 * a.tokens] = Weights::sum(acc, 1);
  }

  /// The weighted sum of a row for a token.
  __device__ __forceinline__ float add(int num_active, int row, int token) const {
    float sum = 0;
#pragma unroll 4
    for (int u = 0; u < num_active; ++u) {
      const float part = parts()[(u * kDownRows + row) * a.tokens + token];
      if (s.active_slot(u)[token] != kNoSlot) sum = fmaf(s.active_weight(u)[token], part, sum);
    }
    return sum;
  }

  /// Rows [first, last) of the output, by the multiplying warps. The first stage is `stage`.
  __device__ __forceinline__ void run(Output output, int num_active, int first, int last, int stage) const {
    const int warp = threadIdx.x / 32, my_row = threadIdx.x % kDownRows, my_token = threadIdx.x / kDownRows;
    const int chunks = ceil_div(a.inter, a.chunk[1]);
    Cursor at = {stage};
    int refills = ceil_div(last - first, kDownRows) * num_active * chunks - a.stages[1];
    for (int top = first; top < last; top += kDownRows) {
      const bool mine = my_token < a.tokens && my_row < min(kDownRows, last - top);
      const size_t to = static_cast<size_t>(my_token) * a.hidden + top + my_row;
      const float value = mine ? before(output, a.out, to) : 0.0f;
      if (top == first) await_parts();
      for (int u = 0; u < num_active; ++u) {
        if (u % kConsumers == warp) multiply(u, top, at);
        for (int c = 0; c < chunks; ++c, at.advance(a.stages[1])) {
          if (refills-- <= 0) continue;
          // Also of a stage that others multiply: its barrier counts all warps, in the round that has come.
          mbarrier_wait(s.full(1, at.stage), at.parity);
          release_to_copies(s.empty(1, at.stage));
        }
      }
      consumers_sync();
      if (mine) store(output, a.out, to, value + add(num_active, my_row, my_token));
      if (top + kDownRows < last) consumers_sync();
    }
  }
};

#endif  // MOE_SM90

}  // namespace moe::layer
