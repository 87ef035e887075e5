// The two products of the quantised layer kernel, by warps that each have a stream of their own.
#pragma once

#include "quant/layer_feed.cuh"

namespace moe::quant_layer {

#if MOE_SM90

template <class Kind>
struct Worker {
  using Rows = RowSteps<Kind>;

  const Args& a;
  const Shared& s;
  const Tiles& tiles;
  Feed<Kind> feed;
  int buffer = 0;  // of the halves

  __device__ __forceinline__ Worker(const Args& a, const Shared& s, const Tiles& tiles)
      : a(a), s(s), tiles(tiles), feed(a, s, tiles) {}

  /// Activations of a tile of gate and up whose halves have been added, as words that carry the launch's number. Lane
  /// 4 g + c has output g of its tokens; two outputs are a word.
  __device__ __forceinline__ void activate(int active, int tile, const float (&sum)[4], uint32_t number) const {
    const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int i = 0; i < Rows::kEach; ++i) {
      const int token = Rows::result_token(i);
      const float scale = token < a.tokens ? s.scale()[token] : 0.0f, gate = sum[i] * scale, up = sum[2 + i] * scale;
      const float value = gate / (1.0f + __expf(-gate)) * up, next = __shfl_down_sync(0xffffffffu, value, 4);
      const uint32_t slot = token < a.tokens ? s.slot_of(active)[token] : kNone;
      if (g % 2 != 0 || slot == kNone) continue;
      const size_t word = (static_cast<size_t>(slot) * a.inter + tile / 8 * kStep) / 2 + g / 2 * 8 + tile % 8;
      store_relaxed(a.act() + word, static_cast<uint64_t>(number) << 32 | pack_bf16(value, next));
    }
  }

  /// Some columns of the activations of the tokens in `mask`, slots of which are `slots`, from all blocks to this
  /// warp's shared memory, a row each.
  __device__ __forceinline__ void fetch(const uint32_t* slots, uint32_t mask, int k, int columns, int pitch,
                                        uint32_t number) const {
    constexpr int kPieces = 3;  // 16 bytes that a lane asks for at once
    const int own = Rows::own_piece(), pieces = columns / 4, end = Rows::kDigits ? round_up(pieces, 32) : pieces;
    const auto is_there = [=](const uint4& v) { return v.y == number && v.w == number; };
    uint8_t* row = s.template act<Kind>(threadIdx.x / 32);
    __syncwarp();  // the columns before have been read
    for (; mask != 0; mask &= mask - 1, row += pitch) {
      const uint64_t* from = a.act() + (static_cast<size_t>(slots[__ffs(mask) - 1]) * a.inter + k) / 2;
#pragma unroll 1
      for (int first = own; first < end; first += 32 * kPieces) {
        uint4 v[kPieces] = {};
        for (;;) {
          bool there = true;
          // Those that are missing together: each look takes a way to L2 and back.
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

  /// Which of the rows of the tokens in `mask` is a token's; of one that is not there the first.
  static __device__ __forceinline__ int row_among(uint32_t mask, int token) {
    return (mask >> token & 1) != 0 ? __popc(mask & ((1u << token) - 1)) : 0;
  }

  /// Rows of tiles of one pass.
  __device__ __forceinline__ void run(int pass, uint32_t number) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp % 2;
    const bool down = tiles.down(pass);
    const quant::Matrix& w = down ? a.w2 : a.w13;
    const quant::LaneScales scales(w, Kind::kFormat);
    const int2 columns = half_of(w.k, half);
    const int per_expert = a.inter / kOutputs;
    const uint8_t* own_act = s.template act<Kind>(warp);
#pragma unroll 1
    for (int at = tiles.begin(pass); at < tiles.end(pass); at += tiles.each(pass)) {
      const int active = down ? at / 2 : at / per_expert;
      mbarrier_wait(a.early() ? s.expert_full(active) : s.active_full(), 0);
      if (s.expert()[active] == kNone) continue;
      const uint32_t* slots = s.slot_of(active);
      int token = min(Rows::operand_token(), a.tokens - 1), pitch = a.pitch(Kind::kFormat), most = 0;
      int result = min(Rows::result_token(0), a.tokens - 1);
      uint32_t mask = 0;
      if (down) {
        mask = __ballot_sync(0xffffffffu, lane < a.tokens && slots[min(lane, a.tokens - 1)] != kNone);
        const int count = __popc(mask);
        // As many wide steps of the rows as fit.
        most = count == 1 ? 12 : count == 2 ? 6 : 3;
        pitch = quant::row_pitch(most * quant::kWideStep, Rows::kDigits);
        token = row_among(mask, token), result = row_among(mask, result);
      }
      const uint8_t* x = (down ? own_act : s.rows() + columns.x / quant::kWideStep * Rows::kBytes) + token * pitch;
      int held = down ? columns.x : columns.y;  // columns of x before this one are here
      float sum[4] = {};
#pragma unroll 1
      for (int k = columns.x; k < columns.y; k += quant::kWideStep, x += Rows::kBytes) {
        if (k == held) {
          const int more = min(most * quant::kWideStep, columns.y - k);
          fetch(slots, mask, k, more, pitch, number);
          held += more, x = own_act + token * pitch;
        }
        feed.ring.template multiply<Rows>(scales, columns.y - k, x, (result - token) * pitch, sum);
        feed.ask();
      }
      if (down) {
#pragma unroll
        for (int i = 0; i < Rows::kEach; ++i) {
          const int of = Rows::result_token(i);
          const uint32_t to = of < a.tokens ? slots[of] : kNone;
          if (to == kNone) continue;
          s.part(to, half)[lane / 4] = sum[i], s.part(to, half)[lane / 4 + 8] = sum[2 + i];
        }
        continue;
      }
      float4* other = s.halves(warp / 2, buffer) + lane;
      if (half == 1) *other = {sum[0], sum[1], sum[2], sum[3]};
      named_barrier(8 + warp / 2, 64);
      buffer ^= 1;
      if (half == 1) continue;
      const float4 v = *other;
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      activate(active, at - active * per_expert, sum, number);
    }
  }

  /// The weighted sum of an output for a token, in the order of its slots.
  __device__ __forceinline__ float add(int row, int token) const {
    const int slots = a.route.slots();
    float sum = 0;
#pragma unroll 4
    for (int slot = token * slots; slot < (token + 1) * slots; ++slot) {
      const uint8_t from = s.part_of()[slot];
      if (from != kNoPart) sum = fmaf(s.chosen()[slot].weight, s.part(from, 0)[row] + s.part(from, 1)[row], sum);
    }
    return sum;
  }

  /// Both products; the block's rows of the output.
  __device__ __forceinline__ void run_all() {
    uint32_t number = 0;
#pragma unroll 1
    for (int i = 0; i < Feed<Kind>::kDepth; ++i) feed.ask();
#pragma unroll 1
    for (int pass = tiles.first - 1; pass < tiles.last; ++pass) {
      const int row = threadIdx.x % kTileRows, token = threadIdx.x / kTileRows;
      const size_t to = static_cast<size_t>(token) * a.hidden + pass * kTileRows + row;
      const bool mine = tiles.down(pass) && token < a.tokens;
      const float value = mine ? before(a.output, a.out, to) : 0.0f;
      if (number == 0 && tiles.begin(pass) < tiles.end(pass)) {
        // It comes with the experts.
        mbarrier_wait(a.early() ? s.expert_full(0) : s.active_full(), 0);
        number = *s.number();
      }
      // Of the kernel behind no block finds room before this one has ended; announced earlier it is slower.
      if (pass + 1 == tiles.last) pdl_launch_dependents();
      run(pass, number);
      if (!tiles.down(pass)) continue;
      __syncthreads();
      if (mine) store(a.output, a.out, to, value + add(row, token));
      if (pass + 1 < tiles.last) __syncthreads();
    }
  }
};

#endif  // MOE_SM90

}  // namespace moe::quant_layer
