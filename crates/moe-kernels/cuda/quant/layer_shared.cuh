// Geometry and shared memory of the quantised layer kernel (quant/layer_stream.cu, which tells the design).
#pragma once

#include "layer/stream_route.cuh"
#include "quant/warp_ring.cuh"

namespace moe::quant_layer {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kPairs = kWarps / 2;  // two warps share a tile of the first product
constexpr int kMaxTokens = 4;       // of an mma's 8 columns
constexpr int kMaxSlots = 32;       // a lane each
constexpr int kTileRows = quant::kTileRows;
constexpr int kOutputs = 8;  // of a tile of the first product: gate and up of each are two of its rows
constexpr int kStep = quant::kStep;
constexpr int kPollNs = 64;  // between two looks at an activation
constexpr uint8_t kNoPart = 0xff;
constexpr uint32_t kNone = 0xffffffffu, kUnknown = 0xfffffffeu;

/// Steps of a warp on their way or waiting.
__host__ __device__ constexpr int depth(QuantFormat format) { return format == QuantFormat::kInt4 ? 6 : 3; }

/// Rows of x, of which integers take digits; not in groups of 32, which cost more than they save (lab book).
template <class Kind>
using RowSteps = quant::RowSteps<quant::kTakesDigits<Kind>>;

/// Bytes of a warp's activations: 12 wide steps of a token, 3 of four.
__host__ __device__ constexpr int act_bytes(QuantFormat format) {
  return round_up(kMaxTokens * quant::row_pitch(3 * quant::kWideStep, quant::has_digits(format)), 128);
}

/// Byte offsets into dynamic shared memory. Barriers come first.
struct Layout {
  uint32_t flags, chosen, expert, part_of, slot_of, sums, halves, parts, act, rows, ring, total;
};

/// All but how weights are coded. What every block reads first comes first.
struct Args : layer::Args {
  Layout at;
  float mean;  // what a sum of a row's squares is multiplied by for their mean
  quant::Matrix w13, w2;

  __host__ __device__ int pitch(QuantFormat format) const {
    return quant::row_pitch(hidden, quant::has_digits(format));
  }
  /// Whether experts are used as soon as each of them is chosen: one token, all of whose experts are here.
  __host__ __device__ bool early() const {
    return tokens == 1 && gate != nullptr && expert_map == nullptr && num_local >= num_ids();
  }
};

inline Layout layout(const Args& a, QuantFormat format) {
  Layout l;
  l.flags = 8 * (kMaxTopK + 1);
  l.chosen = l.flags + 8 + 4 * kMaxTokens;
  l.expert = l.chosen + 8 * a.slots();
  l.part_of = l.expert + 4 * a.slots();
  l.slot_of = round_up(l.part_of + a.slots(), 16);
  l.sums = l.slot_of + 4 * kMaxTokens * a.slots();
  l.halves = round_up(l.sums + 4 * 2 * kWarps * a.tokens, 16);
  l.parts = l.halves + 16 * 32 * 2 * kPairs;
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
  __device__ uint32_t* number() const { return reinterpret_cast<uint32_t*>(base + l.flags); }
  __device__ uint32_t* num_active() const { return number() + 1; }
  __device__ float* scale() const { return reinterpret_cast<float*>(number() + 2); }
  __device__ Choice* chosen() const { return reinterpret_cast<Choice*>(base + l.chosen); }
  /// Local expert of an active one; kNone: none is left.
  __device__ uint32_t* expert() const { return reinterpret_cast<uint32_t*>(base + l.expert); }
  /// The slot whose part is a slot's own, or kNoPart.
  __device__ uint8_t* part_of() const { return base + l.part_of; }
  /// The slots of an active expert by tokens, kNone where there is none.
  __device__ uint32_t* slot_of(int active) const {
    return reinterpret_cast<uint32_t*>(base + l.slot_of) + active * kMaxTokens;
  }
  /// Sums of squares of the tokens, then sums of their logits, one of each warp.
  __device__ float* sums(int which) const { return reinterpret_cast<float*>(base + l.sums) + which * kWarps; }
  /// The second half's sums of a pair of warps.
  __device__ float4* halves(int pair, int buffer) const {
    return reinterpret_cast<float4*>(base + l.halves) + (2 * pair + buffer) * 32;
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

/// The half of so many columns that a warp takes, of whole wide steps but for the last one: where it begins and ends.
__device__ __forceinline__ int2 half_of(int columns, int half) {
  const int middle = min(columns, ceil_div(ceil_div(columns, quant::kWideStep), 2) * quant::kWideStep);
  return half == 0 ? int2{0, middle} : int2{middle, columns};
}

}  // namespace moe::quant_layer
