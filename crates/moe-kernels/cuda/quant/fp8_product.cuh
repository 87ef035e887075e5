// Products of FP8 (E4M3) weights with FP8 activations for prompts (fp8_product_kernel.cuh): geometry, and the warps
// that bring operands to shared memory.
//
// Rows of activations are quantised per row and 128 columns (fp8_quantise.cu). A work tile is a weight tile of 128
// rows, as the pack has it, times up to 256 rows of activations of one expert; a stage of the ring holds 128 columns of
// both, with the scales of the rows and of the weights.
#pragma once

#include "experts/tiles.cuh"
#include "quant/stage.cuh"

namespace moe::fp8 {

using namespace experts_tiles;

constexpr int kColumns = 128;            // of a stage: those of one scale of a row
constexpr int kBlocks = kTileRows / 16;  // of 16 weight rows in a weight tile
using Stage = quant::QuantStage<QuantFormat::kFp8, kColumns, kColumns, kBlocks>;

constexpr int kRows = 256;    // rows of activations of a work tile
constexpr int kGranule = 16;  // in which an expert's rows are spread over work tiles
constexpr int kGroup = 16;    // work tiles that meet all rows of an expert before the next ones do
constexpr int kBoxRows = 32;  // of one load of rows that lie in order
constexpr int kMaxStages = 6;
constexpr int kPieceBytes = 4096;              // of results on their way out
constexpr int kStaging = 2 * 2 * kPieceBytes;  // two for each consuming warpgroup
constexpr int kTableEntry = 16;
constexpr int kRowBytes = kRows * kColumns;
constexpr int kScaleBytes = kRows * 4;
constexpr int kStageBytes = Stage::kBytes + kRowBytes, kSideBytes = Stage::kSideBytes + kScaleBytes;

// Header of shared memory: barriers, work tiles, the rows that each gathering lane brings, and where the rows of
// results go (two lists for each consuming warpgroup).
constexpr int kApart = kGatherLanes / 8;                         // rows between two of a lane
constexpr int kLaneRows = round_up(ceil_div(kRows, kApart), 4);  // of a lane
constexpr int kRowTable = 1024, kPlaceLists = kRowTable + kApart * kLaneRows * 4;
constexpr int kHeader = kPlaceLists + 2 * 2 * kRows * 4;

struct Args {
  const uint8_t* q;        // rows of k bytes
  const float* scales;     // [k / 128, scale_rows]
  const uint32_t* slots;   // of each expert [E, bucket]
  const uint32_t* counts;  // of them [E]
  void* out;
  quant::Source source;
  int bucket, top_k, experts, rows;  // rows: slots of all experts
  int scale_rows, n, k;
  int stages;  // of the ring

  __host__ __device__ int tiles() const { return ceil_div(n, kTileRows); }
  __host__ __device__ int steps() const { return k / kColumns; }
  __host__ __device__ int max_touched() const { return rows < experts ? rows : experts; }
  __host__ __device__ int staging() const { return round_up(kHeader + (max_touched() + 1) * kTableEntry, 1024); }
  __host__ __device__ int smem(int stages) const { return staging() + kStaging + stages * (kStageBytes + kSideBytes); }
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
  int stages;

  __device__ __forceinline__ uint64_t* full(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(kMaxStages + s); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return full(2 * kMaxStages + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 512) + i % kWorkSlots; }
  /// (expert, first place, first row tile, rows) of each touched expert, then (touched experts, places, row tiles).
  __device__ __forceinline__ uint4* table() const { return reinterpret_cast<uint4*>(smem + kHeader); }
  /// Rows of `q` that a gathering lane brings.
  __device__ __forceinline__ uint32_t* lane_rows(int first) const {
    return reinterpret_cast<uint32_t*>(smem + kRowTable) + first * kLaneRows;
  }
  /// Where a warpgroup's rows of results go, one list for each of two work tiles in turn.
  __device__ __forceinline__ uint32_t* places(int group, int turn) const {
    return reinterpret_cast<uint32_t*>(smem + kPlaceLists) + (group * 2 + turn) * kRows;
  }
  __device__ __forceinline__ uint8_t* weights(int s) const { return ring + s * kStageBytes; }
  __device__ __forceinline__ uint8_t* rows(int s) const { return weights(s) + Stage::kBytes; }
  __device__ __forceinline__ uint8_t* side(int s) const { return ring + stages * kStageBytes + s * kSideBytes; }
  /// Of the rows, in the order of `scale_place`.
  __device__ __forceinline__ float* row_scales(int s) const {
    return reinterpret_cast<float*>(side(s) + Stage::kSideBytes);
  }
};
static_assert((2 * kMaxStages + 2 * Block::kWorkSlots) * 8 <= 512 && Block::kWorkSlots * sizeof(Work) <= 512);
static_assert(kHeader % 16 == 0 && kRowTable % 16 == 0 && sizeof(uint4) == kTableEntry);

/// Where a row's scale lies: of each 16 rows the four that a lane has sums of, 2t, 2t + 1, 2t + 8 and 2t + 9, are one
/// load of 16 bytes.
__device__ __forceinline__ int scale_place(int row) {
  return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
}

#if MOE_SM90

/// The table of touched experts. One warp.
__device__ __forceinline__ void make_table(const Block& b, const Args& a) {
  const int lane = threadIdx.x % 32;
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
            group * kGroup + within % width,
            static_cast<int>(entry.y) + from,
            min((each + (row_tile < one_more ? 1 : 0)) * kGranule, rows - from),
            a.slots + static_cast<size_t>(expert) * a.bucket + from};
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
        arrive_expecting(b.full(at.stage), Stage::kBytes);
        Stage::load_weights(b.weights(at.stage), w, block, step, b.full(at.stage), policy);
      }
    }
    announce_work(b, Work{-1, 0, 0, 0, 0, nullptr}, &announced);
  }
};

/// The warps that bring rows and scales; each of their lanes arrives at a stage's barrier. `kGather`: rows by their
/// slots, else in order by the copy engine.
template <bool kGather>
struct Gatherer {
  const Block& b;
  const Args& a;
  const CUtensorMap* rows;
  bool loads;  // whether this is the thread that asks the copy engine
  int index = threadIdx.x - (kConsumers + 1) * 32;
  Cursor at = {};

  using Side = Stage::SideCopies<kGatherLanes>;
  static constexpr int kEachScale = ceil_div(kRows, kGatherLanes);
  static_assert(kApart % 8 == 4);  // so the swizzle of every other row of a lane is the same

  /// Row of `q` of the r-th row of a work tile.
  __device__ __forceinline__ uint32_t row_of(const Work& work, int r) const {
    return kGather ? __ldcg(work.slots + r) / a.top_k : work.first + r;
  }

  /// The rows that the eight lanes of a row bring, the last one's where there is none.
  __device__ __forceinline__ void list_rows(const Work& work) const {
    const int first = index / 8;
    uint32_t* mine = b.lane_rows(first);
    __syncwarp();
    for (int i = index % 8; i < kLaneRows; i += 8) mine[i] = row_of(work, min(first + i * kApart, work.rows - 1));
    __syncwarp();
  }

  /// What lies beside weights and rows, of a step. `scaled`: the rows whose scales this lane copies, or kNoExpert.
  __device__ __forceinline__ void copy_scales(const Side& side, const uint32_t (&scaled)[kEachScale], int step) const {
    side.copy(b.side(at.stage), step);
    const float* from = a.scales + static_cast<size_t>(step) * a.scale_rows;
#pragma unroll
    for (int i = 0; i < kEachScale; ++i)
      if (scaled[i] != kNoExpert)
        cp_async4(b.row_scales(at.stage) + scale_place(index + i * kGatherLanes), from + scaled[i]);
  }

  /// 16 bytes of each of a lane's rows, four rows at a time.
  __device__ __forceinline__ void gather(const Work& work, int step) const {
    const int first = index / 8, column = index % 8, rest = work.rows - first;
    const int even = first * 128 + ((column ^ (first & 7)) << 4), odd = even ^ 4 << 4;
    const uint8_t* q = a.q + step * kColumns + column * 16;
    const uint4* mine = reinterpret_cast<const uint4*>(b.lane_rows(first));
    uint8_t* to = b.rows(at.stage);
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 4) {
      if (i * kApart >= rest) break;
      const uint4 v = mine[i / 4];
      const uint32_t row[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if ((i + j) * kApart < rest)
          cp_async16(to + (i + j) * kApart * 128 + (j % 2 == 0 ? even : odd), q + static_cast<size_t>(row[j]) * a.k);
    }
  }

  __device__ __forceinline__ void load(const Work& work, int step) const {
    const int boxes = ceil_div(work.rows, kBoxRows);
    expect_bytes(b.full(at.stage), boxes * kBoxRows * kColumns);
    for (int i = 0; i < boxes; ++i)
      load_tile(b.rows(at.stage) + i * kBoxRows * kColumns, rows, work.first + i * kBoxRows, step * kColumns,
                b.full(at.stage));
  }

  __device__ __forceinline__ void bring(const Work& work) {
    const Side side(a.source, work.expert * a.source.blocks + work.tile * kBlocks, index);
    uint32_t scaled[kEachScale];
#pragma unroll
    for (int i = 0; i < kEachScale; ++i) {
      const int r = index + i * kGatherLanes;
      scaled[i] = r >= work.rows ? kNoExpert : row_of(work, r);
    }
    if constexpr (kGather) list_rows(work);
    for (int step = 0; step < a.steps(); ++step, at.advance(b.stages)) {
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      copy_scales(side, scaled, step);
      if constexpr (kGather) {
        gather(work, step);
      } else if (loads) {
        load(work, step);
      }
      __syncwarp();
      cp_async_arrive(b.full(at.stage));
    }
  }

  __device__ __forceinline__ void run() {
    for_each_work(b, [&](const Work& work) {
      bring(work);
      __syncwarp();
    });
  }
};

#endif  // MOE_SM90

}  // namespace moe::fp8
