//! The launchers of `cuda/sampling/sampling.cu` and `cuda/sampling/logprobs.cu`, documented there. Each returns a cudaError_t; pointers
//! are device pointers, null where the launcher says so.

use std::ffi::c_void;

unsafe extern "C" {
    pub(super) fn moe_sample(
        logits: *const f32,
        params: *const c_void,
        uses: *mut u32,
        edits: *const c_void,
        rows: i32,
        vocab: i32,
        tokens: *mut u32,
        status: *mut u32,
        stream: *mut c_void,
    ) -> i32;
    pub(super) fn moe_reset_slots(
        words: *const u32,
        count: i32,
        uses: *mut u32,
        edits: *mut c_void,
        vocab: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(super) fn moe_logprobs(
        logits: *const f32,
        params: *const u32,
        stride: i32,
        tokens: *const u32,
        rows: i32,
        vocab: i32,
        out: *mut u32,
        stream: *mut c_void,
    ) -> i32;
}
