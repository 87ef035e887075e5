// Token alignment for any number of experts, slots and tokens: topk_ids -> slots sorted by local expert, without a host
// read in between. The kernels that zero absent slots and that convert ids to the ids of one rank are here, too.
//
// As in experts/align.cu, one block sorts stably and without an atomic, so that the order is the same on every run.
#include "any/any.cuh"
#include "experts/align.cuh"
#include "router/copies.cuh"

namespace moe {
namespace {

constexpr int kSortWarps = 32;

struct Ids {
  const uint32_t* topk_ids;
  const int32_t* expert_map;  // [num_ids] or null
  int num_ids, num_local;

  __device__ __forceinline__ int local(int64_t slot) const {
    return local_expert(topk_ids[slot], expert_map, num_ids, num_local);
  }
};

__global__ void __launch_bounds__(kSortWarps * 32)
    group_slots(const Ids ids, int count, int top_k, uint32_t* offsets, uint32_t* slots, uint32_t* in_rows,
                uint32_t* workspace) {
  extern __shared__ uint32_t smem[];
  uint32_t* counts = workspace == nullptr ? smem : workspace;  // [warps, experts]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = ids.num_local;
  pdl_wait();
  for (size_t i = threadIdx.x; i < static_cast<size_t>(kSortWarps) * experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();

  const int run = round_up(ceil_div(count, kSortWarps), 32);
  const int begin = min(count, warp * run), end = min(count, begin + run);
  uint32_t* own = counts + static_cast<size_t>(warp) * experts;
  for (int base = begin; base < end; base += 32) rank_in_expert(base + lane < end ? ids.local(base + lane) : -1, own);
  __syncthreads();
  // A warp's count becomes the sum of the counts of the warps before it. The expert's total goes to `offsets`.
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    uint32_t sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const size_t at = static_cast<size_t>(w) * experts + e;
      const uint32_t part = counts[at];
      counts[at] = sum;
      sum += part;
    }
    offsets[e] = sum;
  }
  __syncthreads();
  if (warp == 0) warp_offsets(offsets, experts);
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int e = base + lane < end ? ids.local(base + lane) : -1;
    const uint32_t rank = rank_in_expert(e, own);
    if (e < 0) continue;
    const uint32_t place = offsets[e] + rank, slot = base + lane;
    slots[place] = slot;
    if (in_rows != nullptr) in_rows[place] = slot / top_k;
  }
}

// There are so few threads that a block of the products, which loads weights meanwhile, has room on the same SM.
constexpr int kListThreads = 256;
constexpr int kListEach = 8;  // slots that a thread loads at a time

constexpr int kListSegment = 1 << 14;  // least slots of a block
constexpr int kListBlocks = 16;        // most blocks of an expert

/// The sum of `mine` over the threads before this one. `total` is the sum over the whole block. `of_warp` may be used
/// again after the next barrier.
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t mine, uint32_t* of_warp, uint32_t* total) {
  constexpr int kWarps = kListThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t before = warp_exclusive_sum(mine, total);
  if (lane == 0) of_warp[warp] = *total;
  __syncthreads();
  const uint32_t before_warps = warp_exclusive_sum(lane < kWarps ? of_warp[lane] : 0, total);
  return __shfl_sync(0xffffffffu, before_warps, warp) + before;
}

/// Lists the slots of each local expert in ascending order. Block (expert, i) lists the slots of the i-th `segment`;
/// their place in the list follows from the number of slots that it counts in the segments before.
///
/// Floor: every block reads 4 T K bytes of ids from L2, and the blocks write 4 T K bytes together. Predicted: two
/// rounds of loads, a barrier and the launch up to T K = 2,048, 2.2 us; 1 us more for each further 2,048. The one block
/// of moe_align_tokens takes 3.9 us at T K = 512 and 25.7 at 8,192 on an H200. Measured for 32 experts of 128: with one
/// block per expert 5.1 us at T K = 2,048 and 12.2 at 16,384; with several blocks per expert 25 at 65,536 and 98 at
/// 262,144. 22 us were predicted there: counting has only 8 loads in flight and waits for them.
__global__ void __launch_bounds__(kListThreads)
    list_slots(const Ids ids, int count, int segment, uint32_t* counts, uint32_t* lists) {
  __shared__ uint32_t of_warp[2][kListThreads / 32];
  const int expert = blockIdx.x, begin = min(count, static_cast<int>(blockIdx.y) * segment);
  const int end = min(count, begin + segment);
  uint32_t* list = lists + static_cast<size_t>(expert) * count;
  uint32_t listed = 0;
  pdl_launch_dependents();
  pdl_wait();
  if (begin > 0) {
    uint32_t mine = 0;
#pragma unroll 8
    for (int slot = threadIdx.x; slot < begin; slot += kListThreads) mine += ids.local(slot) == expert ? 1 : 0;
    block_exclusive_sum(mine, of_warp[1], &listed);
  }
  int odd = 0;
  for (int base = begin; base < end; base += kListThreads * kListEach, odd ^= 1) {
    const int first = base + static_cast<int>(threadIdx.x) * kListEach;
    uint32_t mine = 0;  // a bit for each slot
#pragma unroll
    for (int i = 0; i < kListEach; ++i)
      if (first + i < end && ids.local(first + i) == expert) mine |= 1u << i;
    uint32_t total;
    uint32_t place = listed + block_exclusive_sum(__popc(mine), of_warp[odd], &total);
#pragma unroll
    for (int i = 0; i < kListEach; ++i)
      if (mine >> i & 1u) list[place++] = first + i;
    listed += total;
  }
  if (threadIdx.x == 0 && blockIdx.y == gridDim.y - 1) counts[expert] = listed;
}

/// Zeroes the rows of slots without a local expert; a block row has one slot.
__global__ void zero_absent(const Ids ids, float* out, int width) {
  pdl_wait();
  if (ids.local(blockIdx.x) >= 0) return;
  for (int i = column_start(); i < width; i += column_step()) out[static_cast<size_t>(blockIdx.x) * width + i] = 0;
}

__global__ void mask_nonlocal(const Ids ids, uint32_t* out, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step())
    out[i] = ids.local(i) >= 0 ? ids.topk_ids[i] : kNoExpert;
}

__global__ void local_ids(const uint32_t* ids, uint32_t first, uint32_t num_local, uint32_t* out, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step()) {
    const uint32_t id = ids[i];
    out[i] = id != kNoExpert && id >= first && id - first < num_local ? id - first : kNoExpert;
  }
}

__global__ void physical_ids(const uint32_t* ids, const int32_t* log2phy, int top_k, int num_experts, int width,
                             uint32_t first_row, bool hashed, uint32_t* out, int64_t count) {
  pdl_wait();
  for (int64_t i = element_start(); i < count; i += element_step())
    out[i] = slot_of_row(log2phy, num_experts, width, first_row + static_cast<uint32_t>(i / top_k), ids[i], hashed);
}

size_t counts_bytes(int num_local) { return sizeof(uint32_t) * kSortWarps * num_local; }

}  // namespace
}  // namespace moe

using namespace moe;

/// Elements (u32) of the workspace of moe_any_group_slots; 0 if it needs none.
extern "C" int64_t moe_any_group_slots_workspace(int num_local) {
  return counts_bytes(num_local) <= 48 * 1024 ? 0 : static_cast<int64_t>(kSortWarps) * num_local;
}

/// Sorts slots by local expert.
extern "C" int moe_any_group_slots(const AnyGroupSlotsArgs* args, void* stream) {
  const AnyGroupSlotsArgs& c = *args;
  if (c.count < 0 || c.count > 0x7fff0000 || c.num_ids < 0 || c.num_local < 0 || (c.count > 0 && c.top_k <= 0))
    return cudaErrorInvalidValue;
  const bool global = moe_any_group_slots_workspace(c.num_local) > 0;
  if (global && c.workspace == nullptr) return cudaErrorInvalidValue;
  const Ids ids = {c.topk_ids, c.expert_map, c.num_ids, c.num_local};
  const size_t smem = global ? 0 : counts_bytes(c.num_local);
  return launch(group_slots, {dim3(1), dim3(kSortWarps * 32), stream, smem}, ids, c.count, c.top_k, c.offsets, c.slots,
                c.in_rows, global ? c.workspace : nullptr);
}

/// counts [num_local] u32 = how many of the slots `topk_ids` [count] each local expert has, lists [num_local, count]
/// u32 = which slots, ascending. Places after the last slot of a list are not written. Ids and map are the same as for
/// moe_any_group_slots.
extern "C" int moe_any_list_slots(const void* topk_ids, const void* expert_map, int count, int num_ids, int num_local,
                                  void* counts, void* lists, void* stream) {
  if (count < 0 || count > 0x7fff0000 || num_ids < 0 || num_local < 0) return cudaErrorInvalidValue;
  if (num_local == 0) return cudaSuccess;
  const Ids ids = {static_cast<const uint32_t*>(topk_ids), static_cast<const int32_t*>(expert_map), num_ids, num_local};
  const int blocks = min(max(count / kListSegment, 1), kListBlocks);
  const int segment = round_up(ceil_div(count, blocks), kListThreads * kListEach);
  return launch(list_slots, {dim3(num_local, blocks), dim3(kListThreads), stream}, ids, count, segment,
                static_cast<uint32_t*>(counts), static_cast<uint32_t*>(lists));
}

/// Zeroes the rows of `out` [count, width] f32 whose slot has no local expert.
extern "C" int moe_any_zero_absent(const void* topk_ids, const void* expert_map, int count, int num_ids, int num_local,
                                   int width, void* out, void* stream) {
  if (count < 0 || num_ids < 0 || num_local < 0 || width < 0) return cudaErrorInvalidValue;
  if (count == 0 || width == 0) return cudaSuccess;
  const Ids ids = {static_cast<const uint32_t*>(topk_ids), static_cast<const int32_t*>(expert_map), num_ids, num_local};
  return launch(zero_absent, over_rows(count, width, stream), ids, static_cast<float*>(out), width);
}

/// out [count] u32 = the id if the map gives it a local expert, else 0xffffffff.
extern "C" int moe_any_mask_nonlocal(const void* topk_ids, const void* expert_map, int64_t count, int num_ids,
                                     void* out, void* stream) {
  if (count < 0 || num_ids < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const Ids ids = {static_cast<const uint32_t*>(topk_ids), static_cast<const int32_t*>(expert_map), num_ids,
                   0x7fffffff};
  return launch(mask_nonlocal, over_elements(count, stream), ids, static_cast<uint32_t*>(out), count);
}

/// out [count] u32 = the physical id of one copy of each logical id; 0xffffffff for ids without a copy. log2phy is
/// [num_experts, width] i32, padded with -1. The ids belong to rows first_row, first_row + 1, .., top_k in each.
extern "C" int moe_any_physical_ids(const void* topk_ids, const void* log2phy, int64_t count, int top_k,
                                    int num_experts, int width, uint32_t first_row, int hashed, void* out,
                                    void* stream) {
  if (count < 0 || top_k < 1 || num_experts < 1 || width < 1) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return launch(physical_ids, over_elements(count, stream), static_cast<const uint32_t*>(topk_ids),
                static_cast<const int32_t*>(log2phy), top_k, num_experts, width, first_row, hashed != 0,
                static_cast<uint32_t*>(out), count);
}

/// out [count] u32 = id - first if that is below num_local, else 0xffffffff.
extern "C" int moe_any_local_ids(const void* topk_ids, uint32_t first, uint32_t num_local, int64_t count, void* out,
                                 void* stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return launch(local_ids, over_elements(count, stream), static_cast<const uint32_t*>(topk_ids), first, num_local,
                static_cast<uint32_t*>(out), count);
}
