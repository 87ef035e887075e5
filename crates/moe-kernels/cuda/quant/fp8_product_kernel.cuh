// The kernel of FP8 products for prompts: fp8_experts.cu and fp8_linear.cu say what becomes of the sums.
//
// Design: two warpgroups, each of 64 rows of each weight tile. A pack lies in the order of the 16-bit operand, whose
// bytes of two rows alternate; four byte permutations make the 8-bit operand of 64 x 32 weights of it, with the columns
// of each 16 in another order, in which the rows are quantised, too. So decode and prompts read one pack, and weights
// go from shared memory to registers once. The tensor cores' sums of 128 columns are multiplied with both scales and
// added in f32 registers, 128 instructions a lane, while the other warpgroup's products run.
#pragma once

#include "ptx/wgmma_fp8.cuh"
#include "quant/fp8_product.cuh"

namespace moe::fp8 {

#if MOE_SM90

constexpr int kSums = kRows / 2;  // of a thread and a weight tile
// Registers that a launch of three warpgroups gives, of which loaders have what consumers leave.
constexpr int kAllRegisters = 3 * 168;
template <int kWidth>
constexpr int kConsumerRegisters = kWidth == 2 ? 232 : 216;

/// Where results wait in shared memory until whole lines of them leave; four warps with barriers of their own.
struct Pieces {
  uint8_t* staging;
  int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  int turn = 0;

  __device__ __forceinline__ void meet() const { named_barrier(1 + group, 128); }
  __device__ __forceinline__ uint8_t* next() { return staging + (group * 2 + (turn ^= 1)) * kPieceBytes; }
};

/// A lane's words of 64 rows x 128 columns as operands of four products of 32 columns.
__device__ __forceinline__ void to_operands(const Stage<1>::Words& words, uint32_t (&a)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    a[i] = __byte_perm(words[i], words[i + 1], 0x6420);      // row g
    a[i + 1] = __byte_perm(words[i], words[i + 1], 0x7531);  // row g + 8
  }
}

template <class Kind, int kWidth>
struct Consumer {
  const Block& b;
  const Args& a;
  Pieces pieces;
  Cursor at = {};

  using Operands = typename Stage<kWidth>::Operands;

  /// total += sums of 128 columns times the scales of a lane's weight rows and of its activations' rows.
  template <int N>
  __device__ __forceinline__ void promote(const float* row_scales, const Operands& o, float (&sums)[N / 2],
                                          float* total) const {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const float2 s = *reinterpret_cast<const float2*>(row_scales + 8 * j);
      total[4 * j] = fmaf(sums[4 * j], s.x * o.exact[0], total[4 * j]);
      total[4 * j + 1] = fmaf(sums[4 * j + 1], s.y * o.exact[0], total[4 * j + 1]);
      total[4 * j + 2] = fmaf(sums[4 * j + 2], s.x * o.exact[1], total[4 * j + 2]);
      total[4 * j + 3] = fmaf(sums[4 * j + 3], s.y * o.exact[1], total[4 * j + 3]);
    }
  }

  /// total = 64 weight rows of each weight tile x N rows, and leaves the ring behind them.
  template <int N>
  __device__ __forceinline__ void multiply(float (&total)[kWidth * kSums]) {
    const int block = threadIdx.x / 32, steps = a.steps();
    typename Stage<kWidth>::Words words;
    float sums[N / 2];
    const auto read = [&](const Cursor& from, int i) {
      Stage<kWidth>::read(b.weights(from.stage), i * kBlocks + block, words);
    };
    const auto await = [&](const Cursor& from) {
      mbarrier_wait(b.full(from.stage), from.parity);
      fence_async_shared();  // rows came by ordinary copies
    };
    await(at);
    read(at, 0);
    for (int step = 0; step < steps; ++step) {
      const uint64_t x = tile_descriptor(b.rows(at.stage));
      const float* row_scales = b.row_scales(at.stage) + threadIdx.x % 4 * 2;
      const bool more = step + 1 < steps;
      Cursor next = at;
      next.advance(b.stages);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        uint32_t operands[16];
        to_operands(words, operands);
        wgmma_hold(operands);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kColumns / 32; ++k) wgmma_e4m3<N>(sums, operands + 4 * k, x + 2 * k, k > 0);
        wgmma_commit();
        const Operands o = Stage<kWidth>::operands(b.side(at.stage), a.source, i * kBlocks + block, 0);
        wgmma_wait<0>();
        wgmma_hold(sums);
        // What comes next is read while these sums are added.
        if (i + 1 < kWidth) read(at, i + 1);
        if (i + 1 == kWidth && more) await(next), read(next, 0);
        promote<N>(row_scales, o, sums, total + i * kSums);
      }
      Stage<kWidth>::give_back(b.empty(at.stage), true);
      at = next;
    }
  }

  /// With as few columns as hold the rows.
  template <int N = kGranule>
  __device__ __forceinline__ void multiply_rows(int rows, float (&total)[kWidth * kSums]) {
    if constexpr (N < kRows) {
      if (rows > N) return multiply_rows<N + kGranule>(rows, total);
    }
    multiply<N>(total);
  }

  __device__ __forceinline__ void run() {
    for_each_work(b, [&](const Work& work) __attribute__((always_inline)) {
      float total[kWidth * kSums] = {};
      multiply_rows(work.rows, total);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) Kind::store(a, pieces, work, work.tile + i, total + i * kSums);
    });
  }
};

#endif  // MOE_SM90

template <class Kind, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_product(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap rows,
                const __grid_constant__ Args a) {
#if MOE_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* staging = smem + a.staging();
  const Block b = {smem, staging, staging + kStaging, a.stages, a.stage_bytes(), a.side_bytes(), a.width};
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
    take_registers<kConsumerRegisters<kWidth>>();
    Consumer<Kind, kWidth>{b, a, {staging}}.run();
  } else {
    give_registers<kAllRegisters - 2 * kConsumerRegisters<kWidth>>();
    if (warp > kConsumers) {
      Gatherer<kWidth>{b, a, &rows}.template run<Kind::kGather>();
    } else if (elect_one()) {
      Producer<kWidth>{b, a, &w}.run();
    }
    __syncwarp();
  }
#endif
}

// ---- host

/// Whether a pack and a number of columns fit.
inline bool fits(const QuantPack& w) { return w.format == QuantFormat::kFp8 && quant::fits(w) && w.k % kColumns == 0; }

/// `a` without width and stages. `rows`: of `a.q`.
template <class Kind>
cudaError_t run(Args a, const QuantPack& w, int64_t rows, void* stream) {
  if (a.rows == 0 || a.experts == 0) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  a.source = quant::source(w, kColumns, kColumns);
  a.n = static_cast<int>(w.n), a.k = static_cast<int>(w.k);
  a.width = w.n % (2 * kTileRows) == 0 ? 2 : 1;
  for (a.stages = kMaxStages; a.stages > 1 && a.smem(a.stages) > limits.block_smem; --a.stages) {}
  if (a.stages < 2) return cudaErrorInvalidValue;
  CUtensorMap weights, activations;
  e = quant::make_pack_map(&weights, w, a.width * kBlocks, Stage<1>::kBlockBytes);
  if (e != cudaSuccess) return e;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(a.k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(a.k)};
  const cuuint32_t box[2] = {kColumns, kBoxRows};
  e = encode_tensor_map(&activations, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, a.q, 2, dims, strides,
                        box);
  if (e != cudaSuccess) return e;
  const Launch l = {dim3(limits.sms), dim3(kThreads), stream, static_cast<size_t>(a.smem(a.stages))};
  return launch(a.width == 2 ? fp8_product<Kind, 2> : fp8_product<Kind, 1>, l, weights, activations, a);
}

}  // namespace moe::fp8
