// Prompt attention on warpgroup products: what a block works on, and the warp that chooses it and loads keys and values
// (prefill_wgmma.cu).
//
// Blocks work in pairs (clusters of two) if sequences are long enough. The rows of the second block follow the rows of
// the first, so both see nearly the same positions, and each loads one half of every tile for both. That halves the
// reads from L2, for which a single block would wait.
#pragma once

#include "attention/prefill.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"

namespace moe::attention_prefill {

constexpr int kGroupRows = 64;                // rows of a warpgroup
constexpr int kRows = 2 * kGroupRows;         // rows of a block
constexpr int kConsumers = 8;                 // warps, two warpgroups
constexpr int kThreads = 3 * 128;             // the third warpgroup loads, with one warp
constexpr int kSlabBytes = kGroupRows * 128;  // 64 columns of a warpgroup's rows
constexpr int kHeader = 1024;                 // barriers and work tiles
constexpr int kWorkSlots = 2;                 // work tiles announced ahead
constexpr int kPairRows = 32 * kRows;  // (token, head) rows of a mean sequence from which on blocks come in pairs

/// Sizes of a key and of a value, the number of stages for which there is room next to 128 queries, and the number of
/// blocks of a cluster, 1 or 2.
template <int kKeyDim, int kValueDim, int kClusterBlocks>
struct Dims {
  static constexpr int kKey = kKeyDim, kValue = kValueDim, kStages = kKeyDim > 128 ? 2 : 3;
  static constexpr int kBlocks = kClusterBlocks;
  // The 128 values of a thread with heads of 256 leave no registers for queries, and for the scores of 64 positions.
  static constexpr bool kSharedQueries = kKeyDim > 192;
  static constexpr int kTile = kSharedQueries ? 64 : 128;  // positions
  static constexpr int kHalfBytes = kTile * 64 * 2;        // 64 columns of a tile: rows of 128 bytes
  static constexpr int kKeyBytes = kTile * kKey * 2, kValueBytes = kTile * kValue * 2;
  static constexpr int kSmem = kHeader + kRows * kKey * 2 + kStages * (kKeyBytes + kValueBytes);
};

static_assert(Dims<64, 64, 1>::kSmem == 115712 && Dims<128, 128, 1>::kSmem == 230400 &&
                  Dims<192, 128, 1>::kSmem == 214016 && Dims<256, 256, 1>::kSmem == 197632,
              "the plan has these sizes, too: src/plan/attention.rs, src/plan/prompt.rs");

/// Rows of one sequence and KV head, and the positions that they see. No tiles: the end of the work. The second block
/// of a pair may have no rows; it then computes the last row, whose result is not stored, and loads its half.
struct Work {
  int sequence, kv_head;
  int first_token;   // of the sequence
  int first, last;   // (token, head) rows of the sequence
  int lowest;        // position of the first row
  int from, end;     // positions that some row of the cluster sees
  int begin, tiles;  // tiles of D::kTile positions, from `begin` on

  /// The position at which the i-th tile begins: tiles are in reverse order.
  template <class D>
  __device__ __forceinline__ int tile_at(int i) const {
    return begin + (tiles - 1 - i) * D::kTile;
  }
};

/// Shared memory of a block.
template <class D>
struct Block {
  static constexpr int kStages = D::kStages;
  uint8_t* smem;

  __device__ __forceinline__ uint64_t* full_k(int s) const { return reinterpret_cast<uint64_t*>(smem) + s; }
  __device__ __forceinline__ uint64_t* empty_k(int s) const { return full_k(kStages + s); }
  __device__ __forceinline__ uint64_t* full_v(int s) const { return full_k(2 * kStages + s); }
  __device__ __forceinline__ uint64_t* empty_v(int s) const { return full_k(3 * kStages + s); }
  __device__ __forceinline__ uint64_t* work_full(int i) const { return full_k(4 * kStages + i % kWorkSlots); }
  __device__ __forceinline__ uint64_t* work_empty(int i) const { return work_full(i) + kWorkSlots; }
  __device__ __forceinline__ uint64_t* mail_full(int i) const { return work_full(0) + 2 * kWorkSlots + i % 2; }
  __device__ __forceinline__ uint64_t* mail_empty(int i) const { return mail_full(i) + 2; }
  /// Tickets that the first block of a pair sends to the second.
  __device__ __forceinline__ uint32_t* mail(int i) const { return reinterpret_cast<uint32_t*>(smem + 496) + i % 2; }
  __device__ __forceinline__ Work* work(int i) const { return reinterpret_cast<Work*>(smem + 512) + i % kWorkSlots; }
  /// Room for 16 rows of q of a warp, and later for its results: one row after the other, or if products read q here,
  /// 64 columns of all rows of the warpgroup after the other.
  __device__ __forceinline__ uint8_t* q(int warp) const {
    if (D::kSharedQueries) return q_group(warp / 4) + warp % 4 * 16 * 128;
    return smem + kHeader + warp * 16 * D::kKey * 2;
  }
  __device__ __forceinline__ uint8_t* q_group(int warpgroup) const {
    return smem + kHeader + warpgroup * kGroupRows * D::kKey * 2;
  }
  __device__ __forceinline__ uint8_t* k(int s) const { return smem + kHeader + kRows * D::kKey * 2 + s * D::kKeyBytes; }
  __device__ __forceinline__ uint8_t* v(int s) const { return k(kStages) + s * D::kValueBytes; }
  static_assert((4 * kStages + 2 * kWorkSlots + 4) * 8 <= 496 && kWorkSlots * sizeof(Work) <= kHeader - 512);
};

/// A place in a ring and the parity of its barriers.
template <class D>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == D::kStages) stage = 0, parity ^= 1;
  }
};

/// The rows of a sequence's positions in pages of the cache.
struct Paged {
  int rows;  // of a page, at most a tile

  __device__ __forceinline__ int row(const Args& a, const Work& w, int position) const {
    const uint32_t* table = a.block_tables + static_cast<size_t>(w.sequence) * a.max_blocks;
    const int block_size = a.cache.block_size;
    return (static_cast<int>(table[position / block_size]) * a.cache.heads + w.kv_head) * block_size +
           position % block_size;
  }
};

/// The rows of a sequence's positions in keys and values [kv_heads, all, D], one after the other.
struct Contiguous {
  int rows;               // a tile
  int all;                // positions of all sequences
  const uint32_t* bases;  // [sequences] the first row of each sequence

  __device__ __forceinline__ int row(const Args&, const Work& w, int position) const {
    return w.kv_head * all + static_cast<int>(bases[w.sequence]) + position;
  }
};

#if MOE_HAS_WGMMA

/// The warp that takes work tiles by ticket, announces them and loads their keys and values. A lane loads 64 columns of
/// one page's rows.
template <class D, class Source>
struct Loader {
  const Block<D>& b;
  const Args& a;
  const Source& source;
  const CUtensorMap *k, *v;

  static __device__ __forceinline__ uint32_t rank() { return D::kBlocks > 1 ? cluster_rank() : 0; }

  /// The ticket's rows. Tiles with the most positions come first. The KV heads of a tile have consecutive tickets if
  /// they share the cache's part of L2; otherwise one KV head follows the other.
  __device__ __forceinline__ Work work_of(int ticket, int tiles, int group) const {
    Work w = {};
    if (ticket >= tiles * a.cache.heads) return w;
    w.kv_head = a.heads_together ? ticket % a.cache.heads : ticket / tiles;
    const int number = a.heads_together ? ticket / a.cache.heads : ticket % tiles;
    const Tile tile = find_tile<D::kBlocks * kRows>(a, group, tiles - 1 - number);
    w.sequence = tile.sequence;
    w.first_token = a.query_start_loc[tile.sequence];
    const int rows = static_cast<int>(a.query_start_loc[tile.sequence + 1] - w.first_token) * group;
    const int first = tile.tile * D::kBlocks * kRows, last = min(first + D::kBlocks * kRows, rows) - 1;
    w.first = first + static_cast<int>(rank()) * kRows;
    w.last = min(w.first + kRows - 1, last);
    w.lowest = a.positions[w.first_token + min(w.first, last) / group];
    w.end = a.positions[w.first_token + last / group] + 1;
    const int lowest = a.positions[w.first_token + first / group];
    w.from = a.window > 0 ? max(0, lowest + 1 - a.window) : 0;
    w.begin = w.from / D::kTile * D::kTile;
    w.tiles = ceil_div(w.end - w.begin, D::kTile);
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

  /// What a lane loads of a tile: 64 columns of the rows of a page.
  struct Piece {
    bool needed;
    int row;  // first row of the page
  };

  template <int kDims>
  __device__ __forceinline__ Piece piece_of(const Work& w, int begin) const {
    const int offset = threadIdx.x % 32 / (kDims / 64) * source.rows, position = begin + offset;
    const bool needed = offset < D::kTile && position + source.rows > w.from && position < w.end;
    return {needed, needed ? source.row(a, w, position) : 0};
  }

  template <int kDims>
  __device__ __forceinline__ void bring(const Piece& piece, uint64_t* full, uint8_t* tile,
                                        const CUtensorMap* map) const {
    constexpr int kHalves = kDims / 64;
    const int lane = threadIdx.x % 32;
    const uint32_t bytes = __popc(__ballot_sync(0xffffffffu, piece.needed)) * source.rows * 128;
    if (lane == 0) arrive_expecting(full, bytes);
    __syncwarp();
    uint8_t* to = tile + lane % kHalves * D::kHalfBytes + lane / kHalves * source.rows * 128;
    if (D::kBlocks == 1) {
      if (piece.needed) load_tile(to, map, piece.row, lane % kHalves * 64, full);
    } else if (piece.needed && lane % 2 == static_cast<int>(rank())) {
      load_tile_to_both(to, map, piece.row, lane % kHalves * 64, full);
    }
  }

  __device__ __forceinline__ void load(const Work& w, Cursor<D>& at) const {
    for (int i = 0; i < w.tiles; ++i, at.advance()) {
      const Piece of_k = piece_of<D::kKey>(w, w.template tile_at<D>(i));
      mbarrier_wait(b.empty_k(at.stage), at.parity ^ 1);
      bring<D::kKey>(of_k, b.full_k(at.stage), b.k(at.stage), k);
      const Piece of_v = D::kKey == D::kValue ? of_k : piece_of<D::kValue>(w, w.template tile_at<D>(i));
      mbarrier_wait(b.empty_v(at.stage), at.parity ^ 1);
      bring<D::kValue>(of_v, b.full_v(at.stage), b.v(at.stage), v);
    }
  }

  /// The first lane's i-th ticket. The first block of a pair takes it and sends it to the second.
  __device__ __forceinline__ uint32_t shared_ticket(int i, uint32_t ticket) const {
    const bool speaks = threadIdx.x % 32 == 0;
    if (rank() == 0) {
      mbarrier_wait(b.mail_empty(i), (i / 2 & 1) ^ 1);
      if (speaks) cluster_send(b.mail(i), ticket, b.mail_full(i), 1);
    } else {
      if (speaks) arrive_expecting(b.mail_full(i), sizeof(ticket));
      mbarrier_wait(b.mail_full(i), i / 2 & 1);
      if (speaks) {
        ticket = *b.mail(i);
        cluster_arrive_at(b.mail_empty(i), 0);
      }
    }
    __syncwarp();
    return ticket;
  }

  /// Loads all work tiles of the block.
  __device__ __forceinline__ void run() const {
    const int group = a.heads / a.cache.heads, tiles = count_tiles<D::kBlocks * kRows>(a, group);
    const uint32_t clusters = gridDim.x / D::kBlocks;
    const bool takes = threadIdx.x % 32 == 0 && rank() == 0;
    Cursor<D> at;
    Work w = work_of(blockIdx.x / D::kBlocks, tiles, group);
    for (int i = 0;; ++i) {
      announce(i, w);
      if (w.tiles == 0) break;
      // The ticket arrives while the keys of this work tile are requested. The next work tile is looked up while the
      // keys are in flight.
      uint32_t ticket = takes ? atomicAdd(a.counters, 1) : 0;
      load(w, at);
      if (D::kBlocks > 1) ticket = shared_ticket(i, ticket);
      w = work_of(__shfl_sync(0xffffffffu, ticket, 0) + clusters, tiles, group);
    }
    // The last cluster to end leaves the counters zero.
    if (takes && add_acq_rel(a.counters + 1, 1) == clusters - 1) a.counters[0] = a.counters[1] = 0;
  }
};

#endif  // MOE_HAS_WGMMA

}  // namespace moe::attention_prefill
