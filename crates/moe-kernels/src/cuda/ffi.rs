//! The launchers of the kernels in `cuda/`, documented there. Each returns a cudaError_t.
//!
//! Pointers are device pointers, 16-byte aligned unless the launcher says otherwise, null where it says so; `stream` is a
//! cudaStream_t of the current device.

use std::ffi::{c_char, c_void};

use half::bf16;

use super::args::*;
use super::peer::{PeerArray, PeerBuffers};

type Stream = *mut c_void;

unsafe extern "C" {
    pub(crate) fn cudaGetErrorString(code: i32) -> *const c_char;

    // linear
    pub(crate) fn moe_linear_stream(args: *const LinearStreamArgs, stream: Stream) -> i32;
    pub(crate) fn moe_linear_tensor(args: *const LinearTensorArgs, stream: Stream) -> i32;

    // attention
    pub(crate) fn moe_qk_norm_rope_cache(args: *const QkNormRopeArgs, stream: Stream) -> i32;
    pub(crate) fn moe_attention_prefill(args: *const PagedAttentionArgs, stream: Stream) -> i32;
    pub(crate) fn moe_attention_decode(args: *const AttentionDecodeArgs, stream: Stream) -> i32;
    pub(crate) fn moe_attention_decode_splits(rows: i32, heads: i32, kv_heads: i32, sms: i32) -> i32;
    pub(crate) fn moe_attention_decode_workspace(
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        splits: i32,
    ) -> usize;

    // router, experts
    pub(crate) fn moe_gate_route(args: *const GateRouteArgs, stream: Stream) -> i32;
    pub(crate) fn moe_max_tiles(slots: i32, num_local: i32, tile_rows: i32) -> i32;
    pub(crate) fn moe_align_tokens(args: *const AlignTokensArgs, stream: Stream) -> i32;
    pub(crate) fn moe_experts_stream(args: *const ExpertsStreamArgs, stream: Stream) -> i32;
    pub(crate) fn moe_experts_stream_flags(slots: i32, num_local: i32) -> i32;
    pub(crate) fn moe_experts_tensor(args: *const ExpertsTensorArgs, stream: Stream) -> i32;
    pub(crate) fn moe_experts_tensor_counters(num_local: i32) -> i32;
    pub(crate) fn moe_experts_tensor_counts() -> i32;
    pub(crate) fn moe_experts_grouped_gate_up(args: *const ExpertsGroupedArgs, stream: Stream) -> i32;
    pub(crate) fn moe_experts_grouped_down(args: *const ExpertsGroupedArgs, stream: Stream) -> i32;
    pub(crate) fn moe_combine(args: *const CombineArgs, stream: Stream) -> i32;
    pub(crate) fn moe_combine_add_rms_norm(
        args: *const CombineArgs,
        residual: *mut f32,
        weight: *const bf16,
        eps: f32,
        stream: Stream,
    ) -> i32;

    // layer
    pub(crate) fn moe_layer_stream(args: *const LayerStreamArgs, stream: Stream) -> i32;
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

    // rows
    pub(crate) fn moe_embedding(
        table: *const bf16,
        ids: *const u32,
        out: *mut f32,
        tokens: i32,
        hidden: i32,
        vocab: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_rms_norm(
        x: *const f32,
        weight: *const bf16,
        eps: f32,
        out: *mut bf16,
        rows: i32,
        hidden: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_add_rms_norm(
        delta: *const f32,
        residual: *mut f32,
        weight: *const bf16,
        eps: f32,
        out: *mut bf16,
        rows: i32,
        hidden: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_rope_rows(args: *const RopeRowsArgs, stream: Stream) -> i32;
    pub(crate) fn moe_feed_tokens(
        from: *const u32,
        sampled: *const u32,
        ids: *mut u32,
        valid: *const u32,
        kept_valid: *mut u32,
        rows: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_fill_random(
        out: *mut bf16,
        count: usize,
        seed: u64,
        stream_id: u64,
        bound: f32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_fill_random_box(
        out: *mut bf16,
        matrices: i64,
        rows: i64,
        columns: i64,
        start: u64,
        matrix_stride: u64,
        row_stride: u64,
        seed: u64,
        bound: f32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_embed_part(
        table: In,
        ids: *const u32,
        out: Out,
        dtype: Dtype,
        out_dtype: Dtype,
        rows: i32,
        width: i32,
        first: i32,
        count: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_join_columns(
        parts: *const f32,
        out: *mut f32,
        rows: i32,
        width: i32,
        ranks: i32,
        stream: Stream,
    ) -> i32;

    // sampling
    pub(crate) fn moe_sample(
        logits: *const f32,
        params: In,
        uses: *mut u32,
        edits: In,
        rows: i32,
        vocab: i32,
        tokens: *mut u32,
        status: *mut u32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_reset_slots(
        words: *const u32,
        count: i32,
        uses: *mut u32,
        edits: Out,
        vocab: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_logprobs(
        logits: *const f32,
        params: *const u32,
        stride: i32,
        tokens: *const u32,
        rows: i32,
        vocab: i32,
        out: *mut u32,
        stream: Stream,
    ) -> i32;

    // peer
    pub(crate) fn moe_peer_buffer_bytes(ranks: i32, capacity: usize) -> usize;
    pub(crate) fn moe_peer_buffer_init(buffer: Out, bytes: usize, stream: Stream) -> i32;
    pub(crate) fn moe_peer_all_reduce(
        peers: *const PeerBuffers,
        input: In,
        out: Out,
        dtype: Dtype,
        count: usize,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_peer_all_reduce_add_rms_norm(
        peers: *const PeerBuffers,
        partial: *const f32,
        residual: *mut f32,
        weight: *const bf16,
        eps: f32,
        out: *mut bf16,
        rows: i32,
        hidden: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_peer_slots(ranks: i32, capacity: usize) -> usize;
    pub(crate) fn moe_peer_all_gather(
        peers: *const PeerBuffers,
        arrays: *const PeerArray,
        count: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_peer_reduce_scatter(
        peers: *const PeerBuffers,
        input: *const f32,
        out: *mut f32,
        count: usize,
        stream: Stream,
    ) -> i32;

    // any dtype and shape; pointers aligned to elements
    pub(crate) fn moe_any_gather(
        table: In,
        ids: In,
        out: Out,
        dtype: Dtype,
        out_dtype: Dtype,
        rows: i32,
        width: i32,
        table_rows: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_copy(
        x: In,
        out: Out,
        dtype: Dtype,
        out_dtype: Dtype,
        count: i64,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_add(
        x: In,
        acc: Out,
        dtype: Dtype,
        acc_dtype: Dtype,
        count: i64,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_add_scaled(
        x: In,
        scales: In,
        acc: Out,
        dtype: Dtype,
        acc_dtype: Dtype,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_scale_rows(
        x: In,
        scales: In,
        out: Out,
        dtype: Dtype,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_weighted_sum(
        slots: In,
        ids: In,
        weights: In,
        out: Out,
        out_dtype: Dtype,
        tokens: i32,
        top_k: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_fill(out: Out, value: f32, count: i64, stream: Stream) -> i32;
    pub(crate) fn moe_any_sequence(out: Out, step: u32, count: i64, stream: Stream) -> i32;
    pub(crate) fn moe_any_sigmoid(x: Out, count: i64, stream: Stream) -> i32;
    pub(crate) fn moe_any_rms_norm(
        x: In,
        weight: In,
        eps: f32,
        out: Out,
        dtype: Dtype,
        stream_dtype: Dtype,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_add_rms_norm(
        delta: In,
        residual: Out,
        weight: In,
        eps: f32,
        out: Out,
        dtype: Dtype,
        stream_dtype: Dtype,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_softmax(x: In, out: Out, rows: i32, width: i32, stream: Stream) -> i32;
    pub(crate) fn moe_any_linear(args: *const AnyLinearArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_gate_up(args: *const AnyGateUpArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_down(args: *const AnyDownArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_qk_norm_rope_cache(args: *const QkNormRopeArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_attention(args: *const PagedAttentionArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_group_slots_workspace(num_local: i32) -> i64;
    pub(crate) fn moe_any_group_slots(args: *const AnyGroupSlotsArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_list_slots(
        topk_ids: In,
        expert_map: In,
        count: i32,
        num_ids: i32,
        num_local: i32,
        counts: Out,
        lists: Out,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_zero_absent(
        topk_ids: In,
        expert_map: In,
        count: i32,
        num_ids: i32,
        num_local: i32,
        width: i32,
        out: Out,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_mask_nonlocal(
        topk_ids: In,
        expert_map: In,
        count: i64,
        num_ids: i32,
        out: Out,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_local_ids(
        topk_ids: In,
        first: u32,
        num_local: u32,
        count: i64,
        out: Out,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_batch_rows(args: *const AnyBatchRowsArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_unbatch_rows(args: *const AnyBatchRowsArgs, stream: Stream) -> i32;
    pub(crate) fn moe_any_number_rows(
        counts: In,
        experts: i32,
        max_tokens: i32,
        offsets: Out,
        numbers: Out,
        stream: Stream,
    ) -> i32;
    pub(crate) fn moe_any_route(args: *const AnyRouteArgs, stream: Stream) -> i32;
}
