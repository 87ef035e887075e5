// Geometry, shared memory and routing of layer_stream.cu.
#pragma once

#include "align.cuh"
#include "linear.cuh"
#include "route.cuh"

namespace moe::layer {

constexpr int kConsumers = 8;  // warps that multiply; each takes every 8th step along K
constexpr int kConsumerThreads = kConsumers * 32;
constexpr int kPairs = 4;        // outputs of a tile of the first product: 4 gate rows and 4 up rows, half of an mma's
constexpr int kDownRows = 16;    // rows of w2 of a tile: an mma's
constexpr int kStep = 64;        // elements along K that a warp takes at a time
constexpr int kMaxChunk[2] = {2048, 1024};  // elements along K of a stage
constexpr int kMaxTokens = 4;    // each takes two of an mma's 8 columns
constexpr int kRouters = kMaxTokens;  // warps that choose experts, a token each; the first then loads weights
constexpr int kThreads = kConsumerThreads + kRouters * 32;
constexpr int kFlying = 2;       // stages on their way to a block: 64 KB are enough, and more only stand in each other's way
constexpr int kAhead = 2;        // stages of w2 requested before this block's activations are written
constexpr int kByTicket = 4;     // one tile in so many is assigned by ticket
constexpr int kMaxSlots = 32;    // a lane each
constexpr int kMaxStages = 16;   // of each product
constexpr int kMinStages = 2;
constexpr uint32_t kNoSlot = 0xffffffffu;

/// What launches leave behind for each other, zero before the first.
struct State {
  uint64_t launches;
  uint64_t arrived;    // blocks that met at the grid barrier, over all launches
  uint32_t tickets;    // drawn in this launch
  uint64_t unused[5];
  uint64_t logits[1];  // [T, E]: launch number, f32
};

struct Args {
  const void* x;     // [T, H] bf16, or f32 where `norm` is given
  const bf16* norm;  // [H] or null
  float eps;
  const bf16* gate;       // [E, H], or null: ids and weights are given
  const bf16* gate_bias;  // [E] or null
  const uint32_t* valid;
  RouteArgs route;
  const bf16* w13;
  const bf16* w2;
  const int32_t* expert_map;
  bf16* act;  // [T K, I]
  void* out;  // [T, H]
  State* state;
  int tokens, num_local, hidden, inter;
  int chunk[2], stages[2], ring;  // of each product: elements along K of a stage, stages; bytes that they share

  __host__ __device__ int slots() const { return tokens * route.top_k; }
  __host__ __device__ int depth(int product) const { return product == 0 ? hidden : inter; }
  __host__ __device__ int stage_bytes(int product) const {
    return (product == 0 ? 2 * kPairs : kDownRows) * chunk[product] * 2;
  }
};

/// Byte offsets into dynamic shared memory; barriers come first.
struct Layout {
  uint32_t tiles, routing, partial, rows, ring, total;
};

__host__ __device__ inline Layout layout(const Args& a) {
  Layout l;
  l.tiles = 8 * (4 * kMaxStages + 2);
  l.routing = round_up(l.tiles + 8 * (kMaxStages + 1), 16);
  // Scales; ids and weights; experts of the units; weights and slots of units and tokens.
  l.partial = round_up(l.routing + 4 * kMaxTokens + a.slots() * 12 + a.slots() * a.tokens * 8, 16);
  l.rows = round_up(l.partial + kConsumers * kDownRows * a.tokens * 4, 128);
  const uint32_t x = a.tokens * a.hidden * 2, act = a.slots() * a.inter * 2;
  l.ring = round_up(l.rows + (x > act ? x : act), 128);
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
  __device__ uint64_t* act_full() const { return full(2, 0); }
  /// This block has told the others that its activations are written.
  __device__ uint64_t* arrived() const { return full(2, 1); }
  __device__ Tile* tile(int stage) const { return reinterpret_cast<Tile*>(base + l.tiles) + stage; }
  __device__ uint32_t* units() const { return reinterpret_cast<uint32_t*>(tile(kMaxStages)); }
  __device__ float* scale() const { return reinterpret_cast<float*>(base + l.routing); }
  __device__ uint32_t* ids() const { return reinterpret_cast<uint32_t*>(scale() + kMaxTokens); }
  __device__ float* weights() const { return reinterpret_cast<float*>(ids() + slots); }
  __device__ uint32_t* expert() const { return reinterpret_cast<uint32_t*>(weights() + slots); }
  __device__ float* unit_weight(int unit) const { return reinterpret_cast<float*>(expert() + slots) + unit * tokens; }
  __device__ uint32_t* unit_slot(int unit) const {
    return reinterpret_cast<uint32_t*>(unit_weight(slots)) + unit * tokens;
  }
  /// Parts of sums, one for each warp.
  __device__ float* partial() const { return reinterpret_cast<float*>(base + l.partial); }
  __device__ uint8_t* rows() const { return base + l.rows; }
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

/// Logits of this block's experts, each with the number of the launch: whoever reads it knows that it is this launch's.
/// `first` holds eight elements of the block's first gate row.
__device__ __forceinline__ void publish_logits(const Args& a, const Shared& s, Vec16 first, uint32_t number) {
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
      const uint64_t word = static_cast<uint64_t>(number) << 32 | __float_as_uint(sum);
      store_relaxed(a.state->logits + static_cast<size_t>(threadIdx.x) * a.route.experts + e, word);
    }
    consumers_sync();  // the parts have been read
  }
}

/// One token's logits from all blocks.
template <int N>
__device__ __forceinline__ void await_logits(const Args& a, int token, uint32_t number, float (&score)[N]) {
  const int lane = threadIdx.x % 32;
  const uint64_t* words = a.state->logits + static_cast<size_t>(token) * a.route.experts;
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

/// Units and which tokens they serve, by one warp, a lane per slot.
__device__ __forceinline__ void build_units(const Args& a, const Shared& s) {
  const int lane = threadIdx.x % 32;
  const int local = lane < s.slots ? local_expert(s.ids()[lane], a.expert_map, a.route.experts, a.num_local) : -1;
  const float weight = lane < s.slots ? s.weights()[lane] : 0;
  for (int i = lane; i < s.slots * a.tokens; i += 32) {
    s.unit_weight(0)[i] = 0;
    s.unit_slot(0)[i] = kNoSlot;
  }
  const uint32_t same = __match_any_sync(0xffffffffu, local);
  const bool leads = local >= 0 && (same & ((1u << lane) - 1)) == 0;
  const uint32_t leaders = __ballot_sync(0xffffffffu, leads);
  int unit = 0;
  for (int i = 0; i < s.slots; ++i) {
    const int other = __shfl_sync(0xffffffffu, local, i);
    unit += (leaders >> i & 1) != 0 && other < local;
  }
  if (local >= 0) {
    // An expert that a token names twice counts with both weights; all blocks must agree on its slot.
    const int token = lane / a.route.top_k;
    atomicAdd(s.unit_weight(unit) + token, weight);
    atomicMin(s.unit_slot(unit) + token, static_cast<uint32_t>(lane));
    if (leads) s.expert()[unit] = local;
  }
  if (lane == 0) *s.units() = __popc(leaders);
}

__device__ __forceinline__ uint32_t launch_number(uint64_t launches) { return static_cast<uint32_t>(launches % 0xffffffffu) + 1; }

/// The routing warps: a token's experts each, and the units by the first warp. Every block makes the same choice.
template <int kPerLane>
__device__ __forceinline__ void route(const Args& a, const Shared& s, int token) {
  const int lane = threadIdx.x % 32, slot = token * a.route.top_k + lane;
  Choice c = {kNoExpert, 0.0f};
  pdl_wait();
  if (a.gate == nullptr) {
    if (lane < a.route.top_k) c = {__ldcg(a.route.topk_ids + slot), __ldcg(a.route.topk_weights + slot)};
  } else if (a.valid == nullptr || static_cast<uint32_t>(token) < __ldcg(a.valid)) {
    float score[kPerLane];
    await_logits(a, token, launch_number(__ldcg(&a.state->launches)), score);
    c = choose(a.route, score);
  }
  if (lane < a.route.top_k) {
    s.ids()[slot] = c.id;
    s.weights()[slot] = c.weight;
    if (a.gate != nullptr && blockIdx.x == 0) a.route.topk_ids[slot] = c.id, a.route.topk_weights[slot] = c.weight;
  }
  named_barrier(2, a.tokens * 32);
  if (token == 0) build_units(a, s);
}

#endif  // MOE_SM90

}  // namespace moe::layer
