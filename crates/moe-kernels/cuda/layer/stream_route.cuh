// The layer kernels from rows to active experts: norm, logits, the choice of experts, and which tokens each active
// expert serves.
#pragma once

#include "layer/stream_load.cuh"
#include "router/choose.cuh"

namespace moe::layer {

#if MOE_HAS_TMA

/// Eight elements of a row times the norm's weight as bf16. The sum of the squares is taken before the weight.
__device__ __forceinline__ Vec16 weigh(const float4& p, const float4& q, const Vec16& norm_weight, float* squares) {
  const float x[8] = {p.x, p.y, p.z, p.w, q.x, q.y, q.z, q.w};
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 g = unpack_bf16(norm_weight.word[i]);
    *squares += x[2 * i] * x[2 * i] + x[2 * i + 1] * x[2 * i + 1];
    out.word[i] = pack_bf16(x[2 * i] * g.x, x[2 * i + 1] * g.y);
  }
  return out;
}

/// Stores token rows in shared memory as bf16. With a norm, rows are f32 and are multiplied by the norm's weight here;
/// 1 / rms multiplies sums later (`scale`). `norm_weight` holds the weight of this thread's first eight columns.
__device__ __forceinline__ void stage_rows(const Args& a, const Shared& s, Vec16 norm_weight) {
  float squares[kMaxTokens] = {};
  for (int at = threadIdx.x * 8; at < a.hidden; at += kConsumerThreads * 8) {
    if (a.norm != nullptr && at >= kConsumerThreads * 8) norm_weight = load_const(a.norm + at);
#pragma unroll
    for (int t = 0; t < kMaxTokens; ++t) {
      if (t >= a.tokens) break;
      const size_t from = static_cast<size_t>(t) * a.hidden + at;
      Vec16 row;
      if (a.norm != nullptr) {
        const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + from);
        row = weigh(__ldcg(x), __ldcg(x + 1), norm_weight, &squares[t]);
      } else {
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(a.x) + from));
        row = {{v.x, v.y, v.z, v.w}};
      }
      *reinterpret_cast<Vec16*>(s.rows() + t * a.row_bytes + at * 2) = row;
    }
  }
#pragma unroll
  for (int t = 0; t < kMaxTokens; ++t) {
    if (t >= a.tokens) break;
    const float part = warp_sum(squares[t]);
    if (threadIdx.x % 32 == 0) s.partial()[t * kConsumers + threadIdx.x / 32] = part;
  }
  consumers_sync();
  if (threadIdx.x < a.tokens) {
    float sum = 0;
    for (int w = 0; w < kConsumers; ++w) sum += s.partial()[threadIdx.x * kConsumers + w];
    s.scale()[threadIdx.x] = a.norm == nullptr ? 1.0f : 1.0f / sqrtf(sum / a.hidden + a.eps);
  }
  if (a.gate == nullptr) consumers_sync();  // the parts have been read
}

__device__ __forceinline__ float dot(const Vec16& p, const Vec16& q) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack_bf16(p.word[i]), y = unpack_bf16(q.word[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

/// What a block knows of its launch. Each block adds its part to `blocks` after it has read it, and the parts of a
/// launch add up to 65,536. So all blocks read the same number of launches, in whatever order they run.
struct Turn {
  uint64_t blocks;

  __device__ __forceinline__ explicit Turn(const Args& a) : blocks(__ldcg(&a.state->blocks)) {}
  __device__ __forceinline__ uint32_t launches() const {
    uint64_t loaded = blocks;
    asm volatile("" : "+l"(loaded));  // keeps the compiler from waiting for it before the branches between load and use
    return static_cast<uint32_t>(loaded >> 16);
  }
  /// The number of the launch in its words: it is never 0, and repeats 2^31 launches later.
  __device__ __forceinline__ uint32_t number() const { return launches() | 1u << 31; }
  /// The index of this launch's tickets.
  __device__ __forceinline__ uint32_t parity() const { return launches() % 2; }
  /// Adds this block's part. One thread calls it, when this block knows its turn.
  __device__ __forceinline__ void end(const Args& a) const {
    if (blockIdx.x == 0) a.state->tickets[parity() ^ 1] = 0;
    const uint64_t part = blockIdx.x == 0 ? 65537 - gridDim.x : 1;
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.state->blocks), part);
  }
};

/// Sends the logits of this block's experts. Each carries the number of the launch, by which readers know that it
/// belongs to this launch. `first` holds eight elements of the block's first gate row.
__device__ __forceinline__ void publish_logits(const Args& a, const Shared& s, Vec16 first, const Turn& turn) {
  float* parts = s.partial() + kMaxTokens * kConsumers;
  for (int e = blockIdx.x; e < a.route.experts; e += gridDim.x) {
    for (int t = 0; t < a.tokens; ++t) {
      float sum = 0;
      for (int at = threadIdx.x * 8; at < a.hidden; at += kConsumerThreads * 8) {
        const bool held = e == static_cast<int>(blockIdx.x) && at < kConsumerThreads * 8;
        const Vec16 g = held ? first : load_const(a.gate + static_cast<size_t>(e) * a.hidden + at);
        sum += dot(*reinterpret_cast<const Vec16*>(s.rows() + t * a.row_bytes + at * 2), g);
      }
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) parts[t * kConsumers + threadIdx.x / 32] = sum;
    }
    consumers_sync();
    if (threadIdx.x < a.tokens) {
      float sum = 0;
      for (int w = 0; w < kConsumers; ++w) sum += parts[threadIdx.x * kConsumers + w];
      sum *= s.scale()[threadIdx.x];
      if (a.gate_bias != nullptr) sum += __bfloat162float(a.gate_bias[e]);
      const uint64_t word = static_cast<uint64_t>(turn.number()) << 32 | __float_as_uint(sum);
      store_relaxed(a.logits() + static_cast<size_t>(threadIdx.x) * a.route.experts + e, word);
    }
    consumers_sync();  // the parts have been read
  }
}

/// Waits for one token's logits from all blocks.
template <int N>
__device__ __forceinline__ void await_logits(const Args& a, int token, uint32_t number, float (&score)[N]) {
  const int lane = threadIdx.x % 32;
  const uint64_t* words = a.logits() + static_cast<size_t>(token) * a.route.experts;
  bool there;
  do {
    there = true;
    uint64_t word[N];
#pragma unroll
    for (int j = 0; j < N; ++j) word[j] = j * 32 + lane < a.route.experts ? load_relaxed(words + j * 32 + lane) : 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const bool exists = j * 32 + lane < a.route.experts;
      there = there && (!exists || static_cast<uint32_t>(word[j] >> 32) == number);
      score[j] = exists ? __uint_as_float(static_cast<uint32_t>(word[j])) : -INFINITY;
    }
  } while (!__all_sync(0xffffffffu, there));
}

/// What a lane knows of its slot before the experts are chosen.
struct Slot {
  int token;
  uint32_t of_token;  // the token's slots

  __device__ __forceinline__ explicit Slot(const Args& a) {
    const int lane = threadIdx.x % 32, k = a.route.slots();
    token = (lane >= k) + (lane >= 2 * k) + (lane >= 3 * k);  // kMaxTokens is 4, and a division takes long
    of_token = (0xffffffffu >> (32 - k)) << token * k;
  }
};

/// Marks that no active expert serves any token yet. One warp.
__device__ __forceinline__ void clear_active(const Args& a, const Shared& s) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < s.slots * a.tokens; i += 32) {
    s.active_weight(0)[i] = 0;
    s.active_slot(0)[i] = kNoSlot;
  }
}

/// The choice of a lane's slot, if experts are given.
__device__ __forceinline__ Choice given_choice(const Args& a) {
  const int lane = threadIdx.x % 32;
  if (lane >= a.slots()) return {kNoExpert, 0.0f};
  return {__ldcg(a.route.topk_ids + lane), __ldcg(a.route.topk_weights + lane)};
}

/// The choice of a lane's slot that the routing warps made.
__device__ __forceinline__ Choice chosen(const Shared& s) {
  const int lane = threadIdx.x % 32;
  return lane < s.slots ? s.chosen()[lane] : Choice{kNoExpert, 0.0f};
}

/// Lists the active experts and which tokens they serve, by one warp; `own` is a lane's slot. Returns the slot's active
/// expert. kRepeats: a token may name an expert more than once; the expert then counts once, in the first of these
/// slots, with the sum of their weights.
template <bool kRepeats>
__device__ __forceinline__ int build_active(const Args& a, const Shared& s, const Slot& slot, const Choice& own) {
  const int lane = threadIdx.x % 32;
  const int local = local_expert(own.id, a.expert_map, a.num_ids(), a.num_local);
  float weight = own.weight;
  const uint32_t before = (1u << lane) - 1, same = __match_any_sync(0xffffffffu, local);
  const bool leads = local >= 0 && (same & before) == 0;
  const uint32_t leaders = __ballot_sync(0xffffffffu, leads), rank = leads ? local : kNoExpert;
  int active = 0;
#pragma unroll 1
  for (int first = 0; first < s.slots; first += 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) active += __shfl_sync(0xffffffffu, rank, first + i) < static_cast<uint32_t>(local);
  }
  const uint32_t mine = kRepeats ? same & slot.of_token : 1u << lane;
  if (kRepeats && __any_sync(0xffffffffu, local >= 0 && (mine & before) != 0)) {
#pragma unroll 1
    for (int i = 0; i < s.slots; ++i) {
      const float other = __shfl_sync(0xffffffffu, own.weight, i);
      if (i > lane && (mine >> i & 1) != 0) weight += other;
    }
  }
  __syncwarp();
  if (local >= 0 && (mine & before) == 0) {
    s.active_weight(active)[slot.token] = weight;
    s.active_slot(active)[slot.token] = lane;
    if (leads) s.expert()[active] = local;
  }
  if (lane == 0) *s.num_active() = __popc(leaders);
  return active;
}

/// Chooses a token's experts, by one of the routing warps. Every block makes the same choice. The first token's warp
/// loads the head.
template <int kPerLane, Rule kRule, class Weights>
__device__ __forceinline__ void route(const Weighted<Weights>& a, const Shared& s, int token, const Turn& turn,
                                      const Head& head) {
  const int lane = threadIdx.x % 32, slot = token * a.route.slots() + lane;
  Choice c = {kNoExpert, 0.0f};
  if (a.valid == nullptr || static_cast<uint32_t>(token) < __ldcg(a.valid)) {
    const int awaited = token == 0 ? head.rank - a.route.shared : -1;
    if (token == 0 && head.rank >= 0 && awaited < 0 && elect_one()) head.load(a, s, a.route.experts + head.rank);
    float score[kPerLane];
    await_logits(a, token, turn.number(), score);
    Choice* slots = s.chosen() + token * a.route.slots();
    c = choose<kRule>(a.route, a.routing, token, score, slots, [&](int rank, uint32_t id, bool mine) {
      if (rank == awaited && mine) head.load(a, s, id);
    });
  }
  if (lane >= a.route.slots()) return;
  s.chosen()[slot] = c;
  if (blockIdx.x != 0) return;
  a.route.topk_ids[slot] = c.id, a.route.topk_weights[slot] = c.weight;
  if (lane < a.route.top_k) leave(a.routing, a.route.experts, token, lane, c.id);
}

#endif  // MOE_HAS_TMA

}  // namespace moe::layer
