// The thread of the layer kernels that brings weights to shared memory, whatever kind they are of.
#pragma once

#include "layer/stream.cuh"

namespace moe::layer {

#if MOE_HAS_TMA

/// The tile that a block begins with where the experts are chosen here. It belongs to the first token's shared experts,
/// then to its likeliest ones, a block for each of their tiles, so that memory has work while the others are still
/// being chosen.
struct Head {
  int rank, place;  // of the expert, -1: there is no head; of the tile among the expert's

  __device__ __forceinline__ explicit Head(const Args& a) : rank(0), place(blockIdx.x) {
    const int per_expert = a.inter / kPairs;
    for (; place >= per_expert; place -= per_expert) ++rank;
    if (a.expert_map != nullptr || a.num_local < a.num_ids() || a.chunk[0] < a.hidden) rank = -1;
  }

  /// The rank of a token's slot: shared experts lie behind the chosen ones and are known before them.
  static __device__ __forceinline__ int rank_of(const Args& a, int slot) {
    return slot < a.route.top_k ? slot + a.route.shared : slot - a.route.top_k;
  }

  /// Loads the tile to the first stage. One lane.
  template <class Weights>
  __device__ __forceinline__ void load(const Weighted<Weights>& a, const Shared& s, uint32_t expert) const {
    a.w.load_head(a, s.stage(0, 0), expert, place * kPairs, s.full(0, 0));
  }

  /// Called by the first token's warp, with `active` and whether there is an expert in each lane's slot. Tells the
  /// consumers what the stage holds. Returns how many of the experts' tiles are heads.
  __device__ __forceinline__ int declare(const Args& a, const Shared& s, int active, bool has) const {
    const int lane = threadIdx.x % 32;
    const bool counts = has && lane < a.route.slots();
    const int chosen = __popc(__ballot_sync(0xffffffffu, counts));
    if (rank < 0) return 0;
    if (counts && rank_of(a, lane) == rank) *s.tile(0) = {static_cast<uint16_t>(active), kPairs, place * kPairs};
    return min(static_cast<int>(gridDim.x), chosen * (a.inter / kPairs));
  }
};

/// Brings stages to shared memory, in the order in which `Consumer` takes them. One thread.
template <class Weights>
struct Loader {
  const Weighted<Weights>& a;
  const Shared& s;
  int num_active;
  Cursor at = {}, landed = {};  // of the first product
  int flying = 0;

  /// Waits until the oldest stage has come if too many are on their way: requests that memory cannot take yet stand
  /// in front of the words on which all blocks wait.
  __device__ __forceinline__ void bound(int product, Cursor& oldest) {
    if (++flying <= kFlying) return;
    mbarrier_wait(s.full(product, oldest.stage), oldest.parity);
    oldest.advance(a.stages[product]);
    --flying;
  }

  __device__ __forceinline__ void load_pairs(int active, int row) {
    const uint32_t expert = s.expert()[active];
    for (int k = 0; k < a.hidden; k += a.chunk[0]) {
      bound(0, landed);
      mbarrier_wait(s.empty(0, at.stage), at.parity ^ 1);
      *s.tile(at.stage) = {static_cast<uint16_t>(active), kPairs, row};
      a.w.load_gate_up(a, s.stage(0, at.stage), expert, row, k, s.full(0, at.stage));
      at.advance(a.stages[0]);
    }
  }

  /// Loads the tiles that are no heads: every gridDim-th of the first half, so that the active experts are finished one
  /// after the other, then tickets, each taken while the tiles before it come.
  __device__ __forceinline__ void load_gate_up(uint32_t* tickets, int heads) {
    const int per_expert = a.inter / kPairs, total = num_active * per_expert - heads,
              assigned = total - total / kByTicket;
    if (static_cast<int>(blockIdx.x) < heads) at.advance(a.stages[0]), flying = 1;
    // Place of a tile among its expert's: a division would stand before the first load.
    int active = 0, place = heads_of(0, heads), before = 0;
    for (int tile = blockIdx.x;; tile += gridDim.x) {
      if (tile >= assigned) tile = assigned + static_cast<int>(atomicAdd(tickets, 1));
      if (tile >= total) return;
      place += tile - before, before = tile;
      while (place >= per_expert) place += heads_of(++active, heads) - per_expert;
      load_pairs(active, place * kPairs);
    }
  }

  /// How many of a active expert's tiles are heads: its first ones.
  __device__ __forceinline__ int heads_of(int active, int heads) const {
    const uint32_t slot = s.active_slot(active)[0];  // of the first token, whose slots are in the order of its choice
    const int per_expert = a.inter / kPairs;
    return slot == kNoSlot ? 0 : max(0, min(heads - Head::rank_of(a, slot) * per_expert, per_expert));
  }

  /// Tells the consumers that the first product is over, and in which stage the second one begins: the one that is free
  /// first. Stages of the first are freed from the one after `at` on.
  __device__ __forceinline__ int change_over() {
    mbarrier_wait(s.empty(0, at.stage), at.parity ^ 1);
    const int oldest = (at.stage + 1) % a.stages[0];
    const int first = ceil_div(oldest * s.stage_bytes[0], s.stage_bytes[1]) % a.stages[1];
    *s.tile(at.stage) = {0, 0, first};
    mbarrier_arrive(s.full(0, at.stage));
    at.advance(a.stages[0]);
    return first;
  }

  /// Waits until the first product needs nothing of a stage of the second any more.
  __device__ __forceinline__ void wait_for_first(int stage) const {
    const int begin = stage * s.stage_bytes[1] / s.stage_bytes[0];
    const int end = ((stage + 1) * s.stage_bytes[1] - 1) / s.stage_bytes[0];
    for (int i = begin; i <= min(end, a.stages[0] - 1); ++i)
      mbarrier_wait(s.empty(0, i), i >= at.stage ? at.parity ^ 1 : at.parity);
  }

  /// Rows [first, last) of every active expert's w2.
  __device__ __forceinline__ void load_down(int first, int last) {
    Cursor to = {change_over()}, oldest = to;
    flying = 0;
    bool used = false;  // whether the ring has been filled once
    for (int top = first; top < last; top += kDownRows) {
      const int rows = min(kDownRows, last - top);
      for (int u = 0; u < num_active; ++u) {
        const uint32_t expert = s.expert()[u];
        for (int k = 0; k < a.inter; k += a.chunk[1]) {
          bound(1, oldest);
          if (used) mbarrier_wait(s.empty(1, to.stage), to.parity ^ 1);
          else wait_for_first(to.stage);
          a.w.load_down(a, s.stage(1, to.stage), expert, top, rows, k, s.full(1, to.stage));
          to.advance(a.stages[1]);
          used = used || to.turn == 0;
        }
      }
    }
  }
};

#endif  // MOE_HAS_TMA

}  // namespace moe::layer
