// A stage of quantised weights in shared memory for warpgroup products: some blocks of 16 rows x 64 or 128 columns as the
// pack has them (quant/args.cuh), beside them the scales and zero points of its columns, and how a warp makes A
// fragments of bf16 of them.
//
// Weights become bf16(bf16(scale) (q - zero)), as a checkpoint that is dequantised to bf16 has them, but for a scale of
// f16, which is rounded first; FP8 has scales of f32, which are taken as the sum of two bf16. The products' sums are
// f32.
//
// Instructions for two weights in a lane: int4 3.75 (shift, mask, subtract, multiply), int8 6.5, FP8 6.5. Four
// schedulers issue 128 lanes' a clock, and an SM's share of the memory brings 38 weights of 4 bits or 19 of 8 in one:
// 56 % of the issue for int4, 48 % for the others.
#pragma once

#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"
#include "quant/args.cuh"
#include "quant/unpack.cuh"

namespace moe::quant {

/// What a product's weights need beside the tensor map of their tiles.
struct Source {
  const uint8_t* scales;
  const uint8_t* zeros;  // null: the middle
  int blocks, all_blocks;  // of 16 rows: of a matrix, of all
  int groups;
  int shares;  // of a group, see QuantStage
  int scale_rows, f16_scales;
};

/// kColumns_: of a stage, 64 or 128. kShare: of them have the same scale, kColumns_ or 32. kRowBlocks: blocks of 16 rows.
template <QuantFormat kFormat, int kColumns_, int kShare, int kRowBlocks>
struct QuantStage {
  static constexpr int kColumns = kColumns_, kUnit = 64, kUnits = kColumns / kUnit;  // a unit is unpacked at once
  static constexpr int kBlockBytes = kColumns / tile_columns(kFormat) * 512;
  static constexpr int kBytes = kRowBlocks * kBlockBytes;
  static constexpr bool kIntegers = kFormat != QuantFormat::kFp8;
  static constexpr int kShares = kColumns / kShare;
  static constexpr int kScaleBytes = kRowBlocks * kShares * (kIntegers ? 32 : 64);
  static constexpr int kZeroBytes = kIntegers ? kRowBlocks * kShares * 16 : 0;
  static constexpr int kSideBytes = kScaleBytes + kZeroBytes;
  static constexpr int kSteps = kUnit / 16;                    // of 16 columns in a unit
  static constexpr int kWords = kSteps * step_words(kFormat);  // of a lane in a unit
  static_assert(kColumns % kUnit == 0 && (kShare == kColumns || (kShare == 32 && kIntegers)));

#if MOE_SM90
  /// The weights of `step`, kBytes that the barrier must expect. One thread.
  static __device__ __forceinline__ void load_weights(void* to, const CUtensorMap* map, int row_block, int step,
                                                      uint64_t* bar, uint64_t policy) {
    load_tile(to, map, row_block, step * (kBlockBytes / 8), bar, policy);
  }

  /// What lies beside them, by cp.async of lane `index` of kLanes.
  template <int kLanes>
  static __device__ __forceinline__ void copy_side(uint8_t* side, const Source& s, int row_block, int step, int index) {
    const auto group_row = [&](int block, int share) {
      const int group = min((step * kShares + share) / s.shares, s.groups - 1);
      return static_cast<size_t>(min(row_block + block, s.all_blocks - 1)) * s.groups + group;
    };
    if constexpr (kIntegers) {
#pragma unroll
      for (int i = index; i < kRowBlocks * kShares * 2; i += kLanes)
        cp_async16(side + i * 16, s.scales + group_row(i / (2 * kShares), i / 2 % kShares) * 32 + i % 2 * 16);
      if (s.zeros == nullptr) return;
#pragma unroll
      for (int i = index; i < kRowBlocks * kShares; i += kLanes)
        cp_async16(side + kScaleBytes + i * 16, s.zeros + group_row(i / kShares, i % kShares) * 16);
    } else if (s.scale_rows == 2) {
      if (index < kRowBlocks) cp_async8(side + index * 64, s.scales + group_row(index, 0) * 8);
    } else {
#pragma unroll
      for (int i = index; i < kRowBlocks * 4; i += kLanes)
        cp_async16(side + i * 16, s.scales + group_row(i / 4, 0) * 64 + i % 4 * 16);
    }
  }

  /// Zero points and scales of a lane's two rows, g and g + 8 of a block.
  struct Operands {
    uint32_t zero[2], scale[2], rest[2];
  };

  static __device__ __forceinline__ Operands operands(const uint8_t* side, const Source& s, int block, int share) {
    const int g = threadIdx.x % 32 / 4;
    Operands o = {};
    if constexpr (kIntegers) {
      const int at = block * kShares + share;
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(side) + at * 16 + g;
      const uint8_t* zeros = side + kScaleBytes + at * 16 + g;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        o.scale[i] = scale_operand(scales[8 * i], s.f16_scales);
        const uint32_t middle = kFormat == QuantFormat::kInt4 ? 8 : 128;
        o.zero[i] = zero_operand<kFormat>(s.zeros == nullptr ? middle : zeros[8 * i]);
      }
    } else {
      const float* scales = reinterpret_cast<const float*>(side) + block * 16;
      const int each = s.scale_rows == 2 ? 1 : 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 terms = scale_operands(scales[(each == 1 ? 0 : g) + each * i]);
        o.scale[i] = terms.x, o.rest[i] = terms.y;
      }
    }
    return o;
  }

  /// What a lane reads of a stage: its words of a block of 16 rows, and its rows' operands.
  struct Lane {
    uint32_t words[kUnits][kWords];
    Operands operands[kShares];
  };

  static __device__ __forceinline__ Lane read(const uint8_t* weights, const uint8_t* side, const Source& s, int block) {
    Lane l;
    const uint8_t* from = weights + block * kBlockBytes + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < kUnits * kWords / 4; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i * 512);
      uint32_t* to = &l.words[0][0] + 4 * i;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) l.operands[i] = operands(side, s, block, i);
    return l;
  }

  /// The fragment of a unit's k-th k-step, before the wgmma_fence that must follow.
  static __device__ __forceinline__ void fragment(const Lane& l, int unit, int k, uint32_t (&a)[4]) {
    const Operands& o = l.operands[kShares == 1 ? 0 : (unit * kUnit + k * 16) / kShare];
    unpack<kFormat>(l.words[unit] + k * (kWords / kSteps), o.zero, a);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = kIntegers ? mul2(a[i], o.scale[i % 2]) : fma2(a[i], o.scale[i % 2], mul2(a[i], o.rest[i % 2]));
    wgmma_hold(a);
  }

  static __device__ __forceinline__ void fragments(const Lane& l, int unit, uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) fragment(l, unit, k, a[k]);
  }

  /// Gives a stage back that this warp has read.
  static __device__ __forceinline__ void give_back(uint64_t* empty) {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }
#endif
};

// ---- host

/// Whether the tensor forms take a pack: its columns as those of x, all rows there, one scale for 32 columns.
inline bool fits(const QuantPack& w) {
  const bool one = w.groups == 1;
  if (w.perm != nullptr || w.q == nullptr || w.scales == nullptr || w.experts <= 0 || w.k <= 0 || w.k % 64 != 0 ||
      w.k_packed != w.k || w.n <= 0 || w.groups <= 0 || w.group <= 0 || w.n_tiles * 16 != w.n ||
      w.experts > INT32_MAX / w.n || w.k > INT32_MAX / 2)
    return false;
  if (w.format == QuantFormat::kFp8)
    return w.scale_dtype == Dtype::kF32 && (w.scale_rows == 2 || w.scale_rows == 16) && (one || w.group % 128 == 0);
  return is_code(w.format, QuantFormat::kFp8) && w.scale_dtype != Dtype::kF32 && is_code(w.scale_dtype, Dtype::kF16) &&
         w.scale_rows == 16 && (one || w.group % 32 == 0);
}

/// Whether they take the packs of both products and their sizes.
inline bool experts_fit(const QuantExpertsTensorArgs& c) {
  const QuantPack &w13 = c.w13, &w2 = c.w2;
  return fits(w13) && fits(w2) && w13.gate_up != 0 && w2.gate_up == 0 && w13.format == w2.format &&
         w13.experts == w2.experts && w13.k == w2.n && w13.n == 2 * w2.k && c.tokens >= 0 && c.top_k > 0 &&
         c.num_ids > 0 && c.tokens <= INT32_MAX / c.top_k && c.bucket >= 0;
}

/// Of `columns` in a stage, those that surely have one scale.
inline int share(const QuantPack& w, int columns) { return w.groups == 1 || w.group % columns == 0 ? columns : 32; }

inline Source source(const QuantPack& w, int share) {
  return {static_cast<const uint8_t*>(w.scales),
          w.zeros,
          static_cast<int>(w.n_tiles),
          static_cast<int>(w.experts * w.n_tiles),
          static_cast<int>(w.groups),
          w.groups == 1 ? 1 : static_cast<int>(w.group / share),
          w.scale_rows,
          w.scale_dtype == Dtype::kF16};
}

/// The map of a pack's tiles in boxes of a stage.
inline cudaError_t make_pack_map(CUtensorMap* map, const QuantPack& w, int row_blocks, int block_bytes) {
  const int64_t words = w.k_packed / tile_columns(w.format) * 64;
  return make_word_map(map, w.q, w.experts * w.n_tiles, words, row_blocks, block_bytes / 8);
}

}  // namespace moe::quant
