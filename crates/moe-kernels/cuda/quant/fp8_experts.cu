// The experts' products of FP8 weights with FP8 activations, in one launch each. They use lists of slots as
// moe_experts_wide does, and rows of activations in order of experts. The first product writes its activations in FP8
// for the second.
//
// Floor: 6 T K H I FLOPs at twice the rate of bf16: 618 GFLOP for 8,192 tokens of Qwen3-30B-A3B, 312 us at 1,980
// TFLOP/s; the weights' 604 MB are 140 us. Measured, one H100: 538 and 303 us. When activations were stored in bf16:
// 510 and 295 us, and 55 us for the launch that quantised them.
#include "quant/fp8_product_kernel.cuh"

namespace moe::fp8 {

#if MOE_HAS_WGMMA
__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
#endif

/// act = silu(gate) up in E4M3, in order of experts, with the bits that moe_fp8_quantise makes of act in bf16. Of each
/// 16 rows of the weight tile 8 are gate's and 8 up's, so a tile makes 64 columns, and a pair of blocks makes the 128
/// that share a scale. Each block tells the other the largest magnitude of its half of each row.
struct StoreActivations {
  static constexpr bool kSlots = false;
  static constexpr int kCluster = kPair;

#if MOE_HAS_WGMMA
  /// A lane's pairs of each 8 columns in bf16, for rows g and g + 8 of a part.
  struct Rows {
    uint32_t word[2][8];

    __device__ __forceinline__ explicit Rows(const float* sums) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float* d = sums + i / 2 * 8 + i % 2 * 2;
        word[i % 2][i / 2] = pack_bf16(swiglu(d[0], d[4]), swiglu(d[1], d[5]));
      }
    }

    /// The largest magnitude of a row's 64 columns, which four lanes have.
    __device__ __forceinline__ float most(int row) const {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = larger(most, word[row][i]);
      most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
      return larger_half(most);
    }
  };

  template <class Consumer>
  static __device__ __forceinline__ void store(Consumer& c, const Work& work, int parts, uint32_t, const float* total) {
    const int g = c.lane / 4, t = c.lane % 4, i = c.stored++;
    const uint32_t rank = work.tile % kPair;
    uint64_t* full = c.b.most_full(c.warp, i);
    if (c.lane == 0) arrive_expecting(full, parts * 64);
    const Rows rows[2] = {Rows(total), Rows(total + kPartSums)};
    float own[2][2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      own[part][0] = rows[part].most(0), own[part][1] = rows[part].most(1);
      if (part < parts && t < 2)
        cluster_send(c.b.most(c.warp, i, part) + t * 8 + g, __float_as_uint(t == 0 ? own[part][0] : own[part][1]), full,
                     rank ^ 1);
    }
    mbarrier_wait(full, i / 2 & 1);
    const RowsOut& out = c.a.act;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int part = half / 2, row = c.first_row(part) + half % 2 * 8 + g;
      if (part >= parts || row >= work.rows) continue;
      const float others = __uint_as_float(c.b.most(c.warp, i, part)[half % 2 * 8 + g]);
      const Scale scale = scale_of(fmaxf(own[part][half % 2], others));
      const uint32_t (&word)[8] = rows[part].word[half % 2];
      const int place = work.first + row, group = work.tile / kPair;
      uint8_t* to = out.q + static_cast<size_t>(place) * (c.a.n / 2) + group * kGroup + 16 * (2 * t + rank);
      *reinterpret_cast<uint4*>(to) = {scaled(word[0], word[1], scale.inverse), scaled(word[2], word[3], scale.inverse),
                                       scaled(word[4], word[5], scale.inverse),
                                       scaled(word[6], word[7], scale.inverse)};
      if (rank == 0 && t == 0) *out.scale(place, group) = scale.scale;
    }
  }
#endif
};

/// Stores rows in bf16 at the places of their slots.
struct StoreSlotRows {
  static constexpr bool kSlots = true;
  static constexpr int kCluster = 1;

#if MOE_HAS_WGMMA
  template <class Consumer>
  static __device__ __forceinline__ void store(Consumer& c, const Work& work, int parts, uint32_t slot,
                                               const float* total) {
    const Piece piece = {c.b.staging + c.warp * 2048};
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int part = half / 2, first = c.first_row(part);
      if (part >= parts) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* d = total + half * 32 + i * 8;
        const uint32_t v[4] = {pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), pack_bf16(d[4], d[5]),
                               pack_bf16(d[6], d[7])};
        piece.put(i, v);
      }
      piece.each([&](int row, int column, const uint4& bytes) {
        const uint32_t place = __shfl_sync(0xffffffffu, slot, part * 16 + row);
        bf16* to = c.a.out + static_cast<size_t>(place) * c.a.n + work.tile * kTileRows + half % 2 * 64;
        if (first + row < work.rows) reinterpret_cast<uint4*>(to)[column] = bytes;
      });
    }
  }
#endif
};

inline bool experts_fit(const Fp8ExpertsArgs& c, bool gate_up) {
  return fits(c.w) && (c.w.gate_up != 0) == gate_up && c.tokens >= 0 && c.top_k > 0 &&
         c.tokens <= INT32_MAX / c.top_k && c.bucket >= 0 && c.w.experts <= INT16_MAX;
}

template <class Kind>
cudaError_t experts(const Fp8ExpertsArgs& c, void* stream) {
  Args a = {};
  a.scales = c.scales, a.slots = c.slots, a.counts = c.counts;
  a.bucket = c.bucket, a.experts = static_cast<int>(c.w.experts), a.rows = c.tokens * c.top_k;
  if constexpr (Kind::kSlots) {
    a.out = static_cast<bf16*>(c.out);
  } else {
    a.act = {static_cast<uint8_t*>(c.out), c.out_scales, scale_rows(a.rows), false};
    if (a.rows > 0 && !a.act.holds(a.rows, static_cast<int>(c.w.n / 2))) return cudaErrorInvalidValue;
  }
  return run<Kind>(a, c.q, c.w, stream);
}

}  // namespace moe::fp8

/// out [T K, I] E4M3 with out_scales, silu(gate) up of the slots, from q [T K, H]; all in order of experts.
extern "C" int moe_fp8_experts_gate_up(const moe::Fp8ExpertsArgs* args, void* stream) {
  using namespace moe;
  if (!fp8::experts_fit(*args, true)) return cudaErrorInvalidValue;
  return fp8::experts<fp8::StoreActivations>(*args, stream);
}

/// out [T K, H] bf16, the row of each slot that has a local expert, from q [T K, I] in order of experts.
extern "C" int moe_fp8_experts_down(const moe::Fp8ExpertsArgs* args, void* stream) {
  using namespace moe;
  if (!fp8::experts_fit(*args, false)) return cudaErrorInvalidValue;
  return fp8::experts<fp8::StoreSlotRows>(*args, stream);
}
