// The warps of the weight-streaming expert kernels that load weights and rows to shared memory.
#pragma once

#include "experts/stream_block.cuh"

namespace moe::stream {

template <class Weights>
__device__ void load_weights(const Block<Weights>& b) {
  Cursor at;
  for_each_run_and_ticket(b, [&](int product, const Run& run, int) {
    const int expert = b.group(run.group).expert;
    for (int tile = run.first; tile < run.end; ++tile) b.a.w.load_tile(b, product, expert, tile, at);
  });
}

/// Loads the rows of each run, takes the tickets, and tells other blocks which activations are written. The consumers
/// release a run's rows after their last write, so they need not wait for that.
template <int kPass, class Weights>
__device__ void load_rows(const Block<Weights>& b) {
  const Args& a = b.a;
  const bool leader = threadIdx.x % 32 == 0;
  const Flags flags(a, b.left);
  Run written = {0, 0, 0};  // the run whose activations have not been announced yet
  uint32_t parity = 1;
  const auto announce = [&] {
    if (written.first == written.end || !leader) return;
    fence_async_proxy();
    add_release(flags.group(written.group), written.end - written.first);
  };
  for_each_run(b.groups * a.tiles(0), a.tiles(0), [&](const Run& run) {
    mbarrier_wait(b.rows_empty(0), parity);
    parity ^= 1;
    const Group group = b.group(run.group);
    copy_rows(b.rows(0, 0, kPass), padded(a.hidden), group.rows, a.hidden * 2, b.rows_full(0),
              [&](int r) { return a.x + static_cast<size_t>(b.slot(group.first + r) / a.top_k) * a.hidden; });
    announce();
    written = run;
  });
  mbarrier_wait(b.rows_empty(0), parity);
  announce();

  // The barriers of both places are in their first phase for the second product, except that the barriers of place 0
  // have been used: `phase` continues them.
  const uint32_t phase0 = parity ^ 1;
  const auto load = [&](const Run& run, int i) {
    const uint32_t phase = i % 2 == 0 ? phase0 + i / 2 : i / 2;
    if (i > 1) mbarrier_wait(b.rows_empty(i), (phase ^ 1) & 1);
    while (load_acquire(flags.group(run.group)) < static_cast<uint32_t>(a.tiles(0))) {}
    fence_async_proxy();
    const Group group = b.group(run.group);
    copy_rows(b.rows(1, i, kPass), padded(a.inter), group.rows, a.inter * 2, b.rows_full(i),
              [&](int r) { return a.act + static_cast<size_t>(b.slot(group.first + r)) * a.inter; });
  };
  const int total = b.groups * a.tiles(1);
  const auto take_ticket = [&] { return leader ? atomicAdd(flags.tickets(), 1) : 0; };
  uint32_t taken = take_ticket();  // the next ticket is in flight while the rows of this one are loaded
  int i = 0;
  for_each_run(b.assigned(), a.tiles(1), [&](const Run& run) { load(run, i++); });
  for (int ticket = 0;; ++ticket) {
    const int first = b.assigned() + static_cast<int>(__shfl_sync(0xffffffffu, taken, 0)) * kTicketTiles;
    const int tile = first % a.tiles(1);
    const bool more = first < total;
    const Run run = {static_cast<uint16_t>(first / a.tiles(1)), static_cast<uint16_t>(tile),
                     static_cast<uint16_t>(more ? tile + kTicketTiles : tile)};
    if (leader) {
      *b.run(ticket) = run;
      mbarrier_arrive(b.run_full(ticket));
    }
    if (!more) return;
    taken = take_ticket();
    load(run, i++);
  }
}

}  // namespace moe::stream
