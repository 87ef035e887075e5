// Dense products of FP8 weights with rows of x in FP8 (E4M3, a scale for each row and 128 columns), on the loop of
// linear/tensor_kernel.cuh.
//
// Floor: with few rows the bytes, as for linear_tensor.cu; with many rows what each block reads again of x and of the
// weights from L2. 256 rows of Qwen3-30B-A3B's qkv are 42 MB in tiles of 128 x 128, 8 us at 5.5 TB/s; with x in bf16
// they are 63 MB. Measured: 13.1 us, o_proj 12.8.
//
// Design: the weights are the operand in registers. Two bytes of a pack's word belong to one row, so a permutation of
// bytes makes four columns of an operand; the columns of x are stored in the order that this gives (fp8_quantise.cu, by
// quads). The tensor cores' sums over 128 columns are multiplied by both scales and added in f32. This is done for one
// half of the rows of x while the products of the other half run.
#include "linear/tensor_kernel.cuh"
#include "ptx/wgmma_fp8.cuh"
#include "quant/stage.cuh"

namespace moe::linear_tensor {

constexpr int kFp8Columns = 128;  // columns of a stage, which share a scale
constexpr int kFixedTime = 1024;  // fixed time of a tile, in stages of one row of x

struct Fp8Source : quant::Source {
  const float* of_rows;  // scales of the rows of x [k / 128, lines]
  int lines;             // m rounded up to 4
};

struct Fp8Weights {
  using Source = Fp8Source;
  static constexpr int kLoaders = 4;
  static constexpr bool kOnly128 = false;
  template <int kGroups>
  static constexpr int kMostTokens = 128;

  static __device__ __forceinline__ int column(const Args<Fp8Weights>&, int row) { return row; }

  template <int kGroups>
  struct Stage : quant::QuantStage<QuantFormat::kFp8, kFp8Columns, kFp8Columns, 4 * kGroups> {
    using Base = quant::QuantStage<QuantFormat::kFp8, kFp8Columns, kFp8Columns, 4 * kGroups>;
    static constexpr int kRowBytes = kFp8Columns;
    static constexpr bool kRowScales = true;

#if MOE_HAS_WGMMA
    using Side = typename Base::template SideCopies<32>;

    static __device__ __forceinline__ void load(void* to, const CUtensorMap* w, int row, int step, uint64_t* bar,
                                                uint64_t policy) {
      load_tile(to, w, row / 16, step * (Base::kBlockBytes / 8), bar, policy);
    }

    template <class B>
    static __device__ __forceinline__ void load_scales(void* to, const Source& s, int token, int step, uint64_t* bar) {
      constexpr int kTokens = B::kPartBytes / kRowBytes;
      const uint32_t bytes = min(kTokens, s.lines - token) * 4;
      expect_bytes(bar, bytes);
      bulk_copy(to, s.of_rows + static_cast<size_t>(step) * s.lines + token, bytes, bar);
    }

    /// Makes the fragments of four k-steps of 32 columns. Bytes 0 and 2 of a word belong to row g, bytes 1 and 3 to row
    /// g + 8.
    static __device__ __forceinline__ void fragments(const typename Base::Words& words, uint32_t (&a)[4][4]) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[k][i] = __byte_perm(words[4 * k + i / 2 * 2], words[4 * k + i / 2 * 2 + 1], i % 2 == 0 ? 0x6420 : 0x7531);
        wgmma_hold(a[k]);
      }
    }

    /// total += sums times the scales of a lane's two weight rows and of its rows of x, which are two of each 8.
    template <int kSums>
    static __device__ __forceinline__ void add(const float2 (&rows)[kSums / 4], float low, float high,
                                               float (&sums)[kSums], float* total) {
      wgmma_hold(sums);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        total[4 * i] = fmaf(sums[4 * i], rows[i].x * low, total[4 * i]);
        total[4 * i + 1] = fmaf(sums[4 * i + 1], rows[i].y * low, total[4 * i + 1]);
        total[4 * i + 2] = fmaf(sums[4 * i + 2], rows[i].x * high, total[4 * i + 2]);
        total[4 * i + 3] = fmaf(sums[4 * i + 3], rows[i].y * high, total[4 * i + 3]);
      }
    }

    template <int kCount>
    static __device__ __forceinline__ void load(const float* from, float2 (&rows)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[i] = *reinterpret_cast<const float2*>(from + i * 8);
    }

    template <class B>
    static __device__ __forceinline__ void consume(const uint8_t* ring, const uint8_t* side, const Source& source,
                                                   uint64_t* full, uint64_t* empty, int stages, int count,
                                                   float (&acc)[B::kProducts][B::kColumns / 2]) {
      // These rows of x are multiplied together, while the sums of the other half are added.
      constexpr int kHalf = B::kColumns / 2;
      const int block = threadIdx.x / 32, scale_at = Base::first_scale(source, block);
      const int other = source.scale_rows == 2 ? 1 : 8;
      int stage = 0, phase = 0;
      typename Base::Words words;
      const auto read = [&] {
        mbarrier_wait(full + stage, phase);
        Base::read(ring + stage * B::kStageBytes, block, words);
      };
      read();
      for (int step = 0; step < count; ++step) {
        const uint8_t* side_bytes = side + stage * B::kSideBytes;
        const uint64_t x = tile_descriptor(ring + stage * B::kStageBytes + B::kWeightBytes);
        uint32_t a[4][4];
        fragments(words, a);
        float first[kHalf / 2], second[kHalf / 2];  // sums over the columns of one scale
        wgmma_fence();
        wgmma_e4m3<kHalf>(first, a, x);
        wgmma_commit();
        wgmma_e4m3<kHalf>(second, a, x + kHalf * kRowBytes / 16);
        wgmma_commit();
        const int used = stage;
        if (++stage == stages) stage = 0, phase ^= 1;
        const float* scales = reinterpret_cast<const float*>(side_bytes) + scale_at;
        const float* of_rows = reinterpret_cast<const float*>(side_bytes + Base::kSideBytes) + threadIdx.x % 4 * 2;
        const float low = scales[0], high = scales[other];
        float2 rows[kHalf / 8];
        load(of_rows, rows);
        if (step + 1 < count) read();
        wgmma_wait<1>();
        add(rows, low, high, first, acc[0]);
        load(of_rows + kHalf, rows);
        wgmma_wait<0>();
        add(rows, low, high, second, acc[0] + kHalf / 2);
        Base::give_back(empty + used, false);
      }
    }
#endif
  };
};

/// Chooses tiles of 128 weight rows x 64, 96 or 128 rows of x, and the number of parts of K: all blocks must have an SM
/// at once (there are fewer where they are clusters), and the sum of stages and rows of x must be smallest.
inline Shape fp8_shape(int m, int n, int steps, int asked, const DeviceLimits& limits) {
  Shape best = {};
  int least = INT32_MAX;
  for (int tokens = 64; tokens <= 128; tokens += 32) {
    const int tiles = ceil_div(n, 128) * ceil_div(m, tokens);
    for (int splits = 1; splits <= kMaxSplits && splits <= steps; ++splits) {
      if (asked > 0 && splits != (asked < steps ? asked : steps)) continue;
      const int at_once = splits == 1 ? limits.sms : limits.sms * 100 / 132;
      const int time = (ceil_div(steps, splits) * tokens + kFixedTime) * ceil_div(tiles * splits, at_once);
      if (time >= least) continue;
      least = time;
      best = {tokens, 2, splits, static_cast<size_t>(limits.block_smem) - kHeader};
    }
  }
  return best;
}

}  // namespace moe::linear_tensor

/// out = x w^T (+ bias), x in FP8, for any m and one FP8 matrix that fits (quant/stage.cuh), k a multiple of 128.
extern "C" int moe_fp8_linear(const moe::Fp8LinearArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::linear_tensor;
  const Fp8LinearArgs& c = *args;
  if (c.m < 0 || c.w.format != QuantFormat::kFp8 || !quant::fits(c.w) || c.w.experts != 1 || c.w.gate_up != 0 ||
      c.w.k % kFp8Columns != 0 || !is_code(c.output, Output::kAddF32) || c.splits < 0 || c.splits > kMaxSplits)
    return cudaErrorInvalidValue;
  if (c.m == 0) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  const int n = static_cast<int>(c.w.n), k = static_cast<int>(c.w.k);
  CUtensorMap map;
  e = quant::make_pack_map(&map, c.w, 8, Fp8Weights::Stage<2>::kBlockBytes);
  if (e != cudaSuccess) return e;
  const Fp8Source source = {quant::source(c.w, kFp8Columns, kFp8Columns), c.scales, round_up(c.m, 4)};
  const Args<Fp8Weights> a = {c.bias, c.out, c.m, n, k, 0, source};
  const Shape s = fp8_shape(c.m, n, k / kFp8Columns, c.splits, limits);
  const bf16* x = reinterpret_cast<const bf16*>(c.q);
  switch (s.tokens) {
    case 64: return run<Fp8Weights, 64, 2>(map, x, a, c.output, s, stream);
    case 96: return run<Fp8Weights, 96, 2>(map, x, a, c.output, s, stream);
    default: return run<Fp8Weights, 128, 2>(map, x, a, c.output, s, stream);
  }
}
