// Geometry of the weight-streaming expert kernels: what is multiplied in which order, and where it is in shared memory.
// Host and device compute it from the same code.
#pragma once

#include "experts/align.cuh"

namespace moe::stream {

/// Warps that multiply; each takes every 8th step of 16 along K. 16 warps were slower from T = 64.
constexpr int kConsumers = 8;
constexpr int kLoaders = 2;                                 // warps that load weights, half a tile each
constexpr int kThreads = (kConsumers + kLoaders + 1) * 32;  // the last warp loads token rows and activations
constexpr int kTileRows = 16;                               // weight rows of a tile: one mma
constexpr int kMaxSlots = 2048;                             // T K; the grouped kernel computes more
constexpr int kMaxStages = 16;
constexpr int kMinStages = 4;
constexpr int kFlagHeader = 32;  // words of the flag buffer before its two sets
constexpr int kSetHeader = 4;    // words of a set before the groups' flags: grid barrier, tickets
constexpr int kTicketTiles = 4;  // tiles of a ticket; divides every tile count

/// All arguments except the weights.
struct Args {
  const bf16* x;
  const uint32_t* topk_ids;
  const float* topk_weights;
  const int32_t* expert_map;
  bf16* act;         // [T K, I]
  float* slot_rows;  // [T K, H]
  bf16* out;         // [T, H], or null
  float* out_f32;    // [T, H], or null; both null: slot_rows are the result
  uint32_t* flags;
  int flag_set;  // words of one set of flags
  int tokens, top_k, num_ids, num_local, hidden, inter;
  int chunk[2], stages;  // elements along K per pipeline stage, for each product
  int stage_bytes;

  __host__ __device__ int slots() const { return tokens * top_k; }
  /// Length of the sums of a product: gate and up (0), down (1).
  __host__ __device__ int depth(int product) const { return product == 0 ? hidden : inter; }
  /// The number of tiles of 16 weight rows per expert: 8 gate and 8 up rows, or 16 rows of w2.
  __host__ __device__ int tiles(int product) const {
    return product == 0 ? inter / (kTileRows / 2) : hidden / kTileRows;
  }
};

/// All arguments. `Weights` is Rows or quant::Tiles: the layout of the weights in stages, how they are loaded and how
/// they are multiplied.
template <class Weights>
struct Weighted : Args {
  Weights w;
};

/// Up to `pass` slots of one expert: what one read of its weights serves.
struct Group {
  uint16_t expert, first, rows;  // slots are sorted[first .. first + rows]
};

__host__ __device__ inline int max_groups(int slots, int num_local, int pass) {
  return (slots < num_local ? slots : num_local) + slots / pass;
}

/// Rows are padded by 16 bytes: their stride is 16 modulo 128, so ldmatrix has no bank conflicts.
__host__ __device__ constexpr uint32_t padded(int elements) { return elements * 2 + 16; }

/// Byte offsets into dynamic shared memory.
struct Layout {
  uint32_t groups, sorted, partial, rows, stage, total;
};

__host__ __device__ inline Layout layout(const Args& a, int pass) {
  Layout l;
  l.groups = 512;  // barriers and the number of groups come first
  l.sorted = round_up(l.groups + max_groups(a.slots(), a.num_local, pass) * static_cast<uint32_t>(sizeof(Group)), 16);
  l.partial = round_up(l.sorted + a.slots() * 2u, 16);
  l.rows = l.partial + 2 * kConsumers * kTileRows * (pass + 4) * 4;
  // The down product has room for the rows of two runs, so that the rows of the next run are there in time.
  const uint32_t twice = 2 * pass * padded(a.inter);
  l.stage = round_up(l.rows + (twice > pass * padded(a.hidden) ? twice : pass * padded(a.hidden)), 128);
  l.total = l.stage + a.stages * a.stage_bytes;
  return l;
}

/// Bytes that alignment needs. It uses the memory where the stages will be.
__host__ __device__ inline uint32_t align_bytes(const Args& a) { return a.slots() * 4u + (2 * a.num_local + 2) * 4u; }

/// A consecutive share of `total` items.
struct Range {
  int begin, end;
};

__device__ __forceinline__ Range share(int total) {
  const uint32_t n = total;  // at most about 10^5 tiles: times a block number they fit in 32 bits
  return {static_cast<int>(n * blockIdx.x / gridDim.x), static_cast<int>(n * (blockIdx.x + 1) / gridDim.x)};
}

/// A place in a ring of stages and the parity of its barriers.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// What `build_groups` computes for all roles.
struct Routing {
  Group* groups;
  uint16_t* sorted;  // place -> slot
  uint32_t* num_groups;

  __device__ Routing(uint8_t* smem, const Layout& l)
      : groups(reinterpret_cast<Group*>(smem + l.groups)),
        sorted(reinterpret_cast<uint16_t*>(smem + l.sorted)),
        num_groups(reinterpret_cast<uint32_t*>(smem + l.groups - 16)) {}
};

/// One warp does it with one lane per slot. There is no pass over the experts, so one token's routing costs a few
/// shuffles.
template <int kPass>
__device__ __forceinline__ void build_few(const Args& a, const Routing& to) {
  const int lane = threadIdx.x;
  const int local = lane < a.slots() ? local_expert(a.topk_ids[lane], a.expert_map, a.num_ids, a.num_local) : -1;
  const uint32_t same = __match_any_sync(0xffffffffu, local);
  const int before = __popc(same & ((1u << lane) - 1));
  const bool leads = local >= 0 && before % kPass == 0;
  int place = before, group = before / kPass;
  for (int j = 0; j < a.slots(); ++j) {
    const int other = __shfl_sync(0xffffffffu, local, j);
    const bool other_leads = __shfl_sync(0xffffffffu, leads, j);
    if (other >= 0 && other < local) place += 1, group += other_leads;
  }
  if (local >= 0) to.sorted[place] = lane;
  if (leads) {
    const int rows = min(kPass, __popc(same) - before);
    to.groups[group] = {static_cast<uint16_t>(local), static_cast<uint16_t>(place), static_cast<uint16_t>(rows)};
  }
  const uint32_t leaders = __ballot_sync(0xffffffffu, leads);
  if (lane == 0) *to.num_groups = __popc(leaders);
}

/// A stable counting sort by the block; `scratch` holds align_bytes().
template <int kPass>
__device__ __forceinline__ void build_many(const Args& a, const Routing& to, uint8_t* scratch) {
  int16_t* local = reinterpret_cast<int16_t*>(scratch);
  uint16_t* place = reinterpret_cast<uint16_t*>(local + a.slots());
  uint32_t* offsets = reinterpret_cast<uint32_t*>(place + a.slots());
  uint32_t* group_base = offsets + a.num_local + 1;
  for (int s = threadIdx.x; s < a.slots(); s += kThreads)
    local[s] = static_cast<int16_t>(local_expert(a.topk_ids[s], a.expert_map, a.num_ids, a.num_local));
  for (int e = threadIdx.x; e < a.num_local; e += kThreads) offsets[e] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int s = threadIdx.x; s < round_up(a.slots(), 32); s += 32) {
      const uint32_t rank = rank_in_expert(s < a.slots() ? local[s] : -1, offsets);
      if (s < a.slots()) place[s] = static_cast<uint16_t>(rank);
    }
    for (int e = threadIdx.x; e < a.num_local; e += 32) group_base[e] = ceil_div(offsets[e], kPass);
    __syncwarp();
    warp_offsets(offsets, a.num_local);
    warp_offsets(group_base, a.num_local);
    if (threadIdx.x == 0) *to.num_groups = group_base[a.num_local];
  }
  __syncthreads();
  for (int s = threadIdx.x; s < a.slots(); s += kThreads)
    if (local[s] >= 0) to.sorted[offsets[local[s]] + place[s]] = static_cast<uint16_t>(s);
  for (int e = threadIdx.x; e < a.num_local; e += kThreads) {
    uint32_t first = offsets[e];
    for (uint32_t u = group_base[e]; u < group_base[e + 1]; ++u, first += kPass) {
      const uint32_t rows = min(static_cast<uint32_t>(kPass), offsets[e + 1] - first);
      to.groups[u] = {static_cast<uint16_t>(e), static_cast<uint16_t>(first), static_cast<uint16_t>(rows)};
    }
  }
  fence_async_proxy();  // the copy engine fills this memory next
}

/// Sorts the slots by expert and cuts them into groups; every block computes the same ones. Returns their number.
template <int kPass>
__device__ __forceinline__ int build_groups(const Args& a, uint8_t* smem, const Layout& l) {
  const Routing to(smem, l);
  if (a.slots() > 32) {
    build_many<kPass>(a, to, smem + l.stage);
  } else if (threadIdx.x < 32) {
    build_few<kPass>(a, to);
  }
  __syncthreads();
  return static_cast<int>(*to.num_groups);
}

}  // namespace moe::stream
