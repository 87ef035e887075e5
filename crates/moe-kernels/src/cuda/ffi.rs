//! The launchers of `cuda/*.cu`, documented there. Each returns a cudaError_t.
//!
//! Pointers are device pointers, 16-byte aligned, null where the launcher says so; `stream` is a
//! cudaStream_t of the current device.

use std::ffi::{c_char, c_void};

use half::bf16;

unsafe extern "C" {
    pub(crate) fn cudaGetErrorString(code: i32) -> *const c_char;

    pub(crate) fn moe_embedding(
        table: *const bf16,
        ids: *const u32,
        out: *mut f32,
        tokens: i32,
        hidden: i32,
        vocab: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_rms_norm(
        x: *const f32,
        weight: *const bf16,
        eps: f32,
        out: *mut bf16,
        rows: i32,
        hidden: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_add_rms_norm(
        delta: *const f32,
        residual: *mut f32,
        weight: *const bf16,
        eps: f32,
        out: *mut bf16,
        rows: i32,
        hidden: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_linear_stream(
        x: *const c_void,
        norm: *const bf16,
        eps: f32,
        w: *const bf16,
        bias: *const bf16,
        out: *mut c_void,
        output: i32,
        m: i32,
        n: i32,
        k: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_linear_tensor(
        x: *const bf16,
        w: *const bf16,
        bias: *const bf16,
        out: *mut c_void,
        output: i32,
        m: i32,
        n: i32,
        k: i32,
        splits: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_qk_norm_rope_cache(
        qkv: *const f32,
        q_norm: *const bf16,
        k_norm: *const bf16,
        eps: f32,
        cos: *const f32,
        sin: *const f32,
        angle_index: *const u32,
        slots: *const u32,
        q_out: *mut bf16,
        k_cache: *mut bf16,
        v_cache: *mut bf16,
        tokens: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        block_size: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_attention_prefill(
        q: *const bf16,
        k_cache: *const bf16,
        v_cache: *const bf16,
        query_start_loc: *const u32,
        positions: *const u32,
        block_tables: *const u32,
        max_blocks: i32,
        out: *mut bf16,
        tokens: i32,
        sequences: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        block_size: i32,
        scale: f32,
        window: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_attention_decode_splits(rows: i32, heads: i32, kv_heads: i32, sms: i32) -> i32;
    pub(crate) fn moe_attention_decode_workspace(
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        splits: i32,
    ) -> usize;
    pub(crate) fn moe_attention_decode(
        qkv: *const f32,
        q_norm: *const bf16,
        k_norm: *const bf16,
        eps: f32,
        cos: *const f32,
        sin: *const f32,
        angle_index: *const u32,
        slots: *const u32,
        positions: *const u32,
        block_tables: *const u32,
        max_blocks: i32,
        k_cache: *mut bf16,
        v_cache: *mut bf16,
        out: *mut bf16,
        workspace: *mut c_void,
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        block_size: i32,
        scale: f32,
        window: i32,
        splits: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_gate_route(
        x: *const c_void,
        gate: *const c_void,
        gate_bias: *const c_void,
        correction_bias: *const c_void,
        valid: *const c_void,
        logits: *mut c_void,
        topk_ids: *mut c_void,
        topk_weights: *mut c_void,
        tickets: *mut c_void,
        tokens: i32,
        hidden: i32,
        experts: i32,
        top_k: i32,
        scoring: i32,
        raw_logits: i32,
        renormalize: i32,
        scale: f32,
        softcap: f32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_max_tiles(slots: i32, num_local: i32, tile_rows: i32) -> i32;
    pub(crate) fn moe_align_tokens(
        topk_ids: *const c_void,
        expert_map: *const c_void,
        slots: i32,
        num_ids: i32,
        num_local: i32,
        tile_rows: i32,
        offsets: *mut c_void,
        sorted: *mut c_void,
        tiles: *mut c_void,
        num_tiles: *mut c_void,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_experts_grouped_gate_up(
        x: *const c_void,
        w13: *const c_void,
        offsets: *const c_void,
        sorted: *const c_void,
        tiles: *const c_void,
        num_tiles: *const c_void,
        act: *mut c_void,
        slots: i32,
        top_k: i32,
        num_local: i32,
        hidden: i32,
        inter: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_experts_grouped_down(
        act: *const c_void,
        w2: *const c_void,
        offsets: *const c_void,
        sorted: *const c_void,
        tiles: *const c_void,
        num_tiles: *const c_void,
        slot_rows: *mut c_void,
        slots: i32,
        num_local: i32,
        hidden: i32,
        inter: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_combine(
        slot_rows: *const c_void,
        topk_ids: *const c_void,
        topk_weights: *const c_void,
        expert_map: *const c_void,
        out: *mut c_void,
        tokens: i32,
        top_k: i32,
        num_ids: i32,
        num_local: i32,
        hidden: i32,
        output: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_experts_stream_flags(slots: i32, num_local: i32) -> i32;
    pub(crate) fn moe_experts_stream(
        x: *const c_void,
        w13: *const c_void,
        w2: *const c_void,
        topk_ids: *const c_void,
        topk_weights: *const c_void,
        expert_map: *const c_void,
        act: *mut c_void,
        slot_rows: *mut c_void,
        out: *mut c_void,
        flags: *mut c_void,
        flag_words: i32,
        tokens: i32,
        top_k: i32,
        num_ids: i32,
        num_local: i32,
        hidden: i32,
        inter: i32,
        output: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_rope_rows(
        positions: *const u32,
        inv_freq: *const f32,
        half: i32,
        attention_factor: f32,
        cos: *mut f32,
        sin: *mut f32,
        rows: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_feed_tokens(
        from: *const u32,
        sampled: *const u32,
        ids: *mut u32,
        valid: *const u32,
        kept_valid: *mut u32,
        rows: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_fill_random(
        out: *mut bf16,
        count: usize,
        seed: u64,
        stream_id: u64,
        bound: f32,
        stream: *mut c_void,
    ) -> i32;
    pub(crate) fn moe_sample(
        logits: *const f32,
        params: *const c_void,
        rows: i32,
        vocab: i32,
        tokens: *mut u32,
        status: *mut u32,
        stream: *mut c_void,
    ) -> i32;
}
