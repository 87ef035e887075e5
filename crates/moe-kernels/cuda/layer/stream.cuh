// Geometry and shared memory of the layer kernels: what all their roles share.
#pragma once

#include "experts/align.cuh"
#include "experts/epilogue.cuh"
#include "layer/args.cuh"
#include "linear/linear.cuh"
#include "router/route.cuh"

namespace moe::layer {

constexpr int kConsumers = 8;  // warps that multiply; each takes every 8th step along K
constexpr int kConsumerThreads = kConsumers * 32;
constexpr int kPairs = 8;      // outputs of a tile of the first product: 8 gate rows and 8 up rows of an mma
constexpr int kDownRows = 16;  // rows of w2 in a tile, the rows of an mma
constexpr int kStep = 64;      // elements along K that a warp takes at a time
constexpr int kMaxChunk[2] = {2048, 1536};  // elements along K of a stage
constexpr int kMaxTokens = 4;               // each takes two of an mma's 8 columns
constexpr int kParts = 4;                   // tiles whose sums wait to be activated
constexpr int kPollNs = 64;                 // nanoseconds between two looks at an activation
constexpr int kPieces = 6;                  // 16 bytes of activations that a lane fetches at once
constexpr int kMaxSlots = 32;               // one for each lane
constexpr int kMaxStages = 16;              // of each product
constexpr int kMinStages = 2;
constexpr int kMinChunk = 256;  // elements along K of a stage, if there is little room
constexpr int kFetchers = 2;    // warps that fetch activations
constexpr int kByTicket = 2;    // one of this many tiles of the first product is assigned by ticket
constexpr int kFlying = 2;      // stages in flight to a block: more would only delay each other
constexpr uint32_t kNoSlot = 0xffffffffu;

/// State that launches pass to the next one; zero before the first.
struct State {
  uint64_t blocks;      // blocks that have read the launch's number: 65,536 for each launch
  uint32_t tickets[2];  // tickets taken in this launch; in the next one
  uint64_t unused[6];
  uint64_t words[1];  // logits [T, E], launch number and f32; activations [T K, I / 2], launch number and two bf16
};

/// All arguments except the weights. What every block reads first comes first: each further 64 bytes of a launch's
/// arguments take 0.1 us.
struct Args {
  int tokens, num_local, hidden, inter;
  int chunk[2], stages[2], ring;  // of each product: elements along K of a stage, stages; bytes that they share
  int row_bytes;                  // bytes from one token's row in shared memory to the next
  int share, longer;              // units of columns of a block; the first `longer` blocks have one more
  float eps;
  const void* x;     // [T, H] bf16, with `norm` f32
  const bf16* norm;  // [H] or null
  const bf16* gate;  // [E, H], or null: ids and weights are given
  State* state;
  RouteArgs route;
  const bf16* gate_bias;  // [E] or null
  const uint32_t* valid;
  const int32_t* expert_map;
  void* out;  // [T, H]
  Output output;
  StepRoutingArgs routing;

  __host__ __device__ int slots() const { return tokens * route.slots(); }
  __host__ __device__ int num_ids() const { return route.experts + route.shared; }
  __device__ int first_unit(int block) const { return block * share + min(block, longer); }
  __device__ uint64_t* logits() const { return state->words; }
  __device__ uint64_t* act() const { return state->words + round_up(kMaxTokens * route.experts, 2); }
  __host__ __device__ int depth(int product) const { return product == 0 ? hidden : inter; }
};

/// The fields that the launchers' arguments share.
template <class Launcher>
Args common_args(const Launcher& c) {
  Args a = {};
  a.tokens = c.tokens;
  a.x = c.x, a.norm = c.norm, a.eps = c.eps, a.gate = c.gate, a.gate_bias = c.gate_bias, a.valid = c.valid;
  a.route = {
      c.correction_bias, c.topk_ids, c.topk_weights, c.num_ids - c.shared, c.top_k - c.shared, c.scoring, c.raw_logits,
      c.renormalize,     c.scale,    c.softcap};
  a.route.shared = c.shared, a.route.shared_weight = c.shared_weight;
  a.route.groups = c.groups, a.route.kept_groups = c.kept_groups;
  a.expert_map = c.expert_map, a.out = c.out, a.output = c.output, a.state = static_cast<State*>(c.state);
  a.routing = c.routing;
  return a;
}

/// All arguments. `Weights` is Rows or quant::Tiles: the layout of the weights in stages, how they are loaded and how
/// they are multiplied.
template <class Weights>
struct Weighted : Args {
  Weights w;
};

/// The number of warps that choose a token's experts. After the choice, the first of them loads weights, the last one
/// activates, and the others fetch activations.
constexpr int kRouters = 2 + kFetchers;
constexpr int kThreads = kConsumerThreads + kRouters * 32;

/// Byte offsets into dynamic shared memory; barriers come first.
struct Layout {
  uint32_t tiles, routing, partial, parts, rows, act, ring, total;
};

__host__ __device__ inline Layout layout(const Args& a) {
  Layout l;
  l.tiles = 8 * (4 * kMaxStages + kMaxSlots + 2 * kParts + 1);
  l.routing = round_up(l.tiles + 8 * (kMaxStages + kParts + 1), 16);
  // Scales; experts and weights of the slots; experts of the active experts; weights and slots of active experts and
  // tokens.
  l.partial = round_up(l.routing + 4 * kMaxTokens + a.slots() * 12 + a.slots() * a.tokens * 8, 16);
  l.parts = l.partial + kConsumers * kDownRows * a.tokens * 4;
  l.rows = round_up(l.parts + kParts * kConsumers * 2 * kPairs * a.tokens * 4, 128);
  l.act = round_up(l.rows + a.tokens * a.row_bytes, 128);
  l.ring = round_up(l.act + a.slots() * a.inter * 2, 128);
  l.total = l.ring + a.ring;
  return l;
}

/// What a stage of the first product holds. If it has no pairs, the product is over and `row` is the first stage of the
/// second product.
struct Tile {
  uint16_t active, pairs;
  int32_t row;
};

/// A block's shared memory. An active expert is an expert that some token chose. Active experts are in the order of
/// local experts, so that the order in which a token's sum is added does not depend on the other tokens.
struct Shared {
  uint8_t* base;
  Layout l;
  int tokens, slots, stage_bytes[2];

  template <class Weights>
  __device__ Shared(uint8_t* smem, const Weighted<Weights>& a)
      : base(smem),
        l(layout(a)),
        tokens(a.tokens),
        slots(a.slots()),
        stage_bytes{a.w.stage_bytes(a, 0), a.w.stage_bytes(a, 1)} {}
  __device__ uint64_t* full(int product, int stage) const {
    return reinterpret_cast<uint64_t*>(base) + 2 * product * kMaxStages + stage;
  }
  __device__ uint64_t* empty(int product, int stage) const { return full(product, kMaxStages + stage); }
  __device__ uint64_t* act_full(int active) const { return full(2, active); }
  __device__ uint64_t* parts_full(int i) const { return act_full(kMaxSlots) + i; }
  __device__ uint64_t* parts_empty(int i) const { return parts_full(kParts) + i; }
  __device__ uint64_t* active_full() const { return parts_empty(kParts); }
  __device__ Tile* tile(int stage) const { return reinterpret_cast<Tile*>(base + l.tiles) + stage; }
  __device__ Tile* parts_tile(int i) const { return tile(kMaxStages) + i; }
  __device__ uint32_t* num_active() const { return reinterpret_cast<uint32_t*>(parts_tile(kParts)); }
  __device__ float* scale() const { return reinterpret_cast<float*>(base + l.routing); }
  __device__ Choice* chosen() const { return reinterpret_cast<Choice*>(scale() + kMaxTokens); }
  __device__ uint32_t* expert() const { return reinterpret_cast<uint32_t*>(chosen() + slots); }
  __device__ float* active_weight(int active) const {
    return reinterpret_cast<float*>(expert() + slots) + active * tokens;
  }
  __device__ uint32_t* active_slot(int active) const {
    return reinterpret_cast<uint32_t*>(active_weight(slots)) + active * tokens;
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

/// A place in a ring and the parity of its barriers. `turn` counts from where the ring began: barriers change parity
/// when all stages have been used.
struct Cursor {
  int stage = 0, turn = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0;
    if (++turn == stages) turn = 0, parity ^= 1;
  }
};

#if MOE_HAS_TMA

__device__ __forceinline__ void consumers_sync() { named_barrier(1, kConsumerThreads); }

#endif  // MOE_HAS_TMA

}  // namespace moe::layer
