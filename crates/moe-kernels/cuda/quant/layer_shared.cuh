// Geometry and shared memory of the quantised layer kernel (quant/layer_stream.cu explains the design).
#pragma once

#include "layer/stream_route.cuh"
#include "quant/warp_ring.cuh"

namespace moe::quant_layer {

constexpr int kWarps = 16;  // warps that multiply
constexpr int kWorkers = kWarps * 32;
constexpr int kMaxTokens = 4;  // of the 8 columns of an mma
constexpr int kMaxSlots = 32;  // one for each lane
constexpr int kTileRows = quant::kTileRows;
constexpr int kOutputs = 8;  // outputs of a tile of the first product: each has two of its rows, gate and up
constexpr int kStep = quant::kStep;
constexpr int kPollNs = 64;  // nanoseconds between two looks at an activation
constexpr uint8_t kNoPart = 0xff;
constexpr uint32_t kNone = 0xffffffffu, kUnknown = 0xfffffffeu;

/// How warps share the tiles of gate and up. In `Pairs`, two warps have one half of a tile's columns each, and add and
/// activate their sums. The first warps also choose experts.
struct Pairs {
  static constexpr int kTeam = 2, kTeams = kWarps / kTeam, kOthers = 0, kMost = kMaxTokens, kThreads = kWorkers;
  static constexpr int kTurn = kTeams - kMost / 2;  // turn of the first team among the teams
  static constexpr int kBuffers = 2;                // buffers for a team's shares of a tile
  static constexpr int kBarriers = 0, kShareBytes = 16 * 32;
};

/// In `Teams`, eight warps have one eighth of the columns each, so that all of them multiply until the end. Other warps
/// choose the experts (one warp for each token), and then each of these adds and activates what one team has
/// multiplied.
struct Teams {
  static constexpr int kTeam = 8, kTeams = kWarps / kTeam, kOthers = 2, kMost = 2, kThreads = kWorkers + kOthers * 32;
  static constexpr int kTurn = 0;
  static constexpr int kBuffers = 4, kBarriers = 2 * kBuffers * kTeams;
  static constexpr int kPitch = kTeam + 4;  // floats from one row to the next
  static constexpr int kShareBytes = 4 * kPitch * kTileRows * kMost;
};

/// The number of shares of the columns in which gate and up are summed, by pairs and by teams. The bits depend on it.
template <class Kind>
constexpr int kShares = Kind::kFormat == QuantFormat::kFp8 ? Teams::kTeam : Pairs::kTeam;

/// The number of a warp's steps that are in flight or waiting.
__host__ __device__ constexpr int depth(QuantFormat format) { return code_bits(format) == 4 ? 6 : 3; }

/// The form of rows of x: digits for integer weights, except for groups of 32, where digits cost more than they save.
template <class Kind>
using RowSteps = quant::RowSteps<quant::kTakesDigits<Kind>>;

/// Bytes of a warp's activations: 12 wide steps of one token, or 3 of four tokens.
__host__ __device__ constexpr int act_bytes(QuantFormat format) {
  return round_up(kMaxTokens * quant::row_pitch(3 * quant::kWideStep, quant::has_digits(format)), 128);
}

/// Byte offsets into dynamic shared memory. Barriers come first.
struct Layout {
  uint32_t flags, chosen, expert, part_of, slot_of, sums, shares, parts, act, rows, ring, total;
};

/// All arguments, except the format of the weights, which is a template argument. What every block reads first comes
/// first.
struct Args : layer::Args {
  Layout at;
  float mean;                  // what a row's sum of squares is multiplied by to get its mean
  int per_expert;              // tiles of gate and up
  int next_experts, next_row;  // what is added to a team's tile to get its next one
  quant::Matrix w13, w2;

  __host__ __device__ int pitch(QuantFormat format) const {
    return quant::row_pitch(hidden, quant::has_digits(format));
  }
  /// Whether experts are used as soon as each of them is chosen: with one token whose experts are all on this rank.
  __host__ __device__ bool early() const {
    return tokens == 1 && gate != nullptr && expert_map == nullptr && num_local >= num_ids();
  }
};

/// All arguments, with biases and activation.
template <class E>
struct WithEpilogue : Args {
  E epilogue;
};

template <class Form>
Layout layout(const Args& a, QuantFormat format) {
  Layout l;
  l.flags = 8 * (kMaxTopK + 1 + Form::kBarriers);
  l.chosen = l.flags + 8 + 4 * kMaxTokens;
  l.expert = l.chosen + 8 * a.slots();
  l.part_of = l.expert + 4 * a.slots();
  l.slot_of = round_up(l.part_of + a.slots(), 16);
  l.sums = l.slot_of + 4 * kMaxTokens * a.slots();
  l.shares = round_up(l.sums + 4 * 2 * kWarps * a.tokens, 16);
  l.parts = l.shares + Form::kShareBytes * Form::kBuffers * Form::kTeams;
  l.act = round_up(l.parts + 4 * 2 * kTileRows * a.slots(), 16);
  l.rows = l.act + act_bytes(format) * kWarps;
  l.ring = round_up(l.rows + a.pitch(format) * a.tokens, 128);
  l.total = l.ring + kWarps * depth(format) * quant::step_bytes(format);
  return l;
}

/// A block's shared memory. An active expert is one that some token chose; a part is a slot's share of the output
/// before its weight.
struct Shared {
  uint8_t* base;
  const Layout& l;

  __device__ uint64_t* expert_full(int active) const { return reinterpret_cast<uint64_t*>(base) + active; }
  __device__ uint64_t* active_full() const { return expert_full(kMaxTopK); }
  /// Barriers of a team's buffer of shares: one for shares that are there, one for a buffer that may be filled again.
  __device__ uint64_t* shares_full(int buffer) const { return active_full() + 1 + buffer; }
  __device__ uint64_t* shares_free(int buffer) const { return shares_full(Teams::kBarriers / 2) + buffer; }
  __device__ uint32_t* number() const { return reinterpret_cast<uint32_t*>(base + l.flags); }
  __device__ uint32_t* num_active() const { return number() + 1; }
  __device__ float* scale() const { return reinterpret_cast<float*>(number() + 2); }
  __device__ Choice* chosen() const { return reinterpret_cast<Choice*>(base + l.chosen); }
  /// The local number of an active expert; kNone: there are no more active experts.
  __device__ uint32_t* expert() const { return reinterpret_cast<uint32_t*>(base + l.expert); }
  /// For each slot, the slot whose part it uses; kNoPart if there is none.
  __device__ uint8_t* part_of() const { return base + l.part_of; }
  /// The slots of an active expert by tokens, kNone where there is none.
  __device__ uint32_t* slot_of(int active) const {
    return reinterpret_cast<uint32_t*>(base + l.slot_of) + active * kMaxTokens;
  }
  /// Sums of squares of the tokens, then sums of their logits; each warp has one.
  __device__ float* sums(int which) const { return reinterpret_cast<float*>(base + l.sums) + which * kWarps; }
  /// The sums of the second warp of a pair.
  __device__ float4* half(int buffer) const {
    return reinterpret_cast<float4*>(base + l.shares + Pairs::kShareBytes * buffer);
  }
  /// A team's shares of a tile's sums for a token: for each row of the tile, a float of each warp.
  __device__ float* shares(int buffer, int token) const {
    return reinterpret_cast<float*>(base + l.shares + Teams::kShareBytes * buffer) + token * kTileRows * Teams::kPitch;
  }
  __device__ float* part(int slot, int half) const {
    return reinterpret_cast<float*>(base + l.parts) + (2 * slot + half) * kTileRows;
  }
  template <class Kind>
  __device__ uint8_t* act(int warp) const {
    return base + l.act + warp * act_bytes(Kind::kFormat);
  }
  __device__ uint8_t* rows() const { return base + l.rows; }
};

/// The end of the first `count` of kShares equal shares of the columns. All shares consist of whole wide steps; only
/// the last one may end in part of a step.
template <int kShares>
__device__ __forceinline__ int shares_end(int columns, int count) {
  const int steps = ceil_div(columns, quant::kWideStep);
  return min(columns, ceil_div(steps * count, kShares) * quant::kWideStep);
}
template <int kShares>
__device__ __forceinline__ int2 share_of(int columns, int share) {
  return {shares_end<kShares>(columns, share), shares_end<kShares>(columns, share + 1)};
}

}  // namespace moe::quant_layer
