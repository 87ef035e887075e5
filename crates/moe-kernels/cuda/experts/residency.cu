// For layers with more experts than the device has slots. One launch chooses which experts are in the slots for a pass
// of a step; another exchanges weights between slots and host memory. Both launches are between the router and the
// products of a layer, so a captured graph needs no host. The rule is the rule of src/residency.rs, integer for
// integer.
//
// Every expert is in exactly one place, a slot or a home. An expert that is fetched takes the slot of an expert that
// the pass does not need, and that expert moves to the home that becomes free. The same threads read both and write
// both, so the bus carries both directions at once.
//
// Floor: an exchange moves the bytes of an expert over the bus, 9.4 MB at 51 GB/s: 185 us each. With both directions at
// once an H200 carries 41.6 GB/s each way by these threads, and 48.8 by its copy engines. Few blocks are best: 32 of
// them keep half a MB in flight, and 528 take 6 % more time (docs/lessons/ranks.md).
#include "experts/args.cuh"
#include "ptx/common.cuh"
#include "ptx/ptx.cuh"

namespace moe {
namespace {

constexpr int kMaxExperts = 2048;
constexpr int kThreads = 512;      // threads of the launch that chooses
constexpr int kCopyThreads = 256;  // threads of a block of the exchange
constexpr int kEach = 4;           // vectors that a thread copies at a time
constexpr int kCopyBlocks = 32;
constexpr uint32_t kUse = 1u << 16;  // what a step that needs an expert adds to its heat
constexpr int kAgeShift = 6;         // each step takes a 64th of the heat

struct Shared {
  int32_t place[kMaxExperts], held[kMaxExperts];
  uint32_t heat[kMaxExperts];
  uint8_t pending[kMaxExperts];
  // Experts to fetch, and slots to use for them, both in their order.
  int16_t missing[kMaxExperts], leaving[kMaxExperts];
  int num_missing, num_active;
};

/// Marks the experts that the step needs, and ages the heat of all.
__device__ void begin_step(const ExpertResidencyArgs& a, Shared& s) {
  for (int e = threadIdx.x; e < a.num_experts; e += kThreads) s.pending[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < a.count; i += kThreads) {
    const uint32_t id = a.topk_ids[i];
    if (id < static_cast<uint32_t>(a.num_experts)) s.pending[id] = 1;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.num_experts; e += kThreads) {
    const uint32_t heat = a.heat[e];
    a.heat[e] = s.heat[e] = heat - (heat >> kAgeShift) + (s.pending[e] ? kUse : 0);
  }
}

/// Lists the pending experts that are in no slot, ascending, and counts the others. One warp does it.
__device__ void list_missing(const ExpertResidencyArgs& a, Shared& s) {
  const int lane = threadIdx.x % 32;
  int missing = 0, active = 0;
  for (int base = 0; base < a.num_experts; base += 32) {
    const int e = base + lane;
    const bool needed = e < a.num_experts && s.pending[e];
    const bool here = needed && s.place[e] >= 0;
    const uint32_t absent = __ballot_sync(0xffffffffu, needed && !here);
    if (needed && !here) s.missing[missing + __popc(absent & ((1u << lane) - 1))] = static_cast<int16_t>(e);
    missing += __popc(absent);
    active += __popc(__ballot_sync(0xffffffffu, here));
  }
  if (lane == 0) s.num_missing = missing, s.num_active = active;
}

/// Ranks the slots whose expert the pass does not need, the coldest first. It ends when there is one for each missing
/// expert.
__device__ void list_leaving(const ExpertResidencyArgs& a, Shared& s) {
  for (int slot = threadIdx.x; slot < a.num_slots; slot += kThreads) {
    const int own = s.held[slot];
    if (s.pending[own]) continue;
    int rank = 0;
    for (int other = 0; other < a.num_slots; ++other) {
      const int expert = s.held[other];
      const bool colder = s.heat[expert] < s.heat[own] || (s.heat[expert] == s.heat[own] && other < slot);
      rank += !s.pending[expert] && colder;
    }
    if (rank < s.num_missing) s.leaving[rank] = static_cast<int16_t>(slot);
  }
}

__global__ void __launch_bounds__(kThreads) expert_residency(const __grid_constant__ ExpertResidencyArgs a) {
  extern __shared__ __align__(16) uint8_t smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem);
  pdl_wait();
  for (int e = threadIdx.x; e < a.num_experts; e += kThreads) s.place[e] = a.place[e];
  for (int slot = threadIdx.x; slot < a.num_slots; slot += kThreads) s.held[slot] = a.held[slot];
  if (a.first) {
    begin_step(a, s);
  } else {
    for (int e = threadIdx.x; e < a.num_experts; e += kThreads)
      s.heat[e] = a.heat[e], s.pending[e] = static_cast<uint8_t>(a.pending[e]);
  }
  __syncthreads();
  if (threadIdx.x < 32) list_missing(a, s);
  __syncthreads();
  if (s.num_missing > 0) list_leaving(a, s);
  __syncthreads();
  const int fetched = min(s.num_missing, a.num_slots - s.num_active);
  for (int i = threadIdx.x; i < fetched; i += kThreads) {
    const int expert = s.missing[i], slot = s.leaving[i], left = s.held[slot], place = s.place[expert];
    a.place[left] = s.place[left] = place;
    a.place[expert] = s.place[expert] = slot;
    a.held[slot] = expert;
    a.exchanges[1 + 2 * i] = slot, a.exchanges[2 + 2 * i] = -1 - place;
  }
  if (threadIdx.x == 0) {
    a.exchanges[0] = fetched;
    if (a.first) a.counts[0] += s.num_missing + s.num_active;
    a.counts[1] += fetched;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.num_experts; e += kThreads) {
    const bool computed = s.pending[e] && s.place[e] >= 0;
    a.map[e] = computed ? s.place[e] : -1;
    a.pending[e] = s.pending[e] && !computed;
  }
}

/// Loads 16 bytes from the host. The load is not cached, because an earlier kernel may have written them.
__device__ __forceinline__ uint4 load_host(const uint4* p) { return __ldcv(p); }

__global__ void __launch_bounds__(kCopyThreads) expert_exchange(const __grid_constant__ ExpertExchangeArgs a) {
  constexpr int64_t kChunk = kCopyThreads * kEach;  // vectors
  pdl_wait();
  const int64_t count = a.exchanges[0];
  const int64_t own13 = a.w13_bytes / 16, own2 = a.w2_bytes / 16;
  const int64_t chunks13 = ceil_div(own13, kChunk), chunks = chunks13 + ceil_div(own2, kChunk);
  for (int64_t work = blockIdx.x; work < count * chunks; work += gridDim.x) {
    const int64_t i = work / chunks, chunk = work % chunks;
    const int64_t slot = a.exchanges[1 + 2 * i], home = a.exchanges[2 + 2 * i];
    const bool down = chunk >= chunks13;
    const int64_t own = down ? own2 : own13, first = (down ? chunk - chunks13 : chunk) * kChunk + threadIdx.x;
    uint4* here = static_cast<uint4*>(down ? a.w2 : a.w13) + slot * own;
    uint4* there = static_cast<uint4*>(a.homes) + home * (own13 + own2) + (down ? own13 : 0);
    uint4 fetched[kEach], left[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t at = first + j * kCopyThreads;
      if (at < own) fetched[j] = load_host(there + at), left[j] = __ldcs(here + at);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t at = first + j * kCopyThreads;
      if (at < own) __stcs(there + at, left[j]), here[at] = fetched[j];
    }
  }
  // The first weights of the products are loaded by the copy engine before their launch waits for the launches before
  // it. The earliest time is when all blocks of this launch have ended, since none of them lets the next launch start
  // earlier.
  __threadfence();
  fence_async_proxy();
}

}  // namespace
}  // namespace moe

/// Decides which experts this pass of a step computes, and which must change places for that. The pass computes as many
/// of the pending experts as there are slots: first the ones in slots, then the ones with the lowest numbers. Launches
/// of one layer must not overlap. It refuses more than 2,048 experts, and more slots than experts.
extern "C" int moe_expert_residency(const moe::ExpertResidencyArgs* args, void* stream) {
  using namespace moe;
  const ExpertResidencyArgs& c = *args;
  if (c.count < 0 || c.num_slots < 1 || c.num_experts < c.num_slots || c.num_experts > kMaxExperts)
    return cudaErrorInvalidValue;
  return launch(expert_residency, {dim3(1), dim3(kThreads), stream, sizeof(Shared)}, c);
}

/// Carries out what moe_expert_residency decided, which must be the launch directly before.
extern "C" int moe_expert_exchange(const moe::ExpertExchangeArgs* args, void* stream) {
  using namespace moe;
  const ExpertExchangeArgs& c = *args;
  if (c.w13_bytes <= 0 || c.w2_bytes <= 0 || c.w13_bytes % 16 != 0 || c.w2_bytes % 16 != 0)
    return cudaErrorInvalidValue;
  return launch(expert_exchange, {dim3(kCopyBlocks), dim3(kCopyThreads), stream}, c);
}
