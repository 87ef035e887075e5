// Token alignment in one launch: topk_ids [T, K] -> slots sorted by local expert, a range per expert,
// and the list of tiles (an expert's next up to `tile_rows` slots) that a grouped product works through.
//
// Floor: 4 T K bytes read, 4 T K written: nothing beside the launch, so what counts is that it is one launch.
// Design: one block, because a stable order across blocks would need a second launch. Warp w owns the
// w-th run of slots: it counts them per expert; the counts become starting places (experts first, warps
// within); a second walk puts each slot where it belongs. Ranks inside a warp come from match_any, so the
// order is a stable sort's without a single atomic, and the same on every run.
#include "align.cuh"

namespace moe {
namespace {

constexpr int kWarps = 32;

struct AlignArgs {
  const uint32_t* topk_ids;
  const int32_t* expert_map;
  int slots, num_ids, num_local, tile_rows;
  uint32_t* offsets;  // [E + 1]
  uint32_t* sorted;   // [T K]
  uint32_t* tiles;    // [max_tiles, 2]: expert, first sorted slot
  uint32_t* num_tiles;
};

__global__ __launch_bounds__(kWarps * 32) void align_tokens(const AlignArgs a) {
  extern __shared__ uint32_t smem[];
  uint32_t* counts = smem;                           // [warps, E]
  uint32_t* offsets = counts + kWarps * a.num_local;  // [E + 1]
  uint32_t* tile_base = offsets + a.num_local + 1;    // [E + 1]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * a.num_local; i += blockDim.x) counts[i] = 0;
  pdl_launch_dependents();
  __syncthreads();
  pdl_wait();

  const int run = round_up(ceil_div(a.slots, kWarps), 32);
  const int begin = warp * run, end = min(a.slots, begin + run);
  uint32_t* own = counts + warp * a.num_local;
  const auto local = [&](int slot) {
    return slot < end ? local_expert(a.topk_ids[slot], a.expert_map, a.num_ids, a.num_local) : -1;
  };
  for (int base = begin; base < end; base += 32) rank_in_expert(local(base + lane), own);
  __syncthreads();

  for (int e = threadIdx.x; e < a.num_local; e += blockDim.x) {
    uint32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t count = counts[w * a.num_local + e];
      counts[w * a.num_local + e] = sum;
      sum += count;
    }
    offsets[e] = sum;
    tile_base[e] = ceil_div(sum, a.tile_rows);
  }
  __syncthreads();
  if (warp == 0) warp_offsets(offsets, a.num_local);
  if (warp == 1) warp_offsets(tile_base, a.num_local);
  __syncthreads();

  for (int i = threadIdx.x; i < kWarps * a.num_local; i += blockDim.x) counts[i] += offsets[i % a.num_local];
  for (int e = threadIdx.x; e < a.num_local; e += blockDim.x) {
    for (uint32_t t = tile_base[e]; t < tile_base[e + 1]; ++t) {
      a.tiles[2 * t] = e;
      a.tiles[2 * t + 1] = offsets[e] + (t - tile_base[e]) * a.tile_rows;
    }
  }
  for (int e = threadIdx.x; e <= a.num_local; e += blockDim.x) a.offsets[e] = offsets[e];
  if (threadIdx.x == 0) *a.num_tiles = tile_base[a.num_local];
  __syncthreads();

  for (int base = begin; base < end; base += 32) {
    const int l = local(base + lane);
    const uint32_t place = rank_in_expert(l, own);
    if (l >= 0) a.sorted[place] = base + lane;
  }
}

size_t align_smem(int num_local) { return sizeof(uint32_t) * ((kWarps + 2) * num_local + 2); }

}  // namespace
}  // namespace moe

/// Tiles that `slots` slots on `num_local` experts can make at most: the length of `tiles`.
extern "C" int moe_max_tiles(int slots, int num_local, int tile_rows) {
  if (slots <= 0 || num_local <= 0 || tile_rows <= 0) return 0;
  return (slots < num_local ? slots : num_local) + slots / tile_rows;
}

/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids` | [T K] u32, physical ids; 0xffffffff = no expert |
/// | `expert_map` | [num_ids] i32, physical id to local expert, -1 = elsewhere; null = identity |
/// | `offsets` | out [num_local + 1] u32: expert e's slots are sorted[offsets[e]..offsets[e + 1]] |
/// | `sorted` | out [T K] u32 slot numbers, ascending within an expert; the tail is left as it was |
/// | `tiles` | out [moe_max_tiles, 2] u32: expert, first place in `sorted`; a tile ends after `tile_rows` places or with its expert |
/// | `num_tiles` | out [1] u32 |
extern "C" int moe_align_tokens(const void* topk_ids, const void* expert_map, int slots, int num_ids,
                                int num_local, int tile_rows, void* offsets, void* sorted, void* tiles,
                                void* num_tiles, void* stream) {
  using namespace moe;
  if (slots < 0 || num_ids <= 0 || num_local <= 0 || tile_rows <= 0) return cudaErrorInvalidValue;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  const size_t smem = align_smem(num_local);
  if (smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  const AlignArgs args = {static_cast<const uint32_t*>(topk_ids), static_cast<const int32_t*>(expert_map),
                          slots, num_ids, num_local, tile_rows, static_cast<uint32_t*>(offsets),
                          static_cast<uint32_t*>(sorted), static_cast<uint32_t*>(tiles),
                          static_cast<uint32_t*>(num_tiles)};
  return launch(align_tokens, {dim3(1), dim3(kWarps * 32), stream, smem}, args);
}
