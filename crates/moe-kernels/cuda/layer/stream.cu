// A sub-layer of a decode step for 1 to 4 tokens in one launch: RMSNorm, router, experts and their weighted sum, from
// the residual stream back to it.
//
// Floor: 6 H I bytes for each chosen expert (75.5 MB for one token of Qwen3-30B-A3B: 16.4 us at 4.59 TB/s). Everything
// else is latency: norm, logits, choice, two products and a sum depend on each other across all SMs. Here there is no
// launch in between and no barrier. Logits and activations are words that carry the launch's number: a reader polls the
// word itself, which takes one way there and one way back, and no fence.
// - Router: every block computes an expert's logit, reads all logits, and makes the same choice. Meanwhile memory
//   already loads the block's first tile: of the experts that were chosen first, or of shared experts, which need no
//   choice.
// - Gate and up: tiles of 8 outputs (64 KB, two copies), one expert after the other. Half of the tiles are assigned to
//   blocks in turn, the rest by ticket, because SMs get unequal shares of a saturated memory. The consumer warps leave
//   their sums to a warp that adds and activates them, and go on.
// - Down: a block owns columns of the output for all experts, so that the weighted sum stays in its registers. It
//   begins with the first expert, whose activations came while the last one's were still being computed, so it waits
//   only for memory.
//
// Copies are long (24 to 32 KB: whole rows, unpadded), because one producer thread issues them. Only two are in flight
// at a time, because words for which blocks wait queue after them. Weights are the 16 rows of mma.sync, and a lane uses
// each 16 bytes for two products. Warps split K and are added in warp order, active experts in ascending order, so a
// token's bits do not depend on the other tokens.
//
// Measured, one H200, one token: 23.6 us, 21.0 with given ids (docs/kernels.md). Blocks wait for each other, so the
// launch is cooperative.
#include "layer/stream_kernel.cuh"

namespace moe::layer {
namespace {

/// Weights in bf16: a stage holds rows.
template <class E>
struct Rows {
  using Sums = float[4][4];
  using Epilogue = E;

  const bf16* w13;  // [num_local, 2 I, H]
  const bf16* w2;   // [num_local, H, I]
  Epilogue epilogue;

  __host__ __device__ int stage_bytes(const Args& a, int product) const {
    return (product == 0 ? 2 * kPairs : kDownRows) * a.chunk[product] * 2;
  }

#if MOE_HAS_TMA

  /// Copies `rows` rows of a stage; whole rows are one consecutive piece.
  static __device__ __forceinline__ void copy_tile(uint8_t* to, const bf16* from, int depth, int chunk, int rows, int k,
                                                   uint64_t* bar) {
    const uint64_t policy = read_once();
    if (chunk == depth) {
      bulk_copy(to, from, rows * depth * 2, bar, policy);
    } else {
      for (int r = 0; r < rows; ++r)
        bulk_copy(to + r * chunk * 2, from + static_cast<size_t>(r) * depth + k, min(chunk, depth - k) * 2, bar,
                  policy);
    }
  }

  /// Loads a tile of the first product; its rows are whole.
  __device__ __forceinline__ void load_head(const Args& a, uint8_t* to, uint32_t expert, int row, uint64_t* bar) const {
    const bf16* gate = w13 + (static_cast<size_t>(expert) * 2 * a.inter + row) * a.hidden;
    const int bytes = kPairs * a.hidden * 2;
    const uint64_t policy = read_once();
    arrive_expecting(bar, 2 * bytes);
    bulk_copy(to, gate, bytes, bar, policy);
    bulk_copy(to + bytes, gate + static_cast<size_t>(a.inter) * a.hidden, bytes, bar, policy);
  }

  /// Loads the columns from k on of a tile of the first product.
  __device__ __forceinline__ void load_gate_up(const Args& a, uint8_t* to, uint32_t expert, int row, int k,
                                               uint64_t* bar) const {
    const bf16* gate = w13 + (static_cast<size_t>(expert) * 2 * a.inter + row) * a.hidden;
    const int chunk = a.chunk[0];
    arrive_expecting(bar, 2 * kPairs * min(chunk, a.hidden - k) * 2);
    copy_tile(to, gate, a.hidden, chunk, kPairs, k, bar);
    copy_tile(to + kPairs * chunk * 2, gate + static_cast<size_t>(a.inter) * a.hidden, a.hidden, chunk, kPairs, k, bar);
  }

  __device__ __forceinline__ void load_down(const Args& a, uint8_t* to, uint32_t expert, int top, int rows, int k,
                                            uint64_t* bar) const {
    const bf16* w = w2 + (static_cast<size_t>(expert) * a.hidden + top) * a.inter;
    arrive_expecting(bar, rows * min(a.chunk[1], a.inter - k) * 2);
    copy_tile(to, w, a.inter, a.chunk[1], rows, k, bar);
  }

  /// Multiplies the steps of a stage that belong to this warp. Rows g of `low` (and 8 + g of `high`) are a lane's
  /// weights, `x` is its token's row.
  ///
  /// In memory the distance between rows is a multiple of 128 bytes, so reads of two rows in the same 64 bytes of 128
  /// would conflict in the banks. Therefore odd rows take the two halves of a step in the other order, and so do odd
  /// columns: token t is in columns 2t and 2t + 1, and row g's sum for it is in the column with the parity of g.
  static __device__ __forceinline__ void multiply(const uint8_t* low, const uint8_t* high, const uint8_t* x, int warp,
                                                  int elements, float (&acc)[4][4]) {
    const uint32_t lane = threadIdx.x % 32, first = lane / 4 % 2 * 64 + lane % 4 * 16, second = first ^ 64;
    const auto load = [](const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); };
#pragma unroll 2
    for (int i = warp; i < elements / kStep; i += kConsumers) {
      const int at = i * kStep * 2;
      const uint4 p = load(low + at + first), r = load(low + at + second), q = load(x + at + first),
                  y = load(x + at + second);
      const uint4 h = load(high + at + first), j = load(high + at + second);
      mma_bf16(acc[0], {p.x, h.x, p.y, h.y}, q.x, q.y);
      mma_bf16(acc[1], {p.z, h.z, p.w, h.w}, q.z, q.w);
      mma_bf16(acc[2], {r.x, j.x, r.y, j.y}, y.x, y.y);
      mma_bf16(acc[3], {r.z, j.z, r.w, j.w}, y.z, y.w);
    }
  }

  /// This lane's sum of row g (`high`: 8 + g) for token t.
  static __device__ __forceinline__ float sum(const float (&acc)[4][4], int high) {
    const bool odd = threadIdx.x / 4 % 2 != 0;
    const int c = 2 * high;
    const float even_sum = (acc[0][c] + acc[1][c]) + (acc[2][c] + acc[3][c]);
    const float odd_sum = (acc[0][c + 1] + acc[1][c + 1]) + (acc[2][c + 1] + acc[3][c + 1]);
    return odd ? odd_sum : even_sum;
  }

  __device__ __forceinline__ void multiply_gate_up(const Args& a, const uint8_t* stage, uint32_t, int, int k,
                                                   const uint8_t* x, int warp, Sums& acc) const {
    const uint8_t* low = stage + threadIdx.x % 32 / 4 * a.chunk[0] * 2;
    multiply(low, low + kPairs * a.chunk[0] * 2, x + k * 2, warp, min(a.chunk[0], a.hidden - k), acc);
  }

  __device__ __forceinline__ void multiply_down(const Args& a, const uint8_t* stage, uint32_t, int, int rows, int k,
                                                const uint8_t* act, int warp, Sums& acc) const {
    const int g = threadIdx.x % 32 / 4;
    const uint8_t* low = stage + min(g, rows - 1) * a.chunk[1] * 2;
    const uint8_t* high = stage + min(g + kDownRows / 2, rows - 1) * a.chunk[1] * 2;
    multiply(low, high, act + k * 2, warp, min(a.chunk[1], a.inter - k), acc);
  }

#endif  // MOE_HAS_TMA
};

template <int kPerLane, Rule kRule, class W>
cudaError_t run(const Launch& l, const Weighted<W>& a) {
  switch (a.output) {
    case Output::kF32: return launch(layer_kernel<kPerLane, kRule, Output::kF32, W>, l, a);
    case Output::kBf16: return launch(layer_kernel<kPerLane, kRule, Output::kBf16, W>, l, a);
    default: return launch(layer_kernel<kPerLane, kRule, Output::kAddF32, W>, l, a);
  }
}

/// The rule that most models with such weights have: they have a kernel of their own.
template <class W>
constexpr Rule kUsualRule = Rule::kPlain;
template <>
constexpr Rule kUsualRule<Rows<BiasedSwiglu>> = Rule::kRawLogits;

template <int kPerLane, class W>
cudaError_t run_routed(const Launch& l, const Weighted<W>& a) {
  switch (rule_of(a.route, a.routing)) {
    case kUsualRule<W>: return run<kPerLane, kUsualRule<W>>(l, a);
    case Rule::kGroups: return run<16, Rule::kGroups>(l, a);
    default: return run<kPerLane, Rule::kAny>(l, a);
  }
}

template <class W>
cudaError_t run(Weighted<W> a, void* stream) {
  Launch l;
  const cudaError_t e = prepare(&a, &l, stream);
  if (e != cudaSuccess) return e;
  if (a.gate == nullptr) return run<0, Rule::kAny>(l, a);
  return a.route.experts <= 128 ? run_routed<4>(l, a) : run_routed<16>(l, a);
}

}  // namespace
}  // namespace moe::layer

/// Bytes of the zeroed `state` buffer of launches with up to this many experts and intermediate columns.
extern "C" size_t moe_layer_stream_state(int experts, int inter) {
  using namespace moe::layer;
  return sizeof(State) +
         sizeof(uint64_t) * (static_cast<size_t>(kMaxTokens) * experts + static_cast<size_t>(kMaxSlots) * inter / 2);
}

/// Whether moe_layer_stream supports these sizes when a block may request `block_smem` bytes of shared memory: 1 or 0.
/// This is a pure function: the host makes the same choice with the same rule (plan/experts.rs), and a test compares
/// the two.
extern "C" int moe_layer_stream_fits(int tokens, int hidden, int inter, int num_ids, int num_local, int top_k,
                                     int block_smem) {
  using namespace moe;
  using namespace moe::layer;
  Weighted<Rows<PlainSwiglu>> a = {};
  a.tokens = tokens, a.hidden = hidden, a.inter = inter, a.num_local = num_local;
  a.route.experts = num_ids, a.route.top_k = top_k;
  return valid(a) && num_ids <= 512 && top_k <= num_ids && divide_ring(&a, block_smem);
}

/// out[t] (+)= sum over k of topk_weights[t, k] * w2[e] (silu(gate) * up), gate and up from w13[e] y[t], e =
/// topk_ids[t, k], y = x or its RMSNorm, ids and weights from the router logits y gate^T or given; biases and another
/// activation as `epilogue` says.
///
/// Refuses everything for which moe_layer_stream_fits is 0: T > 4, T K > 32, E > 512, and H or I that are not a
/// multiple of 64 or too large for shared memory.
extern "C" int moe_layer_stream(const moe::LayerStreamArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::layer;
  const LayerStreamArgs& c = *args;
  layer::Args a = common_args(c);
  a.num_local = c.num_local, a.hidden = c.hidden, a.inter = c.inter;
  if (!launchable(a)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  return with_epilogue(c.epilogue, [&](auto epilogue) {
    using W = layer::Rows<decltype(epilogue)>;
    return layer::run(layer::Weighted<W>{a, W{c.w13, c.w2, epilogue}}, stream);
  });
}
