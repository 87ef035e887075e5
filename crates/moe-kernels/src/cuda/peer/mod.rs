//! Collectives over memory that the ranks of a host share. This file has the launches of `cuda/peer/all_reduce.cu`;
//! `combine`, `dispatch` and `share` have the launches of the files with the same names, and `gather` has the launches
//! of `gather.cu` and `scatter.cu`.
//!
//! The caller (moe-comm's `PeerAllReduce`) allocates that memory, maps it and knows the other ranks. This module has
//! the addresses, the checks and the launches.

mod combine;
mod dispatch;
mod gather;
mod share;

use std::time::Duration;

use candle_core::{DType, Result, bail};

pub use combine::OwnedRows;
pub(crate) use dispatch::PeerTokens;
pub(crate) use gather::{PeerArray, PeerNeeds};

use super::args::Dtype;
use super::{aligned, ffi, small};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::exec::Exec;
use crate::monolithic::PreNorm;
use crate::view::{View, ViewMut};

/// The largest number of ranks in a group.
pub const MAX_PEERS: usize = 8;

/// The widest rows of the fused form: a block keeps its part of a row in shared memory.
const MAX_HIDDEN: usize = 16 * 1024;

/// Whether the fused forms take rows of this number of elements.
fn is_row(hidden: usize) -> bool {
    hidden > 0 && hidden.is_multiple_of(8) && hidden <= MAX_HIDDEN
}

/// A group's buffers with the addresses that a rank's kernels use; `moe::Peers` of `cuda/peer/peer.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PeerBuffers {
    buffers: [u64; MAX_PEERS],
    status: u64,
    limit: u64,
    capacity: u64,
    rank: i32,
    ranks: i32,
}

impl PeerBuffers {
    /// Bytes of each rank's buffer for calls of up to `capacity` bytes.
    ///
    /// # Errors
    /// Fewer than 2 or more than [`MAX_PEERS`] ranks; a capacity above 1 GiB.
    pub fn bytes(ranks: usize, capacity: usize) -> Result<usize> {
        // SAFETY: a pure function of two numbers.
        match unsafe { ffi::moe_peer_buffer_bytes(small("peers", ranks)?, capacity) } {
            0 => bail!(
                "peers: expected 2 to {MAX_PEERS} ranks and at most 1 GiB, got {ranks} and {capacity} bytes"
            ),
            bytes => Ok(bytes),
        }
    }

    /// Initialises a new buffer of this rank, in stream order.
    ///
    /// # Safety
    /// `buffer` is the address of `bytes` bytes on the context's device, a size from [`bytes`](Self::bytes).
    ///
    /// # Errors
    /// A context on the CPU; an error of the device.
    pub unsafe fn init(buffer: u64, bytes: usize, ex: &Exec) -> Result<()> {
        let cuda = ex.cuda("peers")?;
        // SAFETY: the caller's promise.
        cuda.check("peers", unsafe { ffi::moe_peer_buffer_init(buffer as *mut _, bytes, cuda.raw()?) })
    }

    /// The group of the ranks that have these buffers, with the addresses that are valid on `rank`. A kernel that waits
    /// longer than `limit` for a rank ends and writes 1 + that rank to the u32 at `status`. A kernel that finds a value
    /// there does not wait.
    ///
    /// # Safety
    /// As long as kernels of this group run, each address points to a buffer of [`bytes`](Self::bytes) for this
    /// capacity and `status` to a word in host memory, and the device of `rank` can read and write them. All buffers
    /// were initialised before. The ranks launch the same calls in the same order, each on one stream.
    ///
    /// # Errors
    /// An invalid number of ranks or capacity; a rank outside of the group.
    pub unsafe fn new(
        rank: usize,
        buffers: &[u64],
        capacity: usize,
        status: u64,
        limit: Duration,
    ) -> Result<Self> {
        Self::bytes(buffers.len(), capacity)?;
        if rank >= buffers.len() {
            bail!("peers: rank {rank} is outside of a group of {} ranks", buffers.len())
        }
        let mut all = [0; MAX_PEERS];
        all[..buffers.len()].copy_from_slice(buffers);
        Ok(Self {
            buffers: all,
            status,
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            capacity: capacity as u64,
            rank: small("peers", rank)?,
            ranks: small("peers", buffers.len())?,
        })
    }

    /// Whether [`all_reduce_into`](Self::all_reduce_into) takes `count` elements. All ranks get the same answer.
    pub fn fits(&self, dtype: DType, count: usize) -> bool {
        let bytes = count.saturating_mul(dtype.size_in_bytes());
        matches!(dtype, DType::F32 | DType::BF16) && bytes as u64 <= self.capacity
    }

    /// Whether [`all_reduce_add_rms_norm_into`](Self::all_reduce_add_rms_norm_into) takes rows of H elements.
    pub fn fits_norm(&self, rows: usize, hidden: usize) -> bool {
        is_row(hidden) && self.fits(DType::F32, rows.saturating_mul(hidden))
    }

    /// Replaces `data` (f32 or bf16, any dims, any alignment) by the sum over the ranks: f32 additions in rank
    /// order, rounded once. The same bits on every rank and in every run.
    ///
    /// # Errors
    /// A view that is not on the context's device; what [`fits`](Self::fits) refuses.
    pub fn all_reduce_into(&self, mut data: ViewMut, ex: &mut Exec) -> Result<()> {
        let op = "peer all_reduce";
        let cuda = ex.cuda("peer all_reduce")?;
        let dtype = data.dtype();
        let count = data.elem_count();
        if !self.fits(dtype, count) {
            let dtype = dtype.as_str();
            let most = self.capacity;
            bail!("{op}: expected f32 or bf16 and at most {most} bytes, got {count} elements of {dtype}")
        }
        let at: *mut std::ffi::c_void = cuda.write(op, "data", &mut data)?;
        let dtype = Dtype::of(op, dtype)?;
        // SAFETY: dtype and size are checked above; the buffers are the promise of `new`.
        cuda.check(op, unsafe { ffi::moe_peer_all_reduce(self, at, at, dtype, count, cuda.raw()?) })
    }

    /// `residual` [T, H] f32 += the sum over the ranks of `partial` [T, H] f32, added as in
    /// [`all_reduce_into`](Self::all_reduce_into). If `norm` is given, its `out` [T, H] bf16 = norm of `residual`. A
    /// residual that is the same on all ranks stays the same, bit by bit.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a view that is not on the context's device or whose address is not a multiple of 16 bytes;
    /// what [`fits_norm`](Self::fits_norm) refuses.
    pub fn all_reduce_add_rms_norm_into(
        &self,
        partial: View,
        mut residual: ViewMut,
        norm: Option<(&PreNorm, ViewMut)>,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "peer all_reduce_add_rms_norm";
        let cuda = ex.cuda("peer all_reduce_add_rms_norm")?;
        let (t, h) = expect_matrix(op, "partial", &partial)?;
        expect_dtype(op, "partial", &partial, DType::F32)?;
        expect(op, "residual", &residual, DType::F32, &[t, h])?;
        let mut weight = std::ptr::null();
        let mut eps = 0.;
        let mut to = std::ptr::null_mut();
        let mut vectors = aligned(&[partial, residual.as_view()]);
        if let Some((norm, mut out)) = norm {
            expect(op, "weight", &norm.weight, DType::BF16, &[h])?;
            expect(op, "out", &out, DType::BF16, &[t, h])?;
            vectors &= aligned(&[norm.weight, out.as_view()]);
            (weight, eps) = (cuda.read(op, "weight", norm.weight)?, norm.eps);
            to = cuda.write(op, "out", &mut out)?;
        }
        let partial = cuda.read(op, "partial", partial)?;
        let residual = cuda.write(op, "residual", &mut residual)?;
        if !self.fits_norm(t, h) || !vectors {
            bail!(
                "{op}: expected views at multiples of 16 bytes, H a multiple of 8 up to {MAX_HIDDEN} and at most {} \
                 bytes of f32; got dims [{t}, {h}]",
                self.capacity
            )
        }
        // SAFETY: dims, dtypes, alignment and size are checked above; the buffers are the promise of `new`.
        let code = unsafe {
            ffi::moe_peer_all_reduce_add_rms_norm(
                self,
                partial,
                residual,
                weight,
                eps,
                to,
                small(op, t)?,
                small(op, h)?,
                cuda.raw()?,
            )
        };
        cuda.check(op, code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocation and addressing must follow the same rule.
    #[test]
    fn buffers_hold_both_halves_of_one_and_two_shots() {
        for (ranks, capacity) in [(2, 1 << 20), (3, 100), (4, 2 << 20), (8, 2 << 20), (8, 1)] {
            let bytes = PeerBuffers::bytes(ranks, capacity).unwrap();
            assert!(bytes >= 256 + 2 * 2 * capacity, "{ranks} ranks, {capacity} bytes: {bytes}");
            assert_eq!(
                bytes,
                256 + (32 << 20),
                "{ranks} ranks, {capacity} bytes: halves for thousands of rows"
            );
        }
        for (ranks, capacity) in [(1, 64), (9, 64), (4, 2 << 30)] {
            assert!(PeerBuffers::bytes(ranks, capacity).is_err(), "{ranks} ranks, {capacity} bytes");
        }
    }

    #[test]
    fn a_rank_is_one_of_the_group() {
        // SAFETY: nothing is launched.
        let at =
            |rank, n: usize| unsafe { PeerBuffers::new(rank, &vec![0; n], 64, 0, Duration::from_secs(1)) };
        assert!(at(1, 2).is_ok_and(|group| group.fits(DType::F32, 16) && !group.fits(DType::F32, 17)));
        assert!(at(0, 8).is_ok_and(|group| group.fits_norm(2, 8) && !group.fits_norm(1, 12)));
        assert!(at(2, 2).is_err_and(|e| e.to_string().contains("rank 2 is outside of a group of 2 ranks")));
        assert!(at(0, 9).is_err());
    }
}
