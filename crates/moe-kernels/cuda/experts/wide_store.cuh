// What a warpgroup does with its 64 weight rows x up to 256 token rows of sums (wide_kernel.cuh). It stores them
// through shared memory, so that whole lines are written. Its barriers are for its own four warps, so that the other
// warpgroup can multiply meanwhile.
//
// A piece of 4 KB in shared memory is 64 rows of activations (32 columns) or 32 slot rows (64 columns). There are two
// pieces in turn: the barrier between writing and reading one also ends the reading of the other. A piece's rows are
// stored while the next piece is written, so that no thread waits for what it has just read.
#pragma once

#include "experts/wide.cuh"
#include "ptx/wgmma.cuh"

namespace moe::experts_wide {

#if MOE_HAS_WGMMA

constexpr int kSums = kMostRows / 2;      // sums of a thread; wgmma.cuh says which 4 of each 8 token rows
constexpr int kPairSums = kPairRows / 2;  // sums of a thread for one of two weight tiles

template <class W>
struct Store {
  const Block<W>& b;
  const Args<W>& a;
  int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  int turn = 0;
  int owed = -1;  // the expert whose activations have not been announced to the other blocks yet

  __device__ __forceinline__ void meet() const { named_barrier(1 + group, 128); }
  __device__ __forceinline__ uint8_t* piece() { return b.staging + (group * 2 + (turn ^= 1)) * kPieceBytes; }

  using Biases = typename W::Epilogue::Biases;

  /// The biases of this thread's two weight rows of a weight tile: a gate row and its up row, or two rows of w2.
  __device__ __forceinline__ Biases biases(const Work& work, int tile) const {
    const int g = lane / 4;
    return work.product == 0
               ? a.epilogue.gate_up(work.expert, a.inter, tile * (kTileRows / 2) + group * 32 + warp * 8 + g)
               : a.epilogue.down(work.expert, a.hidden, tile * kTileRows + group * 64 + warp * 16 + g);
  }

  __device__ __forceinline__ float activate(float gate, float up, const Biases& biases) const {
    return a.epilogue.template activate<true>(gate, up, biases);
  }

  /// Tells the other blocks that the activations stored last are there. It is called late, when they have been written
  /// long ago and no thread waits for that. The proxy fence costs a clock or two in each thread; the fence towards the
  /// other blocks costs about 800 clocks, and only one thread issues it.
  __device__ __forceinline__ void publish() {
    if (owed < 0) return;
    fence_async_global();  // the copy engine of another block reads them
    meet();
    if (thread == 0) {
      fence_release();
      const Counters::Set set = b.counters();
      add_relaxed(set.progress(owed), 1);
      add_relaxed(set.finished(), 1);
    }
    owed = -1;
  }

  /// The activations of a weight tile: a warp has the gate rows of 8 columns and, 8 rows further, their up rows.
  template <int kRows>
  __device__ __forceinline__ void activations(const Work& work, int tile, const float* sums, const Biases& biases) {
    if (tile * (kTileRows / 2) >= a.inter) return;  // the last work tile has one weight tile
    const uint64_t policy = a.keeps_activations() ? read_late() : read_again();
    uint4 held[2];  // the piece before, which is stored while this one is written
    const auto leave = [&](int first) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = first + i * 32 + thread / 4;
        if (r >= work.rows) continue;
        bf16* to = a.act + static_cast<size_t>(work.first + r) * a.inter + tile * 64 + group * 32;
        store16(to + thread % 4 * 8, held[i], policy);
      }
    };
#pragma unroll
    for (int first = 0; first < kRows; first += 64) {
      if (first >= work.rows) continue;
      uint8_t* at = piece();
#pragma unroll
      for (int half = 0; half < 64; half += 32) {
        if (first + half >= work.rows) continue;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = sums + (first + half + 8 * i) / 2;
          v[i] = pack_bf16(activate(d[0], d[2], biases), activate(d[1], d[3], biases));
        }
        stmatrix_x4_trans(at + (half + lane) * 64 + ((warp ^ (lane / 2 & 3)) << 4), v);
      }
      if (first > 0) leave(first - 64);
      meet();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = i * 32 + thread / 4;
        held[i] = *reinterpret_cast<const uint4*>(at + r * 64 + ((thread % 4 ^ (r / 2 & 3)) << 4));
      }
    }
    leave((work.rows - 1) / 64 * 64);
    owed = work.expert;
  }

  /// The slots of the rows of 8 lanes, every 16th row of the tile: lane j of the 8 holds the slots of rows j and j + 8.
  template <int kRows>
  using Slots = uint32_t[ceil_div(kRows, 128)];

  /// Loads the slots of the rows that these lanes store. It is called before the products, which hide the latency.
  template <int kRows>
  __device__ __forceinline__ void fetch_slots(const Work& work, Slots<kRows>& slots) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kRows, 128); ++i) {
      const int r = (i * 8 + thread % 8) * 16 + thread / 8;
      slots[i] = r < work.rows ? __ldcg(work.slots + r) : kNoExpert;
    }
  }

  /// Stores the second product's sums, rounded, in the rows of the slots. In the last tile the second warpgroup may
  /// have no columns.
  template <int kRows>
  __device__ __forceinline__ void slot_rows(const Work& work, int tile, const float* sums, const Slots<kRows>& slots,
                                            const Biases& biases) {
    const int columns = tile * kTileRows + group * 64;
    if (columns >= a.hidden) return;
    uint4 held[2];  // as above, with their slots
    uint32_t slot[2];
    const auto leave = [&]() __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (slot[i] == kNoExpert) continue;
        bf16* to = a.slot_rows + static_cast<size_t>(slot[i]) * a.hidden + columns;
        reinterpret_cast<uint4*>(to)[thread % 8] = held[i];
      }
    };
#pragma unroll
    for (int first = 0; first < kRows; first += 32) {
      if (first >= work.rows) continue;
      uint8_t* at = piece();
#pragma unroll
      for (int half = 0; half < 32; half += 16) {
        const float* d = sums + (first + half) / 2;
        const auto low = [&](int i) {
          return pack_bf16(a.epilogue.low(d[i], biases), a.epilogue.low(d[i + 1], biases));
        };
        const auto high = [&](int i) {
          return pack_bf16(a.epilogue.high(d[i], biases), a.epilogue.high(d[i + 1], biases));
        };
        const uint32_t v[4] = {low(0), high(2), low(4), high(6)};
        const int r = half + lane / 16 * 8 + lane % 8, column = warp * 2 + lane / 8 % 2;
        stmatrix_x4_trans(at + r * 128 + ((column ^ (r & 7)) << 4), v);
      }
      if (first > 0) leave();
      meet();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = i * 16 + thread / 8, row = first / 16 + i;
        held[i] = *reinterpret_cast<const uint4*>(at + r * 128 + ((thread % 8 ^ (r & 7)) << 4));
        slot[i] = __shfl_sync(0xffffffffu, slots[row / 8], row % 8, 8);
      }
    }
    leave();
  }
};

#endif  // MOE_HAS_WGMMA

}  // namespace moe::experts_wide
