// Geometry of the experts' products for prompts, and the warps that load operands to shared memory (wide_kernel.cuh).
// `W` describes how weights are stored, as in tensor.cuh; its stages have 64 columns, and its kBytes are the bytes of
// one weight tile. kConsumerRegisters: registers of a consuming thread.
#pragma once

#include "experts/epilogue.cuh"
#include "experts/tiles.cuh"

namespace moe::experts_wide {

using namespace experts_tiles;

constexpr int kMostRows = 256;  // token rows of a work tile: the columns of one wgmma
constexpr int kPairRows = 128;  // token rows of a work tile of two weight tiles: a thread has as many sums as with one
constexpr int kGranule = 16;    // the step by which its columns grow
constexpr int kGroup = 16;      // work tiles that all rows of an expert multiply before the next kGroup work tiles
constexpr int kActRows = 32;    // rows of one load of activations
constexpr int kMaxStages = 8;
constexpr int kRing = 192 * 1024;
constexpr int kHeader = 1024;                  // barriers and work tiles
constexpr int kPieceBytes = 4096;              // results on their way to memory
constexpr int kStaging = 2 * 2 * kPieceBytes;  // two pieces for each consuming warpgroup
constexpr int kTableEntry = 16;
constexpr int64_t kKept = 16 << 20;  // bytes of activations up to which L2 is to keep them for the second product

/// The number of weight tiles of an expert in each product. One is 64 gate and 64 up rows, or 128 rows of w2.
__host__ __device__ inline int weight_tiles(int product, int hidden, int inter) {
  return product == 0 ? inter / (kTileRows / 2) : ceil_div(hidden, kTileRows);
}

template <class W>
struct Args {
  const bf16* x;           // [T, H]
  const uint32_t* slots;   // of each expert, in its bucket [E, bucket]
  const uint32_t* counts;  // of the buckets [E]
  bf16* act;               // [T K, I], in order of experts
  bf16* slot_rows;         // [T K, H], by slot
  Counters counters;       // progress in work tiles of one warpgroup
  int bucket, tokens, top_k, num_local, hidden, inter;
  int width;     // weight tiles of a work tile, one or two; the last work tile may have only the first of two
  int capacity;  // most token rows of a work tile, a multiple of kActRows
  typename W::Source source[2];
  typename W::Epilogue epilogue;

  /// The number of work tiles of an expert's weights in each product.
  __host__ __device__ int tiles(int product) const { return ceil_div(weight_tiles(product, hidden, inter), width); }
  /// The number of stages of one work tile.
  __host__ __device__ int steps(int product) const { return (product == 0 ? hidden : inter) / kTileColumns; }
  __host__ __device__ int num_slots() const { return tokens * top_k; }
  __device__ bool keeps_activations() const { return static_cast<int64_t>(num_slots()) * inter * 2 <= kKept; }
  __host__ __device__ int max_touched() const { return num_slots() < num_local ? num_slots() : num_local; }
  __host__ __device__ int stage_bytes() const { return width * W::kBytes + capacity * kTileColumns * 2; }
  __host__ __device__ int stages() const {
    const int fit = kRing / (stage_bytes() + width * W::kSideBytes);
    return fit < kMaxStages ? fit : kMaxStages;
  }
  /// The number of work tiles over which an expert's rows are spread evenly.
  __device__ int row_tiles(int rows) const { return ceil_div(round_up(rows, kGranule), capacity); }
  /// The number of parts in which the first product leaves the activations of `row_tiles` row tiles.
  __device__ uint32_t parts(int row_tiles) const { return 2u * row_tiles * tiles(0); }
  /// Where results and ring begin in shared memory: after the barriers and the table of touched experts.
  __host__ __device__ int staging() const { return round_up(kHeader + (max_touched() + 1) * kTableEntry, 1024); }
  __host__ __device__ int smem() const { return staging() + kStaging + kRing; }
};

/// `width` weight tiles of an expert times up to `capacity` of its rows.
struct Work {
  int product, expert, tile;  // product: -1 at the end of the work; tile: the first weight tile
  int first, rows;            // places of its activations
  int steps;
  uint32_t parts;         // parts of the expert's activations for which the second product waits
  const uint32_t* slots;  // slots of its rows
};

/// Shared memory of a block.
template <class W>
struct Block {
  static constexpr int kWorkSlots = 4;  // work tiles announced ahead to the other warps
  uint8_t *smem, *staging, *ring;
  int stages, bytes, width;

  __device__ __forceinline__ uint64_t* full(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(kMaxStages + s); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return full(2 * kMaxStages + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 512) + i % kWorkSlots; }
  /// The counters of this launch.
  __device__ __forceinline__ Counters::Set counters() const { return Counters::Set::kept(smem + kHeader - 16); }
  __device__ __forceinline__ void keep(const Counters::Set& set) const { set.keep(smem + kHeader - 16); }
  /// (expert, first place, first row tile, rows) of each touched expert, then (touched experts, places, row tiles).
  __device__ __forceinline__ uint4* table() const { return reinterpret_cast<uint4*>(smem + kHeader); }
  __device__ __forceinline__ uint8_t* weights(int s) const { return ring + s * bytes; }
  __device__ __forceinline__ uint8_t* rows(int s) const { return weights(s) + width * W::kBytes; }
  /// The scales and zero points of a stage, one weight tile after the other.
  __device__ __forceinline__ uint8_t* side(int s) const { return ring + stages * bytes + s * width * W::kSideBytes; }

  static_assert((2 * kMaxStages + 2 * kWorkSlots) * 8 <= 512 && kWorkSlots * sizeof(Work) <= 512 - 16);
};
static_assert(kHeader == 1024 && kTableEntry == 16 && kStaging + kRing == 212992,
              "the plan has Args::smem, too: src/plan/experts.rs");
static_assert(sizeof(uint4) == kTableEntry && kMostRows % kActRows == 0 && kActRows % kGranule == 0);

#if MOE_HAS_WGMMA

/// Makes the table of touched experts from the counts of their buckets, and chooses the set of counters. One warp does
/// it, with several loads at a time.
template <class W>
__device__ __forceinline__ void scan_counts(const Block<W>& b, const Args<W>& a) {
  constexpr int kEach = 4;
  const int lane = threadIdx.x % 32;
  const Counters::Set set = a.counters.set(__ldcg(a.counters.next()));
  uint32_t touched = 0, rows = 0, tiles = 0;
  for (int first = 0; first < a.num_local; first += 32 * kEach) {
    uint32_t count[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = first + i * 32 + lane;
      count[i] = expert < a.num_local ? __ldcg(a.counts + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t some = __ballot_sync(0xffffffffu, count[i] > 0), expert = first + i * 32 + lane;
      uint32_t all_rows, all_tiles;
      const uint32_t rows_before = warp_exclusive_sum(count[i], &all_rows);
      const uint32_t tiles_before = warp_exclusive_sum(static_cast<uint32_t>(a.row_tiles(count[i])), &all_tiles);
      if (count[i] > 0)
        b.table()[touched + __popc(some & ((1u << lane) - 1))] =
            make_uint4(expert, rows + rows_before, tiles + tiles_before, count[i]);
      touched += __popc(some), rows += all_rows, tiles += all_tiles;
    }
  }
  if (lane == 0) b.table()[a.max_touched()] = {touched, rows, tiles, 0}, b.keep(set);
}

/// The thread that loads weights: it takes the block's work tiles and announces them to the other warps.
template <class W>
struct Producer {
  const Block<W>& b;
  const Args<W>& a;
  const CUtensorMap *w13, *w2;
  Cursor at = {};
  int announced = 0;

  __device__ __forceinline__ void load(const Work& work, int step, uint64_t policy) const {
    uint64_t* full = b.full(at.stage);
    arrive_expecting(full, b.width * W::kBytes);
    for (int i = 0; i < a.width; ++i)
      W::load(b.weights(at.stage) + i * W::kBytes, work.product == 0 ? w13 : w2, a, work.product, work.expert,
              work.tile + i, step, full, policy);
  }

  /// The n-th work tile of an expert. Up to kGroup in turn have the same rows; then come the next rows; then the next
  /// weights. So blocks that run at the same time find each other's operands in L2.
  __device__ __forceinline__ Work work_at(int product, const uint4& entry, int n) const {
    const int tiles = a.tiles(product), rows = entry.w, row_tiles = a.row_tiles(rows);
    const int group = n / (row_tiles * kGroup), within = n - group * row_tiles * kGroup;
    const int width = min(kGroup, tiles - group * kGroup), row_tile = within / width;
    const int granules = ceil_div(rows, kGranule), each = granules / row_tiles, one_more = granules % row_tiles;
    const int from = (row_tile * each + min(row_tile, one_more)) * kGranule, expert = entry.x;
    return {product,
            expert,
            (group * kGroup + within % width) * a.width,
            static_cast<int>(entry.y) + from,
            min((each + (row_tile < one_more ? 1 : 0)) * kGranule, rows - from),
            a.steps(product),
            a.parts(row_tiles),
            a.slots + static_cast<size_t>(expert) * a.bucket + from};
  }

  /// Loads all work tiles of the block.
  __device__ __forceinline__ void run() {
    const uint4* table = b.table();
    const uint4 end = table[a.max_touched()];
    uint32_t* tickets = b.counters().tickets();
    const int gate_up = end.z * a.tiles(0), total = gate_up + end.z * a.tiles(1);
    const uint64_t once = read_once(), again = read_again();
    int product = 0, touched = 0;  // both only grow, because a block's tickets do
    for (int ticket = blockIdx.x; ticket < total;) {
      if (product == 0 && ticket >= gate_up) product = 1, touched = 0;
      const int n = ticket - product * gate_up, tiles = a.tiles(product);
      while (touched + 1 < static_cast<int>(end.x) && n >= static_cast<int>(table[touched + 1].z) * tiles) ++touched;
      const uint4 entry = table[touched];
      const Work work = work_at(product, entry, n - static_cast<int>(entry.z) * tiles);
      announce_work(b, work, &announced);
      const uint64_t policy = static_cast<int>(entry.w) <= a.capacity ? once : again;
      uint32_t taken = 0;
      for (int i = 0; i < work.steps; ++i, at.advance(b.stages)) {
        // The ticket is taken as late as its latency allows: the block that is furthest ahead takes the next work tile.
        if (i == max(work.steps - 3, 0)) taken = atomicAdd(tickets, 1);
        mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
        load(work, i, policy);
      }
      ticket = gridDim.x + taken;
    }
    announce_work(b, Work{-1, 0, 0, 0, 0, 0, 0, nullptr}, &announced);
  }
};

/// The warps that load token rows. Each of their lanes arrives at a stage's barrier, or another lane arrives for it.
template <class W>
struct Gatherer {
  const Block<W>& b;
  const Args<W>& a;
  const CUtensorMap* act;
  Cursor at = {};
  bool all = false;  // whether all activations are there

  /// Loads x in pieces of 16 bytes: each lane loads one column of every twelfth row.
  __device__ __forceinline__ void gather(const Work& work) {
    constexpr int kApart = kGatherLanes / 8, kEach = ceil_div(kMostRows, kApart);
    static_assert(kApart % 8 == 4);  // so that the swizzle of every other row of a lane is the same
    const int index = threadIdx.x - (kConsumers + 1) * 32, first = index / 8, column = index % 8;
    const int even = first * 128 + ((column ^ (first & 7)) << 4), odd = even ^ 4 << 4;
    const uint4* x = reinterpret_cast<const uint4*>(a.x);
    const int rows = work.rows - first;
    // Offsets in units of 16 bytes. All slots are loaded first; a missing row is replaced by the last one.
    uint32_t from[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) from[i] = __ldcg(work.slots + min(first + i * kApart, work.rows - 1));
#pragma unroll
    for (int i = 0; i < kEach; ++i) from[i] = from[i] / a.top_k * (a.hidden / 8) + column;
    const Sides side = sides(work);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages), x += kTileColumns / 8) {
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      copy_side(side, step);
      uint8_t* to = b.rows(at.stage);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (i * kApart < rows) cp_async16(to + i * kApart * 128 + (i % 2 == 0 ? even : odd), x + from[i]);
      cp_async_arrive(b.full(at.stage));
    }
  }

  /// This lane's part of copying the scales and zero points of a work tile's one or two weight tiles.
  struct Sides {
    typename W::Side first, second;
  };

  __device__ __forceinline__ Sides sides(const Work& work) const {
    const int index = threadIdx.x - (kConsumers + 1) * 32;
    return {W::side(a, work.product, work.expert, work.tile, index),
            W::side(a, work.product, work.expert, work.tile + 1, index)};
  }

  __device__ __forceinline__ void copy_side([[maybe_unused]] const Sides& s, int step) const {
    if constexpr (W::kSideBytes > 0) {
      s.first.copy(b.side(at.stage), step);
      if (a.width == 2) s.second.copy(b.side(at.stage) + W::kSideBytes, step);
    }
  }

  /// Waits until the activations of a work tile are there.
  __device__ __forceinline__ void await(const Work& work) {
    if (all) return;
    const uint4 end = b.table()[a.max_touched()];
    const Counters::Set set = b.counters();
    all = load_acquire(set.finished()) == a.parts(end.z);
    while (!all && load_acquire(set.progress(work.expert)) < work.parts) {}
    fence_async_proxy();
  }

  /// Loads the activations of a step, which are in order of experts. One thread calls it. Rows after the last row of
  /// the work tile are loaded to the end of the last box, and their results are not used.
  __device__ __forceinline__ void load(const Work& work, int step) {
    const int boxes = ceil_div(work.rows, kActRows);
    uint64_t* full = b.full(at.stage);
    expect_bytes(full, boxes * kActRows * kTileColumns * 2);
    for (int i = 0; i < boxes; ++i)
      load_tile(b.rows(at.stage) + i * kActRows * 128, act, work.first + i * kActRows, step * kTileColumns, full);
  }

  /// All steps of the second product; one thread does it for all lanes of these warps.
  __device__ __forceinline__ void load_all(const Work& work) {
    await(work);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      load(work, step);
      mbarrier_arrive_many(b.full(at.stage), kGatherLanes);
    }
  }

  /// The same as load_all, if all lanes have to load scales and zero points.
  __device__ __forceinline__ void load_with_side(const Work& work, bool loads) {
    if (loads) await(work);
    __syncwarp();
    const Sides side = sides(work);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      copy_side(side, step);
      if (loads) load(work, step);
      __syncwarp();
      cp_async_arrive(b.full(at.stage));
    }
  }

  __device__ __forceinline__ void run() {
    const bool loads = threadIdx.x / 32 == kConsumers + 1 && elect_one();
    for_each_work(b, [&](const Work& work) {
      if (work.product == 0) {
        gather(work);
      } else if constexpr (W::kSideBytes > 0) {
        load_with_side(work, loads);
      } else if (loads) {
        load_all(work);
      }
      __syncwarp();
    });
  }
};

#endif  // MOE_HAS_WGMMA

}  // namespace moe::experts_wide
