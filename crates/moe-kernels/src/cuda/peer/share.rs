//! Sums of thousands of rows, with the addition and the norm that follow, where each rank processes its share of the
//! rows.

use candle_core::{DType, Result, bail};

use super::{MAX_HIDDEN, PeerBuffers, ffi, is_row};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::cuda::{aligned, small};
use crate::exec::Exec;
use crate::monolithic::PreNorm;
use crate::view::{View, ViewMut};

impl PeerBuffers {
    /// Whether [`share_add_rms_norm_into`](Self::share_add_rms_norm_into) takes rows of H elements. All ranks get the
    /// same answer.
    pub fn fits_share(&self, rows: usize, hidden: usize) -> bool {
        is_row(hidden) && i32::try_from(rows).is_ok()
    }

    /// For the rows that this rank keeps: `residual` [T, H] f32 += the sum over the ranks of `partial` [T, H] f32,
    /// added in rank order, with the other ranks' parts rounded to bf16. For all rows: `out` [T, H] bf16 = norm of
    /// `residual`, with the same bits on all ranks. T, H and the number of ranks decide which rows a rank keeps. Rows
    /// of `residual` that other ranks keep are not changed.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a view that is not on the context's device or whose address is not a multiple of 16 bytes;
    /// what [`fits_share`](Self::fits_share) refuses.
    pub fn share_add_rms_norm_into(
        &self,
        partial: View,
        mut residual: ViewMut,
        norm: &PreNorm,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "peer share_add_rms_norm";
        let cuda = ex.cuda("peer share_add_rms_norm")?;
        let (t, h) = expect_matrix(op, "partial", &partial)?;
        expect_dtype(op, "partial", &partial, DType::F32)?;
        expect(op, "residual", &residual, DType::F32, &[t, h])?;
        expect(op, "weight", &norm.weight, DType::BF16, &[h])?;
        expect(op, "out", &out, DType::BF16, &[t, h])?;
        if !self.fits_share(t, h) || !aligned(&[partial, residual.as_view(), norm.weight, out.as_view()]) {
            bail!(
                "{op}: expected views at multiples of 16 bytes and H a multiple of 8 up to {MAX_HIDDEN}; got dims [{t}, {h}]"
            )
        }
        let partial = cuda.read(op, "partial", partial)?;
        let weight = cuda.read(op, "weight", norm.weight)?;
        let residual = cuda.write(op, "residual", &mut residual)?;
        let out = cuda.write(op, "out", &mut out)?;
        // SAFETY: dims, dtypes and alignment are checked above; the buffers are the promise of `new`.
        let code = unsafe {
            ffi::moe_peer_share_add_rms_norm(
                self,
                partial,
                residual,
                weight,
                norm.eps,
                out,
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn rows_of_any_number_and_of_whole_vectors_are_taken() {
        // SAFETY: nothing is launched.
        let group = unsafe { PeerBuffers::new(0, &[0; 2], 2 << 20, 0, Duration::from_secs(1)) }.unwrap();
        assert!(group.fits_share(0, 8) && group.fits_share(1 << 20, 16 * 1024));
        assert!(!group.fits_share(1, 12) && !group.fits_share(1, 32 * 1024) && !group.fits_share(1, 0));
    }
}
