//! The launchers of `cuda/peer/all_reduce.cu` and `cuda/peer/gather.cu`, documented there. Each returns a cudaError_t; pointers are
//! device pointers, null where the launcher says so.

use std::ffi::c_void;

use half::bf16;

use super::PeerBuffers;
use super::gather::PeerPart;

unsafe extern "C" {
    pub(super) fn moe_peer_buffer_bytes(ranks: i32, capacity: usize) -> usize;
    pub(super) fn moe_peer_buffer_init(buffer: *mut c_void, bytes: usize, stream: *mut c_void) -> i32;
    pub(super) fn moe_peer_all_reduce(
        peers: *const PeerBuffers,
        input: *const c_void,
        out: *mut c_void,
        dtype: i32,
        count: usize,
        stream: *mut c_void,
    ) -> i32;
    pub(super) fn moe_peer_all_reduce_add_rms_norm(
        peers: *const PeerBuffers,
        partial: *const f32,
        residual: *mut f32,
        weight: *const bf16,
        eps: f32,
        out: *mut bf16,
        rows: i32,
        hidden: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(super) fn moe_peer_slots(ranks: i32, capacity: usize) -> usize;
    pub(super) fn moe_peer_all_gather(
        peers: *const PeerBuffers,
        arrays: *const PeerPart,
        count: i32,
        stream: *mut c_void,
    ) -> i32;
    pub(super) fn moe_peer_reduce_scatter(
        peers: *const PeerBuffers,
        input: *const f32,
        out: *mut f32,
        count: usize,
        stream: *mut c_void,
    ) -> i32;
}
