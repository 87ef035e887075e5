// Attention over latent rows on warpgroup products: what a block works on, and the warp that chooses it and loads
// queries and latent rows (latent.cu).
#pragma once

#include "attention/prefill.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"

namespace moe::attention_latent {

using attention_prefill::Args;

constexpr int kKey = 576;                        // columns of a latent row, all of which are the key
constexpr int kValue = 512;                      // the first columns of a latent row, which are the value
constexpr int kRows = 64;                        // (token, head) rows of a block
constexpr int kTile = 64;                        // positions
constexpr int kStages = 2;                       // tiles in shared memory
constexpr int kParts = kKey / kTileColumns;      // parts of 64 columns of all rows of a tile
constexpr int kPartBytes = kTile * 128;          // bytes of a part of a tile, and of the queries
constexpr int kTileBytes = kParts * kPartBytes;  // bytes of a tile, and of the queries
constexpr int kQueryBox = 16;                    // rows of one copy of queries
constexpr int kWarps = 8;                        // two warpgroups that compute
constexpr int kThreads = 3 * 128;                // the third warpgroup loads, with one warp
constexpr int kWeightBytes = kRows * kTile * 2;  // weights, from one warpgroup to the other
constexpr int kHeader = 2048;                    // barriers, work tiles, factors
constexpr int kSmem = kHeader + (1 + kStages) * kTileBytes + kWeightBytes;
static_assert(kSmem == 231424, "the plan has this size, too: src/plan/attention.rs");
constexpr int kWorkSlots = 2;  // work tiles announced ahead
constexpr int kMaxSplits = 160;

/// Arguments of these launches that other prompt kernels do not have.
struct Splits {
  int count;        // parts of the positions; with one part, results are final
  float* values;    // [tokens * heads, count, kValue]
  float2* softmax;  // [tokens * heads, count] maximum of the scaled scores (powers of two), and sum of the weights
  // Whether each row's own positions are split (decode::range_of). A split without positions has then written nothing.
  bool by_row;
};

/// Rows of one sequence and the positions of one split that they see. `tiles` is 0 if the split has no positions. A
/// sequence of -1 is the end of the work.
struct Work {
  int sequence;
  int first_token;   // of the sequence
  int first, last;   // (token, head) rows of the sequence
  int lowest;        // position of the first row
  int from, end;     // positions that some row sees, of all splits
  int begin, tiles;  // tiles of kTile positions, from `begin` on
  int split;

  /// The position at which the i-th tile begins. Tiles are in reverse order, so that tiles with a mask come first.
  __device__ __forceinline__ int tile_at(int i) const { return begin + (tiles - 1 - i) * kTile; }
};

/// Shared memory of a block.
struct Block {
  uint8_t* smem;

  __device__ __forceinline__ uint64_t* full(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* empty(int s) const { return full(kStages + s); }
  __device__ __forceinline__ uint64_t* query_full() const { return full(2 * kStages); }
  __device__ __forceinline__ uint64_t* query_empty() const { return full(2 * kStages + 1); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return full(2 * kStages + 2 + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 256) + i % kWorkSlots; }
  /// For each thread of a warpgroup, the factors of its two rows' sums.
  __device__ __forceinline__ float2* factors() const { return reinterpret_cast<float2*>(smem + 1024); }
  __device__ __forceinline__ uint8_t* query() const { return smem + kHeader; }
  __device__ __forceinline__ uint8_t* tile(int s) const { return smem + kHeader + (1 + s) * kTileBytes; }
  /// For each thread of a warpgroup, its weights as an A operand, [4][128] of 16 bytes.
  __device__ __forceinline__ uint4* weights() const { return reinterpret_cast<uint4*>(tile(kStages)); }
};
static_assert((2 * kStages + 2 + 2 * kWorkSlots) * 8 <= 256 && kWorkSlots * sizeof(Work) <= 1024 - 256);

/// A place in the ring of tiles and the parity of its barriers.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// Converts a caller's arguments to the arguments of the launches.
inline Args args_of(const PagedAttentionArgs& c) {
  Args a = {};
  a.q = static_cast<const bf16*>(c.q);
  a.cache = cache_of(c.k_cache, c.v_cache, 1, c.block_size);
  a.query_start_loc = c.query_start_loc;
  a.positions = c.positions;
  a.block_tables = c.block_tables;
  a.max_blocks = c.max_blocks;
  a.out = static_cast<bf16*>(c.out);
  a.tokens = c.tokens;
  a.sequences = c.sequences;
  a.heads = c.heads;
  a.scale = c.scale * kLog2E;
  a.window = c.window;
  a.most = INT32_MAX;
  a.counters = c.counters;
  return a;
}

/// Whether sizes and dtypes fit latent rows.
inline bool is_latent(const PagedAttentionArgs& c) {
  return c.tokens >= 0 && c.sequences >= 0 && c.kv_heads == 1 && c.heads > 0 && c.head_dim == kKey &&
         c.value_dim == kValue && c.value_row == kKey && c.k_cache == c.v_cache && c.block_size > 0 && c.window >= 0 &&
         c.dtype == Dtype::kBf16 && c.q_dtype == Dtype::kBf16 && c.splits >= 1 && c.splits <= kMaxSplits &&
         static_cast<int64_t>(c.num_blocks) * c.block_size <= INT32_MAX &&
         static_cast<int64_t>(c.tokens) * c.heads <= INT32_MAX;
}

/// The parts of the caller's `partials`.
inline Splits splits_of(const PagedAttentionArgs& c, bool by_row) {
  const size_t rows = static_cast<size_t>(c.tokens) * c.heads;
  return {c.splits, c.partials, reinterpret_cast<float2*>(c.partials + c.splits * rows * kValue), by_row};
}

/// out = the weighted mean of the splits (latent_merge.cu).
cudaError_t launch_merge(const Args& a, const Splits& splits, void* stream);

/// values [tokens, heads, 128] = w_uv [heads, 128, kValue] times the weighted mean of the splits.
cudaError_t launch_merge_values(const Args& a, const Splits& splits, const bf16* w_uv, bf16* values, void* stream);

#if MOE_HAS_WGMMA

/// The warp that takes work by ticket, announces it and loads its queries and latent rows. A lane loads 64 columns of
/// one page's rows, or of 16 queries.
struct Loader {
  const Block& b;
  const Args& a;
  const Splits& splits;
  const CUtensorMap *query, *rows;
  int page_rows;

  /// The ticket's work. Tiles with the most positions come first, and the splits of a tile have consecutive tickets.
  __device__ __forceinline__ Work work_of(int ticket, int tiles) const {
    Work w = {};
    w.sequence = -1;
    if (ticket >= tiles * splits.count) return w;
    w.split = ticket % splits.count;
    const attention_prefill::Tile tile =
        attention_prefill::find_tile<kRows>(a, a.heads, tiles - 1 - ticket / splits.count);
    w.sequence = tile.sequence;
    w.first_token = a.query_start_loc[tile.sequence];
    const int all = static_cast<int>(a.query_start_loc[tile.sequence + 1] - w.first_token) * a.heads;
    w.first = tile.tile * kRows;
    w.last = min(w.first + kRows, all) - 1;
    w.lowest = a.positions[w.first_token + w.first / a.heads];
    w.end = a.positions[w.first_token + w.last / a.heads] + 1;
    w.from = a.window > 0 ? max(0, w.lowest + 1 - a.window) : 0;
    const int first = w.from / kTile, count = ceil_div(w.end, kTile) - first, each = ceil_div(count, splits.count);
    w.begin = (first + w.split * each) * kTile;
    w.tiles = max(0, min(each, count - w.split * each));
    return w;
  }

  __device__ __forceinline__ void announce(int i, const Work& w) const {
    mbarrier_wait(b.work_empty(i), (i / kWorkSlots & 1) ^ 1);
    if (threadIdx.x % 32 == 0) {
      *b.work(i) = w;
      mbarrier_arrive(b.work_full(i));
    }
    __syncwarp();
  }

  /// Loads the queries of a work tile. Shared memory after its last row is not written.
  __device__ __forceinline__ void load_queries(const Work& w, uint32_t parity) const {
    const int lane = threadIdx.x % 32, boxes = ceil_div(w.last - w.first + 1, kQueryBox);
    const int row = w.first_token * a.heads + w.first;
    mbarrier_wait(b.query_empty(), parity ^ 1);
    if (lane == 0) arrive_expecting(b.query_full(), boxes * kParts * kQueryBox * 128);
    __syncwarp();
    for (int i = lane; i < boxes * kParts; i += 32) {
      const int box = i / kParts, part = i % kParts;
      load_tile(b.query() + part * kPartBytes + box * kQueryBox * 128, query, row + box * kQueryBox,
                part * kTileColumns, b.query_full());
    }
  }

  /// Latent rows of tiles [first, last) of a work tile.
  __device__ __forceinline__ void load_rows(const Work& w, int first, int last, Cursor& at) const {
    const int lane = threadIdx.x % 32, pages = kTile / page_rows, block_size = a.cache.block_size;
    const uint32_t* table = a.block_tables + static_cast<size_t>(w.sequence) * a.max_blocks;
    for (int i = first; i < last; ++i, at.advance()) {
      const int begin = w.tile_at(i);
      const int low = max(0, w.from - begin) / page_rows, high = ceil_div(min(kTile, w.end - begin), page_rows);
      mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
      if (lane == 0) arrive_expecting(b.full(at.stage), (high - low) * page_rows * kKey * 2);
      __syncwarp();
      for (int piece = lane; piece < pages * kParts; piece += 32) {
        const int page = piece / kParts, part = piece % kParts, position = begin + page * page_rows;
        if (page < low || page >= high) continue;
        const int row = static_cast<int>(table[position / block_size]) * block_size + position % block_size;
        load_tile(b.tile(at.stage) + part * kPartBytes + page * page_rows * 128, rows, row, part * kTileColumns,
                  b.full(at.stage));
      }
    }
  }

  /// Does all work of the block. The rows before a sequence's first new one were written before this step, so the rows
  /// of the first work tile are loaded while the kernel before still computes the queries.
  __device__ __forceinline__ void run() const {
    const int tiles = attention_prefill::count_tiles<kRows>(a, a.heads);
    const bool more = tiles * splits.count > static_cast<int>(gridDim.x);  // else every block has one ticket
    Cursor at;
    uint32_t queries = 0;  // parity
    Work w = work_of(blockIdx.x, tiles);
    const bool old = splits.count > 1 && w.sequence >= 0 && w.begin + w.tiles * kTile <= w.lowest;
    int early = old ? min(w.tiles, kStages) : 0;
    load_rows(w, 0, early, at);
    pdl_wait();
    for (int i = 0;; ++i, early = 0) {
      announce(i, w);
      if (w.sequence < 0) break;
      uint32_t ticket = more && threadIdx.x % 32 == 0 ? atomicAdd(a.counters, 1) : 0;
      ticket = __shfl_sync(0xffffffffu, ticket, 0) + gridDim.x;
      if (w.tiles > 0) {
        load_queries(w, queries);
        queries ^= 1;
        load_rows(w, early, w.tiles, at);
      }
      w = work_of(ticket, tiles);
    }
    // The last block to end leaves the counters zero.
    if (more && threadIdx.x % 32 == 0 && add_acq_rel(a.counters + 1, 1) == gridDim.x - 1)
      a.counters[0] = a.counters[1] = 0;
  }
};

#endif  // MOE_HAS_WGMMA

}  // namespace moe::attention_latent
