// One token per row of logits, on the device, with the CPU's definition and its bits (model-runtime, `sampling`).
//
// Floor: the logits are read once, 4 V bytes per row (608 KB for Qwen3-30B-A3B; 156 MB for 256 rows, a part of which is
// still in L2 after the vocabulary projection). A row with penalties reads the same number of bytes of counts. A
// cluster of 8 blocks processes a row and keeps it in shared memory. So the logits are read once for any parameters,
// and are not changed in global memory. Sums over the row go through distributed shared memory.
//
// Weights are integers, so sums need no order. Sampling finds the warp, and then the four ids that contain the random
// share. Sequences whose earlier tokens matter have a slot: how often each token occurred, and edits of single logits
// (exclusions, biases). The sampled token is added to the counts here, so the host is not needed between two steps.
#include "sampling/row.cuh"
#include "sampling/search.cuh"

namespace moe {
namespace {

constexpr float kGreedyBelow = 1e-5f, kSmallestTemperature = 1e-2f;
constexpr uint32_t kMaxEdits = 1024;    // per slot
constexpr uint32_t kPrompt = 1u << 31;  // a token of the prompt; the other bits count it in the output

/// Parameters of a row, as the host lays them out.
struct SampleRow {
  float temperature, top_p, min_p;
  uint32_t top_k;  // 0 keeps all
  uint64_t seed;
  uint64_t position;                      // output position; u64::MAX = padding row, no token
  float repetition, frequency, presence;  // 1, 0, 0 = none
  uint32_t slot;                          // a number without a slot, such as u32::MAX: no penalties, no edits
  uint32_t bans, edits;                   // the slot's first `bans` edits apply (0 if they do not), ..
  uint32_t edits_from;                    // .. and `edits` more from this one on
  uint32_t logprobs;                      // not used by sampling
};
static_assert(sizeof(SampleRow) == 64, "shared with the host");

/// The contents of slots. Rows and resets name slots in device memory, so only the kernel can check whether one exists.
struct Slots {
  uint32_t* uses;      // [count, vocab]
  const uint2* edits;  // [count, kMaxEdits]: id, bits of a bias; -inf excludes
  uint32_t count;

  __device__ __forceinline__ bool has(uint32_t slot) const { return slot < count; }
};

enum Status : uint32_t { kOk = 0, kNotFinite = 1, kEmpty = 2 };

/// The edited logit. A finite one stays finite, so that no parameter can exclude a token.
__device__ __forceinline__ float saturate(float before, float after) {
  constexpr float kLargest = 3.40282347e38f;
  return fabsf(before) < INFINITY ? fminf(fmaxf(after, -kLargest), kLargest) : before;
}

/// Excludes the tokens whose bit of `mask` is not set. It follows `Row::load`: each thread changes the groups that it
/// loaded, so no barrier is needed in between. Returns what `load` returns.
__device__ __forceinline__ float keep_masked(Row& row, const uint32_t* mask) {
  for (int g = threadIdx.x; g < row.groups(); g += kRowThreads) {
    const int id = row.first + 4 * g;  // a multiple of 4: its four bits are in one word
    const uint32_t bits = __ldg(mask + id / 32) >> id % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if ((bits >> j & 1) == 0) row.logits[4 * g + j] = -INFINITY;
  }
  return row.largest();
}

/// Edits are in the order of ids. The edits of one token follow each other, and one thread applies them.
__device__ __forceinline__ void apply_edits(Row& row, const uint2* edits, int count) {
  for (int i = threadIdx.x; i < count; i += kRowThreads) {
    const uint32_t id = edits[i].x;
    const int at = static_cast<int>(id) - row.first;
    if (at < 0 || at >= row.count || (i > 0 && edits[i - 1].x == id)) continue;
    float x = row.logits[at];
    for (int j = i; j < count && edits[j].x == id; ++j) {
      const float bias = __uint_as_float(edits[j].y);
      x = bias == -INFINITY ? bias : saturate(x, __fadd_rn(x, bias));
    }
    row.logits[at] = x;
  }
  __syncthreads();
}

/// Applies the three penalties to a token that was used.
__device__ __forceinline__ float penalised(float x, uint32_t uses, const SampleRow& p) {
  const uint32_t count = uses & ~kPrompt;
  float y = x > 0.f ? __fdiv_rn(x, p.repetition) : __fmul_rn(x, p.repetition);
  y = __fsub_rn(y, __fmul_rn(p.frequency, __uint2float_rn(count)));
  return saturate(x, __fsub_rn(y, count > 0 ? p.presence : 0.f));
}

/// Applies the row's slot to its logits, in the order of the CPU. Returns what `Row::load` returns.
__device__ __forceinline__ float edit(Row& row, const SampleRow& p, const Slots& slots, int vocab) {
  const uint2* edits = slots.edits + static_cast<size_t>(p.slot) * kMaxEdits;
  const uint32_t from = min(p.edits_from, kMaxEdits);
  __syncthreads();
  apply_edits(row, edits, min(p.bans, kMaxEdits));
  apply_edits(row, edits + from, min(p.edits, kMaxEdits - from));
  if (p.repetition != 1.f || p.frequency != 0.f || p.presence != 0.f) {
    const uint32_t* uses = slots.uses + static_cast<size_t>(p.slot) * vocab + row.first;
    constexpr int kAtOnce = 8;
    for (int begin = threadIdx.x; begin < row.count; begin += kAtOnce * kRowThreads) {
      uint32_t n[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * kRowThreads;
        n[j] = i < row.count ? __ldcg(uses + i) : 0;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * kRowThreads;
        if (n[j] != 0) row.logits[i] = penalised(row.logits[i], n[j], p);
      }
    }
    __syncthreads();
  }
  return row.largest();
}

/// Weights of four ids. kAll: at temperature 1 without min-p, and all tokens are kept.
template <bool kAll>
struct KeptWeights {
  const Row& row;
  const Weights& weights;
  Edge edge;

  __device__ __forceinline__ uint64_t of(int g, uint64_t (&each)[4]) const {
    const float4 x4 = row.group(g);
    const float largest = max4(x4), x[4] = {x4.x, x4.y, x4.z, x4.w};
    each[0] = each[1] = each[2] = each[3] = 0;
    if (weights.none(largest) || (!kAll && largest < edge.logit)) return 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kAll) each[j] = weights.of_plain(x[j]);
      else if (edge.keeps(x[j], row.first + 4 * g + j)) each[j] = weights.of(x[j]);
    }
    return each[0] + each[1] + each[2] + each[3];
  }
};

/// The first id at which the running weight exceeds its share of the total. One thread of the cluster gets it, the
/// others get u32::MAX. All blocks call it.
template <bool kAll>
__device__ __forceinline__ uint32_t sample_id(Row& row, const Weights& weights, Edge edge, uint64_t random) {
  const KeptWeights<kAll> kept = {row, weights, edge};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int per_warp = ceil_div(row.groups(), kRowWarps);
  uint64_t own = 0, each[4], all[2][kRowCluster], total = 0, before = 0;
#pragma unroll 2
  for (int g = warp * per_warp + lane; g < min(row.groups(), (warp + 1) * per_warp); g += 32) own += kept.of(g, each);
  const uint64_t block = row.block_sum(own);
  row.exchange(block, 0, all);
#pragma unroll
  for (int r = 0; r < kRowCluster; ++r) {
    total += all[0][r];
    before += r < static_cast<int>(cluster_rank()) ? all[0][r] : 0;
  }
  // The part of the total that corresponds to the random bits.
  const uint64_t share = __umul64hi(random, total);
  if (share < before || share - before >= block) return ~0u;
  int holder = 0;
  while (share - before >= row.s.warps[holder]) before += row.s.warps[holder++];
  const int end = min(row.groups(), (holder + 1) * per_warp);
  for (int first = holder * per_warp; first < end; first += kRowThreads) {
    const int g = first + threadIdx.x;
    own = g < end ? kept.of(g, each) : 0;
    const uint64_t part = row.block_sum(own);
    uint64_t until = before + warp_inclusive_sum(own) - own;
    for (int w = 0; w < warp; ++w) until += row.s.warps[w];
    if (share >= until && share - until < own) {
      const uint64_t at = share - until, two = each[0] + each[1];
      return row.first + 4 * g + (at >= each[0]) + (at >= two) + (at >= two + each[2]);
    }
    before += part;
  }
  return ~0u;
}

/// The token of a row that is not greedy.
__device__ __forceinline__ uint32_t sampled(Row& row, const SampleRow& p, float top, int vocab) {
  const float temperature = fmaxf(p.temperature, kSmallestTemperature);
  const Weights weights(top, temperature, p.min_p);
  const uint64_t random = random_bits(p.seed, p.position);
  Edge edge = kKeepAll;
  const bool cuts = p.top_k > 0 && p.top_k < static_cast<uint32_t>(vocab);
  if (cuts) edge = top_k_edge(row, top, p.top_k, weights);
  if (p.top_p < 1.f) edge = top_p_edge(row, edge, top, temperature, weights, p.top_p);
  const bool all = weights.plain && !cuts && p.top_p >= 1.f;
  return all ? sample_id<true>(row, weights, edge, random) : sample_id<false>(row, weights, edge, random);
}

__global__ void __launch_bounds__(kRowThreads, 2)
    sample_kernel(const float* logits, const SampleRow* rows, Slots slots, const uint32_t* masks, int vocab,
                  uint32_t* tokens, uint32_t* status) {
  extern __shared__ __align__(16) float buffer[];
  __shared__ RowShared s;
  // It is read where it is used, because the loads need its registers.
  const SampleRow& p = rows[blockIdx.y];
  const bool writes = cluster_rank() == 0 && threadIdx.x == 0;
  pdl_launch_dependents();
  pdl_wait();
  if (p.position == ~0ull) {
    if (writes) tokens[blockIdx.y] = ~0u, status[blockIdx.y] = kOk;
    return;
  }
  Row row(s, buffer, vocab);
  float own = row.load(logits + static_cast<size_t>(blockIdx.y) * vocab);
  if (masks != nullptr) own = keep_masked(row, masks + static_cast<size_t>(blockIdx.y) * ceil_div(vocab, 32));
  if (slots.has(p.slot)) own = edit(row, p, slots, vocab);
  const bool greedy = p.temperature < kGreedyBelow;
  const Row::Top top = row.top(own, greedy);
  const float largest = key_logit(top.key);
  const uint32_t code = top.bad != 0 ? kNotFinite : largest > -INFINITY ? kOk : kEmpty;
  uint32_t token = ~0u;
  if (code == kOk && !greedy) token = sampled(row, p, largest, vocab);
  else if (writes) token = top.bad != 0 ? ~static_cast<uint32_t>(top.bad) : key_token(top.key);
  if (writes) status[blockIdx.y] = code;
  if (token == ~0u) return;
  tokens[blockIdx.y] = token;
  if (slots.has(p.slot) && code == kOk) ++slots.uses[static_cast<size_t>(p.slot) * vocab + token];
}

/// One slot to rebuild, in the layout of the host; offsets are into the array of words that also contains this entry.
struct SlotReset {
  uint32_t slot, tokens, prompt, history;  // `history` ids from `tokens` on, of which the first `prompt` are the prompt
  uint32_t edits_at, edits;                // pairs of words
  uint32_t unused[2];
};

/// Whether the `n` words from `first` on are within `words`.
__device__ __forceinline__ bool inside(uint32_t first, uint32_t n, uint32_t words) {
  return n <= words && first <= words - n;
}

/// Floor: writing the slot's counts, and reading the history.
__global__ void __launch_bounds__(kRowThreads)
    reset_kernel(const uint32_t* words, uint32_t len, Slots slots, uint2* edits, int vocab) {
  const SlotReset r = reinterpret_cast<const SlotReset*>(words)[blockIdx.x];
  if (!slots.has(r.slot) || !inside(r.tokens, r.history, len)) return;
  if (r.edits > kMaxEdits || !inside(r.edits_at, 2 * r.edits, len)) return;
  uint32_t* uses = slots.uses + static_cast<size_t>(r.slot) * vocab;
  for (int i = threadIdx.x; i < vocab; i += kRowThreads) uses[i] = 0;
  for (uint32_t i = threadIdx.x; i < r.edits; i += kRowThreads)
    edits[static_cast<size_t>(r.slot) * kMaxEdits + i] = {words[r.edits_at + 2 * i], words[r.edits_at + 2 * i + 1]};
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < r.history; i += kRowThreads) {
    const uint32_t id = words[r.tokens + i];
    if (id >= static_cast<uint32_t>(vocab)) continue;
    if (i < r.prompt) atomicOr(uses + id, kPrompt);
    else atomicAdd(uses + id, 1u);
  }
}

}  // namespace
}  // namespace moe

/// tokens [rows] u32 sampled from logits [rows, vocab] f32 with `params` [rows] (SampleRow). status [rows] u32: 0 =
/// sampled (u32::MAX for a padding row), 1 = a logit is NaN or +inf (the token is the first such id), 2 = every logit
/// is -inf. Rows that name one of the slots read uses [slots, vocab] u32 and count their token there; edits are [slots,
/// 1024, 2] u32; a slot has at most one row. masks [rows, ceil(vocab / 32)] u32 or null: a token whose bit is not set
/// is excluded before anything else (token i is bit i % 32 of word i / 32). vocab is at most 8 x what shared memory
/// holds (about 420,000).
extern "C" int moe_sample(const float* logits, const void* params, uint32_t* uses, const void* edits, int slots,
                          const uint32_t* masks, int rows, int vocab, uint32_t* tokens, uint32_t* status,
                          void* stream) {
  using namespace moe;
  if (rows < 0 || rows > 65535 || vocab <= 0 || slots < 0 || (slots > 0 && (uses == nullptr || edits == nullptr)))
    return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const cudaError_t e = row_fits(vocab);
  if (e != cudaSuccess) return e;
  Launch l = {dim3(kRowCluster, rows), dim3(kRowThreads), stream, row_smem(vocab)};
  l.cluster = kRowCluster;
  const Slots all = {uses, static_cast<const uint2*>(edits), static_cast<uint32_t>(slots)};
  return launch(sample_kernel, l, logits, static_cast<const SampleRow*>(params), all, masks, vocab, tokens, status);
}

/// Rebuilds `count` different slots of `slots` from `words` [len]: count entries (SlotReset), then the ids and edits to
/// which they point. An entry whose slot does not exist, or that has too many words or edits, is skipped. Does not
/// overlap the launch before it.
extern "C" int moe_reset_slots(const uint32_t* words, int len, int count, uint32_t* uses, void* edits, int slots,
                               int vocab, void* stream) {
  using namespace moe;
  if (count < 0 || len < 0 || count > len / static_cast<int>(sizeof(SlotReset) / sizeof(uint32_t)) || slots < 0 ||
      vocab <= 0)
    return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  Launch l = {dim3(count), dim3(kRowThreads), stream};
  l.overlap = false;
  const Slots all = {uses, nullptr, static_cast<uint32_t>(slots)};
  return launch(reset_kernel, l, words, static_cast<uint32_t>(len), all, static_cast<uint2*>(edits), vocab);
}
