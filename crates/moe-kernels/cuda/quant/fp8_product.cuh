// Products of FP8 (E4M3) weights with FP8 activations for prompts (fp8_product_kernel.cuh): their geometry, and the
// warps that load operands to shared memory.
//
// Rows of activations are in order of experts and are quantised per row and 128 columns (fp8_quantise.cu). A work tile
// is up to 256 of these rows, all of one expert, times a weight tile of 128 rows in the order of the pack. A stage of
// the ring holds 128 columns of both, with the scales of the rows and of the weights.
//
// Blocks may come in pairs, clusters of two: they multiply the same rows by neighbouring weight tiles, and each loads
// one half of the rows for both.
#pragma once

#include "experts/tiles.cuh"
#include "ptx/cluster.cuh"
#include "quant/fp8_row.cuh"
#include "quant/stage.cuh"

namespace moe::fp8 {

using namespace experts_tiles;

constexpr int kColumns = 128;            // columns of a stage, which share a scale of a row
constexpr int kBlocks = kTileRows / 16;  // blocks of 16 weight rows in a weight tile
using Stage = quant::QuantStage<QuantFormat::kFp8, kColumns, kColumns, kBlocks>;

constexpr int kPart = 64;                // rows of one product
constexpr int kRows = 256;               // rows of a work tile: two parts for each consuming warpgroup
constexpr int kGroupTiles = 16;          // weight tiles that all rows of an expert multiply before the next kGroupTiles
constexpr int kConverters = kGatherers;  // warps that turn weights into an operand
constexpr int kMaxStages = 6;
// Room for results before they are stored (16 rows of 128 bytes for each warp), or for magnitudes that a pair
// exchanges.
constexpr int kStaging = kConsumers * 2048;
constexpr int kPair = 2;  // blocks of a cluster
constexpr int kTableEntry = 16;
constexpr int kHeader = 1024;  // barriers and work tiles
constexpr int kRowBytes = kRows * kColumns, kPartBytes = kPart * kColumns;
constexpr int kScaleBytes = (kRows + 4) * 4;  // scales of the rows; 4 more because copies are of 16 bytes
constexpr int kStageBytes = Stage::kBytes + kRowBytes, kSideBytes = Stage::kSideBytes + kScaleBytes;

struct Args {
  const float* scales;     // scales of the rows [k / 128, scale_rows]
  const uint32_t* slots;   // the slots of each expert [E, bucket]
  const uint32_t* counts;  // the number of slots of each expert [E]
  bf16* out;               // results in bf16, or
  RowsOut act;             // results in FP8
  quant::Source source;
  int bucket, experts, rows;  // rows: the slots of all experts
  int scale_rows, n, k;
  int stages;  // stages of the ring

  __host__ __device__ int tiles() const { return n / kTileRows; }
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

  __device__ __forceinline__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(smem) + i; }
  /// The barrier for weights that have come in the order of the pack.
  __device__ __forceinline__ uint64_t* packed(int s) const { return barrier(s); }
  /// The barrier for a whole stage: the weights have been turned into an operand, and everything else has come.
  __device__ __forceinline__ uint64_t* full(int s) const { return barrier(kMaxStages + s); }
  __device__ __forceinline__ uint64_t* empty(int s) const { return barrier(2 * kMaxStages + s); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return barrier(3 * kMaxStages + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 512) + i % kWorkSlots; }
  /// The barrier for what the other block of a pair sends to a warp at its i-th work tile: the largest magnitudes of
  /// the 16 rows of a part.
  __device__ __forceinline__ uint64_t* most_full(int warp, int i) const {
    return work_full(0) + 2 * kWorkSlots + warp * 2 + i % 2;
  }
  __device__ __forceinline__ uint32_t* most(int warp, int i, int part) const {
    return reinterpret_cast<uint32_t*>(staging) + ((warp * 2 + i % 2) * 2 + part) * 16;
  }
  /// For each touched expert (expert, first place, first row tile, rows), then (touched experts, places, row tiles).
  __device__ __forceinline__ uint4* table() const { return reinterpret_cast<uint4*>(smem + kHeader); }
  __device__ __forceinline__ uint8_t* weights(int s) const { return ring + s * kStageBytes; }
  __device__ __forceinline__ uint8_t* rows(int s) const { return weights(s) + Stage::kBytes; }
  __device__ __forceinline__ uint8_t* side(int s) const { return ring + stages * kStageBytes + s * kSideBytes; }
  /// The scales of the rows. They begin with the first row's place rounded down to a multiple of 4.
  __device__ __forceinline__ float* row_scales(int s) const {
    return reinterpret_cast<float*>(side(s) + Stage::kSideBytes);
  }
};
static_assert((3 * kMaxStages + 2 * Block::kWorkSlots + 2 * kConsumers) * 8 <= 512);
static_assert(Block::kWorkSlots * sizeof(Work) <= 512 && kConsumers * 2 * 2 * 16 * 4 <= kStaging);
static_assert(sizeof(uint4) == kTableEntry && kSideBytes % 16 == 0);

#if MOE_HAS_WGMMA

/// Makes the table of touched experts. One warp calls it.
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

/// The warp that chooses the block's work tiles, announces them to the other warps and loads their operands. `kCluster`
/// is the number of blocks of a cluster, which multiply the same rows by one weight tile each.
template <int kCluster>
struct Producer {
  const Block& b;
  const Args& a;
  const CUtensorMap *w, *rows;
  bool leads;  // whether this thread instructs the copy engine
  int lane = threadIdx.x % 32;
  uint64_t policy = read_again();
  int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  Cursor at = {};

  using Side = Stage::SideCopies<32>;
  static constexpr int kGroup = fp8::kGroupTiles / kCluster;
  // This block's share of a part.
  static constexpr int kShareRows = kPart / kCluster, kShareBytes = kPartBytes / kCluster;

  /// The cluster's n-th work tile of an expert. Up to kGroup weight tiles in turn have the same rows; then the next
  /// rows follow.
  __device__ __forceinline__ Work work_at(const uint4& entry, int n) const {
    const int tiles = a.tiles() / kCluster, rows = entry.w, expert = entry.x, row_tiles = a.row_tiles(rows);
    const int group = n / (row_tiles * kGroup), within = n - group * row_tiles * kGroup;
    const int width = min(kGroup, tiles - group * kGroup), row_tile = within / width;
    const int parts = ceil_div(rows, kPart), each = parts / row_tiles, one_more = parts % row_tiles;
    const int from = (row_tile * each + min(row_tile, one_more)) * kPart;
    return {0,
            expert,
            (group * kGroup + within % width) * kCluster + rank,
            static_cast<int>(entry.y) + from,
            min((each + (row_tile < one_more ? 1 : 0)) * kPart, rows - from),
            a.slots + static_cast<size_t>(expert) * a.bucket + from};
  }

  /// Loads a step. Rows after the last row of the work tile are loaded to the end of the last part, and their results
  /// are not stored.
  __device__ __forceinline__ void load(const Work& work, int block, int step) const {
    uint64_t *packed = b.packed(at.stage), *full = b.full(at.stage);
    arrive_expecting(packed, Stage::kBytes);
    Stage::load_weights(b.weights(at.stage), w, block, step, packed, policy);
    const int parts = ceil_div(work.rows, kPart), before = work.first % 4;
    const int scale_bytes = round_up(before + work.rows, 4) * 4;
    arrive_expecting(full, parts * kPartBytes + scale_bytes);
    for (int i = 0; i < parts; ++i) {
      uint8_t* to = b.rows(at.stage) + i * kPartBytes + rank * kShareBytes;
      const int row = work.first + i * kPart + rank * kShareRows;
      if (kCluster > 1) load_tile_to_both(to, rows, row, step * kColumns, full);
      else load_tile(to, rows, row, step * kColumns, full, policy);
    }
    bulk_copy(b.row_scales(at.stage), a.scales + static_cast<size_t>(step) * a.scale_rows + work.first - before,
              scale_bytes, full);
  }

  __device__ __forceinline__ void run() {
    const uint4* table = b.table();
    const uint4 end = table[a.max_touched()];
    const int tiles = a.tiles() / kCluster, total = end.z * tiles;
    int touched = 0, announced = 0;
    for (int n = blockIdx.x / kCluster; n < total; n += gridDim.x / kCluster) {
      while (touched + 1 < static_cast<int>(end.x) && n >= static_cast<int>(table[touched + 1].z) * tiles) ++touched;
      const uint4 entry = table[touched];
      const Work work = work_at(entry, n - static_cast<int>(entry.z) * tiles);
      if (leads) announce_work(b, work, &announced);
      const int block = work.expert * a.source.blocks + work.tile * kBlocks;
      const Side side(a.source, block, lane);
      for (int step = 0; step < a.steps(); ++step, at.advance(b.stages)) {
        mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
        if (leads) load(work, block, step);
        side.copy(b.side(at.stage), step);
        cp_async_arrive(b.full(at.stage));
        __syncwarp();
      }
    }
    if (leads) announce_work(b, Work{-1, 0, 0, 0, 0, nullptr}, &announced);
  }
};

/// The warps that turn weights of a pack into the operand of warpgroup products, in place. A pack has the order of the
/// 16-bit operand: the bytes of two rows alternate, and a lane has columns 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16.
/// The conversion keeps these four together, and rows are quantised in the same order (fp8_quantise.cu): of each 64
/// columns h, the 16 bytes number 2c + h of a row hold the lane's columns of all four 16s.
struct Converter {
  const Block& b;
  const Args& a;
  int warp = threadIdx.x / 32 - kConsumers - 1, lane = threadIdx.x % 32;
  Cursor at = {};

  /// Converts 16 rows x 128 columns.
  __device__ __forceinline__ void convert(uint8_t* block) const {
    const int g = lane / 4, c = lane % 4;
    Stage::Words words;
    Stage::read(block + lane * 16, words);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* to = block + g * 128 + (((2 * c + half) ^ g) << 4);
      uint32_t low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t* v = words + half * 8 + i * 2;
        low[i] = __byte_perm(v[0], v[1], 0x6420), high[i] = __byte_perm(v[0], v[1], 0x7531);
      }
      *reinterpret_cast<uint4*>(to) = {low[0], low[1], low[2], low[3]};
      *reinterpret_cast<uint4*>(to + 1024) = {high[0], high[1], high[2], high[3]};
    }
  }

  __device__ __forceinline__ void run() {
    for_each_work(b, [&](const Work&) {
      for (int step = 0; step < a.steps(); ++step, at.advance(b.stages)) {
        mbarrier_wait(b.packed(at.stage), at.parity);
        for (int i = warp; i < kBlocks; i += kConverters) convert(b.weights(at.stage) + i * Stage::kBlockBytes);
        // One lane's arrival is enough: every lane fences its own writes, and the warp meets before it.
        fence_async_shared();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(b.full(at.stage));
      }
    });
  }
};

#endif  // MOE_HAS_WGMMA

}  // namespace moe::fp8
