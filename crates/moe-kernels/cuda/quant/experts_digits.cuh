// Quantised experts with few rows each whose weights are integers. These are the products of experts_tensor.cu with
// integer mma: the weights are multiplied without unpacking, and the token rows are digits (digits.cuh).
//
// With at most 8 tokens no expert has more than 8 rows, so a stage has room for 8.
//
// A consuming warp has 16 weight rows. It spends 73 instructions on 64 weights of a lane and up to 4 rows, where bf16
// takes 135 for 8 rows. Two of the gathering warps make the digits of rows in registers and take the stages in turn:
// the digits of a row in a stage depend only on its 128 columns there. Rows of the second product are loaded by
// ordinary loads, too.
//
// The order of these sums differs from the order in the other kernels, so batch-invariant calls do not use this kernel.
#pragma once

#include "experts/tensor_kernel.cuh"
#include "quant/digits.cuh"
#include "quant/experts.cuh"
#include "quant/q4k_digits.cuh"

namespace moe::experts_tensor {

/// The same as QuantWeights (experts_tensor.cu), for up to 32 rows of an expert at a time.
template <QuantFormat kFormat, int kShare, class E>
struct DigitWeights : quant::ExpertStage<kFormat, quant::digits::kColumns, kShare> {
  using Epilogue = E;
  using Base = quant::ExpertStage<kFormat, quant::digits::kColumns, kShare>;
  using typename Base::Source;
  using typename Base::Stage;
  using Self = DigitWeights;
  using RowSide = quant::digits::Side<Stage::kWhole ? kUnitGroups : Stage::kShares>;
  static constexpr int kGroup = quant::digits::kGroup;
  static constexpr int kFewestRows = kGroup;
  static constexpr int kRowArrivals = 64;  // arrivals of the lanes that load scales, and of the lanes that load rows
  static constexpr int kRowSides = Base::kSideBytes, kMostRows = 32;
  static constexpr int kSideBytes = round_up(kRowSides + kMostRows * static_cast<int>(sizeof(RowSide)), 16);
  template <int kCapacity>
  static constexpr int kFewBlocks = kCapacity == 16 ? 3 : 2;
  /// More stages would not help: the loads of the other warps wait until the weights that their SM has requested have
  /// come.
  template <int>
  static constexpr int kMostStages = 4;
  template <int kCapacity>
  static constexpr int kConsumerRegisters = kCapacity == 16 ? 64 : 88;

#if MOE_HAS_WGMMA
  static __device__ __forceinline__ int result_row(int i) { return i * kGroup + static_cast<int>(threadIdx.x) % 4; }

  /// acc += this warp's 16 weight rows x kRows token rows over the work tile's steps. `at` is then past these steps.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kSums<kRows>]) {
    constexpr int kGroups = kRows / kGroup;
    if constexpr (Stage::kWhole) return multiply_units<kGroups>(b, work, at, acc);
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Source s = a.source[work.product];
    // Byte offsets from the beginning of a stage to this lane's weights and to its digits in both halves of the
    // columns. Then byte offsets from the stage's scales to this lane's first scale, and to the `RowSide` of its rows.
    uint32_t weights_at = block * Stage::kBlockBytes + lane * 16;
    uint32_t x_at[2] = {Self::kBytes + quant::digits::lane_offset(0), Self::kBytes + quant::digits::lane_offset(1)};
    uint32_t side_at = Stage::first_scale(s, block), row_at = kRowSides + lane % 4 * sizeof(RowSide);
    keep(weights_at), keep(x_at[0]), keep(x_at[1]), keep(side_at), keep(row_at);
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_wait(b.full(at.stage), at.parity);
      const uint8_t *stage = b.weights(at.stage), *side = b.side(at.stage);
      const RowSide* rows = reinterpret_cast<const RowSide*>(side + row_at);
      typename Stage::Words words;
      Stage::read(stage + weights_at, words);
      constexpr int kPairs = 2;  // of k-steps in half a stage
      quant::digits::Factors<kFormat> f[Stage::kShares == 1 ? 1 : kPairs];
      const auto load = [&](int share) {
        const uint32_t first = side_at + share * 16;
        f[share % kPairs].load(reinterpret_cast<const uint16_t*>(side) + first, s.f16_scales,
                               side + Stage::kScaleBytes + first, s.zeros != nullptr);
      };
      int sums[kGroups][4];
      if constexpr (Stage::kShares == 1) load(0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t weights[kPairs][4];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          if constexpr (Stage::kShares > 1) load(half * kPairs + pair);
          quant::digits::bytes<kFormat>(words + (half * 4 + pair * 2) * Stage::kWords, weights[pair]);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const uint4 c = *reinterpret_cast<const uint4*>(stage + x_at[half] + group * quant::digits::kGroupBytes);
          const RowSide& row = rows[group * kGroup];
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const int share = Stage::kShares == 1 ? 0 : half * kPairs + pair;
            if (Stage::kShares > 1 || half + pair == 0)
              for (int& sum : sums[group]) sum = 0;
            quant::digits::mma(sums[group], weights[pair], pair == 0 ? c.x : c.z, pair == 0 ? c.y : c.w);
            if (Stage::kShares == 1 && half + pair < 2) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i)
              f[share % kPairs].add(i, sums[group][2 * i], sums[group][2 * i + 1], row.sums[share], row.unit,
                                    acc[group / 2 * 4 + group % 2 + 2 * i]);
          }
        }
      }
      Stage::give_back(b.empty(at.stage), false);
    }
  }

  /// The same with Q4_K (q4k_digits.cuh).
  template <int kGroups, int kAcc>
  static __device__ __forceinline__ void multiply_units(const Block<Self>& b, const Work& work, Cursor& at,
                                                        float (&acc)[kAcc]) {
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t weights_at = block * Stage::kBlockBytes + lane * 16;
    uint32_t x_at = Self::kBytes + quant::digits::lane_offset(0);
    uint32_t side_at = block * Stage::Q4k::kBlockBytes + lane / 4 * 4;
    uint32_t row_at = kRowSides + lane % 4 * sizeof(RowSide);
    keep(weights_at), keep(x_at), keep(side_at), keep(row_at);
    constexpr uint32_t kOther = 512, kSwapped = 64;  // the digits of the other half of the columns: see `lane_offset`
    for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
      mbarrier_wait(b.full(at.stage), at.parity);
      const uint8_t *stage = b.weights(at.stage), *side = b.side(at.stage);
      const RowSide* rows = reinterpret_cast<const RowSide*>(side + row_at);
      typename Stage::Words words;
      Stage::read(stage + weights_at, words);
      const quant::digits::UnitScales<(kGroups > 2)> scales = {side + side_at};
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint8_t* at_group = stage + group * quant::digits::kGroupBytes;
        const uint8_t* x[2] = {at_group + x_at, at_group + kOther + (x_at ^ kSwapped)};
        scales.multiply(words, x, rows[group * kGroup], acc[group / 2 * 4 + group % 2],
                        acc[group / 2 * 4 + group % 2 + 2]);
      }
      Stage::give_back(b.empty(at.stage), false);
    }
  }

  /// A lane's part of the rows of a work tile: in each step, 16 columns of one row of each group.
  template <int kCapacity>
  struct Rows {
    static constexpr int kGroups = kCapacity / kGroup;
    const bf16* from;
    int row[kGroups], width, column;

    __device__ __forceinline__ Rows(const Args<Self>& a, const Work& work)
        : from(work.product == 0 ? a.x : a.act),
          width(work.product == 0 ? a.hidden : a.inter),
          column(threadIdx.x % 8 * 16) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int r = i * kGroup + threadIdx.x % 32 / 8;
        row[i] = r >= work.rows ? -1 : work.product == 0 ? static_cast<int>(work.slots[r]) / a.top_k : work.first + r;
      }
    }

    /// Loads this lane's columns of a step. Rows of the second product are read from L2, because other blocks have
    /// written them in this launch.
    __device__ __forceinline__ void load(int group, int step, uint4 (&x)[2]) const {
      const int at = step * quant::digits::kColumns + column;
      x[0] = x[1] = make_uint4(0, 0, 0, 0);
      if (row[group] < 0 || at >= width) return;
      const uint4* p = reinterpret_cast<const uint4*>(from + static_cast<size_t>(row[group]) * width + at);
      x[0] = __ldcg(p), x[1] = __ldcg(p + 1);
    }
  };

  /// The first gathering warp loads the scales and zero points. The others make digits of rows and take the stages in
  /// turn.
  template <int kCapacity>
  static __device__ __forceinline__ void gather(const Block<Self>& b, const Args<Self>& a, const CUtensorMap*) {
    const int warp = threadIdx.x / 32 - (kConsumers + 1);
    if (warp == 0) bring_sides(b, a);
    else bring_rows<kCapacity>(b, a, warp - 1);
  }

  static __device__ __forceinline__ void bring_sides(const Block<Self>& b, const Args<Self>& a) {
    Cursor at;
    for_each_work(b, [&](const Work& work) {
      const Source& s = a.source[work.product];
      const typename Stage::template SideCopies<32> copies(s, Base::row_block(s, work.expert, work.tile),
                                                           threadIdx.x % 32);
      for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
        mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
        copies.copy(b.side(at.stage), step);
        cp_async_arrive(b.full(at.stage));
        __syncwarp();
      }
    });
  }

  /// `turn` is the number of stages until this warp's next one.
  template <int kCapacity>
  static __device__ __forceinline__ void bring_rows(const Block<Self>& b, const Args<Self>& a, int turn) {
    const uint32_t all_rows = b.table()[a.max_touched()].y;
    bool all = false;
    Cursor at;
    for_each_work(b, [&](const Work& work) {
      const Rows<kCapacity> rows(a, work);
      if (work.product == 1) {
        if (elect_one()) await_activations(b, a, work, all_rows, &all);
        __syncwarp();
      }
      for (int step = 0; step < work.steps; ++step, at.advance(b.stages)) {
        if (turn-- > 0) continue;
        turn = kGatherers - 2;
        uint4 x[2];
        rows.load(0, step, x);
        mbarrier_wait(b.empty(at.stage), at.parity ^ 1);
        RowSide* sides = reinterpret_cast<RowSide*>(b.side(at.stage) + kRowSides);
#pragma unroll
        for (int group = 0; group < Rows<kCapacity>::kGroups; ++group) {
          if (group * kGroup >= work.rows) break;
          if (group > 0) rows.load(group, step, x);
          quant::digits::store(x[0], x[1], b.rows(at.stage) + group * quant::digits::kGroupBytes,
                               sides + group * kGroup);
        }
        mbarrier_arrive(b.full(at.stage));
        __syncwarp();
      }
    });
  }
#endif
};

}  // namespace moe::experts_tensor
