//! The launchers of the kernels in `cuda/`, documented there. Each returns a cudaError_t.
//!
//! Pointers are device pointers, 16-byte aligned unless the launcher says otherwise, and null only where it allows
//! that. `stream` is a cudaStream_t of the current device.

use std::ffi::{c_char, c_void};

use half::bf16;

use super::args::*;
use super::peer::{PeerArray, PeerBuffers, PeerNeeds, PeerTokens};
#[cfg(test)]
use super::quant_format::QuantFormat;

type Stream = *mut c_void;

/// Declares launchers, arguments of a type together. Each takes the stream as its last argument.
macro_rules! launchers {
    ($($name:ident($($($arg:ident)+ : $ty:ty),*);)*) => {
        unsafe extern "C" {
            $(pub(crate) fn $name($($($arg: $ty,)+)* stream: Stream) -> i32;)*
        }
    };
}

launchers! {
    // linear
    moe_linear_stream(args: *const LinearStreamArgs);
    moe_linear_tensor(args: *const LinearTensorArgs);

    // attention
    moe_qk_norm_rope_cache(args: *const QkNormRopeArgs);
    moe_attention_prefill(args: *const PagedAttentionArgs);
    moe_attention_prefill_wgmma_on_blocks(args: *const PagedAttentionArgs, blocks: i32);
    moe_attention_prefill_wgmma_fp8(
        args: *const PagedAttentionArgs, blocks: i32, scales: *mut f32, lines quads: i32
    );
    moe_attention_decode_overlapped(args: *const AttentionDecodeArgs, overlapped: i32);
    moe_attention_decode_fp8(
        args: *const AttentionDecodeArgs, overlapped: i32, scales: *mut f32, lines quads: i32
    );
    moe_attention_latent(args: *const PagedAttentionArgs);
    moe_attention_latent_values(args: *const PagedAttentionArgs, w_uv: In, values: Out);
    moe_attention_latent_decode(args: *const PagedAttentionArgs, w_uv: In, values: Out);
    moe_attention_latent_query(args: *const MlaRowsArgs, w_uk: In);
    moe_mla_expand(args: *const MlaExpandArgs);
    moe_attention_expanded(args: *const PagedAttentionArgs, bases: *const u32, all: i32);

    // router, experts
    moe_gate_route(args: *const GateRouteArgs);
    moe_balance_ids(args: *const BalanceIdsArgs);
    moe_align_tokens(args: *const AlignTokensArgs);
    moe_experts_stream(args: *const ExpertsStreamArgs);
    moe_experts_tensor(args: *const ExpertsTensorArgs);
    moe_experts_wide(args: *const ExpertsTensorArgs);
    moe_experts_grouped_gate_up(args: *const ExpertsGroupedArgs);
    moe_experts_grouped_down(args: *const ExpertsGroupedArgs);
    moe_combine(args: *const CombineArgs);
    moe_expert_residency(args: *const ExpertResidencyArgs);
    moe_expert_exchange(args: *const ExpertExchangeArgs);
    moe_combine_add_rms_norm(args: *const CombineArgs, residual: *mut f32, weight: *const bf16, eps: f32);
    moe_combine_add_rms_norm_fp8(
        args: *const CombineArgs, residual: *mut f32, weight: *const bf16, eps: f32,
        scales: *mut f32, lines quads: i32
    );

    // quantised weights
    moe_quant_linear_stream(args: *const QuantLinearStreamArgs);
    moe_quant_linear_tensor(args: *const QuantLinearTensorArgs);
    moe_quant_layer_stream(args: *const QuantLayerStreamArgs);
    moe_quant_experts_stream(args: *const QuantExpertsStreamArgs);
    moe_quant_experts_tensor(args: *const QuantExpertsTensorArgs);
    moe_quant_experts_wide(args: *const QuantExpertsTensorArgs);

    moe_quant_pack_stored(args: *const QuantPackStoredArgs);
    moe_quant_look_at_scales(scales: In, tile_rows groups: i64, found: Out);
    moe_quant_narrow_scales(scales: In, count: i64, out: Out, dtype: Dtype, rows: i32);
    moe_order_rows(args: *const OrderRowsArgs);
    moe_fp8_places(args: *const Fp8PlacesArgs);
    moe_fp8_quantise(args: *const Fp8QuantiseArgs);
    moe_fp8_linear(args: *const Fp8LinearArgs);
    moe_fp8_rows(w: *const QuantPack, rows scales: Out);
    moe_fp8_experts_gate_up(args: *const Fp8ExpertsArgs);
    moe_fp8_experts_down(args: *const Fp8ExpertsArgs);

    // layer
    moe_layer_stream(args: *const LayerStreamArgs);

    // rows
    moe_embedding(table: *const bf16, ids: *const u32, out: *mut f32, tokens hidden vocab: i32);
    moe_rms_norm(x: *const f32, weight: *const bf16, eps: f32, out: *mut bf16, rows hidden: i32);
    moe_add_rms_norm(
        delta: *const f32, residual: *mut f32, weight: *const bf16, eps: f32, out: *mut bf16,
        rows hidden: i32
    );
    moe_rope_rows(args: *const RopeRowsArgs);
    moe_copy_states(args: *const CopyStatesArgs);
    moe_copy_words(from: *const u32, to: *mut u32, words: usize);
    moe_upload_step(
        from: *const u32, to: *mut u32, words: usize, sampled: *const u32, ids source rows: usize,
        kept_valid read_back: *mut u32, results: usize
    );
    moe_fill_random(out: *mut bf16, count: usize, seed stream_id: u64, bound: f32);
    moe_fill_random_box(
        out: *mut bf16, matrices rows columns: i64, start matrix_stride row_stride seed: u64, bound: f32
    );
    moe_embed_part(table: In, ids: *const u32, out: Out, dtype out_dtype: Dtype, rows width first count: i32);
    moe_join_columns(parts: *const f32, out: *mut f32, rows width ranks: i32);

    // linear attention; pointers aligned to elements
    moe_causal_conv(args: *const CausalConvArgs);
    moe_gated_delta(args: *const GatedDeltaArgs);
    moe_gated_delta_chunks(args: *const GatedDeltaArgs);
    moe_gated_rms_norm(args: *const GatedNormArgs);

    // sampling
    moe_sample(
        logits: *const f32, params: In, uses: *mut u32, edits: In, slots: i32, masks: *const u32,
        rows vocab: i32, tokens status: *mut u32
    );
    moe_reset_slots(
        words: *const u32, len count: i32, uses: *mut u32, edits: Out, slots vocab: i32
    );
    moe_logprobs(
        logits: *const f32, params: *const u32, stride: i32, tokens: *const u32, rows vocab: i32,
        out: *mut u32
    );

    // peer
    moe_peer_buffer_init(buffer: Out, bytes: usize);
    moe_peer_all_reduce(peers: *const PeerBuffers, input: In, out: Out, dtype: Dtype, count: usize);
    moe_peer_all_reduce_add_rms_norm(
        peers: *const PeerBuffers, partial: *const f32, residual: *mut f32, weight: *const bf16, eps: f32,
        out: *mut bf16, rows hidden: i32
    );
    moe_peer_share_add_rms_norm(
        peers: *const PeerBuffers, partial: *const f32, residual: *mut f32, weight: *const bf16, eps: f32,
        out: *mut bf16, rows hidden: i32
    );
    moe_peer_combine_add_rms_norm(
        peers: *const PeerBuffers, slots: *const CombineArgs, counts: *const u32, needs: *const PeerNeeds,
        residual: *mut f32, weight: *const bf16, eps: f32, out: *mut bf16
    );
    moe_peer_dispatch(peers: *const PeerBuffers, tokens: *const PeerTokens);
    moe_peer_all_gather(
        peers: *const PeerBuffers, arrays: *const PeerArray, count: i32, needs: *const PeerNeeds
    );
    moe_peer_reduce_scatter(
        peers: *const PeerBuffers, input: *const c_void, narrow: i32, out: *mut f32, slots: *const u32,
        needs: *const PeerNeeds
    );

    // any dtype and shape; pointers aligned to elements
    moe_any_gather(table ids: In, out: Out, dtype out_dtype: Dtype, rows width table_rows: i32);
    moe_any_copy(x: In, out: Out, dtype out_dtype: Dtype, count: i64);
    moe_any_add(x: In, acc: Out, dtype acc_dtype: Dtype, count: i64);
    moe_any_add_scaled(x scales: In, acc: Out, dtype acc_dtype: Dtype, rows width: i32);
    moe_any_scale_rows(x scales: In, out: Out, dtype: Dtype, rows width: i32);
    moe_any_weighted_sum(slots ids weights: In, out: Out, out_dtype: Dtype, tokens top_k width: i32);
    moe_any_fill(out: Out, value: f32, count: i64);
    moe_any_sequence(out: Out, step: u32, count: i64);
    moe_any_sigmoid(x: Out, count: i64);
    moe_any_sigmoid_gate(gates: In, x: Out, dtype: Dtype, rows: i32, width: i32, gate_row: i32);
    moe_any_rms_norm(
        x weight: In, eps: f32, out: Out, dtype stream_dtype weight_dtype: Dtype, rows width: i32
    );
    moe_any_add_rms_norm(
        delta: In, residual: Out, weight: In, eps: f32, out: Out, dtype stream_dtype weight_dtype: Dtype,
        rows width: i32
    );
    moe_any_head_squares(qkv: In, squares: Out, tokens normed all head_dim: i32);
    moe_any_heads_norm(
        qkv: Out, squares q_norm k_norm: In, eps: f32, dtype: Dtype,
        tokens heads kv_heads head_dim ranks kv_replicas: i32
    );
    moe_any_softmax(x: In, out: Out, rows width: i32);
    moe_any_linear(args: *const AnyLinearArgs);
    moe_any_gate_up(args: *const AnyGateUpArgs);
    moe_any_gated(args: *const AnyGatedArgs);
    moe_any_down(args: *const AnyDownArgs);
    moe_any_quant_linear(args: *const AnyQuantLinearArgs);
    moe_any_quant_gate_up(args: *const AnyQuantGateUpArgs);
    moe_any_quant_down(args: *const AnyQuantDownArgs);
    moe_any_dequantise(w: *const QuantPack, out: Out, dtype: Dtype);
    moe_quant_dequantise(w: *const QuantPack, out: Out);
    moe_any_qk_norm_rope_cache(args: *const QkNormRopeArgs);
    moe_any_attention(args: *const PagedAttentionArgs);
    moe_any_mla_latent(args: *const MlaLatentArgs);
    moe_any_mla_cache(args: *const MlaCacheArgs);
    moe_any_mla_query(args: *const MlaQueryArgs);
    moe_any_mla_rows(args: *const MlaRowsArgs);
    moe_any_per_head(args: *const PerHeadArgs);
    moe_any_copy_columns(from: In, to: Out, dtype: Dtype, rows width from_row to_row: i32);
    moe_any_group_slots(args: *const AnyGroupSlotsArgs);
    moe_any_list_slots(topk_ids expert_map: In, count num_ids num_local: i32, counts lists: Out);
    moe_any_zero_absent(topk_ids expert_map: In, count num_ids num_local width: i32, out: Out);
    moe_any_mask_nonlocal(topk_ids expert_map: In, count: i64, num_ids: i32, out: Out);
    moe_any_physical_ids(topk_ids log2phy: In, count: i64, top_k num_experts width: i32, first_row: u32, hashed: i32, out: Out);
    moe_any_local_ids(topk_ids: In, first num_local: u32, count: i64, out: Out);
    moe_any_word_sum(bytes: In, len: i64, sum: Out);
    moe_any_batch_rows(args: *const AnyBatchRowsArgs);
    moe_any_unbatch_rows(args: *const AnyBatchRowsArgs);
    moe_any_number_rows(counts: In, experts max_tokens: i32, offsets numbers: Out);
    moe_any_route(args: *const AnyRouteArgs);
}

// The text of an error, and functions that tell launch code about sizes.
unsafe extern "C" {
    pub(crate) fn cudaGetErrorString(code: i32) -> *const c_char;
    pub(crate) fn moe_ptx_only() -> i32;
    pub(crate) fn moe_attention_decode_splits(rows: i32, heads: i32, kv_heads: i32, sms: i32) -> i32;
    pub(crate) fn moe_attention_decode_workspace(
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        splits: i32,
    ) -> usize;
    pub(crate) fn moe_attention_latent_splits(tokens: i32, sequences: i32, heads: i32, sms: i32) -> i32;
    pub(crate) fn moe_attention_latent_decode_splits(sequences: i32, sms: i32) -> i32;
    pub(crate) fn moe_max_tiles(slots: i32, num_local: i32, tile_rows: i32) -> i32;
    pub(crate) fn moe_experts_stream_flags(slots: i32, num_local: i32) -> i32;
    pub(crate) fn moe_experts_tensor_counters(num_local: i32) -> i32;
    pub(crate) fn moe_experts_tensor_counts() -> i32;
    pub(crate) fn moe_layer_stream_state(experts: i32, inter: i32) -> usize;
    #[cfg(test)]
    pub(crate) fn moe_layer_stream_fits(
        tokens: i32,
        hidden: i32,
        inter: i32,
        num_ids: i32,
        num_local: i32,
        top_k: i32,
        block_smem: i32,
    ) -> i32;
    #[cfg(test)]
    pub(crate) fn moe_quant_linear_stream_fits(format: QuantFormat, m: i32, k: i32, block_smem: i32) -> i32;
    #[cfg(test)]
    pub(crate) fn moe_quant_layer_stream_fits(
        format: QuantFormat,
        tokens: i32,
        hidden: i32,
        inter: i32,
        num_ids: i32,
        num_local: i32,
        top_k: i32,
        block_smem: i32,
    ) -> i32;
    pub(crate) fn moe_peer_buffer_bytes(ranks: i32, capacity: usize) -> usize;
    pub(crate) fn moe_peer_combine_rows(ranks: i32, capacity: usize, hidden: i32) -> i64;
    pub(crate) fn moe_peer_dispatch_rows(ranks: i32, capacity: usize, row_slots: u32, top_k: u32) -> i64;
    pub(crate) fn moe_any_group_slots_workspace(num_local: i32) -> i64;
}
