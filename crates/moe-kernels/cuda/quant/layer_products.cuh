// The two products of the quantised layer kernel. Each warp that multiplies has its own stream of weights.
#pragma once

#include "quant/layer_load.cuh"

namespace moe::quant_layer {

#if MOE_HAS_TMA

/// Sends two activations of a row of tiles of gate and up to all blocks, as a word that carries the launch's number.
__device__ __forceinline__ void store_pair(const Args& a, uint32_t slot, int row, int pair, uint32_t two,
                                           uint32_t number) {
  const size_t word = (static_cast<size_t>(slot) * a.inter + row / 8 * kStep) / 2 + pair * 8 + row % 8;
  store_relaxed(a.act() + word, static_cast<uint64_t>(number) << 32 | two);
}

// Two named barriers; and the value for a thread without a result.
constexpr int kPartsThere = 2, kPartsRead = 3, kNoResult = 1 << 20;

/// A thread's output in a row of tiles.
struct Result {
  int row, token;
  size_t to;
  float value = 0.0f;

  __device__ __forceinline__ Result(const Args& a, int pass, int thread)
      : row(thread % kTileRows),
        token(thread / kTileRows),
        to(static_cast<size_t>(token) * a.hidden + pass * kTileRows + row) {
    if (token < a.tokens) value = before(a.output, a.out, to);
  }

  /// Stores the output with the weighted sum of the experts' parts, in the order of the token's slots.
  __device__ __forceinline__ void store(const Args& a, const Shared& s) const {
    if (token >= a.tokens) return;
    const int slots = a.route.slots();
    float sum = 0;
#pragma unroll 4
    for (int slot = token * slots; slot < (token + 1) * slots; ++slot) {
      const uint8_t from = s.part_of()[slot];
      if (from != kNoPart) sum = fmaf(s.chosen()[slot].weight, s.part(from, 0)[row] + s.part(from, 1)[row], sum);
    }
    moe::store(a.output, a.out, to, value + sum);
  }
};

template <class Kind, class Form, class E>
struct Worker {
  using Rows = RowSteps<Kind>;
  using Biases = typename E::Biases;

  const WithEpilogue<E>& a;
  const Shared& s;
  const Tiles<Form>& tiles;
  Loader<Kind, Form> loader;
  int turn = 0;  // of the team's tiles of gate and up

  __device__ __forceinline__ Worker(const WithEpilogue<E>& a, const Shared& s, const Tiles<Form>& tiles)
      : a(a), s(s), tiles(tiles), loader(a, s, tiles) {}

  /// Adds the two halves of a pair's tile of gate and up and activates the sums; the pair's first warp does it. Lane 4
  /// g + c has output g of its tokens. Two outputs make a word.
  __device__ __forceinline__ void activate(Tile tile, float (&sum)[4], const Biases& biases, uint32_t number) const {
    const int lane = threadIdx.x % 32, pair = threadIdx.x / 64, g = lane / 4;
    const bool second = threadIdx.x / 32 % 2 != 0;
    float4* other = s.half(pair * Pairs::kBuffers + turn % Pairs::kBuffers) + lane;
    if (second) *other = {sum[0], sum[1], sum[2], sum[3]};
    named_barrier(8 + pair, 64);
    if (second) return;
    const float4 v = *other;
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
#pragma unroll
    for (int i = 0; i < Rows::kEach; ++i) {
      const int token = Rows::result_token(i);
      const float scale = token < a.tokens ? s.scale()[token] : 0.0f;
      const float value = a.epilogue.activate(sum[i] * scale, sum[2 + i] * scale, biases);
      const float next = __shfl_down_sync(0xffffffffu, value, 4);
      const uint32_t slot = token < a.tokens ? s.slot_of(tile.active)[token] : kNone;
      if (g % 2 == 0 && slot != kNone) store_pair(a, slot, tile.row, g / 2, pack_bf16(value, next), number);
    }
  }

  /// Gives this warp's share of a tile of gate and up to the warp that adds the team's shares.
  __device__ __forceinline__ void hand_over(const float (&sum)[4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, round = turn / Teams::kBuffers;
    const int buffer = warp / Teams::kTeam * Teams::kBuffers + turn % Teams::kBuffers;
    if (round > 0) mbarrier_wait(s.shares_free(buffer), (round - 1) % 2);
#pragma unroll
    for (int i = 0; i < Rows::kEach; ++i) {
      const int token = Rows::result_token(i);
      if (token >= a.tokens) break;
      float* to = s.shares(buffer, token) + lane / 4 * Teams::kPitch + warp % Teams::kTeam;
      to[0] = sum[i], to[8 * Teams::kPitch] = sum[2 + i];
    }
    warp_arrive(s.shares_full(buffer));
  }

  /// Fetches columns of activations, written by all blocks, to this warp's shared memory: one row for each token in
  /// `mask`. `slots` are the tokens' slots.
  __device__ __forceinline__ void fetch(const uint32_t* slots, uint32_t mask, int k, int columns, int pitch,
                                        uint32_t number) const {
    constexpr int kPieces = 3;  // 16 bytes that a lane asks for at once
    const int own = Rows::own_piece(), pieces = columns / 4, end = Rows::kDigits ? round_up(pieces, 32) : pieces;
    const auto is_there = [=](const uint4& v) { return v.y == number && v.w == number; };
    uint8_t* row = s.template act<Kind>(threadIdx.x / 32);
    __syncwarp();  // the columns of the call before have been read
    for (; mask != 0; mask &= mask - 1, row += pitch) {
      const uint64_t* from = a.act() + (static_cast<size_t>(slots[__ffs(mask) - 1]) * a.inter + k) / 2;
#pragma unroll 1
      for (int first = own; first < end; first += 32 * kPieces) {
        uint4 v[kPieces] = {};
        for (;;) {
          bool there = true;
          // All missing pieces are requested together: each look costs a round trip to L2.
#pragma unroll
          for (int i = 0; i < kPieces; ++i)
            if (first + i * 32 < pieces && !is_there(v[i])) v[i] = load_relaxed_pair(from + 2 * (first + i * 32));
#pragma unroll
          for (int i = 0; i < kPieces; ++i) there = there && (first + i * 32 >= pieces || is_there(v[i]));
          if (there) break;
          __nanosleep(kPollNs);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (first + i * 32 < end) Rows::store_piece(row, first + i * 32, {v[i].x, v[i].z});
      }
    }
    __syncwarp();
  }

  /// The index of a token's row among the rows of the tokens in `mask`; the first row for a token that is not in it.
  static __device__ __forceinline__ int row_among(uint32_t mask, int token) {
    return (mask >> token & 1) != 0 ? __popc(mask & ((1u << token) - 1)) : 0;
  }

  /// The biases of a lane's rows of a tile, g and g + 8: of gate and up, or of the output. One warp of a pair adds
  /// them.
  __device__ __forceinline__ Biases row_biases(Tile tile, bool down) const {
    const int expert = s.expert()[tile.active], g = threadIdx.x % 32 / 4;
    const bool first = threadIdx.x / 32 % 2 == 0;
    if (down) return first ? a.epilogue.down(expert, a.hidden, tile.row * kTileRows + g) : Biases{};
    return first && Form::kOthers == 0 ? a.epilogue.gate_up(expert, a.inter, tile.row * kOutputs + g) : Biases{};
  }

  /// Multiplies the rows of tiles of one pass.
  __device__ __forceinline__ void run(int pass, uint32_t number) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool down = tiles.down(pass);
    const quant::LaneScales scales(down ? a.w2 : a.w13, Kind::kFormat);
    const int2 columns = tiles.columns(down);
    const uint8_t* own_act = s.template act<Kind>(warp);
#pragma unroll 1
    for (Tile tile = tiles.begin(pass); tiles.has(tile); tile = tiles.next(tile, down)) {
      mbarrier_wait(a.early() ? s.expert_full(tile.active) : s.active_full(), 0);
      if (s.expert()[tile.active] == kNone) continue;
      const Biases biases = row_biases(tile, down);
      const uint32_t* slots = s.slot_of(tile.active);
      int token = min(Rows::operand_token(), a.tokens - 1), pitch = a.pitch(Kind::kFormat), most = 0;
      int result = min(Rows::result_token(0), a.tokens - 1);
      uint32_t mask = 0;
      if (down) {
        mask = __ballot_sync(0xffffffffu, lane < a.tokens && slots[min(lane, a.tokens - 1)] != kNone);
        const int count = __popc(mask);
        // The number of wide steps for which the shared memory has room, for this number of rows.
        most = count == 1 ? 12 : count == 2 ? 6 : 3;
        pitch = quant::row_pitch(most * quant::kWideStep, Rows::kDigits);
        token = row_among(mask, token), result = row_among(mask, result);
      }
      const uint8_t* x = (down ? own_act : s.rows() + columns.x / quant::kWideStep * Rows::kBytes) + token * pitch;
      int held = down ? columns.x : columns.y;  // columns of x before this one are in shared memory
      float sum[4] = {}, done[4] = {};          // sums of the current share; sums of the shares before it
      int k = columns.x;
      constexpr int kOwn = kShares<Kind> / Form::kTeam;  // shares of gate and up of this warp
#pragma unroll 1
      for (int share = down ? kOwn - 1 : 0; share < kOwn; ++share) {
        const int end = down ? columns.y : shares_end<kShares<Kind>>(a.hidden, warp % Form::kTeam * kOwn + share + 1);
#pragma unroll 1
        for (; k < end; k += quant::kWideStep, x += Rows::kBytes) {
          if (k == held) {
            const int more = min(most * quant::kWideStep, columns.y - k);
            fetch(slots, mask, k, more, pitch, number);
            held += more, x = own_act + token * pitch;
          }
          loader.ring.template multiply<Rows>(scales, columns.y - k, x, (result - token) * pitch, sum);
          loader.ask();
        }
        if constexpr (kOwn > 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) done[i] += sum[i], sum[i] = 0.0f;
        }
      }
      if constexpr (kOwn > 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = done[i];
      }
      if (down) leave(slots, sum, biases);
      else if constexpr (Form::kOthers == 0) activate(tile, sum, biases, number), ++turn;
      else hand_over(sum), ++turn;
    }
  }

  /// Stores one expert's sums over half of the columns, for a row of tiles of the output. They are added to the other
  /// experts' sums later.
  __device__ __forceinline__ void leave(const uint32_t* slots, const float (&sum)[4], const Biases& biases) const {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2;
#pragma unroll
    for (int i = 0; i < Rows::kEach; ++i) {
      const int of = Rows::result_token(i);
      const uint32_t to = of < a.tokens ? slots[of] : kNone;
      if (to == kNone) continue;
      s.part(to, half)[lane / 4] = E::low(sum[i], biases), s.part(to, half)[lane / 4 + 8] = E::high(sum[2 + i], biases);
    }
  }

  /// Computes both products and, unless other warps do it, stores the block's rows of the output.
  __device__ __forceinline__ void run_all() {
    uint32_t number = 0;
#pragma unroll 1
    for (int i = 0; i < loader.kDepth; ++i) loader.ask();
#pragma unroll 1
    for (int pass = tiles.first - 1; pass < tiles.last; ++pass) {
      const bool down = tiles.down(pass), last = pass + 1 == tiles.last;
      const Result result(a, pass, down && Form::kOthers == 0 ? static_cast<int>(threadIdx.x) : kNoResult);
      if (number == 0 && tiles.num_active > 0) {
        // The launch's number arrives with the experts.
        mbarrier_wait(a.early() ? s.expert_full(0) : s.active_full(), 0);
        number = *s.number();
      }
      // Blocks of the next kernel have no room before this block ends, and announcing them earlier is slower.
      if (last) pdl_launch_dependents();
      run(pass, number);
      if (!down) continue;
      if constexpr (Form::kOthers == 0) {
        __syncthreads();
        result.store(a, s);
        if (!last) __syncthreads();
      } else {
        named_barrier_arrive(kPartsThere, kWorkers + 32);
        if (!last) named_barrier(kPartsRead, kWorkers + 32);
      }
    }
  }
};

#endif  // MOE_HAS_TMA

}  // namespace moe::quant_layer
