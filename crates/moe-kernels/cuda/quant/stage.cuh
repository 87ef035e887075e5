// A stage of quantised weights in shared memory for warpgroup products, and how a warp makes A fragments of bf16 of it.
// A stage holds blocks of 16 rows x 64 or 128 columns in the order of the pack (quant/args.cuh), then the scales and
// zero points of its columns.
//
// Products for few token rows multiply exact integers (or e4m3), and scales multiply their sums over the columns of one
// scale in f32: no weight is rounded. The sums of products for prompts fill the registers, so scales multiply fragments
// there: bf16(bf16(scale) (q - zero)), the same weights as in a checkpoint that is dequantised to bf16, except that a
// scale of f16 is rounded to bf16 first. A scale of FP8, which is f32, is the sum of two bf16. FP4's fragments are
// exact with their scales, and its sums are multiplied by the factor of their row alone (quant/fp4.cuh). Q4_K's
// fragments are the weights, rounded (quant/q4k.cuh).
//
// Instructions for two weights in a lane: int4 2.75 (shift, mask, subtract), int8 5.5, FP8 4.5, FP4 with its scales
// 3.25, Q4_K 3.25 and 0.6 for its operands; multiplying by scales takes 1 more, with FP8 2 more. Four schedulers issue
// the instructions of 128 lanes in a clock, and an SM's share of the memory bandwidth brings 38 weights of 4 bits or 19
// of 8 bits in a clock. So unpacking takes 41 % of the issue slots for int4 and int8, before all other work of a stage.
#pragma once

#include <type_traits>

#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"
#include "quant/args.cuh"
#include "quant/fp4_stage.cuh"
#include "quant/q4k_stage.cuh"

namespace moe::quant {

/// What a product needs of its weights in addition to the tensor map of their tiles.
struct Source {
  const uint8_t* scales;
  const uint8_t* zeros;    // null: the middle of the range of the codes
  int blocks, all_blocks;  // blocks of 16 rows: of a matrix, of all matrices
  int groups;
  // 2^32 / shares of a group (QuantStage), rounded up, because the loop over stages divides by that number; 0 for one
  // share.
  uint32_t inverse;
  int scale_rows, f16_scales;
  int uniform;  // whether the columns of a stage share a scale
};

/// kColumns_: columns of a stage, 64 or 128. kShare: columns whose sums have the same scale, kColumns_ or 32.
/// kRowBlocks: blocks of 16 rows.
template <QuantFormat kFormat, int kColumns_, int kShare, int kRowBlocks>
struct QuantStage {
  static constexpr int kColumns = kColumns_, kSteps = kColumns / 16;
  static constexpr int kBlockBytes = kColumns / tile_columns(kFormat) * 512;
  static constexpr int kBytes = kRowBlocks * kBlockBytes;
  static constexpr bool kIntegers = is_integer(kFormat), kFp4 = is_fp4(kFormat);
  /// Whether fragments are the weights, so that nothing multiplies their sums.
  static constexpr bool kWhole = is_q4k(kFormat);
  static constexpr int kShares = kColumns / kShare, kShareSteps = kShare / 16;
  static constexpr int kScaleBytes = kRowBlocks * kShares * (kIntegers ? 32 : 64);
  static constexpr int kZeroBytes = kIntegers ? kRowBlocks * kShares * 16 : 0;
  using Fp4 = Fp4Side<kFormat, kColumns, kRowBlocks>;
  using Q4k = Q4kSide<kColumns, kRowBlocks>;
  static constexpr int kSideBytes = kWhole ? Q4k::kBytes : kFp4 ? Fp4::kBytes : kScaleBytes + kZeroBytes;
  static constexpr int kWords = step_words(kFormat);  // words of a lane in a k-step
  static constexpr uint32_t kReleases = kWarpArrivals;
  static_assert(kColumns % 64 == 0 && (kShare == kColumns || (kShare == 32 && kIntegers)));

#if MOE_HAS_WGMMA
  /// Loads the weights of `step`; one thread calls it. The barrier must expect kBytes.
  static __device__ __forceinline__ void load_weights(void* to, const CUtensorMap* map, int row_block, int step,
                                                      uint64_t* bar, uint64_t policy) {
    load_tile(to, map, row_block, step * (kBlockBytes / 8), bar, policy);
  }

  /// The number of pieces of at most 16 bytes in a stage's scales, which come first, and zero points.
  static constexpr int kScaleItems = kRowBlocks * kShares * (kIntegers ? 2 : 4);
  static constexpr int kItems = kScaleItems + (kIntegers ? kRowBlocks * kShares : 0);

  /// Copies a lane's part of the scales and zero points for all stages of a work tile; `index` is the lane's number
  /// among kLanes. It knows the address of each of its pieces for the first group, and the distance to the next group.
  template <int kLanes>
  class GroupCopies {
    static constexpr int kEach = ceil_div(kItems, kLanes), kBlockItems = kIntegers ? 2 : 4;
    const uint8_t* from[kEach];
    int next[kEach];  // bytes
    int index, last_group;
    uint32_t inverse;

    static __device__ __forceinline__ bool is_zero(int item) { return item >= kScaleItems; }
    /// The block of a piece, and its share.
    static __device__ __forceinline__ int place(int item) {
      return is_zero(item) ? item - kScaleItems : item / kBlockItems;
    }

   public:
    __device__ __forceinline__ GroupCopies(const Source& s, int row_block, int index)
        : index(index), last_group(s.groups - 1), inverse(s.inverse) {
      const int scale_bytes = kIntegers ? 32 : s.scale_rows * 4;  // bytes of the scales of a block in a group
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int item = index + i * kLanes, within = is_zero(item) ? 0 : item % kBlockItems * 16;
        const int block = min(row_block + place(item) / kShares, s.all_blocks - 1);
        next[i] = is_zero(item) ? 16 : scale_bytes;
        from[i] = (is_zero(item) ? s.zeros : s.scales + within) + static_cast<size_t>(block) * s.groups * next[i];
        if (item >= kItems || (is_zero(item) && s.zeros == nullptr) || within >= next[i]) from[i] = nullptr;
      }
    }

    /// Copies this lane's pieces of `step` by cp.async.
    __device__ __forceinline__ void copy(uint8_t* side, int step) const {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (from[i] == nullptr) continue;
        const int item = index + i * kLanes, share = step * kShares + place(item) % kShares;
        const int group = inverse == 0 ? share : static_cast<int>(__umulhi(share, inverse));
        const uint8_t* at = from[i] + min(group, last_group) * next[i];
        if (!kIntegers && next[i] == 8) {
          cp_async8(side + item * 16, at);
        } else {
          cp_async16(side + item * 16, at);
        }
      }
    }
  };

  template <int kLanes>
  using SideCopies =
      std::conditional_t<kWhole, typename Q4k::template Copies<kLanes>,
                         std::conditional_t<kFp4, typename Fp4::template Copies<kLanes>, GroupCopies<kLanes>>>;

  /// Zero points and scales of a lane's two rows, g and g + 8 of a block.
  struct Operands {
    uint32_t zero[2];            // FP4 and Q4_K: the operand of `unpack`, which fetch_step loads
    uint32_t own[2];             // Q4_K: the operands of one group
    uint32_t scale[2], rest[2];  // as bf16, for products whose fragments are scaled
    float exact[2];              // for products whose sums are scaled
  };

  /// The operands, from pointers to this lane's first scale and zero point.
  static __device__ __forceinline__ Operands operands(const uint8_t* scale, const uint8_t* zero, const Source& s) {
    Operands o = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kIntegers) {
        const uint16_t of_row = reinterpret_cast<const uint16_t*>(scale)[8 * i];
        o.exact[i] = exact_scale(of_row, s.f16_scales);
        o.scale[i] = scale_operand(of_row, s.f16_scales);
        const uint32_t middle = kFormat == QuantFormat::kInt4 ? 8 : 128;
        o.zero[i] = zero_operand<kFormat>(s.zeros == nullptr ? middle : zero[8 * i]);
      } else {
        o.exact[i] = reinterpret_cast<const float*>(scale)[s.scale_rows == 2 ? i : 8 * i];
        const uint2 terms = scale_operands(o.exact[i]);
        o.scale[i] = terms.x, o.rest[i] = terms.y;
      }
    }
    return o;
  }

  /// The index of this lane's first scale of a block, counted from the stage's first scale.
  static __device__ __forceinline__ int first_scale(const Source& s, int block) {
    if constexpr (kFp4) return Fp4::first(block);
    if constexpr (kWhole) return block * Q4k::kBlockBytes;
    return block * kShares * 16 + (!kIntegers && s.scale_rows == 2 ? 0 : static_cast<int>(threadIdx.x) % 32 / 4);
  }

  /// The operands of a share of a stage's columns. `at` is first_scale of the block.
  static __device__ __forceinline__ Operands operands(const uint8_t* side, const Source& s, int at, int share) {
    if constexpr (kFp4 || kWhole) {
      Operands o = {};
      if constexpr (kWhole) Q4k::load(side + at, o.own);
      else Fp4::load_factors(side, at, o.exact);
      return o;
    }
    at += share * 16;
    return operands(side + at * (kIntegers ? 2 : 4), side + kScaleBytes + at, s);
  }

  /// Loads new operands if the columns with one scale begin at this k-step.
  static __device__ __forceinline__ void fetch(const uint8_t* side, const Source& s, int block, int k, Operands* o) {
    if (k == 0 || (k % kShareSteps == 0 && !s.uniform)) *o = operands(side, s, first_scale(s, block), k / kShareSteps);
  }

  /// FP4 and Q4_K: loads the operands of `unpack` if columns with other ones begin at this k-step. `at` is first_scale.
  static __device__ __forceinline__ void fetch_step([[maybe_unused]] const uint8_t* side, [[maybe_unused]] int at,
                                                    [[maybe_unused]] int k, [[maybe_unused]] Operands* o) {
    if constexpr (kFp4) Fp4::load_operands(side, at, k, o->zero);
    if constexpr (kWhole)
      if (k % 2 == 0) share_q4k_operands(o->own, k / 2, o->zero);
  }
  /// The same for a block.
  static __device__ __forceinline__ void fetch_step_of(const uint8_t* side, [[maybe_unused]] int block, int k,
                                                       Operands* o) {
    if constexpr (kFp4) fetch_step(side, Fp4::first(block), k, o);
    if constexpr (kWhole) fetch_step(side, 0, k, o);
  }

  /// A lane's words of a block of 16 rows.
  using Words = uint32_t[kSteps * kWords];

  static __device__ __forceinline__ void read(const uint8_t* weights, int block, Words& words) {
    read(weights + block * kBlockBytes + threadIdx.x % 32 * 16, words);
  }

  /// Reads a lane's words; `from` is the first of them.
  static __device__ __forceinline__ void read(const uint8_t* from, Words& words) {
#pragma unroll
    for (int i = 0; i < kSteps * kWords; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i / 4 * 512);
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  }

  /// The fragment of a k-step, before the wgmma_fence that must follow: exact q - zero or e4m3, or scaled weights. With
  /// FP4 it always has scaled weights, without the factors of rows, and with Q4_K weights.
  template <bool kScaled>
  static __device__ __forceinline__ void fragment(const Words& words, const Operands& o, int k, uint32_t (&a)[4]) {
    unpack<kFormat>(words + k * kWords, o.zero, a);
    if constexpr (kScaled && !kFp4 && !kWhole) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = kIntegers ? mul2(a[i], o.scale[i % 2]) : fma2(a[i], o.scale[i % 2], mul2(a[i], o.rest[i % 2]));
    }
    wgmma_hold(a);
  }

  /// total += sums times the scales of a lane's rows.
  template <int kSums>
  static __device__ __forceinline__ void add_scaled(float (&total)[kSums], float (&sums)[kSums], const Operands& o) {
    wgmma_hold(sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = fmaf(sums[i], o.exact[i / 2 % 2], total[i]);
  }

  /// Multiplies the first kSums sums by the exact scales of a lane's rows, which are read from a stage's scales.
  template <int kSums>
  static __device__ __forceinline__ void scale_rows(const uint8_t* side, const Source& s, int block, float* sums) {
    const Operands o = operands(side, s, first_scale(s, block), 0);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= o.exact[i / 2 % 2];
  }

  /// Gives back a stage that this warp has read. The fence orders the reads before the next copy into the stage. A lane
  /// that has passed another fence since its last read needs none.
  static __device__ __forceinline__ void give_back(uint64_t* empty, bool fence) {
    if (fence) fence_async_shared();
    warp_arrive(empty);
  }
#endif
};

// ---- host

/// Whether the tensor-core kernels accept a pack: its columns are in the order of x, no row is missing, and 32 columns
/// share a scale.
inline bool fits(const QuantPack& w) {
  const bool one = w.groups == 1;
  if (w.perm != nullptr || w.q == nullptr || w.scales == nullptr || w.experts <= 0 || w.k <= 0 || w.k % 64 != 0 ||
      w.k_packed != w.k || w.n <= 0 || w.groups <= 0 || w.group <= 0 || w.n_tiles * 16 != w.n ||
      w.experts > INT32_MAX / w.n || w.k > INT32_MAX / 2)
    return false;
  if (is_q4k(w.format))
    return w.scale_dtype == Dtype::kF32 && w.scale_rows == 16 && w.group == kQ4kGroup &&
           w.groups == ceil_div(w.k, w.group);
  if (is_fp4(w.format))
    return w.scale_dtype == Dtype::kF32 && w.scale_rows == 16 && w.group == fp4_group(w.format) &&
           w.groups == ceil_div(w.k, w.group);
  if (w.format == QuantFormat::kFp8)
    return w.scale_dtype == Dtype::kF32 && (w.scale_rows == 2 || w.scale_rows == 16) && (one || w.group % 128 == 0);
  return is_code(w.format, QuantFormat::kFp8) && w.scale_dtype != Dtype::kF32 && is_code(w.scale_dtype, Dtype::kF16) &&
         w.scale_rows == 16 && (one || w.group % 32 == 0);
}

/// Whether the sums of `columns` columns have one scale.
inline bool is_uniform(const QuantPack& w, int columns) {
  return w.groups == 1 || w.group % columns == 0 || is_fp4(w.format) || is_q4k(w.format);
}
/// The number of columns of a stage whose sums are sure to have the same scale.
inline int share(const QuantPack& w, int columns) { return is_uniform(w, columns) ? columns : 32; }

inline Source source(const QuantPack& w, int columns, int share) {
  const uint32_t shares =
      w.groups == 1 || is_fp4(w.format) || is_q4k(w.format) ? 1 : static_cast<uint32_t>(w.group / share);
  return {static_cast<const uint8_t*>(w.scales),
          w.zeros,
          static_cast<int>(w.n_tiles),
          static_cast<int>(w.experts * w.n_tiles),
          static_cast<int>(w.groups),
          shares == 1 ? 0 : UINT32_MAX / shares + 1,
          w.scale_rows,
          w.scale_dtype == Dtype::kF16,
          is_uniform(w, columns)};
}

/// Makes the tensor map of a pack's tiles, in boxes of one stage.
inline cudaError_t make_pack_map(CUtensorMap* map, const QuantPack& w, int row_blocks, int block_bytes) {
  const int64_t words = w.k_packed / tile_columns(w.format) * 64;
  return make_word_map(map, w.q, w.experts * w.n_tiles, words, row_blocks, block_bytes / 8);
}

}  // namespace moe::quant
