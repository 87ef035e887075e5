// Geometry, shared memory and routing of layer_stream.cu.
#pragma once

#include "align.cuh"
#include "linear.cuh"
#include "route.cuh"

namespace moe::layer {

constexpr int kConsumers = 8;  // warps that multiply; each takes every 8th step along K
constexpr int kConsumerThreads = kConsumers * 32;
constexpr int kPairs = 8;        // outputs of a tile of the first product: 8 gate rows and 8 up rows, an mma's
constexpr int kDownRows = 16;    // rows of w2 of a tile: an mma's
constexpr int kStep = 64;        // elements along K that a warp takes at a time
constexpr int kMaxChunk[2] = {2048, 1024};  // elements along K of a stage
constexpr int kMaxTokens = 4;    // each takes two of an mma's 8 columns
constexpr int kRouters = kMaxTokens;  // warps that choose a token's experts; then the first loads weights, the last activates, the others fetch
constexpr int kFetchers = kRouters - 2;
constexpr int kParts = 4;        // tiles whose sums wait to be activated
constexpr int kThreads = kConsumerThreads + kRouters * 32;
constexpr int kFlying = 2;       // stages on their way to a block: enough, and more only stand in each other's way
constexpr int kByTicket = 2;     // one tile in so many is assigned by ticket
constexpr int kPollNs = 64;      // between two looks at an activation
constexpr int kPieces = 6;       // 16 bytes of activations that a lane fetches at once
constexpr int kMaxSlots = 32;    // a lane each
constexpr int kMaxStages = 16;   // of each product
constexpr int kMinStages = 2;
constexpr int kMinChunk = 256;   // elements along K of a stage, where less room is left
constexpr uint32_t kNoSlot = 0xffffffffu;

/// What launches leave behind for each other, zero before the first.
struct State {
  uint64_t blocks;      // that know the launch's number: 65,536 of each launch
  uint32_t tickets[2];  // drawn in this launch; of the next one
  uint64_t unused[6];
  uint64_t words[1];    // logits [T, E], launch number and f32; activations [T K, I / 2], launch number and two bf16
};

/// What every block reads first comes first: each 64 bytes of a launch's arguments are 0.1 us away.
struct Args {
  int tokens, num_local, hidden, inter;
  int chunk[2], stages[2], ring;  // of each product: elements along K of a stage, stages; bytes that they share
  int share, longer;              // columns of a block, of which the first `longer` have one more
  float eps;
  const void* x;     // [T, H] bf16, or f32 where `norm` is given
  const bf16* norm;  // [H] or null
  const bf16* gate;  // [E, H], or null: ids and weights are given
  State* state;
  RouteArgs route;
  const bf16* gate_bias;  // [E] or null
  const uint32_t* valid;
  const bf16* w13;
  const bf16* w2;
  const int32_t* expert_map;
  void* out;  // [T, H]

  __host__ __device__ int slots() const { return tokens * route.top_k; }
  __device__ int first_column(int block) const { return block * share + min(block, longer); }
  __device__ uint64_t* logits() const { return state->words; }
  __device__ uint64_t* act() const { return state->words + round_up(kMaxTokens * route.experts, 2); }
  __host__ __device__ int depth(int product) const { return product == 0 ? hidden : inter; }
  __host__ __device__ int stage_bytes(int product) const {
    return (product == 0 ? 2 * kPairs : kDownRows) * chunk[product] * 2;
  }
};

/// Byte offsets into dynamic shared memory; barriers come first.
struct Layout {
  uint32_t tiles, routing, partial, parts, rows, act, ring, total;
};

__host__ __device__ inline Layout layout(const Args& a) {
  Layout l;
  l.tiles = 8 * (4 * kMaxStages + kMaxSlots + 2 * kParts + 1);
  l.routing = round_up(l.tiles + 8 * (kMaxStages + kParts + 1), 16);
  // Scales; experts and weights of the slots; experts of the units; weights and slots of units and tokens.
  l.partial = round_up(l.routing + 4 * kMaxTokens + a.slots() * 12 + a.slots() * a.tokens * 8, 16);
  l.parts = l.partial + kConsumers * kDownRows * a.tokens * 4;
  l.rows = round_up(l.parts + kParts * kConsumers * 2 * kPairs * a.tokens * 4, 128);
  l.act = l.rows + a.tokens * a.hidden * 2;
  l.ring = round_up(l.act + a.slots() * a.inter * 2, 128);
  l.total = l.ring + a.ring;
  return l;
}

/// What a stage of the first product holds; no pairs: the product is over, and the second one's first stage is `row`.
struct Tile {
  uint16_t unit, pairs;
  int32_t row;
};

/// A block's shared memory. A unit is an expert that some token chose; units are in the order of local experts, so that
/// a token's sum has an order of its own.
struct Shared {
  uint8_t* base;
  Layout l;
  int tokens, slots, stage_bytes[2];

  __device__ Shared(uint8_t* smem, const Args& a)
      : base(smem), l(layout(a)), tokens(a.tokens), slots(a.slots()), stage_bytes{a.stage_bytes(0), a.stage_bytes(1)} {}
  __device__ uint64_t* full(int product, int stage) const {
    return reinterpret_cast<uint64_t*>(base) + 2 * product * kMaxStages + stage;
  }
  __device__ uint64_t* empty(int product, int stage) const { return full(product, kMaxStages + stage); }
  __device__ uint64_t* act_full(int unit) const { return full(2, unit); }
  __device__ uint64_t* parts_full(int i) const { return act_full(kMaxSlots) + i; }
  __device__ uint64_t* parts_empty(int i) const { return parts_full(kParts) + i; }
  __device__ uint64_t* units_full() const { return parts_empty(kParts); }
  __device__ Tile* tile(int stage) const { return reinterpret_cast<Tile*>(base + l.tiles) + stage; }
  __device__ Tile* parts_tile(int i) const { return tile(kMaxStages) + i; }
  __device__ uint32_t* units() const { return reinterpret_cast<uint32_t*>(parts_tile(kParts)); }
  __device__ float* scale() const { return reinterpret_cast<float*>(base + l.routing); }
  __device__ Choice* chosen() const { return reinterpret_cast<Choice*>(scale() + kMaxTokens); }
  __device__ uint32_t* expert() const { return reinterpret_cast<uint32_t*>(chosen() + slots); }
  __device__ float* unit_weight(int unit) const { return reinterpret_cast<float*>(expert() + slots) + unit * tokens; }
  __device__ uint32_t* unit_slot(int unit) const {
    return reinterpret_cast<uint32_t*>(unit_weight(slots)) + unit * tokens;
  }
  /// Parts of sums, one for each warp.
  __device__ float* partial() const { return reinterpret_cast<float*>(base + l.partial); }
  /// Sums of a tile, [warp, gate and up rows, token].
  __device__ float* parts(int i) const {
    return reinterpret_cast<float*>(base + l.parts) + i * kConsumers * 2 * kPairs * tokens;
  }
  __device__ uint8_t* rows() const { return base + l.rows; }
  __device__ uint8_t* act() const { return base + l.act; }
  /// The ring has two divisions, one for each product.
  __device__ uint8_t* stage(int product, int i) const { return base + l.ring + i * stage_bytes[product]; }
};

/// A place in a ring and the parity of its barriers. `turn` counts from where it began: barriers change parity when all
/// stages have been used.
struct Cursor {
  int stage = 0, turn = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0;
    if (++turn == stages) turn = 0, parity ^= 1;
  }
};

#if MOE_SM90

__device__ __forceinline__ void consumers_sync() { named_barrier(1, kConsumerThreads); }
__device__ __forceinline__ void routers_sync() { named_barrier(2, kRouters * 32); }

/// Eight elements of a row and norm weight as bf16, and the sum of the squares before the weight.
__device__ __forceinline__ Vec16 weigh(const float4& p, const float4& q, const Vec16& gain, float* squares) {
  const float x[8] = {p.x, p.y, p.z, p.w, q.x, q.y, q.z, q.w};
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 g = unpack_bf16(gain.word[i]);
    *squares += x[2 * i] * x[2 * i] + x[2 * i + 1] * x[2 * i + 1];
    out.word[i] = pack_bf16(x[2 * i] * g.x, x[2 * i + 1] * g.y);
  }
  return out;
}

/// Token rows to shared memory as bf16, f32 rows times the norm's weight: 1 / rms multiplies sums later (`scale`). `gain`
/// holds the weight of this thread's first eight columns.
__device__ __forceinline__ void stage_rows(const Args& a, const Shared& s, Vec16 gain) {
  float squares[kMaxTokens] = {};
  for (int at = threadIdx.x * 8; at < a.hidden; at += kConsumerThreads * 8) {
    if (a.norm != nullptr && at >= kConsumerThreads * 8) gain = load_const(a.norm + at);
#pragma unroll
    for (int t = 0; t < kMaxTokens; ++t) {
      if (t >= a.tokens) break;
      const size_t from = static_cast<size_t>(t) * a.hidden + at;
      Vec16 row;
      if (a.norm != nullptr) {
        const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + from);
        row = weigh(__ldcg(x), __ldcg(x + 1), gain, &squares[t]);
      } else {
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(a.x) + from));
        row = {{v.x, v.y, v.z, v.w}};
      }
      *reinterpret_cast<Vec16*>(s.rows() + (t * a.hidden + at) * 2) = row;
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

/// What a block knows of its launch. Each block adds its part to `blocks` after it has read it, and all parts of a launch
/// are 65,536, so that all blocks read the same number whoever is first.
struct Turn {
  uint64_t blocks;

  __device__ __forceinline__ explicit Turn(const Args& a) : blocks(__ldcg(&a.state->blocks)) {}
  __device__ __forceinline__ uint32_t launches() const {
    uint64_t loaded = blocks;
    asm volatile("" : "+l"(loaded));  // keeps the compiler from waiting for it before the branches between load and use
    return static_cast<uint32_t>(loaded >> 16);
  }
  /// In the words of this launch: never 0, and the same again 2^31 launches later.
  __device__ __forceinline__ uint32_t number() const { return launches() | 1u << 31; }
  /// Which tickets are this launch's.
  __device__ __forceinline__ uint32_t parity() const { return launches() % 2; }
  /// By one thread, when this block knows its turn.
  __device__ __forceinline__ void end(const Args& a) const {
    if (blockIdx.x == 0) a.state->tickets[parity() ^ 1] = 0;
    const uint64_t part = blockIdx.x == 0 ? 65537 - gridDim.x : 1;
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.state->blocks), part);
  }
};

/// Logits of this block's experts, each with the number of the launch: whoever reads it knows that it is this launch's.
/// `first` holds eight elements of the block's first gate row.
__device__ __forceinline__ void publish_logits(const Args& a, const Shared& s, Vec16 first, const Turn& turn) {
  float* parts = s.partial() + kMaxTokens * kConsumers;
  for (int e = blockIdx.x; e < a.route.experts; e += gridDim.x) {
    for (int t = 0; t < a.tokens; ++t) {
      float sum = 0;
      for (int at = threadIdx.x * 8; at < a.hidden; at += kConsumerThreads * 8) {
        const bool held = e == static_cast<int>(blockIdx.x) && at < kConsumerThreads * 8;
        const Vec16 g = held ? first : load_const(a.gate + static_cast<size_t>(e) * a.hidden + at);
        sum += dot(*reinterpret_cast<const Vec16*>(s.rows() + (t * a.hidden + at) * 2), g);
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

/// One token's logits from all blocks.
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
    const int lane = threadIdx.x % 32, k = a.route.top_k;
    token = (lane >= k) + (lane >= 2 * k) + (lane >= 3 * k);  // kMaxTokens is 4, and a division takes long
    of_token = (0xffffffffu >> (32 - a.route.top_k)) << token * a.route.top_k;
  }
};

/// No unit serves any token yet. One warp.
__device__ __forceinline__ void clear_units(const Args& a, const Shared& s) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < s.slots * a.tokens; i += 32) {
    s.unit_weight(0)[i] = 0;
    s.unit_slot(0)[i] = kNoSlot;
  }
}

/// Units and which tokens they serve, by one warp, a lane per slot. An expert that a token names more than once counts with
/// the sum of its weights, in the first of its slots.
__device__ __forceinline__ void build_units(const Args& a, const Shared& s, const Slot& slot) {
  const int lane = threadIdx.x % 32;
  const Choice own = lane < s.slots ? s.chosen()[lane] : Choice{kNoExpert, 0.0f};
  const int local = local_expert(own.id, a.expert_map, a.route.experts, a.num_local);
  float weight = own.weight;
  const uint32_t before = (1u << lane) - 1, same = __match_any_sync(0xffffffffu, local);
  const bool leads = local >= 0 && (same & before) == 0;
  const uint32_t leaders = __ballot_sync(0xffffffffu, leads), rank = leads ? local : kNoExpert;
  int unit = 0;
#pragma unroll 1
  for (int first = 0; first < s.slots; first += 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) unit += __shfl_sync(0xffffffffu, rank, first + i) < static_cast<uint32_t>(local);
  }
  const uint32_t mine = same & slot.of_token;
  if (__any_sync(0xffffffffu, local >= 0 && (mine & before) != 0)) {
#pragma unroll 1
    for (int i = 0; i < s.slots; ++i) {
      const float other = __shfl_sync(0xffffffffu, own.weight, i);
      if (i > lane && (mine >> i & 1) != 0) weight += other;
    }
  }
  __syncwarp();
  if (local >= 0 && (mine & before) == 0) {
    s.unit_weight(unit)[slot.token] = weight;
    s.unit_slot(unit)[slot.token] = lane;
    if (leads) s.expert()[unit] = local;
  }
  if (lane == 0) *s.units() = __popc(leaders);
}

/// A token's experts, by one of the routing warps. Every block makes the same choice.
template <int kPerLane>
__device__ __forceinline__ void route(const Args& a, const Shared& s, int token, const Turn& turn) {
  const int lane = threadIdx.x % 32, slot = token * a.route.top_k + lane;
  Choice c = {kNoExpert, 0.0f};
  if (a.gate == nullptr) {
    if (lane < a.route.top_k) c = {__ldcg(a.route.topk_ids + slot), __ldcg(a.route.topk_weights + slot)};
  } else if (a.valid == nullptr || static_cast<uint32_t>(token) < __ldcg(a.valid)) {
    float score[kPerLane];
    await_logits(a, token, turn.number(), score);
    c = choose(a.route, score, s.chosen() + token * a.route.top_k);
  }
  if (lane >= a.route.top_k) return;
  s.chosen()[slot] = c;
  if (a.gate != nullptr && blockIdx.x == 0) a.route.topk_ids[slot] = c.id, a.route.topk_weights[slot] = c.weight;
}

/// Activations of this block's tiles to L2, by one warp: a lane per pair and token, two pairs in a word.
__device__ __forceinline__ void activate(const Args& a, const Shared& s, uint32_t number) {
  const int lane = threadIdx.x % 32, pair = lane % kPairs, token = min(lane / kPairs, a.tokens - 1);
  for (int i = 0;; ++i) {
    const int buffer = i % kParts;
    mbarrier_wait(s.parts_full(buffer), i / kParts % 2);
    const Tile tile = *s.parts_tile(buffer);
    if (tile.pairs == 0) return;
    const float scale = s.scale()[token];
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
      const float* part = s.parts(buffer) + (w * 2 * kPairs + pair) * a.tokens + token;
      gate += part[0], up += part[kPairs * a.tokens];
    }
    warp_arrive(s.parts_empty(buffer));
    gate *= scale, up *= scale;
    const float value = gate / (1.0f + __expf(-gate)) * up, next = __shfl_down_sync(0xffffffffu, value, 1);
    const uint32_t slot = s.unit_slot(tile.unit)[token];
    if (lane % 2 == 0 && lane / kPairs < a.tokens && slot != kNoSlot) {
      const uint64_t word = static_cast<uint64_t>(number) << 32 | pack_bf16(value, next);
      store_relaxed(a.act() + (static_cast<size_t>(slot) * a.inter + tile.row + pair) / 2, word);
    }
  }
}

/// Activations of units to shared memory, by one of `kFetchers` warps: they lie in L2 as words that say whether they are of
/// this launch. A lane looks for the last one of its own at first, so that those who wait read little.
__device__ __forceinline__ void fetch_activations(const Args& a, const Shared& s, int fetcher, uint32_t number) {
  const int lane = threadIdx.x % 32, pieces = a.inter / 4, units = *s.units();
  const auto is_there = [=](const uint4& v) { return v.y == number && v.w == number; };
  for (int u = fetcher; u < units; u += kFetchers) {
    for (int t = 0; t < a.tokens; ++t) {
      const uint32_t slot = s.unit_slot(u)[t];
      if (slot == kNoSlot) continue;
      const uint64_t* from = a.act() + static_cast<size_t>(slot) * a.inter / 2;
      uint2* to = reinterpret_cast<uint2*>(s.act() + slot * a.inter * 2);
      const int last = lane + (pieces - 1 - lane) / 32 * 32;
      if (lane < pieces) while (!is_there(load_relaxed_pair(from + 2 * last))) __nanosleep(kPollNs);
      for (int first = lane; first < pieces; first += 32 * kPieces) {
        uint4 v[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (first + i * 32 < pieces) v[i] = load_relaxed_pair(from + 2 * (first + i * 32));
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int at = first + i * 32;
          if (at >= pieces) break;
          while (!is_there(v[i])) v[i] = load_relaxed_pair(from + 2 * at);
          to[at] = {v[i].x, v[i].z};
        }
      }
    }
    warp_arrive(s.act_full(u));
  }
}

#endif  // MOE_SM90

}  // namespace moe::layer
