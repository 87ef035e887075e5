//! Each rank's sums of its experts' slots, returned to the owners of tokens, with the addition and the norm that
//! follow.

use candle_core::{DType, Result, bail};

use super::gather::{PeerNeeds, address, counts_of_all};
use super::{MAX_HIDDEN, PeerBuffers, ffi, is_row};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::cuda::args::{CombineArgs, Dtype, Output};
use crate::cuda::{aligned, small};
use crate::dispatched::SlotRows;
use crate::exec::Exec;
use crate::monolithic::PreNorm;
use crate::view::{View, ViewMut};

/// The largest number of slots of a token: each lane of a warp checks one.
const MAX_SLOTS: usize = 32;

/// Which rows each rank owns, and which ranks have sums for them.
#[derive(Clone, Copy, Debug)]
pub struct OwnedRows<'a> {
    /// The number of rows of each rank, the same on all ranks.
    pub counts: &'a [usize],
    /// The ids [sum(counts), K] u32 of all rows, K at most 32, and the rank \[P\] u32 that owns each expert, the same
    /// on all ranks. If they are given, a rank that owns no expert of a row sends nothing for it, and its sum for that
    /// row must be zero.
    pub needs: Option<(View<'a>, View<'a>)>,
}

impl PeerBuffers {
    /// Whether [`combine_add_rms_norm_into`](Self::combine_add_rms_norm_into) takes K slots of H elements for these
    /// numbers of rows of each rank. All ranks get the same answer.
    pub fn fits_combine(&self, counts: &[usize], top_k: usize, hidden: usize) -> bool {
        let (Ok(width), true) = (i32::try_from(hidden), is_row(hidden)) else { return false };
        // SAFETY: a pure function of three numbers.
        let most = unsafe { ffi::moe_peer_combine_rows(self.ranks, self.capacity as usize, width) };
        let fits = |rows: &usize| i64::try_from(*rows).is_ok_and(|rows| rows <= most);
        counts.len() == self.ranks as usize && counts.iter().all(fits) && (1..=MAX_SLOTS).contains(&top_k)
    }

    /// `residual` [counts\[rank\], H] f32 += the sum over the ranks, in rank order, of each rank's sum of these rows'
    /// slots in ascending k. Then `out` [counts\[rank\], H] bf16 = norm of `residual`. `slots` contains all ranks'
    /// rows, [sum(counts), ..] in rank order, and `counts` is the same on all ranks. The bits are the same as with
    /// separate launches for the sum, its return, and the addition with the norm.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a view that is not on the context's device or whose address is not a multiple of 16 bytes;
    /// what [`fits_combine`](Self::fits_combine) refuses.
    pub fn combine_add_rms_norm_into(
        &self,
        slots: &SlotRows,
        OwnedRows { counts, needs }: OwnedRows,
        mut residual: ViewMut,
        norm: &PreNorm,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "peer combine_add_rms_norm";
        let cuda = ex.cuda("peer combine_add_rms_norm")?;
        let (tokens, top_k, hidden) = slots.check(op)?;
        let own = counts.get(self.rank as usize).copied().unwrap_or(0);
        expect(op, "residual", &residual, DType::F32, &[own, hidden])?;
        expect(op, "weight", &norm.weight, DType::BF16, &[hidden])?;
        expect(op, "out", &out, DType::BF16, &[own, hidden])?;
        if counts.iter().sum::<usize>() != tokens
            || !self.fits_combine(counts, top_k, hidden)
            || !aligned(&[slots.rows, residual.as_view(), norm.weight, out.as_view()])
        {
            bail!(
                "{op}: expected views at multiples of 16 bytes, the rows of {} ranks, up to {MAX_SLOTS} slots and H a multiple \
                 of 8 up to {MAX_HIDDEN}; got dims {:?} of {counts:?} rows",
                self.ranks,
                slots.rows.dims()
            )
        }
        let routing = slots.routing;
        let num_ids = match routing.and_then(|routing| routing.expert_map) {
            Some(map) => small(op, map.elem_count())?,
            None => i32::MAX,
        };
        if let Some(map) = routing.and_then(|routing| routing.expert_map) {
            expect_dtype(op, "expert_map", &map, DType::I32)?;
        }
        let args = CombineArgs {
            slot_rows: cuda.read(op, "slots", slots.rows)?,
            topk_ids: cuda.read_or_null(op, "topk_ids", routing.map(|routing| routing.topk_ids))?,
            topk_weights: cuda.read_or_null(
                op,
                "topk_weights",
                routing.map(|routing| routing.topk_weights),
            )?,
            expert_map: cuda.read_or_null(
                op,
                "expert_map",
                routing.and_then(|routing| routing.expert_map),
            )?,
            out: std::ptr::null_mut(),
            tokens: small(op, tokens)?,
            top_k: small(op, top_k)?,
            num_ids,
            // This bound only has to be large enough: every local expert in the map exists.
            num_local: num_ids,
            hidden: small(op, hidden)?,
            rows: Dtype::of(op, DType::F32)?,
            output: Output::stored_as(DType::F32),
        };
        let rows = counts_of_all(counts)?;
        // The sums are rows of f32, in whole slots.
        let needs = match needs {
            Some((ids, owners)) if tokens > 0 => {
                let (_, ids_of_row) = expect_matrix(op, "ids", &ids)?;
                if ids_of_row > MAX_SLOTS {
                    bail!("{op}: expected up to {MAX_SLOTS} ids of a row, got {ids_of_row}")
                }
                Some(PeerNeeds::new(op, &slots.rows, (ids, owners), cuda)?)
            }
            _ => None,
        };
        let weight = cuda.read(op, "weight", norm.weight)?;
        let residual = cuda.write(op, "residual", &mut residual)?;
        let out = cuda.write(op, "out", &mut out)?;
        // SAFETY: dims, dtypes and alignment are checked above; the buffers are the promise of `new`.
        let code = unsafe {
            ffi::moe_peer_combine_add_rms_norm(
                self,
                &args,
                rows.as_ptr(),
                address(&needs),
                residual,
                weight,
                norm.eps,
                out,
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
    fn rows_that_the_buffers_hold_are_taken() {
        // SAFETY: nothing is launched.
        let group = unsafe { PeerBuffers::new(0, &[0; 4], 2 << 20, 0, Duration::from_secs(1)) }.unwrap();
        // Half a buffer has 16 MiB: 4 MiB for each rank.
        assert!(
            group.fits_combine(&[512, 0, 1, 512], 8, 2048) && !group.fits_combine(&[513, 0, 0, 0], 8, 2048)
        );
        assert!(!group.fits_combine(&[1; 3], 8, 2048), "three of four ranks");
        assert!(!group.fits_combine(&[1; 4], 33, 2048) && !group.fits_combine(&[1; 4], 0, 2048));
        assert!(!group.fits_combine(&[1; 4], 8, 12) && !group.fits_combine(&[1; 4], 8, 32 * 1024));
    }
}
