// One token per row of logits, on the device, with the CPU's definition and its bits (model-runtime, `sampling`).
//
// Floor: the logits once, 4 V bytes per row (608 KB of Qwen3-30B-A3B; 156 MB for 256 rows, which the vocabulary
// projection has just left partly in L2). A cluster of 8 blocks takes a row and keeps it in shared memory, so the
// logits are read once whatever the parameters ask for; sums over the row go through distributed shared memory.
//
// Weights are integers, so sums need no order; the draw walks ids in order by prefix sums. top-k and top-p both look
// for the smallest key (logit, lower id first) that stays: the first, from the likeliest down, at which a running
// count or a running weight reaches its share. A search by 8-bit digits of the key finds it in eight passes over
// shared memory without sorting. It gives exactly the CPU's token because both test the same sums.
#include "cluster.cuh"
#include "common.cuh"
#include "sampling.cuh"

namespace moe {
namespace {

constexpr int kThreads = 512;
constexpr int kCluster = 8;
constexpr int kDigit = 8, kBins = 1 << kDigit;
constexpr int kParts = 4;
constexpr float kTopKClasses = 16.f;  // per unit of logit: the likeliest tokens lie within 16 of the first
constexpr float kGreedyBelow = 1e-5f, kSmallestTemperature = 1e-2f;

/// Parameters of a row, as the host lays them out.
struct SampleRow {
  float temperature, top_p, min_p;
  uint32_t top_k;     // 0 keeps all
  uint64_t seed;
  uint64_t position;  // output position; u64::MAX = padding row, no token
};
static_assert(sizeof(SampleRow) == 32, "shared with the host");

enum Status : uint32_t { kOk = 0, kNotFinite = 1, kEmpty = 2 };

struct Shared {
  uint64_t mine[2];               // what this block tells the others
  uint64_t warps[kThreads / 32];  // parts of block sums
  uint32_t bins[kParts][kBins];   // of this block: tokens, and three parts of their weights
  uint32_t counts[kBins];         // of the row
  uint64_t totals[kBins];
  uint64_t found[2];
};

/// A row's logits, one slice per block of the cluster.
struct Slice {
  const float* logits;
  int first, count;  // ids
};

__device__ __forceinline__ uint64_t block_reduce(Shared& s, uint64_t v, bool largest) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, v, step);
    v = largest ? (other > v ? other : v) : v + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = v;
  __syncthreads();
  v = s.warps[0];
  for (int i = 1; i < kThreads / 32; ++i) {
    const uint64_t other = s.warps[i];
    v = largest ? (other > v ? other : v) : v + other;
  }
  return v;
}

/// Two values of every block of the cluster.
__device__ __forceinline__ void cluster_exchange(Shared& s, uint64_t a, uint64_t b, uint64_t (&all)[2][kCluster]) {
  if (threadIdx.x == 0) s.mine[0] = a, s.mine[1] = b;
  cluster_sync();
#pragma unroll
  for (int r = 0; r < kCluster; ++r) {
    all[0][r] = cluster_load(s.mine, r);
    all[1][r] = cluster_load(s.mine + 1, r);
  }
  cluster_sync();
}

__device__ __forceinline__ uint64_t cluster_sum(Shared& s, uint64_t v) {
  uint64_t all[2][kCluster], sum = 0;
  cluster_exchange(s, block_reduce(s, v, false), 0, all);
#pragma unroll
  for (int r = 0; r < kCluster; ++r) sum += all[0][r];
  return sum;
}

__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, v, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) v += other;
  }
  return v;
}

/// From the top bin down, the first at which `reached(before + its total)`; its digit and the sum before it to
/// `s.found`, digit kBins if there is none. One warp.
template <class Reached>
__device__ __forceinline__ void find_bin(Shared& s, uint64_t before, Reached reached) {
  constexpr int kPerLane = kBins / 32;
  const int lane = threadIdx.x % 32, top = kBins - 1 - lane * kPerLane;
  uint64_t own = 0;
  for (int i = 0; i < kPerLane; ++i) own += s.totals[top - i];
  const uint64_t sum = warp_inclusive_sum(own);
  const uint32_t hit = __ballot_sync(0xffffffffu, reached(before + sum));
  if (hit == 0) {
    if (lane == 0) s.found[0] = kBins;
    return;
  }
  if (lane != __ffs(hit) - 1) return;
  before += sum - own;
  for (int i = 0; i < kPerLane; ++i) {
    const uint64_t with = before + s.totals[top - i];
    if (reached(with)) {
      s.found[0] = top - i;
      s.found[1] = before;
      return;
    }
    before = with;
  }
}

/// Adds a token to its bin. Shared memory adds 32-bit words in hardware but not 64-bit ones, so a weight goes in
/// three parts that cannot overflow. Where a warp's tokens share a bin (equal logits), one lane adds for all.
template <bool kWeighted>
__device__ __forceinline__ void add_to_bin(Shared& s, bool inside, uint32_t bin, uint64_t weight) {
  const uint32_t all = __ballot_sync(0xffffffffu, inside);
  if (all == 0) return;
  const uint32_t first = __shfl_sync(0xffffffffu, bin, __ffs(all) - 1);
  uint32_t count = 1;
  if (__all_sync(0xffffffffu, !inside || bin == first)) {
    if (kWeighted) {
      if (!inside) weight = 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) weight += __shfl_xor_sync(0xffffffffu, weight, step);
    }
    count = __popc(all);
    inside = static_cast<int>(threadIdx.x % 32) == __ffs(all) - 1;
  }
  if (!inside) return;
  atomicAdd(&s.bins[0][bin], count);
  if (kWeighted) {
    atomicAdd(&s.bins[1][bin], static_cast<uint32_t>(weight & 0xffff));
    atomicAdd(&s.bins[2][bin], static_cast<uint32_t>(weight >> 16 & 0xffff));
    atomicAdd(&s.bins[3][bin], static_cast<uint32_t>(weight >> 32));
  }
}

/// The row's totals of every bin from those of the blocks.
template <bool kWeighted>
__device__ __forceinline__ void total_bins(Shared& s) {
  cluster_sync();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    uint64_t part[kParts] = {};
#pragma unroll
    for (int r = 0; r < kCluster; ++r) {
#pragma unroll
      for (int p = 0; p < (kWeighted ? kParts : 1); ++p) part[p] += cluster_load(&s.bins[p][i], r);
    }
    s.counts[i] = static_cast<uint32_t>(part[0]);
    s.totals[i] = kWeighted ? part[1] + (part[2] << 16) + (part[3] << 32) : part[0];
  }
  cluster_sync();
}

/// The largest key at which the running sum over the keys from the top down, of tokens or of `weight`, has `reached`
/// its share; only keys from `smallest` up count. `smallest` if the sum never gets there.
///
/// The first pass sorts tokens by their distance from `top`, `per_unit` classes to a unit of logit, because the
/// leading bits of logits hardly tell them apart; the others go by digits of the key, until one token is left.
template <bool kWeighted, class Weight, class Reached>
__device__ __forceinline__ uint64_t search(Shared& s, const Slice& slice, uint64_t smallest, float top, float per_unit,
                                           Weight weight, Reached reached) {
  const auto class_of = [=](float x) { return kBins - 1 - min(kBins - 1u, __float2uint_rz((top - x) * per_unit)); };
  uint64_t prefix = 0, before = 0;
  uint32_t the_class = 0;
  // The tokens that the passes so far leave: the key of token i, or 0.
  const auto left = [&](int i, int shift, float* x) -> uint64_t {
    if (i >= slice.count) return 0;
    *x = slice.logits[i];
    const uint64_t key = token_key(*x, slice.first + i);
    const bool inside = shift >= 64 || (class_of(*x) == the_class && (shift == 64 - kDigit || key >> (shift + kDigit) == prefix));
    return inside && key >= smallest && (!kWeighted || weight(*x) > 0) ? key : 0;
  };
  for (int shift = 64; shift >= 0; shift -= kDigit) {
    for (int i = threadIdx.x; i < kParts * kBins; i += kThreads) s.bins[0][i] = 0;
    __syncthreads();
    for (int from = 0; from < slice.count; from += kThreads) {
      float x = 0.f;
      const uint64_t key = left(from + threadIdx.x, shift, &x);
      const uint32_t bin = shift >= 64 ? class_of(x) : key >> shift & (kBins - 1);
      add_to_bin<kWeighted>(s, key != 0, bin, kWeighted && key != 0 ? weight(x) : 0);
    }
    total_bins<kWeighted>(s);
    if (threadIdx.x < 32) find_bin(s, before, reached);
    __syncthreads();
    if (s.found[0] == kBins) return smallest;
    before = s.found[1];
    const uint32_t bin = static_cast<uint32_t>(s.found[0]);
    if (shift == 64) {
      the_class = bin;
    } else {
      prefix = prefix << kDigit | bin;
    }
    if (s.counts[bin] == 1 && shift > 0) {
      uint64_t key = 0, all[2][kCluster];
      float x;
      for (int i = threadIdx.x; i < slice.count; i += kThreads) key = max(key, left(i, shift - kDigit, &x));
      cluster_exchange(s, block_reduce(s, key, true), 0, all);
#pragma unroll
      for (int r = 0; r < kCluster; ++r) key = max(key, all[0][r]);
      return key;
    }
    __syncthreads();
  }
  return prefix;
}

/// The first id, among keys from `smallest` up, at which the running weight exceeds its share of the total.
__device__ __forceinline__ void draw(Shared& s, const Slice& slice, const Weights& weights, uint64_t smallest,
                                     uint64_t random, uint32_t* token) {
  // An odd length of what a thread walks keeps its shared memory accesses apart from its neighbours'.
  const int walk = ceil_div(slice.count, kThreads) | 1, begin = threadIdx.x * walk;
  const int end = min(slice.count, begin + walk);
  const auto weight = [&](int i) -> uint64_t {
    const float x = slice.logits[i];
    return smallest == 0 || token_key(x, slice.first + i) >= smallest ? weights.of(x) : 0;
  };
  uint64_t own = 0;
#pragma unroll 4
  for (int i = begin; i < end; ++i) own += weight(i);
  const uint64_t block = block_reduce(s, own, false);
  uint64_t all[2][kCluster], total = 0, before = 0;
  cluster_exchange(s, block, 0, all);
  const uint32_t rank = cluster_rank();
#pragma unroll
  for (int r = 0; r < kCluster; ++r) {
    total += all[0][r];
    if (r < rank) before += all[0][r];
  }
  // The part of the total that the random bits stand for.
  const uint64_t share = __umul64hi(random, total);
  if (share < before || share >= before + block) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t sum = warp_inclusive_sum(own);
  __syncthreads();
  if (lane == 31) s.warps[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += s.warps[w];
  before += sum - own;
  // One thread's tokens hold the share; its warp walks them together.
  const uint32_t holder = __ballot_sync(0xffffffffu, share >= before && share < before + own);
  if (holder == 0) return;
  const int at = __ffs(holder) - 1, from = __shfl_sync(0xffffffffu, begin, at), to = __shfl_sync(0xffffffffu, end, at);
  before = __shfl_sync(0xffffffffu, before, at);
  for (int first = from; first < to; first += 32) {
    const int i = first + lane;
    const uint64_t running = before + warp_inclusive_sum(i < to ? weight(i) : 0);
    const uint32_t past = __ballot_sync(0xffffffffu, share < running);
    if (past != 0) {
      if (lane == 0) *token = slice.first + first + __ffs(past) - 1;
      return;
    }
    before = __shfl_sync(0xffffffffu, running, 31);
  }
}

/// The block's slice of the row to shared memory, its largest key and its first logit that is no number (as ~id, so
/// that the largest is the first; 0 if there is none).
__device__ __forceinline__ void load_slice(const float* from, float* to, const Slice& slice, uint64_t* best, uint64_t* bad) {
  const auto take = [&](int i, float x) {
    const uint64_t key = token_key(x, slice.first + i);
    *best = key > *best ? key : *best;
    if (!(x < INFINITY)) *bad = max(*bad, static_cast<uint64_t>(~0u - (slice.first + i)));
  };
  int whole = 0;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    whole = slice.count / 4 * 4;
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < whole; i += kThreads * 4) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(from + i));
      *reinterpret_cast<float4*>(to + i) = x;
      take(i, x.x), take(i + 1, x.y), take(i + 2, x.z), take(i + 3, x.w);
    }
  }
#pragma unroll 4
  for (int i = whole + threadIdx.x; i < slice.count; i += kThreads) {
    const float x = __ldcg(from + i);
    to[i] = x;
    take(i, x);
  }
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(const float* logits, const SampleRow* rows, int vocab, uint32_t* tokens, uint32_t* status) {
  extern __shared__ __align__(16) float buffer[];
  __shared__ Shared s;
  const int row = blockIdx.y, share = round_up(ceil_div(vocab, kCluster), 4);
  const uint32_t rank = cluster_rank();
  const SampleRow params = rows[row];
  const Slice slice = {buffer, min(vocab, static_cast<int>(rank) * share),
                       max(0, min(share, vocab - static_cast<int>(rank) * share))};
  const bool writes = rank == 0 && threadIdx.x == 0;
  pdl_launch_dependents();
  pdl_wait();
  if (params.position == ~0ull) {
    if (writes) tokens[row] = ~0u, status[row] = kOk;
    return;
  }
  const float* from = logits + static_cast<size_t>(row) * vocab + slice.first;
  uint64_t best = 0, bad = 0;
  load_slice(from, buffer, slice, &best, &bad);
  uint64_t all[2][kCluster];
  best = block_reduce(s, best, true);
  bad = block_reduce(s, bad, true);
  cluster_exchange(s, best, bad, all);
#pragma unroll
  for (int r = 0; r < kCluster; ++r) {
    best = all[0][r] > best ? all[0][r] : best;
    bad = all[1][r] > bad ? all[1][r] : bad;
  }
  const float top = key_logit(best);
  if (bad != 0 || !(top > -INFINITY) || params.temperature < kGreedyBelow) {
    if (writes) {
      tokens[row] = bad != 0 ? ~0u - static_cast<uint32_t>(bad) : key_token(best);
      status[row] = bad != 0 ? kNotFinite : top > -INFINITY ? kOk : kEmpty;
    }
    return;
  }
  if (writes) status[row] = kOk;
  const Weights weights = {top, fmaxf(params.temperature, kSmallestTemperature), params.min_p};
  uint64_t smallest = 0;
  if (params.top_k > 0 && params.top_k < static_cast<uint32_t>(vocab)) {
    const uint64_t wanted = params.top_k;
    smallest = search<false>(s, slice, 0, top, kTopKClasses, [](float) { return uint64_t{1}; },
                             [=](uint64_t n) { return n >= wanted; });
  }
  if (params.top_p < 1.f) {
    uint64_t own = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < slice.count; i += kThreads)
      own += smallest == 0 || token_key(buffer[i], slice.first + i) >= smallest ? weights.of(buffer[i]) : 0;
    const double wanted = __dmul_rn(static_cast<double>(params.top_p), __ull2double_rn(cluster_sum(s, own)));
    smallest = search<true>(s, slice, smallest, top, kBins / (30.f * weights.temperature),
                            [&](float x) { return weights.of(x); }, [=](uint64_t w) { return __ull2double_rn(w) >= wanted; });
  }
  draw(s, slice, weights, smallest, random_bits(params.seed, params.position), tokens + row);
}

}  // namespace
}  // namespace moe

/// tokens [rows] u32 sampled from logits [rows, vocab] f32 with `params` [rows] (SampleRow). status [rows] u32:
/// 0 = sampled (u32::MAX for a padding row), 1 = a logit is NaN or +inf (the token is the first such), 2 = every
/// logit is -inf. vocab at most 8 x what shared memory holds (about 450,000).
extern "C" int moe_sample(const float* logits, const void* params, int rows, int vocab, uint32_t* tokens,
                          uint32_t* status, void* stream) {
  using namespace moe;
  if (rows < 0 || rows > 65535 || vocab <= 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;  // needs clusters
  const size_t smem = static_cast<size_t>(round_up(ceil_div(vocab, kCluster), 4)) * sizeof(float);
  if (smem + sizeof(Shared) > static_cast<size_t>(limits.block_smem)) return cudaErrorInvalidValue;
  Launch l = {dim3(kCluster, rows), dim3(kThreads), stream, smem};
  l.cluster = kCluster;
  return launch(sample_kernel, l, logits, static_cast<const SampleRow*>(params), vocab, tokens, status);
}
