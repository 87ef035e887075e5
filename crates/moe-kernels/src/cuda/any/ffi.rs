//! The launchers of `cuda/any/*.cu`, documented there. Each returns a cudaError_t; pointers are
//! device pointers to elements of the dtype that a code names, null where the launcher says so.

use std::ffi::c_void;

use super::route::RawRoute;

type In = *const c_void;
type Out = *mut c_void;
type Stream = *mut c_void;

unsafe extern "C" {
    pub(super) fn moe_any_gather(
        table: In,
        ids: In,
        out: Out,
        dtype: i32,
        out_dtype: i32,
        rows: i32,
        width: i32,
        table_rows: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_copy(
        x: In,
        out: Out,
        dtype: i32,
        out_dtype: i32,
        count: i64,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_add(x: In, acc: Out, dtype: i32, acc_dtype: i32, count: i64, stream: Stream)
    -> i32;
    pub(super) fn moe_any_add_scaled(
        x: In,
        scales: In,
        acc: Out,
        dtype: i32,
        acc_dtype: i32,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_scale_rows(
        x: In,
        scales: In,
        out: Out,
        dtype: i32,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_weighted_sum(
        slots: In,
        ids: In,
        weights: In,
        out: Out,
        out_dtype: i32,
        tokens: i32,
        top_k: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_fill(out: Out, value: f32, count: i64, stream: Stream) -> i32;
    pub(super) fn moe_any_sequence(out: Out, step: u32, count: i64, stream: Stream) -> i32;
    pub(super) fn moe_any_sigmoid(x: Out, count: i64, stream: Stream) -> i32;
    pub(super) fn moe_any_rms_norm(
        x: In,
        weight: In,
        eps: f32,
        out: Out,
        dtype: i32,
        stream_dtype: i32,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_add_rms_norm(
        delta: In,
        residual: Out,
        weight: In,
        eps: f32,
        out: Out,
        dtype: i32,
        stream_dtype: i32,
        rows: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_softmax(x: In, out: Out, rows: i32, width: i32, stream: Stream) -> i32;
    pub(super) fn moe_any_linear(
        x: In,
        w: In,
        bias: In,
        out: Out,
        dtype: i32,
        out_dtype: i32,
        rows: i32,
        n: i32,
        k: i32,
        invariant: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_gate_up(
        x: In,
        offsets: In,
        in_rows: In,
        w13: In,
        bias: In,
        out: Out,
        dtype: i32,
        activation: i32,
        alpha: f32,
        limit: f32,
        x_rows: i32,
        rows: i32,
        experts: i32,
        width: i32,
        hidden: i32,
        invariant: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_down(
        x: In,
        offsets: In,
        out_rows: In,
        w2: In,
        bias: In,
        out: Out,
        dtype: i32,
        rows: i32,
        num_out: i32,
        experts: i32,
        hidden: i32,
        width: i32,
        invariant: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_qk_norm_rope_cache(
        qkv: In,
        q_norm: In,
        k_norm: In,
        eps: f32,
        cos: In,
        sin: In,
        angle_index: In,
        slots: In,
        q_out: Out,
        k_cache: Out,
        v_cache: Out,
        dtype: i32,
        stream_dtype: i32,
        q_dtype: i32,
        tokens: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        block_size: i32,
        num_slots: i64,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_attention(
        q: In,
        k_cache: In,
        v_cache: In,
        starts: In,
        positions: In,
        tables: In,
        out: Out,
        dtype: i32,
        q_dtype: i32,
        rows: i32,
        sequences: i32,
        max_blocks: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        num_blocks: i32,
        block_size: i32,
        scale: f32,
        window: i32,
        invariant: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_group_slots_workspace(num_local: i32) -> i64;
    pub(super) fn moe_any_group_slots(
        topk_ids: In,
        expert_map: In,
        count: i32,
        top_k: i32,
        num_ids: i32,
        num_local: i32,
        offsets: Out,
        slots: Out,
        in_rows: Out,
        workspace: Out,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_list_slots(
        topk_ids: In,
        expert_map: In,
        count: i32,
        num_ids: i32,
        num_local: i32,
        counts: Out,
        lists: Out,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_zero_absent(
        topk_ids: In,
        expert_map: In,
        count: i32,
        num_ids: i32,
        num_local: i32,
        width: i32,
        out: Out,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_mask_nonlocal(
        topk_ids: In,
        expert_map: In,
        count: i64,
        num_ids: i32,
        out: Out,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_local_ids(
        topk_ids: In,
        first: u32,
        num_local: u32,
        count: i64,
        out: Out,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_batch_rows(
        rows: In,
        offsets: In,
        slots: In,
        out: Out,
        counts: Out,
        dtype: i32,
        num_slots: i32,
        top_k: i32,
        experts: i32,
        max_tokens: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_unbatch_rows(
        rows: In,
        offsets: In,
        slots: In,
        out: Out,
        dtype: i32,
        num_slots: i32,
        experts: i32,
        max_tokens: i32,
        width: i32,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_number_rows(
        counts: In,
        experts: i32,
        max_tokens: i32,
        offsets: Out,
        numbers: Out,
        stream: Stream,
    ) -> i32;
    pub(super) fn moe_any_route(args: *const RawRoute, stream: Stream) -> i32;
}
