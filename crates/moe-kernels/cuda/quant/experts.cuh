// The parts of the experts' kernels on warpgroup products that are specific to quantised weights and that do not depend
// on the tiles of token rows (experts_tensor.cu, experts_wide.cu).
#pragma once

#include "experts/tiles.cuh"
#include "quant/stage.cuh"

namespace moe::quant {

/// A stage of one weight tile, and how its parts are loaded.
template <QuantFormat kFormat, int kColumns, int kShare>
struct ExpertStage : QuantStage<kFormat, kColumns, kShare, experts_tiles::kTileRows / 16> {
  using Stage = QuantStage<kFormat, kColumns, kShare, experts_tiles::kTileRows / 16>;
  using Source = quant::Source;

#if MOE_HAS_WGMMA
  static __device__ __forceinline__ int row_block(const Source& s, int expert, int tile) {
    return expert * s.blocks + tile * (experts_tiles::kTileRows / 16);
  }

  template <class Args>
  static __device__ __forceinline__ void load(void* to, const CUtensorMap* map, const Args& a, int product, int expert,
                                              int tile, int step, uint64_t* bar, uint64_t policy) {
    Stage::load_weights(to, map, row_block(a.source[product], expert, tile), step, bar, policy);
  }

  using Side = typename Stage::template SideCopies<experts_tiles::kGatherLanes>;

  /// Loads a gathering lane's part of the scales and zero points of a weight tile.
  template <class Args>
  static __device__ __forceinline__ Side side(const Args& a, int product, int expert, int tile, int index) {
    const Source& s = a.source[product];
    return Side(s, row_block(s, expert, tile), index);
  }
#endif
};

/// Whether the packs of both products and their sizes are supported.
inline bool experts_fit(const QuantExpertsTensorArgs& c) {
  const QuantPack &w13 = c.w13, &w2 = c.w2;
  return fits(w13) && fits(w2) && w13.gate_up != 0 && w2.gate_up == 0 && w13.format == w2.format &&
         w13.experts == w2.experts && w13.k == w2.n && w13.n == 2 * w2.k &&
         experts_tiles::sizes_fit(c.tokens, c.top_k, c.num_ids, w13.experts, w13.k, w2.k, c.bucket);
}

/// Makes the tensor maps of both packs.
inline cudaError_t make_pack_maps(CUtensorMap* w13, CUtensorMap* w2, const QuantExpertsTensorArgs& c, int block_bytes) {
  const cudaError_t e = make_pack_map(w13, c.w13, experts_tiles::kTileRows / 16, block_bytes);
  return e != cudaSuccess ? e : make_pack_map(w2, c.w2, experts_tiles::kTileRows / 16, block_bytes);
}

}  // namespace moe::quant
