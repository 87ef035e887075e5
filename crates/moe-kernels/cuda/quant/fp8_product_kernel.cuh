// The kernel of FP8 products for prompts. fp8_experts.cu defines what is done with the sums.
//
// Design: rows of activations are the first operand and weights the second. A lane's sums of a product then belong to
// two rows and need two scales of rows, and the scales of the weights are the same for all lanes. Both operands are in
// shared memory. Weights arrive in the order of the pack, which is the order of the 16-bit operand, and three warps
// turn them into the operand in place, once for up to 256 rows. So decode and prompts read the same pack.
//
// The tensor cores' sums over 128 columns are multiplied by both scales and added in f32 registers, for 64 rows at a
// time, while the products of the other warpgroup run.
#pragma once

#include "ptx/wgmma_fp8.cuh"
#include "quant/fp8_product.cuh"

namespace moe::fp8 {

#if MOE_HAS_WGMMA

constexpr int kPartSums = kTileRows / 2;  // sums of a thread, for 64 rows x 128 weight rows
// Registers of a launch of three warpgroups. Loaders get the registers that the consumers do not take.
constexpr int kAllRegisters = 3 * 168, kConsumerRegisters = 232;

/// The shared memory in which results wait until whole lines of them are stored: this warp's 16 rows of 128 bytes.
struct Piece {
  uint8_t* at;
  int lane = threadIdx.x % 32;

  /// Stores two neighbouring 16-byte columns, the i-th pair, of all rows, in the order in which products leave them:
  /// rows 0 .. 7 and 8 .. 15 of the first column, then of the second.
  __device__ __forceinline__ void put(int i, const uint32_t (&v)[4]) const {
    const int row = lane % 16, column = 2 * i + lane / 16;
    stmatrix_x4(at + row * 128 + ((column ^ (row & 7)) << 4), v);
  }

  /// Calls f(row, column of 16 bytes, bytes): each lane has the bytes of four rows, and eight lanes have a row.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, column = lane % 8;
      f(row, column, *reinterpret_cast<const uint4*>(at + row * 128 + ((column ^ (row & 7)) << 4)));
    }
    __syncwarp();
  }
};

/// Scales of the weights of a stage: one for each 8 weight rows, or, with `kByRow`, for this lane's two of each 8.
template <bool kByRow>
struct WeightScales {
  const float* at;
  float2 of[kByRow ? 1 : kBlocks];

  __device__ __forceinline__ explicit WeightScales(const uint8_t* side)
      : at(reinterpret_cast<const float*>(side) + (kByRow ? threadIdx.x % 4 * 2 : 0)) {
    if constexpr (!kByRow) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) of[i] = *reinterpret_cast<const float2*>(at + i * 16);
    }
  }

  /// The scales of the i-th 8 weight rows.
  __device__ __forceinline__ float2 operator[](int i) const {
    if constexpr (kByRow) return *reinterpret_cast<const float2*>(at + i * 8);
    const float scale = i % 2 == 0 ? of[i / 2].x : of[i / 2].y;
    return {scale, scale};
  }
};

template <class Kind, bool kByRow>
struct Consumer {
  const Block& b;
  const Args& a;
  int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Cursor at = {};
  int stored = 0;  // work tiles

  /// The first row of this warp's 16 in a part. The parts of a work tile belong to the two warpgroups in turn.
  __device__ __forceinline__ int first_row(int part) const { return (2 * part + group) * kPart + warp % 4 * 16; }

  /// Gives the stage back to all blocks that fill it.
  __device__ __forceinline__ void give_back() const {
    if constexpr (Kind::kCluster == 1) return Stage::give_back(b.empty(at.stage), false);
    __syncwarp();
    if (lane < Kind::kCluster) cluster_arrive_at(b.empty(at.stage), lane);
  }

  /// total += sums times the scales of rows (r, r + 8) and weights.
  static __device__ __forceinline__ void add(const WeightScales<kByRow>& weights, float row, float row_8,
                                             const float (&sums)[kPartSums], float* total) {
#pragma unroll
    for (int i = 0; i < kPartSums / 4; ++i) {
      const float2 w = weights[i];
      total[4 * i] = fmaf(sums[4 * i], row * w.x, total[4 * i]);
      total[4 * i + 1] = fmaf(sums[4 * i + 1], row * w.y, total[4 * i + 1]);
      total[4 * i + 2] = fmaf(sums[4 * i + 2], row_8 * w.x, total[4 * i + 2]);
      total[4 * i + 3] = fmaf(sums[4 * i + 3], row_8 * w.y, total[4 * i + 3]);
    }
  }

  /// total += the rows of kParts parts times the weight tile. The ring is then past the stages of this work tile.
  template <int kParts>
  __device__ __forceinline__ void multiply(const Work& work, float (&total)[2 * kPartSums]) {
    const int scale_at = work.first % 4 + first_row(0) + lane / 4;
    for (int left = a.steps(); left > 0; --left, at.advance(b.stages)) {
      mbarrier_wait(b.full(at.stage), at.parity);
      if constexpr (kParts > 0) {
        const uint64_t rows = tile_descriptor(b.rows(at.stage) + group * kPartBytes);
        const uint64_t weights = tile_descriptor(b.weights(at.stage));
        const float* row_scales = b.row_scales(at.stage) + scale_at;
        const WeightScales<kByRow> scales(b.side(at.stage));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          float sums[kPartSums];
          wgmma_fence();
          wgmma_e4m3(sums, rows + part * (2 * kPartBytes >> 4), weights);
          wgmma_commit();
          const float row = row_scales[part * 2 * kPart], row_8 = row_scales[part * 2 * kPart + 8];
          wgmma_wait<0>();
          wgmma_hold(sums);
          // The scales are in registers by now. `kByRow` still needs the scales in shared memory.
          if (!kByRow && part + 1 == kParts) give_back();
          add(scales, row, row_8, sums, total + part * kPartSums);
          if (kByRow && part + 1 == kParts) give_back();
        }
      } else {
        give_back();
      }
    }
  }

  __device__ __forceinline__ void run() {
    for_each_work(b, [&](const Work& work) __attribute__((always_inline)) {
      // Each lane holds a slot of one of the 16 rows of the first part and of the second part.
      uint32_t slot = 0;
      const int mine = first_row(lane / 16) + lane % 16;
      if (Kind::kSlots && mine < work.rows) slot = __ldcg(work.slots + mine);
      float total[2 * kPartSums] = {};
      const int parts = (ceil_div(work.rows, kPart) + 1 - group) / 2;
      if (parts == 2) multiply<2>(work, total);
      else if (parts == 1) multiply<1>(work, total);
      else multiply<0>(work, total);
      if (parts > 0) Kind::store(*this, work, parts, slot, total);
    });
  }
};

#endif  // MOE_HAS_WGMMA

template <class Kind, bool kByRow>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_product(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap rows,
                const __grid_constant__ Args a) {
#if MOE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* staging = smem + a.staging();
  const Block b = {smem, staging, staging + kStaging, a.stages};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&w);
    prefetch_tensor_map(&rows);
    for (int i = 0; i < b.stages; ++i) {
      mbarrier_init(b.packed(i), 1);
      // Arrivals: the loads, the producer's lanes that load scales of weights, and the converters.
      mbarrier_init(b.full(i), 1 + 32 + kConverters);
      mbarrier_init(b.empty(i), kConsumers * (Kind::kCluster == 1 ? Stage::kReleases : Kind::kCluster));
    }
    for (int i = 0; i < Block::kWorkSlots; ++i) {
      mbarrier_init(b.work_full(i), 1);
      mbarrier_init(b.work_empty(i), (kConsumers + kConverters) * kWarpArrivals);
    }
    for (int i = 0; i < kConsumers * 2; ++i) mbarrier_init(b.most_full(i / 2, i), 1);
    mbarrier_fence_init();
  }
  if constexpr (Kind::kCluster > 1) cluster_sync();
  else __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  if (warp == 0) make_table(b, a);
  __syncthreads();
  if (warp < kConsumers) {
    take_registers<kConsumerRegisters>();
    Consumer<Kind, kByRow>{b, a}.run();
  } else {
    give_registers<kAllRegisters - 2 * kConsumerRegisters>();
    if (warp > kConsumers) {
      Converter{b, a}.run();
    } else {
      Producer<Kind::kCluster>{b, a, &w, &rows, elect_one()}.run();
    }
  }
  // The other block may still write to this one's shared memory.
  if constexpr (Kind::kCluster > 1) cluster_sync();
#endif
}

// ---- host

/// Whether this product supports a pack and its numbers of rows and columns.
inline bool fits(const QuantPack& w) {
  return w.format == QuantFormat::kFp8 && quant::fits(w) && w.k % kColumns == 0 && w.n % kTileRows == 0;
}

/// The number of columns of the scales of this many rows: their lines are copied in pieces of 16 bytes.
inline int scale_rows(int rows) { return round_up(rows, 4); }

/// Launches the kernel. Source, sizes and stages of `a` are filled in here. `q`: rows of activations.
template <class Kind>
cudaError_t run(Args a, const uint8_t* q, const QuantPack& w, void* stream) {
  if (a.rows == 0 || a.experts == 0) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t e = device_limits(&limits);
  if (e != cudaSuccess) return e;
  if (limits.major < 9) return cudaErrorNotSupported;
  a.source = quant::source(w, kColumns, kColumns);
  a.n = static_cast<int>(w.n), a.k = static_cast<int>(w.k), a.scale_rows = scale_rows(a.rows);
  for (a.stages = kMaxStages; a.stages > 1 && a.smem(a.stages) > limits.block_smem; --a.stages) {}
  if (a.stages < 2 || a.tiles() % Kind::kCluster != 0) return cudaErrorInvalidValue;
  CUtensorMap weights, rows;
  e = quant::make_pack_map(&weights, w, kBlocks, Stage::kBlockBytes);
  if (e != cudaSuccess) return e;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(a.k), static_cast<cuuint64_t>(a.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(a.k)};
  const cuuint32_t box[2] = {kColumns, kPart / Kind::kCluster};
  e = encode_tensor_map(&rows, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, q, 2, dims, strides, box);
  if (e != cudaSuccess) return e;
  Launch l = {dim3(limits.sms / Kind::kCluster * Kind::kCluster), dim3(kThreads), stream,
              static_cast<size_t>(a.smem(a.stages))};
  l.cluster = Kind::kCluster;
  return launch(w.scale_rows == 2 ? fp8_product<Kind, false> : fp8_product<Kind, true>, l, weights, rows, a);
}

}  // namespace moe::fp8
