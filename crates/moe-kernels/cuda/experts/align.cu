// Token alignment in one launch: topk_ids [T, K] -> slots sorted by local expert, a range per expert,
// and the list of tiles (an expert's next up to `tile_rows` slots) that a grouped product works through.
//
// Floor: 4 T K bytes read, 4 T K written. That is nothing compared with the launch, so what counts is that there is
// only one launch.
// Design: one block, because a stable order across blocks would need a second launch. Slots are counted by atomics,
// whose order does not matter. Ranks come from a bit per (expert, slot): a slot's rank is the number of bits before
// it, so the order is a stable sort's and the same on every run. A chunk of up to 2,048 slots has a bitmap at a time.
// Predicted at T = 256: ids 0.8 us, four barriers and scans 1.5, launch 1: 3.5 us. Measured, one H200:
// T = 64 3.9 us, 256 6.3, 1,024 25.7 (4.6, 8.2 and 20.9 with ranks by match_any).
#include "experts/align.cuh"

namespace moe {
namespace {

constexpr int kAlignThreads = 1024;
constexpr int kAlignWarps = kAlignThreads / 32;
constexpr int kMaxWords = 64;                          // of 32 slots in a chunk
constexpr int kEach = kMaxWords * 32 / kAlignThreads;  // slots of a thread

struct Args {
  const uint32_t* topk_ids;
  const int32_t* expert_map;
  int slots, num_ids, num_local, tile_rows;
  // Words of a chunk, and words from one expert to the next: an odd number, against bank conflicts.
  int words, stride;
  uint32_t* offsets;  // [E + 1]
  uint32_t* sorted;   // [T K]
  uint32_t* tiles;    // [max_tiles, 2]: expert, first sorted slot
  uint32_t* num_tiles;
};

/// Shared memory: counts, which become the first places [E + 1]; first tiles [E + 1]; a bitmap [E, words]; and the
/// number of bits before each of its words.
struct AlignMemory {
  uint32_t *offsets, *tile_base, *bits;
  uint16_t* before;

  __device__ AlignMemory(uint32_t* smem, const Args& a)
      : offsets(smem),
        tile_base(offsets + a.num_local + 1),
        bits(tile_base + a.num_local + 1),
        before(reinterpret_cast<uint16_t*>(bits + a.num_local * a.stride)) {}
};

size_t align_smem(int num_local, int words) {
  return sizeof(uint32_t) * 2 * (num_local + 1) +
         (sizeof(uint32_t) + sizeof(uint16_t)) * static_cast<size_t>(num_local) * (words | 1);
}

/// Sets the bits of a chunk's slots. local[i] is the expert of this thread's i-th slot, or -1.
__device__ __forceinline__ void mark(const AlignMemory& m, int stride, const int (&local)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kAlignThreads + threadIdx.x;
    if (local[i] >= 0) atomicOr(m.bits + local[i] * stride + at / 32, 1u << at % 32);
  }
}

/// Counts the bits before each word; every warp takes some experts.
__device__ __forceinline__ void count_before(const AlignMemory& m, int words, int stride, int num_local) {
  const int lane = threadIdx.x % 32;
  for (int e = threadIdx.x / 32; e < num_local; e += kAlignWarps) {
    uint32_t start = 0;
    for (int base = 0; base < words; base += 32) {
      uint32_t total;
      const int w = base + lane;
      const uint32_t sum = warp_exclusive_sum(w < words ? __popc(m.bits[e * stride + w]) : 0, &total);
      if (w < words) m.before[e * stride + w] = static_cast<uint16_t>(start + sum);
      start += total;
    }
  }
}

__global__ __launch_bounds__(kAlignThreads) void align_tokens(const __grid_constant__ Args a) {
  extern __shared__ uint32_t smem[];
  const AlignMemory m(smem, a);
  const int words = a.words, stride = a.stride, chunk = words * 32;
  const auto local = [&](int slot, int end) {
    return slot < end ? local_expert(a.topk_ids[slot], a.expert_map, a.num_ids, a.num_local) : -1;
  };
  const auto clear = [&] {
    for (int i = threadIdx.x; i < a.num_local * stride; i += kAlignThreads) m.bits[i] = 0;
  };
  for (int e = threadIdx.x; e < a.num_local; e += kAlignThreads) m.offsets[e] = 0;
  clear();
  pdl_launch_dependents();
  __syncthreads();
  pdl_wait();

  int own[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) own[i] = local(i * kAlignThreads + threadIdx.x, min(chunk, a.slots));
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (own[i] >= 0) atomicAdd(m.offsets + own[i], 1);
  for (int slot = chunk + threadIdx.x; slot < a.slots; slot += kAlignThreads) {
    const int e = local(slot, a.slots);
    if (e >= 0) atomicAdd(m.offsets + e, 1);
  }
  mark(m, stride, own);
  __syncthreads();
  for (int e = threadIdx.x; e < a.num_local; e += kAlignThreads) m.tile_base[e] = ceil_div(m.offsets[e], a.tile_rows);
  __syncthreads();
  if (threadIdx.x / 32 == 0) warp_offsets(m.offsets, a.num_local);
  if (threadIdx.x / 32 == 1) warp_offsets(m.tile_base, a.num_local);
  count_before(m, words, stride, a.num_local);
  __syncthreads();

  for (int e = threadIdx.x; e <= a.num_local; e += kAlignThreads) {
    const uint32_t first = m.offsets[e];
    a.offsets[e] = first;
    if (e == a.num_local) {
      *a.num_tiles = m.tile_base[e];
      break;
    }
    for (uint32_t t = m.tile_base[e]; t < m.tile_base[e + 1]; ++t) {
      a.tiles[2 * t] = e;
      a.tiles[2 * t + 1] = first + (t - m.tile_base[e]) * a.tile_rows;
    }
  }
  for (int begin = 0;;) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (own[i] < 0) continue;
      const int at = i * kAlignThreads + threadIdx.x, word = own[i] * stride + at / 32;
      const uint32_t rank = m.before[word] + __popc(m.bits[word] & ((1u << at % 32) - 1));
      a.sorted[m.offsets[own[i]] + rank] = begin + at;
    }
    begin += chunk;
    if (begin >= a.slots) return;
    __syncthreads();
    // The slots of the next chunk follow the slots of this one.
    for (int e = threadIdx.x; e < a.num_local; e += kAlignThreads) {
      const int last = e * stride + words - 1;
      m.offsets[e] += m.before[last] + __popc(m.bits[last]);
    }
    __syncthreads();
    clear();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      own[i] = local(begin + i * kAlignThreads + static_cast<int>(threadIdx.x), min(begin + chunk, a.slots));
    mark(m, stride, own);
    __syncthreads();
    count_before(m, words, stride, a.num_local);
    __syncthreads();
  }
}

}  // namespace
}  // namespace moe

/// The largest number of tiles that `slots` slots on `num_local` experts can make: the length of `tiles`.
extern "C" int moe_max_tiles(int slots, int num_local, int tile_rows) {
  if (slots <= 0 || num_local <= 0 || tile_rows <= 0) return 0;
  return (slots < num_local ? slots : num_local) + slots / tile_rows;
}

/// Sorts slots by local expert and cuts them into tiles.
extern "C" int moe_align_tokens(const moe::AlignTokensArgs* args, void* stream) {
  using namespace moe;
  const AlignTokensArgs& c = *args;
  if (c.slots < 0 || c.num_ids <= 0 || c.num_local <= 0 || c.tile_rows <= 0) return cudaErrorInvalidValue;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  int words = c.slots > kMaxWords * 32 ? kMaxWords : ceil_div(c.slots, 32);
  if (words < 1) words = 1;
  while (words > 1 && align_smem(c.num_local, words) > static_cast<size_t>(limits.block_smem)) words /= 2;
  const size_t smem = align_smem(c.num_local, words);
  if (smem > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  const Args a = {c.topk_ids, c.expert_map, c.slots,   c.num_ids, c.num_local, c.tile_rows,
                  words,      words | 1,    c.offsets, c.sorted,  c.tiles,     c.num_tiles};
  return launch(align_tokens, {dim3(1), dim3(kAlignThreads), stream, smem}, a);
}
