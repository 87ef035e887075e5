// The thread of the layer kernels that loads weights to shared memory, for every kind of weights.
#pragma once

#include "layer/stream.cuh"

namespace moe::layer {

#if MOE_HAS_TMA

/// The tile that a block begins with if the experts are chosen in this launch. The tiles of the first token's experts
/// are assigned to the blocks in order: shared experts first, then the chosen ones, the likeliest first. So memory has
/// work while the other experts are still being chosen.
struct Head {
  int rank, place;  // rank of the expert, -1: there is no head; place of the tile among the expert's tiles

  __device__ __forceinline__ explicit Head(const Args& a) : rank(0), place(blockIdx.x) {
    const int per_expert = a.inter / kPairs;
    for (; place >= per_expert; place -= per_expert) ++rank;
    if (a.expert_map != nullptr || a.num_local < a.num_ids() || a.chunk[0] < a.hidden) rank = -1;
  }

  /// The rank of a token's slot: shared experts come after the chosen ones in the slots, and are known before them.
  static __device__ __forceinline__ int rank_of(const Args& a, int slot) {
    return slot < a.route.top_k ? slot + a.route.shared : slot - a.route.top_k;
  }

  /// Loads the tile to the first stage. One lane calls it.
  template <class Weights>
  __device__ __forceinline__ void load(const Weighted<Weights>& a, const Shared& s, uint32_t expert) const {
    a.w.load_head(a, s.stage(0, 0), expert, place * kPairs, s.full(0, 0));
  }

  /// The first token's warp calls it, with `active` and `has` (whether there is an expert) for each lane's slot. It
  /// tells the consumers what the stage holds. Returns how many of the expert's tiles are heads.
  __device__ __forceinline__ int declare(const Args& a, const Shared& s, int active, bool has) const {
    const int lane = threadIdx.x % 32;
    const bool counts = has && lane < a.route.slots();
    const int chosen = __popc(__ballot_sync(0xffffffffu, counts));
    if (rank < 0) return 0;
    if (counts && rank_of(a, lane) == rank) *s.tile(0) = {static_cast<uint16_t>(active), kPairs, place * kPairs};
    return min(static_cast<int>(gridDim.x), chosen * (a.inter / kPairs));
  }
};

/// Loads stages to shared memory, in the order in which `Consumer` takes them. One thread.
template <class Weights>
struct Loader {
  const Weighted<Weights>& a;
  const Shared& s;
  int num_active;
  Cursor at = {}, landed = {};  // of the first product
  int flying = 0;

  /// Waits until the oldest stage has come if too many are in flight: requests for which memory has no capacity yet
  /// delay the words for which all blocks wait.
  __device__ __forceinline__ void bound(int product, Cursor& oldest) {
    if (++flying <= kFlying) return;
    mbarrier_wait(s.full(product, oldest.stage), oldest.parity);
    oldest.advance(a.stages[product]);
    --flying;
  }

  __device__ __forceinline__ void load_pairs(int active, int row) {
    const uint32_t expert = s.expert()[active];
    a.w.epilogue.prefetch_gate_up(expert, a.inter, row);
    for (int k = 0; k < a.hidden; k += a.chunk[0]) {
      bound(0, landed);
      mbarrier_wait(s.empty(0, at.stage), at.parity ^ 1);
      *s.tile(at.stage) = {static_cast<uint16_t>(active), kPairs, row};
      a.w.load_gate_up(a, s.stage(0, at.stage), expert, row, k, s.full(0, at.stage));
      at.advance(a.stages[0]);
    }
  }

  /// Loads the tiles that are not heads. Of the first half, every gridDim-th tile is this block's, so that the active
  /// experts are finished one after the other. Then tiles are taken by ticket, and each ticket is requested while the
  /// tiles before it are loaded.
  __device__ __forceinline__ void load_gate_up(uint32_t* tickets, int heads) {
    const int per_expert = a.inter / kPairs, total = num_active * per_expert - heads,
              assigned = total - total / kByTicket;
    if (static_cast<int>(blockIdx.x) < heads) at.advance(a.stages[0]), flying = 1;
    // The place of a tile among its expert's tiles. It is counted, because a division would delay the first load.
    int active = 0, place = heads_of(0, heads), before = 0;
    for (int tile = blockIdx.x;; tile += gridDim.x) {
      if (tile >= assigned) tile = assigned + static_cast<int>(atomicAdd(tickets, 1));
      if (tile >= total) return;
      place += tile - before, before = tile;
      while (place >= per_expert) place += heads_of(++active, heads) - per_expert;
      load_pairs(active, place * kPairs);
    }
  }

  /// The number of an active expert's tiles that are heads. They are its first tiles.
  __device__ __forceinline__ int heads_of(int active, int heads) const {
    const uint32_t slot = s.active_slot(active)[0];  // slots of the first token are in the order of its choice
    const int per_expert = a.inter / kPairs;
    return slot == kNoSlot ? 0 : max(0, min(heads - Head::rank_of(a, slot) * per_expert, per_expert));
  }

  /// Tells the consumers that the first product is over, and in which stage the second one begins. It is the stage that
  /// becomes free first: stages of the first product become free in order, beginning with the stage after `at`.
  __device__ __forceinline__ int change_over() {
    mbarrier_wait(s.empty(0, at.stage), at.parity ^ 1);
    const int oldest = (at.stage + 1) % a.stages[0];
    const int first = ceil_div(oldest * s.stage_bytes[0], s.stage_bytes[1]) % a.stages[1];
    *s.tile(at.stage) = {0, 0, first};
    mbarrier_arrive(s.full(0, at.stage));
    at.advance(a.stages[0]);
    return first;
  }

  /// Waits until the first product no longer needs a stage of the second product.
  __device__ __forceinline__ void wait_for_first(int stage) const {
    const int begin = stage * s.stage_bytes[1] / s.stage_bytes[0];
    const int end = ((stage + 1) * s.stage_bytes[1] - 1) / s.stage_bytes[0];
    for (int i = begin; i <= min(end, a.stages[0] - 1); ++i)
      mbarrier_wait(s.empty(0, i), i >= at.stage ? at.parity ^ 1 : at.parity);
  }

  /// Loads rows [first, last) of every active expert's w2.
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
