// Quantised experts with few rows each whose weights are integers: the products of experts_tensor.cu by integer mma, of
// weights as they are and token rows as digits (digits.cuh).
//
// With at most 8 tokens no expert has more rows, and a stage has room for no more.
//
// A consuming warp has 16 weight rows and spends 73 instructions on 64 weights of a lane and up to 4 rows where bf16
// takes 135 for 8 rows. Two of the gathering warps make digits of rows, a stage each in turn, in registers: a row's
// digits depend on its 128 columns alone. Rows of the second product come as ordinary loads, too.
//
// Sums have an order of their own, so batch-invariant calls do not take it.
#pragma once

#include "experts/tensor_kernel.cuh"
#include "quant/digits.cuh"
#include "quant/experts.cuh"

namespace moe::experts_tensor {

/// As QuantWeights (experts_tensor.cu), for up to 32 rows of an expert at a time.
template <QuantFormat kFormat, int kShare>
struct DigitWeights : quant::ExpertStage<kFormat, quant::digits::kColumns, kShare> {
  using Base = quant::ExpertStage<kFormat, quant::digits::kColumns, kShare>;
  using typename Base::Source;
  using typename Base::Stage;
  using Self = DigitWeights;
  using RowSide = quant::digits::Side<Stage::kShares>;
  static constexpr int kGroup = quant::digits::kGroup;
  static constexpr int kFewestRows = kGroup;
  static constexpr int kRowArrivals = 64;  // of the lanes that bring scales and of those that bring rows
  static constexpr int kRowSides = Base::kSideBytes, kMostRows = 32;
  static constexpr int kSideBytes = round_up(kRowSides + kMostRows * static_cast<int>(sizeof(RowSide)), 16);
  template <int kCapacity>
  static constexpr int kFewBlocks = kCapacity == 16 ? 3 : 2;
  /// What a lane of the other warps asks for waits behind the weights that its SM has asked for.
  template <int>
  static constexpr int kMostStages = 4;
  template <int kCapacity>
  static constexpr int kConsumerRegisters = kCapacity == 16 ? 64 : 88;

#if MOE_HAS_WGMMA
  static __device__ __forceinline__ int result_row(int i) { return i * kGroup + static_cast<int>(threadIdx.x) % 4; }

  /// acc += this warp's 16 weight rows x kRows token rows over the work tile's steps, and leaves the ring behind them.
  template <int kCapacity, int kRows>
  static __device__ __forceinline__ void multiply(const Block<Self>& b, const Args<Self>& a, const Work& work,
                                                  Cursor& at, float (&acc)[kSums<kRows>]) {
    constexpr int kGroups = kRows / kGroup;
    const int block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Source s = a.source[work.product];
    // Bytes from the beginning of a stage to this lane's weights and digits, in both halves of the columns; from what
    // lies beside them to its first scale and to what it needs of rows.
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
      constexpr int kPairs = 2;  // of k-steps in half of a stage
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

  /// A lane's part of a work tile's rows: 16 columns of a row of each group in a step.
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

    /// Loads this lane's columns of a step. Other blocks have written the second product's rows in this launch.
    __device__ __forceinline__ void load(int group, int step, uint4 (&x)[2]) const {
      const int at = step * quant::digits::kColumns + column;
      x[0] = x[1] = make_uint4(0, 0, 0, 0);
      if (row[group] < 0 || at >= width) return;
      const uint4* p = reinterpret_cast<const uint4*>(from + static_cast<size_t>(row[group]) * width + at);
      x[0] = __ldcg(p), x[1] = __ldcg(p + 1);
    }
  };

  /// The first gathering warp brings what lies beside the weights, the others make digits of rows, a stage each in
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

  /// `turn`: stages until this warp's next.
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
