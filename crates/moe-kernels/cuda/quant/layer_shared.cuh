// Geometry and shared memory of the quantised layer kernel (quant/layer_stream.cu, which tells the design).
#pragma once

#include "layer/stream_route.cuh"
#include "quant/warp_ring.cuh"

namespace moe::quant_layer {

constexpr int kWarps = 16;  // that multiply
constexpr int kWorkers = kWarps * 32;
constexpr int kMaxTokens = 4;  // of an mma's 8 columns
constexpr int kMaxSlots = 32;  // a lane each
constexpr int kTileRows = quant::kTileRows;
constexpr int kOutputs = 8;  // of a tile of the first product: gate and up of each are two of its rows
constexpr int kStep = quant::kStep;
constexpr int kPollNs = 64;  // between two looks at an activation
constexpr uint8_t kNoPart = 0xff;
constexpr uint32_t kNone = 0xffffffffu, kUnknown = 0xfffffffeu;

/// How warps share the tiles of gate and up. Two of them have halves of a tile's columns, add and activate; the first
/// warps also choose experts.
struct Pairs {
  static constexpr int kTeam = 2, kTeams = kWarps / kTeam, kOthers = 0, kMost = kMaxTokens, kThreads = kWorkers;
  static constexpr int kTurn = kTeams - kMost / 2;  // of the first team among the teams
  static constexpr int kBuffers = 2;                // of a team's shares of a tile
  static constexpr int kBarriers = 0, kShareBytes = 16 * 32;
};

/// Eight warps have an eighth each, so that all multiply until the end. Others choose the experts, one for each token,
/// then each adds and activates what a team has multiplied.
struct Teams {
  static constexpr int kTeam = 8, kTeams = kWarps / kTeam, kOthers = 2, kMost = 2, kThreads = kWorkers + kOthers * 32;
  static constexpr int kTurn = 0;
  static constexpr int kBuffers = 4, kBarriers = 2 * kBuffers * kTeams;
  static constexpr int kPitch = kTeam + 4;  // floats from a row to the next
  static constexpr int kShareBytes = 4 * kPitch * kTileRows * kMost;
};

/// In how many shares of the columns gate and up are summed, by pairs and by teams: bits depend on it.
template <class Kind>
constexpr int kShares = Kind::kFormat == QuantFormat::kFp8 ? Teams::kTeam : Pairs::kTeam;

/// Steps of a warp on their way or waiting.
__host__ __device__ constexpr int depth(QuantFormat format) { return format == QuantFormat::kInt4 ? 6 : 3; }

/// Rows of x: digits for integer weights, but not for groups of 32, where they cost more than they save (lab book).
template <class Kind>
using RowSteps = quant::RowSteps<quant::kTakesDigits<Kind>>;

/// Bytes of a warp's activations: 12 wide steps of a token, 3 of four.
__host__ __device__ constexpr int act_bytes(QuantFormat format) {
  return round_up(kMaxTokens * quant::row_pitch(3 * quant::kWideStep, quant::has_digits(format)), 128);
}

/// Byte offsets into dynamic shared memory. Barriers come first.
struct Layout {
  uint32_t flags, chosen, expert, part_of, slot_of, sums, shares, parts, act, rows, ring, total;
};

/// All but how weights are coded. What every block reads first comes first.
struct Args : layer::Args {
  Layout at;
  float mean;                  // what a sum of a row's squares is multiplied by for their mean
  int per_expert;              // tiles of gate and up
  int next_experts, next_row;  // from a team's tile to its next one
  quant::Matrix w13, w2;

  __host__ __device__ int pitch(QuantFormat format) const {
    return quant::row_pitch(hidden, quant::has_digits(format));
  }
  /// Whether experts are used as soon as each of them is chosen: one token, all of whose experts are here.
  __host__ __device__ bool early() const {
    return tokens == 1 && gate != nullptr && expert_map == nullptr && num_local >= num_ids();
  }
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
  /// Barriers of a team's buffer of shares: the shares are there; it may be filled again.
  __device__ uint64_t* shares_full(int buffer) const { return active_full() + 1 + buffer; }
  __device__ uint64_t* shares_free(int buffer) const { return shares_full(Teams::kBarriers / 2) + buffer; }
  __device__ uint32_t* number() const { return reinterpret_cast<uint32_t*>(base + l.flags); }
  __device__ uint32_t* num_active() const { return number() + 1; }
  __device__ float* scale() const { return reinterpret_cast<float*>(number() + 2); }
  __device__ Choice* chosen() const { return reinterpret_cast<Choice*>(base + l.chosen); }
  /// Local expert of an active one; kNone: none is left.
  __device__ uint32_t* expert() const { return reinterpret_cast<uint32_t*>(base + l.expert); }
  /// For each slot, the slot whose part it uses, or kNoPart.
  __device__ uint8_t* part_of() const { return base + l.part_of; }
  /// The slots of an active expert by tokens, kNone where there is none.
  __device__ uint32_t* slot_of(int active) const {
    return reinterpret_cast<uint32_t*>(base + l.slot_of) + active * kMaxTokens;
  }
  /// Sums of squares of the tokens, then sums of their logits, one of each warp.
  __device__ float* sums(int which) const { return reinterpret_cast<float*>(base + l.sums) + which * kWarps; }
  /// The second half's sums of a pair of warps.
  __device__ float4* half(int buffer) const {
    return reinterpret_cast<float4*>(base + l.shares + Pairs::kShareBytes * buffer);
  }
  /// A team's shares of a tile's sums for a token: of each of its rows a float of each warp.
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

/// Where the first so many of equal shares of columns end, which are of whole wide steps but for the last one.
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
