// What the roles of a block of the weight-streaming expert kernels share: its tiles, flags and shared memory.
//
// SMs get unequal shares of a saturated memory (equal work took 193 to 258 us). So a block is assigned all its tiles of
// the first product and half of its tiles of the second, in consecutive runs, and takes the rest by ticket. Which block
// computes a tile does not change its bits.
#pragma once

#include "experts/stream.cuh"

namespace moe::stream {

/// Consecutive tiles of one group; none: there are no more.
struct Run {
  uint16_t group, first, end;
};

/// Calls f(run) for each run of this block's share of `total` tiles, `tiles` to a group.
template <class F>
__device__ __forceinline__ void for_each_run(int total, int tiles, F f) {
  const Range range = share(total);
  int group = range.begin / tiles, first = range.begin % tiles;
  for (int left = range.end - range.begin; left > 0; first = 0, ++group) {
    const int end = min(tiles, first + left);
    f(Run{static_cast<uint16_t>(group), static_cast<uint16_t>(first), static_cast<uint16_t>(end)});
    left -= end - first;
  }
}

/// This launch's flags in the shared buffer.
struct Flags {
  uint32_t* set;    // grid barrier, tickets, one flag per group
  uint32_t* other;  // the set of the launches before and after

  /// `left` is the first word pair of the buffer: how many blocks have ended, over all launches. It grows by gridDim.x
  /// with each launch, and cannot reach the next multiple before this block has ended.
  __device__ Flags(const Args& a, uint64_t left) {
    const bool odd = left / gridDim.x % 2 != 0;
    uint32_t* sets = a.flags + kFlagHeader;
    set = sets + (odd ? a.flag_set : 0);
    other = sets + (odd ? 0 : a.flag_set);
  }

  __device__ uint32_t* arrived() const { return set; }
  __device__ uint32_t* tickets() const { return set + 1; }
  __device__ uint32_t* group(int u) const { return set + kSetHeader + u; }
};

/// Everything the roles of a block share.
template <class Weights>
struct Block {
  const Weighted<Weights>& a;
  Layout l;
  uint8_t* smem;
  uint64_t left;
  int groups;

  __device__ uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(smem) + stage; }
  __device__ uint64_t* empty(int stage) const { return full(kMaxStages + stage); }
  __device__ uint64_t* rows_full(int i) const { return full(2 * kMaxStages + i % 2); }
  __device__ uint64_t* rows_empty(int i) const { return full(2 * kMaxStages + 2 + i % 2); }
  __device__ uint64_t* run_full(int i) const { return full(2 * kMaxStages + 4 + i % 4); }
  __device__ Run* run(int i) const { return reinterpret_cast<Run*>(full(2 * kMaxStages + 8)) + i % 4; }
  __device__ uint8_t* stage(int i) const { return smem + l.stage + i * a.stage_bytes; }
  __device__ Group group(int u) const { return Routing(smem, l).groups[u]; }
  __device__ int slot(int place) const { return Routing(smem, l).sorted[place]; }

  /// The rows of the i-th run of a product. There is one place for token rows, and two in turn for activations.
  __device__ uint8_t* rows(int product, int i, int pass) const {
    return smem + l.rows + (product == 1 && i % 2 != 0 ? pass * padded(a.inter) : 0);
  }
  /// The number of tiles of the down product that are assigned beforehand.
  __device__ int assigned() const { return groups * a.tiles(1) / 2 / kTicketTiles * kTicketTiles; }

  /// Waits for the i-th run by ticket.
  __device__ Run wait_for_ticket(int i) const {
    mbarrier_wait(run_full(i), i / 4 % 2);
    return *run(i);
  }
};

/// Calls f(product, run, i) for all runs of this block; i counts within the product.
template <class Weights, class F>
__device__ __forceinline__ void for_each_run_and_ticket(const Block<Weights>& b, F f) {
  int i = 0;
  for_each_run(b.groups * b.a.tiles(0), b.a.tiles(0), [&](const Run& run) { f(0, run, i++); });
  i = 0;
  for_each_run(b.assigned(), b.a.tiles(1), [&](const Run& run) { f(1, run, i++); });
  for (int ticket = 0;; ++ticket) {
    const Run run = b.wait_for_ticket(ticket);
    if (run.first == run.end) return;
    f(1, run, i++);
  }
}

}  // namespace moe::stream
