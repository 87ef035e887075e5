// moe_layer_stream for quantised experts: a sub-layer of a decode step for 1 to 4 tokens in one launch.
//
// Floor: 3 H I weights for each chosen expert, 19.5 MB at 4 bits with scales for a token of Qwen3-30B-A3B: 4.4 us at
// 4.4 TB/s. The latencies around it are longer than that. So this kernel does not feed all warps from one ring, as the
// kernel for bf16 does (layer/stream.cu). It only takes the exchange between blocks from there: logits and activations
// are words that carry the launch's number.
//
// - Each warp works alone. It copies its steps of 128 columns to its own ring (layer_load.cuh), and between a copy and
//   a product there is no barrier. 16 warps hide what a step waits for.
// - A tile of gate and up, 8 rows of each, is computed by two warps, half of the columns each. Gate and up of an output
//   are in the same lane, so SwiGLU follows in registers. With one or two tokens of FP8, a team of eight warps computes
//   a tile, so that no warp is idle while others still have tiles, and two more warps do everything except multiplying
//   (layer_teams.cuh): a step of FP8 takes long enough to pay for the overhead of a tile every two steps.
// - In the down product a warp takes half of the columns of an expert, and itself fetches the activations that it
//   needs.
// - With one token, a warp waits only for its own expert, in the order of choice: while the last experts are being
//   chosen, the weights of the first ones are already in flight.
// - Tokens are the columns of mma.sync, so weights are unpacked once for all of them. Integer weights are not unpacked:
//   they are multiplied by the digits of tokens (digits.cuh). A warp makes the digits of the columns that it has stored
//   while it waits for logits.
//
// Sums over columns are sums of two halves; in FP8's gate and up they are sums of eight eighths, both with pairs and
// with teams. A token's sum over experts is in the order of its slots. So a token's bits do not depend on the other
// tokens.
//
// A block owns whole rows of tiles of w2, so of 2,048 columns 128 blocks own 16 each and four none.
#include "quant/layer_route.cuh"
#include "quant/layer_teams.cuh"

namespace moe::quant_layer {
namespace {

/// kPerLane: the number of a token's logits that a lane holds; 0: ids and weights are given. kRule: see rule_of.
template <class Kind, class Form, int kPerLane, Rule kRule, class E>
__global__ void __launch_bounds__(Form::kThreads, 1) quant_layer_kernel(const __grid_constant__ WithEpilogue<E> a) {
#if MOE_HAS_TMA
  extern __shared__ __align__(128) uint8_t smem[];
  const Shared s = {smem, a.at};
  // One warp chooses the experts of a token: one of the first warps, or one of the warps that do not multiply.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = Form::kOthers == 0 ? warp : warp - kWarps;
  const bool works = Form::kOthers == 0 || warp < kWarps, chooses = own >= 0 && own < a.tokens;
  constexpr bool kRoutes = kPerLane > 0;
  const bool early = kRoutes && a.early(), routes = kRoutes && static_cast<int>(blockIdx.x) < a.route.experts;
  FirstColumns<Form::kMost> columns;
  if (works) columns.load_weights(a, routes);
  pdl_wait();
  if (works) columns.load_rows(a);
  const layer::Turn turn(a);
  prepare<Form>(a, s, early);
  if (works && a.tokens == 1) stage_rows<Kind, 1>(a, s, columns, routes);
  else if (works) stage_rows<Kind, Form::kMost>(a, s, columns, routes);
  __syncthreads();
  float scale = 0.0f;
  if (chooses) scale = publish_logit(a, s, own, blockIdx.x, turn);
  if constexpr (kRoutes) {
    for (int e = blockIdx.x + gridDim.x; e < a.route.experts; e += gridDim.x) {
      __syncthreads();  // the sums of the expert before have been read
      if (works) sum_logits<Kind>(a, s, e);
      __syncthreads();
      if (chooses) publish_logit(a, s, own, e, turn);
    }
  }
  if (works) finish_rows<Kind>(a, s);
  if (chooses) {
    if (!early && lane == 0) s.scale()[own] = scale;
    if (!early && own == 0 && lane == 0) *s.number() = turn.number();
    if constexpr (kRoutes) route<kPerLane, kRule>(a, s, own, turn.number(), scale);
    if (!early) {
      named_barrier(1, 32 * a.tokens);
      if (own == 0) build_active(a, s);
      warp_arrive(s.active_full());
    }
    if (own == 0 && lane == 0) turn.end(a);
  }
  if (!early) mbarrier_wait(s.active_full(), 0);
  const int team = works ? warp / Form::kTeam : own;
  const Tiles<Form> tiles(a, team, early ? a.slots() : static_cast<int>(*s.num_active()));
  if constexpr (Form::kOthers > 0) {
    if (!works) {
      activate_all(a, s, tiles, team);
      if (own == 0) store_all(a, s, tiles);
      return;
    }
  }
  Worker<Kind, Form, E>(a, s, tiles).run_all();
#endif
}

/// The rule that most models with this epilogue have: it has a kernel of its own.
template <class E>
constexpr Rule kUsualRule = Rule::kPlain;
template <>
constexpr Rule kUsualRule<BiasedSwiglu> = Rule::kRawLogits;

template <class Kind, class Form, class E>
cudaError_t run(WithEpilogue<E> a, const DeviceLimits& limits, void* stream) {
  a.at = layout<Form>(a, Kind::kFormat), a.mean = 1.0f / a.hidden;
  if (a.at.total > static_cast<uint32_t>(limits.block_smem)) return cudaErrorInvalidValue;
  const int units = a.hidden / kTileRows;
  a.share = units / limits.sms, a.longer = units % limits.sms;
  a.per_expert = a.inter / kOutputs;
  a.next_experts = limits.sms * Form::kTeams / a.per_expert, a.next_row = limits.sms * Form::kTeams % a.per_expert;
  Launch l = {dim3(limits.sms), dim3(Form::kThreads), stream, a.at.total};
  l.cooperative = true;
  if (a.gate == nullptr) return launch(quant_layer_kernel<Kind, Form, 0, Rule::kAny, E>, l, a);
  const Rule rule = rule_of(a.route, a.routing);
  if (rule == Rule::kGroups) return launch(quant_layer_kernel<Kind, Form, 16, Rule::kGroups, E>, l, a);
  if (a.route.experts <= 128 && rule == kUsualRule<E>)
    return launch(quant_layer_kernel<Kind, Form, 4, kUsualRule<E>, E>, l, a);
  return launch(quant_layer_kernel<Kind, Form, 16, Rule::kAny, E>, l, a);
}

/// FP8 with one or two tokens uses teams, if shared memory has room for their shares. Everything else uses pairs, which
/// are faster there (docs/lessons/quantised.md).
template <class Kind, class E>
cudaError_t run(const WithEpilogue<E>& a, void* stream) {
  DeviceLimits limits;
  const cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  if constexpr (Kind::kFormat == QuantFormat::kFp8) {
    const bool fits = layout<Teams>(a, Kind::kFormat).total <= static_cast<uint32_t>(limits.block_smem);
    if (a.tokens <= Teams::kMost && fits) return run<Kind, Teams, E>(a, limits, stream);
  }
  return run<Kind, Pairs, E>(a, limits, stream);
}

/// Whether the launcher accepts these arguments, apart from the room in shared memory.
bool launchable(const Args& a) {
  const RouteArgs& r = a.route;
  const bool sizes = a.tokens >= 0 && a.tokens <= kMaxTokens && r.slots() > 0 && r.slots() <= kMaxTopK &&
                     a.slots() <= kMaxSlots && a.hidden > 0 && a.hidden % kStep == 0 && a.inter > 0 &&
                     a.inter % kStep == 0 && a.num_local > 0 && a.num_local <= 1024 && r.experts > 0;
  const bool routes = a.num_ids() <= 512 && r.slots() <= a.num_ids() && is_code(r.scoring, Scoring::kSqrtSoftplus) &&
                      are_groups(r.groups, r.kept_groups, r.experts);
  const bool shares = r.shared >= 0 && r.top_k > 0 && (r.shared == 0 || a.gate != nullptr);
  return sizes && is_code(a.output, Output::kAddF32) && shares && (a.gate == nullptr || routes);
}

}  // namespace
}  // namespace moe::quant_layer

/// The same as moe_layer_stream_fits.
extern "C" int moe_quant_layer_stream_fits(moe::QuantFormat format, int tokens, int hidden, int inter, int num_ids,
                                           int num_local, int top_k, int block_smem) {
  using namespace moe;
  quant_layer::Args a = {};
  a.tokens = tokens, a.hidden = hidden, a.inter = inter, a.num_local = num_local;
  a.route.experts = num_ids, a.route.top_k = top_k;
  const bool sizes = quant_layer::launchable(a) && num_ids <= 512 && top_k <= num_ids;
  return sizes && quant_layer::layout<quant_layer::Pairs>(a, format).total <= static_cast<uint32_t>(block_smem);
}

/// The same as moe_layer_stream, for sizes that moe_quant_layer_stream_fits allows and packs that make_matrix accepts.
extern "C" int moe_quant_layer_stream(const moe::QuantLayerStreamArgs* args, void* stream) {
  using namespace moe;
  const QuantLayerStreamArgs& c = *args;
  quant_layer::Args a = {};
  static_cast<layer::Args&>(a) = layer::common_args(c);
  if (!quant::make_experts(c.w13, c.w2, &a.w13, &a.w2)) return cudaErrorInvalidValue;
  a.num_local = static_cast<int>(c.w13.experts), a.hidden = a.w13.k, a.inter = a.w2.k;
  if (!quant_layer::launchable(a)) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  const bool wide = quant::has_wide_groups(a.w13) && quant::has_wide_groups(a.w2);
  return with_epilogue(c.epilogue, [&](auto epilogue) {
    const quant_layer::WithEpilogue<decltype(epilogue)> all = {a, epilogue};
    return quant::with_step_kind(c.w13.format, wide,
                                 [&](auto kind) -> int { return quant_layer::run<decltype(kind)>(all, stream); });
  });
}
