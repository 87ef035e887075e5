// The kernel of FP8 products for prompts: fp8_experts.cu says what becomes of the sums.
//
// Design: two warpgroups, each of 64 of the weight tile's 128 rows. A pack lies in the order of the 16-bit operand,
// whose bytes of two rows alternate; byte permutations make the 8-bit operand of it, with the columns of each 16 in
// another order, in which the rows are quantised, too. So decode and prompts read one pack, and weights go from shared
// memory to registers once, for up to 256 rows of activations.
//
// The tensor cores' sums of 128 columns are multiplied with both scales and added in f32 registers, of 128 rows at a
// time, while the other warpgroup's products run. Smaller parts in two sets of registers, so that a warpgroup's own
// products run meanwhile, or warpgroups that take turns by barriers, are no faster (docs/kernels-labbook.md).
#pragma once

#include "ptx/wgmma_fp8.cuh"
#include "quant/fp8_product.cuh"

namespace moe::fp8 {

#if MOE_SM90

constexpr int kSums = kRows / 2;  // of a thread
// Registers that a launch of three warpgroups gives, of which loaders have what consumers leave.
constexpr int kAllRegisters = 3 * 168, kConsumerRegisters = 232;

/// Rows of activations of a work tile: kCount parts of kSize, each the columns of one product.
template <int kCount_, int kSize_>
struct Parts {
  static constexpr int kCount = kCount_, kSize = kSize_, kAll = kCount * kSize;
  static_assert(kSize % 16 == 0 && kSize <= 128 && kAll <= kRows);
};

/// Where results wait in shared memory until whole lines of them leave; four warps with barriers of their own.
struct Pieces {
  const Block& b;
  int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  int turn = 0, list = 0;

  __device__ __forceinline__ void meet() const { named_barrier(1 + group, 128); }
  __device__ __forceinline__ uint8_t* next() { return b.staging + (group * 2 + (turn ^= 1)) * kPieceBytes; }

  /// Begins to fetch where a work tile's rows go, long before `places` are read.
  __device__ __forceinline__ void fetch_places(const Work& work) {
    uint32_t* to = b.places(group, list ^= 1);
    for (int r = thread; r < work.rows; r += 128) cp_async4(to + r, work.slots + r);
  }
  __device__ __forceinline__ const uint32_t* places() const {
    cp_async_wait<0>();
    meet();
    return b.places(group, list);
  }
};

/// What the parts of a stage share.
struct StageOperands {
  uint64_t rows;         // descriptor
  const float4* scales;  // of rows, this lane's
  float weights[2];      // scales of this lane's two weight rows
};

template <class Kind>
struct Consumer {
  const Block& b;
  const Args& a;
  Pieces pieces;
  Cursor at = {};

  /// Waits for a stage and makes a lane's operand of its 64 weight rows x 128 columns.
  __device__ __forceinline__ void read_weights(const Cursor& from, uint32_t (&operand)[16]) const {
    mbarrier_wait(b.full(from.stage), from.parity);
    if constexpr (Kind::kGather) fence_async_shared();  // rows came by ordinary copies
    Stage::Words words;
    Stage::read(b.weights(from.stage), threadIdx.x / 32, words);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      operand[i] = __byte_perm(words[i], words[i + 1], 0x6420);      // row g
      operand[i + 1] = __byte_perm(words[i], words[i + 1], 0x7531);  // row g + 8
    }
    wgmma_hold(operand);
  }

  template <class P>
  static __device__ __forceinline__ void start(int part, float (&sums)[P::kSize / 2], const uint32_t (&operand)[16],
                                               uint64_t rows) {
    wgmma_fence();
    wgmma_e4m3<P::kSize>(sums, operand, rows + part * P::kSize * (kColumns >> 4));
    wgmma_commit();
  }

  /// total += a part's sums times the scales of a lane's weight rows and of its activations' rows.
  template <class P>
  static __device__ __forceinline__ void add(int part, const StageOperands& o, const float (&sums)[P::kSize / 2],
                                             float (&total)[kSums]) {
#pragma unroll
    for (int i = 0; i < P::kSize / 2; i += 8) {
      const int at = part * P::kSize / 2 + i;
      const float4 s = o.scales[at / 2];
      const float scale[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        total[at + j] = fmaf(sums[i + j], scale[j / 4 * 2 + j % 2] * o.weights[j / 2 % 2], total[at + j]);
    }
  }

  __device__ __forceinline__ StageOperands operands(const Cursor& from) const {
    const int first = Stage::first_scale(a.source, threadIdx.x / 32);
    const auto scales = Stage::operands(b.side(from.stage), a.source, first, 0);
    return {tile_descriptor(b.rows(from.stage)),
            reinterpret_cast<const float4*>(b.row_scales(from.stage)) + threadIdx.x % 4,
            {scales.exact[0], scales.exact[1]}};
  }

  /// total += 64 weight rows x P's rows, and leaves the ring behind them.
  template <class P>
  __device__ __forceinline__ void multiply(float (&total)[kSums]) {
    for (int left = a.steps(); left > 0; --left, at.advance(b.stages)) {
      uint32_t operand[16];
      read_weights(at, operand);
      const StageOperands o = operands(at);
#pragma unroll
      for (int part = 0; part < P::kCount; ++part) {
        float sums[P::kSize / 2] = {};
        start<P>(part, sums, operand, o.rows);
        wgmma_wait<0>();
        wgmma_hold(sums);
        add<P>(part, o, sums, total);
      }
      Stage::give_back(b.empty(at.stage), false);
    }
  }

  /// With the first of these parts that hold the rows.
  template <class P, class... More>
  __device__ __forceinline__ void multiply_rows(int rows, float (&total)[kSums]) {
    if constexpr (sizeof...(More) > 0) {
      if (rows > P::kAll) return multiply_rows<More...>(rows, total);
    }
    multiply<P>(total);
  }

  __device__ __forceinline__ void run() {
    for_each_work(b, [&](const Work& work) __attribute__((always_inline)) {
      if constexpr (Kind::kPlaces) pieces.fetch_places(work);
      float total[kSums] = {};
      multiply_rows<Parts<1, 16>, Parts<1, 32>, Parts<1, 48>, Parts<1, 64>, Parts<1, 80>, Parts<1, 96>, Parts<1, 112>,
                    Parts<1, 128>, Parts<2, 80>, Parts<2, 96>, Parts<2, 112>, Parts<2, 128>>(work.rows, total);
      Kind::store(a, pieces, work, total);
    });
  }
};

#endif  // MOE_SM90

template <class Kind>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_product(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap rows,
                const __grid_constant__ Args a) {
#if MOE_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* staging = smem + a.staging();
  const Block b = {smem, staging, staging + kStaging, a.stages};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w);
    prefetch_tensor_map(&rows);
    for (int i = 0; i < b.stages; ++i) {
      mbarrier_init(b.full(i), 1 + kGatherLanes);
      mbarrier_init(b.empty(i), kConsumers);
    }
    for (int i = 0; i < Block::kWorkSlots; ++i) {
      mbarrier_init(b.work_full(i), 1);
      mbarrier_init(b.work_empty(i), kConsumers + kGatherers);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  if (warp == 0) make_table(b, a);
  __syncthreads();
  if (warp < kConsumers) {
    take_registers<kConsumerRegisters>();
    Consumer<Kind>{b, a, {b}}.run();
  } else {
    give_registers<kAllRegisters - 2 * kConsumerRegisters>();
    if (warp > kConsumers) {
      Gatherer<Kind::kGather>{b, a, &rows, warp == kConsumers + 1 && elect_one()}.run();
    } else if (elect_one()) {
      Producer{b, a, &w}.run();
    }
    __syncwarp();
  }
#endif
}

// ---- host

/// Whether a pack and a number of columns fit.
inline bool fits(const QuantPack& w) { return w.format == QuantFormat::kFp8 && quant::fits(w) && w.k % kColumns == 0; }

/// `a` without source, sizes of the pack and stages. `rows`: of `a.q`.
template <class Kind>
cudaError_t run(Args a, const QuantPack& w, int64_t rows, void* stream) {
  if (a.rows == 0 || a.experts == 0) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  a.source = quant::source(w, kColumns, kColumns);
  a.n = static_cast<int>(w.n), a.k = static_cast<int>(w.k);
  for (a.stages = kMaxStages; a.stages > 1 && a.smem(a.stages) > limits.block_smem; --a.stages) {}
  if (a.stages < 2) return cudaErrorInvalidValue;
  CUtensorMap weights, activations;
  e = quant::make_pack_map(&weights, w, kBlocks, Stage::kBlockBytes);
  if (e != cudaSuccess) return e;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(a.k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(a.k)};
  const cuuint32_t box[2] = {kColumns, kBoxRows};
  e = encode_tensor_map(&activations, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, a.q, 2, dims, strides,
                        box);
  if (e != cudaSuccess) return e;
  const Launch l = {dim3(limits.sms), dim3(kThreads), stream, static_cast<size_t>(a.smem(a.stages))};
  return launch(fp8_product<Kind>, l, weights, activations, a);
}

}  // namespace moe::fp8
