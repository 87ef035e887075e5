// Products of FP8 (E4M3) weights with FP8 activations for prompts (fp8_product_kernel.cuh): geometry, and the warps
// that bring operands to shared memory.
//
// Rows of activations are quantised per row and 128 columns (fp8_quantise.cu). A work tile is one or two weight tiles
// of 128 rows, as the pack has them, times up to 128 rows of activations of one expert; a stage of the ring holds 128
// columns of both, with the scales of the rows and of the weights.
#pragma once

#include "experts/tiles.cuh"
#include "quant/stage.cuh"

namespace moe::fp8 {

using namespace experts_tiles;

constexpr int kColumns = 128;            // of a stage: those of one scale of a row
constexpr int kBlocks = kTileRows / 16;  // of 16 weight rows in a weight tile
template <int kWidth>
using Stage = quant::QuantStage<QuantFormat::kFp8, kColumns, kColumns, kWidth * kBlocks>;

constexpr int kRows = 128;    // rows of activations of a work tile
constexpr int kGranule = 16;  // by which they grow
constexpr int kGroup = 16;    // work tiles that meet all rows of an expert before the next ones do
constexpr int kBoxRows = 32;  // of one load of rows that lie in order
constexpr int kMaxStages = 6;
constexpr int kHeader = 1024;
constexpr int kPieceBytes = 4096;              // of results on their way out
constexpr int kStaging = 2 * 2 * kPieceBytes;  // two for each consuming warpgroup
constexpr int kTableEntry = 16;
constexpr int kRowBytes = kRows * kColumns;
constexpr int kScaleBytes = kRows * 4;

struct Args {
  const uint8_t* q;        // rows of k bytes
  const float* scales;     // [k / 128, scale_rows]
  const uint32_t* slots;   // of each expert [E, bucket]; null: one matrix, all rows in order
  const uint32_t* counts;  // of them [E]
  void* out;
  quant::Source source;
  int bucket, top_k, experts, rows;  // rows: slots of all experts, or of the one matrix
  int scale_rows, n, k;
  int width;   // weight tiles of a work tile
  int stages;  // of the ring
  int gates;   // of one matrix with gate and up rows in its tiles: how many gates; else 0
  Output output;

  __host__ __device__ int tiles() const { return ceil_div(n, kTileRows) / width; }
  __host__ __device__ int steps() const { return k / kColumns; }
  __host__ __device__ int max_touched() const { return rows < experts ? rows : experts; }
  __host__ __device__ int stage_bytes() const { return width * Stage<1>::kBytes + kRowBytes; }
  __host__ __device__ int side_bytes() const { return width * Stage<1>::kSideBytes + kScaleBytes; }
  __host__ __device__ int staging() const { return round_up(kHeader + (max_touched() + 1) * kTableEntry, 1024); }
  __host__ __device__ int smem(int stages) const {
    return staging() + kStaging + stages * (stage_bytes() + side_bytes());
  }
  __device__ int row_tiles(int rows) const { return ceil_div(rows, kRows); }
};

struct Work {
  int product;  // -1: the end
  int expert, tile, first, rows;
  const uint32_t* slots;
};

struct Block {
  static constexpr int kWorkSlots = 4;
  uint8_t *smem, *staging, *ring;
  int stages, bytes, side_bytes, width;

  __device__ __forceinline__ uint64_t* full(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(kMaxStages + s); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return full(2 * kMaxStages + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 512) + i % kWorkSlots; }
  /// (expert, first place, first row tile, rows) of each touched expert, then (touched experts, places, row tiles).
  __device__ __forceinline__ uint4* table() const { return reinterpret_cast<uint4*>(smem + kHeader); }
  __device__ __forceinline__ uint8_t* weights(int s) const { return ring + s * bytes; }
  __device__ __forceinline__ uint8_t* rows(int s) const { return weights(s) + width * Stage<1>::kBytes; }
  __device__ __forceinline__ uint8_t* side(int s) const { return ring + stages * bytes + s * side_bytes; }
  __device__ __forceinline__ float* row_scales(int s) const {
    return reinterpret_cast<float*>(side(s) + width * Stage<1>::kSideBytes);
  }
};
static_assert((2 * kMaxStages + 2 * Block::kWorkSlots) * 8 <= 512 && Block::kWorkSlots * sizeof(Work) <= 512);

#if MOE_SM90

/// The table of touched experts. One warp.
__device__ __forceinline__ void make_table(const Block& b, const Args& a) {
  const int lane = threadIdx.x % 32;
  if (a.slots == nullptr) {
    const auto rows = static_cast<uint32_t>(a.rows);
    if (lane == 0) b.table()[0] = {0, 0, 0, rows}, b.table()[a.max_touched()] = {1, rows, ceil_div(rows, kRows), 0};
    return;
  }
  uint32_t touched = 0, rows = 0, tiles = 0;
  for (int first = 0; first < a.experts; first += 32) {
    const int expert = first + lane;
    const uint32_t count = expert < a.experts ? __ldcg(a.counts + expert) : 0;
    const uint32_t some = __ballot_sync(0xffffffffu, count > 0);
    uint32_t all_rows, all_tiles;
    const uint32_t rows_before = warp_exclusive_sum(count, &all_rows);
    const uint32_t tiles_before = warp_exclusive_sum(static_cast<uint32_t>(a.row_tiles(count)), &all_tiles);
    if (count > 0)
      b.table()[touched + __popc(some & ((1u << lane) - 1))] =
          make_uint4(expert, rows + rows_before, tiles + tiles_before, count);
    touched += __popc(some), rows += all_rows, tiles += all_tiles;
  }
  if (lane == 0) b.table()[a.max_touched()] = {touched, rows, tiles, 0};
}

/// The thread that loads weights: deals the block's work tiles and announces them to the other warps.
template <int kWidth>
struct Producer {
  const Block& b;
  const Args& a;
  const CUtensorMap* w;

  /// The n-th work tile of an expert: up to kGroup in turn have the same rows, then come the next rows.
  __device__ __forceinline__ Work work_at(const uint4& entry, int n) const {
    const int tiles = a.tiles(), rows = entry.w, row_tiles = a.row_tiles(rows), expert = entry.x;
    const int group = n / (row_tiles * kGroup), within = n - group * row_tiles * kGroup;
    const int width = min(kGroup, tiles - group * kGroup), row_tile = within / width;
    const int granules = ceil_div(rows, kGranule), each = granules / row_tiles, one_more = granules % row_tiles;
    const int from = (row_tile * each + min(row_tile, one_more)) * kGranule;
    return {0,
            expert,
            (group * kGroup + within % width) * a.width,
            static_cast<int>(entry.y) + from,
            min((each + (row_tile < one_more ? 1 : 0)) * kGranule, rows - from),
            a.slots == nullptr ? nullptr : a.slots + static_cast<size_t>(expert) * a.bucket + from};
  }

  __device__ __forceinline__ void run() {
    const uint4* table = b.table();
    const uint4 end = table[a.max_touched()];
    const int tiles = a.tiles(), total = end.z * tiles;
    const uint64_t policy = read_again();
    Cursor at;
    int touched = 0, announced = 0;
    for (int n = blockIdx.x; n < total; n += gridDim.x) {
      while (touched + 1 < static_cast<int>(end.x) && n >= static_cast<int>(table[touched + 1].z) * tiles) ++touched;
      const uint4 entry = table[touched];
      const Work work = work_at(entry, n - static_cast<int>(entry.z) * tiles);
      announce_work(b, work, &announced);
      const int block = work.expert * a.source.blocks + work.tile * kBlocks;
      for (int step = 0; step < a.steps(); ++step, at.advance(b.stages)) {
        mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
        arrive_expecting(b.full(at.stage), Stage<kWidth>::kBytes);
        Stage<kWidth>::load_weights(b.weights(at.stage), w, block, step, b.full(at.stage), policy);
      }
    }
    announce_work(b, Work{-1, 0, 0, 0, 0, nullptr}, &announced);
  }
};

/// The warps that bring rows and scales. Each of their lanes arrives at a stage's barrier.
template <int kWidth>
struct Gatherer {
  const Block& b;
  const Args& a;
  const CUtensorMap* rows;
  int index = threadIdx.x - (kConsumers + 1) * 32;
  Cursor at = {};

  using Side = typename Stage<kWidth>::template SideCopies<kGatherLanes>;
  static constexpr int kEachScale = ceil_div(kRows, kGatherLanes);

  /// Row of `q` of the r-th row of a work tile.
  __device__ __forceinline__ uint32_t row_of(const Work& work, int r) const {
    return a.slots == nullptr ? work.first + r : __ldcg(work.slots + r) / a.top_k;
  }

  /// What lies beside weights and rows, of a step. `rows`: those whose scales this lane copies, or kNoExpert.
  __device__ __forceinline__ void copy_scales(const Side& side, const uint32_t (&rows)[kEachScale], int step) const {
    side.copy(b.side(at.stage), step);
    const float* from = a.scales + static_cast<size_t>(step) * a.scale_rows;
#pragma unroll
    for (int i = 0; i < kEachScale; ++i)
      if (rows[i] != kNoExpert) cp_async4(b.row_scales(at.stage) + index + i * kGatherLanes, from + rows[i]);
  }

  /// `kGather`: rows by their slots, else in order by the copy engine.
  template <bool kGather>
  __device__ __forceinline__ void bring(const Work& work, bool loads) {
    constexpr int kApart = kGatherLanes / 8, kEach = ceil_div(kRows, kApart);
    static_assert(kApart % 8 == 4);  // so the swizzle of every other row of a lane is the same
    const Side side(a.source, work.expert * a.source.blocks + work.tile * kBlocks, index);
    uint32_t scaled[kEachScale];
#pragma unroll
    for (int i = 0; i < kEachScale; ++i) {
      const int r = index + i * kGatherLanes;
      scaled[i] = r >= work.rows ? kNoExpert : row_of(work, r);
    }
    const int first = index / 8, column = index % 8, rest = work.rows - first;
    const int even = first * 128 + ((column ^ (first & 7)) << 4), odd = even ^ 4 << 4;
    const uint4* q = reinterpret_cast<const uint4*>(a.q);
    uint32_t from[kEach];  // in 16 bytes, of the last row where there is none
    if constexpr (kGather) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) from[i] = __ldcg(work.slots + min(first + i * kApart, work.rows - 1));
#pragma unroll
      for (int i = 0; i < kEach; ++i) from[i] = from[i] / a.top_k * (a.k / 16) + column;
    }
    for (int step = 0; step < a.steps(); ++step, at.advance(b.stages), q += kColumns / 16) {
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      copy_scales(side, scaled, step);
      uint8_t* to = b.rows(at.stage);
      if constexpr (kGather) {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (i * kApart < rest) cp_async16(to + i * kApart * 128 + (i % 2 == 0 ? even : odd), q + from[i]);
      } else if (loads) {
        const int boxes = ceil_div(work.rows, kBoxRows);
        expect_bytes(b.full(at.stage), boxes * kBoxRows * kColumns);
        for (int i = 0; i < boxes; ++i)
          load_tile(to + i * kBoxRows * kColumns, this->rows, work.first + i * kBoxRows, step * kColumns,
                    b.full(at.stage));
      }
      __syncwarp();
      cp_async_arrive(b.full(at.stage));
    }
  }

  template <bool kGather>
  __device__ __forceinline__ void run() {
    const bool loads = threadIdx.x / 32 == kConsumers + 1 && elect_one();
    for_each_work(b, [&](const Work& work) {
      bring<kGather>(work, loads);
      __syncwarp();
    });
  }
};

#endif  // MOE_SM90

}  // namespace moe::fp8
