// Geometry of the experts on warpgroup products, and the warps that load operands to shared memory (tensor_kernel.cuh).
//
// `W` describes how weights are stored and multiplied: Bf16Weights (tensor.cu), QuantWeights (quant/experts_tensor.cu),
// or the variants for few rows (quant/experts_few.cuh, quant/experts_digits.cuh). It has
//   kColumns      columns of a stage, a multiple of 64
//   kBytes        bytes of a stage's weights
//   kSideBytes    bytes of a stage's scales and zero points, which are copied from the Source of each product
//   load          loads a stage's weights, by one thread
//   kReleases     lanes of a consuming warp that arrive when a stage may be filled again
//   multiply      adds a work tile's products to accumulators, which belong to the token rows that result_row gives
//   gather        loads token rows, in the gathering warps; kRowArrivals: their arrivals for each stage
//   side          with CopiedRows: a gathering lane's part of copying scales and zero points
//   kFewBlocks<capacity>          blocks of an SM if a stage holds up to 32 token rows
//   kMostStages<capacity>         largest number of stages of a block's ring
//   kConsumerRegisters<capacity>  registers of a consuming thread, if not what the launch gives
//   Epilogue                      what is computed in addition to the products (epilogue.cuh)
#pragma once

#include "experts/epilogue.cuh"
#include "experts/tiles.cuh"

namespace moe::experts_tensor {

using namespace experts_tiles;

constexpr int kMaxStages = 16;
constexpr int kHeader = 1024;  // barriers and work tiles
constexpr int kPaceNs = 800;   // nanoseconds between the first stages
constexpr int kActRows = 8;    // rows of one load of activations: an atom of the swizzle

template <class W>
struct Args {
  const bf16* x;           // [T, H]
  const uint32_t* slots;   // of each expert, in its bucket [E, bucket]
  const uint32_t* counts;  // the number of slots in each bucket [E]
  bf16* act;               // [T K, I], in order of experts
  float* slot_rows;        // [T K, H], by slot
  Counters counters;       // progress in activation rows times work tiles
  int bucket;
  int tokens, top_k, num_local, hidden, inter, stages;
  bool guess;  // whether nearly every expert is touched: weights are then loaded before the touched experts are known
  typename W::Source source[2];
  typename W::Epilogue epilogue;

  /// The number of work tiles of one expert in each product: 64 gate and 64 up rows, or 128 rows of w2.
  __host__ __device__ int tiles(int product) const {
    return product == 0 ? inter / (kTileRows / 2) : ceil_div(hidden, kTileRows);
  }
  /// The number of stages of one work tile.
  __host__ __device__ int steps(int product) const { return ceil_div(product == 0 ? hidden : inter, W::kColumns); }
  __host__ __device__ int num_slots() const { return tokens * top_k; }
  __host__ __device__ int max_touched() const { return num_slots() < num_local ? num_slots() : num_local; }
  /// Where the ring begins in shared memory: after the barriers and the table of touched experts.
  __host__ __device__ int ring() const { return round_up(kHeader + (max_touched() + 1) * 8, 1024); }
};

/// 128 weight rows of an expert times up to `capacity` of its rows. If there are no rows, its stages are not
/// multiplied.
struct Work {
  int product, expert, tile;  // product -1: the end of the work
  int first, rows;            // places of its activations
  const uint32_t* slots;      // slots of its rows
  int total;                  // rows of the expert
  int steps;
};

/// Bytes of a stage with `capacity` token rows, rounded up so that each stage is aligned to the swizzle.
template <class W>
__host__ __device__ constexpr int stage_bytes(int capacity) {
  return W::kBytes + capacity * W::kColumns * 2;
}

/// Shared memory of a block: barriers, work tiles, table of experts, ring, and the scales and zero points of each
/// stage.
template <class W>
struct Block {
  static constexpr int kWorkSlots = 4;  // work tiles announced ahead to the other warps
  uint8_t *smem, *ring;
  int stages, bytes;

  __device__ __forceinline__ uint64_t* full(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(kMaxStages + s); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return full(2 * kMaxStages + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 512) + i % kWorkSlots; }
  /// The counters of this launch.
  __device__ __forceinline__ Counters::Set counters() const { return Counters::Set::kept(smem + kHeader - 16); }
  __device__ __forceinline__ void keep(const Counters::Set& set) const { set.keep(smem + kHeader - 16); }
  /// (expert, first place) of each touched expert, then (touched experts, all rows).
  __device__ __forceinline__ uint2* table() const { return reinterpret_cast<uint2*>(smem + kHeader); }
  __device__ __forceinline__ uint8_t* weights(int s) const { return ring + s * bytes; }
  /// Token rows: 64 columns of all rows, then the next 64.
  __device__ __forceinline__ uint8_t* rows(int s) const { return weights(s) + W::kBytes; }
  __device__ __forceinline__ uint8_t* side(int s) const { return ring + stages * bytes + s * W::kSideBytes; }

  static_assert((2 * kMaxStages + 2 * kWorkSlots) * 8 <= 512 && kWorkSlots * sizeof(Work) <= 512 - 16);
};

#if MOE_HAS_WGMMA

/// Keeps a value in a register. Where registers are short, the compiler would compute it again for each stage.
__device__ __forceinline__ void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }

/// Makes the table of touched experts from the counts of their buckets, and chooses the set of counters. One warp does
/// it; it issues all its loads first.
template <class W>
__device__ __forceinline__ void scan_counts(const Block<W>& b, const Args<W>& a) {
  constexpr int kEach = 8;
  const int lane = threadIdx.x % 32;
  const Counters::Set set = a.counters.set(__ldcg(a.counters.next()));
  uint32_t touched = 0, rows = 0;
  for (int first = 0; first < a.num_local; first += 32 * kEach) {
    uint32_t count[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = first + i * 32 + lane;
      count[i] = expert < a.num_local ? __ldcg(a.counts + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t some = __ballot_sync(0xffffffffu, count[i] > 0);
      uint32_t total;
      const uint32_t before = warp_exclusive_sum(count[i], &total), expert = first + i * 32 + lane;
      if (count[i] > 0) b.table()[touched + __popc(some & ((1u << lane) - 1))] = make_uint2(expert, rows + before);
      touched += __popc(some), rows += total;
    }
  }
  if (lane == 0) b.table()[a.max_touched()] = {touched, rows}, b.keep(set);
}

/// Copies what the routing chose to shared memory, so that no work tile begins with a chain of loads. All threads call
/// it.
template <class W>
__device__ __forceinline__ void fill_table(const Block<W>& b, const Args<W>& a) {
  if (threadIdx.x < 32) scan_counts(b, a);
  __syncthreads();
}

/// The thread that loads weights: it takes the block's work tiles and announces them to the other warps.
template <class W>
struct Producer {
  const Block<W>& b;
  const Args<W>& a;
  const CUtensorMap *w13, *w2;
  // Weights are evicted from L2 before rows, activations and results (T = 128: this saves 5 us of 301), except if an
  // expert reads them again.
  const uint64_t once = read_once(), again = read_again();
  uint64_t policy = once;
  Cursor at = {};
  int announced = 0;

  /// Loads the weights of a work tile's step to a stage: alternating gate and up rows, or 128 rows of w2.
  __device__ __forceinline__ void load(int product, int expert, int tile, int step, int stage) const {
    arrive_expecting(b.full(stage), W::kBytes);
    W::load(b.weights(stage), product == 0 ? w13 : w2, a, product, expert, tile, step, b.full(stage), policy);
  }

  __device__ __forceinline__ void announce(const Work& work) { announce_work(b, work, &announced); }

  /// The block's first work tile has the number of the block: if all experts before it are touched, its weights are
  /// known. Loads as many of its stages as the ring has, and returns their number. The loads are issued one after the
  /// other: all at once, they would slow down the short kernels before this one, which wait for one load after another
  /// (a layer at T = 128: 349 us at once, 343 this way).
  __device__ __forceinline__ int guess() const {
    const int expert = blockIdx.x / a.tiles(0);
    const int ahead = a.guess && expert < a.num_local ? min(b.stages, a.steps(0)) : 0;
    for (int i = 0; i < ahead; ++i) {
      load(0, expert, blockIdx.x % a.tiles(0), i, i);
      __nanosleep(kPaceNs);
    }
    return ahead;
  }

  /// Loads all work tiles of the block; `guess` has loaded the first `ready` stages.
  template <int kCapacity>
  __device__ __forceinline__ void run(int ready) {
    const uint2* table = b.table();
    const uint2 end = table[a.max_touched()];
    const int experts = end.x, guessed = blockIdx.x / a.tiles(0);
    if (ready > 0 && (guessed >= experts || static_cast<int>(table[guessed].x) != guessed)) {
      announce({0, guessed, 0, 0, 0, nullptr, 0, ready});
      for (; ready > 0; --ready) at.advance(b.stages);
    }
    uint32_t* tickets = b.counters().tickets();
    const int gate_up = experts * a.tiles(0), total = gate_up + experts * a.tiles(1);
    for (int ticket = blockIdx.x; ticket < total;) {
      const int product = ticket < gate_up ? 0 : 1, n = product == 0 ? ticket : ticket - gate_up;
      const int touched = n / a.tiles(product), tile = n % a.tiles(product), steps = a.steps(product);
      const int expert = table[touched].x, first = table[touched].y;
      const int last = touched + 1 < experts ? table[touched + 1].y : end.y;
      const uint32_t* slots = a.slots + static_cast<size_t>(expert) * a.bucket;
      uint32_t taken = 0;
      policy = last - first > kCapacity ? again : once;
      for (int place = first; place < last; place += kCapacity) {
        announce(
            {product, expert, tile, place, min(kCapacity, last - place), slots + (place - first), last - first, steps});
        for (int i = 0; i < steps; ++i) {
          // The ticket is taken as late as its latency allows: the block that is furthest ahead takes the next work
          // tile.
          if (i == max(steps - 6, 0) && place + kCapacity >= last) taken = atomicAdd(tickets, 1);
          if (i >= ready) {
            mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
            load(product, expert, tile, i, at.stage);
          }
          at.advance(b.stages);
        }
        ready = 0;
      }
      ticket = gridDim.x + taken;
    }
    announce({-1, 0, 0, 0, 0, nullptr, 0, 0});
  }
};

/// Waits until an expert's activations are there. `all` becomes true when the activations of all experts are there.
template <class W>
__device__ __forceinline__ void await_activations(const Block<W>& b, const Args<W>& a, const Work& work,
                                                  uint32_t all_rows, bool* all) {
  if (*all) return;
  const uint32_t tiles = a.tiles(0);
  const Counters::Set set = b.counters();
  *all = load_acquire(set.finished()) == all_rows * tiles;
  while (!*all && load_acquire(set.progress(work.expert)) < work.total * tiles) {}
  fence_async_proxy();
}

/// A lane's part of a work tile's rows of x: 16 bytes of some rows in each 64 columns.
template <int kCapacity, class W>
struct Rows {
  static constexpr int kEach = ceil_div(kCapacity * 8, kGatherLanes), kApart = kGatherLanes / 8;
  const bf16* from[kEach];
  int first, column, rows;

  __device__ __forceinline__ Rows(const Args<W>& a, const Work& work, int index)
      : first(index / 8), column(index % 8), rows(work.rows) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int r = first + i * kApart;
      from[i] = r < rows ? a.x + static_cast<size_t>(work.slots[r] / a.top_k) * a.hidden + column * 8 : nullptr;
    }
  }

  /// Copies this part of the next step. `left`: the number of columns that are left; after them x is zero.
  __device__ __forceinline__ void copy(uint8_t* to, int left) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int r = first + i * kApart;
      if (r >= rows) continue;
      uint8_t* at = to + r * 128 + ((column ^ (r & 7)) << 4);
      cp_async16(at, from[i]);
#pragma unroll
      for (int part = 1; part < W::kColumns / kTileColumns; ++part)
        cp_async16_or_zero(at + part * (kCapacity * 128), from[i] + part * kTileColumns, part * kTileColumns < left);
      from[i] += W::kColumns;
    }
  }
};

/// Loads this warp's share of the activations: every third box of 8 rows, which are in order of experts. One thread
/// calls it; it adds the bytes to what the barrier expects.
template <int kCapacity, class W>
__device__ __forceinline__ void load_activations(const Block<W>& b, const CUtensorMap* act, const Work& work, int stage,
                                                 int step, int warp) {
  constexpr int kParts = W::kColumns / kTileColumns;
  uint64_t* full = b.full(stage);
  const int share = work.rows - warp * kActRows;
  if (share > 0) expect_bytes(full, ceil_div(share, kGatherers * kActRows) * kActRows * W::kColumns * 2);
  for (int r = warp * kActRows; r < work.rows; r += kGatherers * kActRows) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      load_tile(b.rows(stage) + part * (kCapacity * 128) + r * 128, act, work.first + r,
                step * W::kColumns + part * kTileColumns, full);
  }
}

/// The warps that load token rows, scales and zero points.
template <int kCapacity, class W>
__device__ __forceinline__ void gather(const Block<W>& b, const Args<W>& a, const CUtensorMap* act) {
  const int index = threadIdx.x - (kConsumers + 1) * 32, warp = index / 32;
  const uint32_t all_rows = b.table()[a.max_touched()].y;
  bool all = false;
  Cursor at;
  const auto await_stage = [&](const auto& side, int step) {
    mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
    if constexpr (W::kSideBytes > 0) side.copy(b.side(at.stage), step);
  };
  for_each_work(b, [&](const Work& work) {
    const auto side = W::side(a, work.product, work.expert, work.tile, index);
    if (work.product == 0) {
      Rows<kCapacity, W> rows(a, work, index);
      for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
        await_stage(side, step);
        rows.copy(b.rows(at.stage), a.hidden - step * W::kColumns);
        cp_async_arrive(b.full(at.stage));
        __syncwarp();
      }
      return;
    }
    if (elect_one()) await_activations(b, a, work, all_rows, &all);
    __syncwarp();
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      await_stage(side, step);
      if (elect_one()) {
        load_activations<kCapacity>(b, act, work, at.stage, step, warp);
        if constexpr (W::kSideBytes == 0) mbarrier_arrive_many(b.full(at.stage), 32);  // for all lanes
      }
      __syncwarp();
      if constexpr (W::kSideBytes > 0) cp_async_arrive(b.full(at.stage));
    }
  });
}

#endif  // MOE_HAS_WGMMA

/// Token rows without conversion, in the swizzle of warpgroup products.
struct CopiedRows {
  static constexpr int kFewestRows = 8;  // least rows of a product
  static constexpr int kRowArrivals = kGatherLanes;
  template <int kCapacity>
  static constexpr int kMostStages = experts_tensor::kMaxStages;

#if MOE_HAS_WGMMA
  /// The token row of a lane's i-th result.
  static __device__ __forceinline__ int result_row(int i) {
    return i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }

  template <int kCapacity, class W>
  static __device__ __forceinline__ void gather(const Block<W>& b, const Args<W>& a, const CUtensorMap* act) {
    experts_tensor::gather<kCapacity>(b, a, act);
  }
#endif
};

/// The number of sums of a lane for kRows token rows.
template <int kRows>
constexpr int kSums = kRows < 8 ? 4 : kRows / 2;

}  // namespace moe::experts_tensor
