//! The rows of a decode step, sent to the ranks whose experts need them.

use candle_core::{DType, Result, bail};

use super::gather::{counts_of_all, row_slots};
use super::{MAX_PEERS, PeerBuffers, ffi};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::cuda::{aligned, small};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// The tokens of a call in the form that the launcher takes.
#[repr(C)]
pub(crate) struct PeerTokens {
    rows: *const std::ffi::c_void,
    all_rows: *mut std::ffi::c_void,
    ids: *const u32,
    all_ids: *mut u32,
    weights: *const f32,
    all_weights: *mut f32,
    owners: *const u32,
    counts: [u32; MAX_PEERS],
    row_slots: u32,
    top_k: u32,
    experts: u32,
}

impl PeerBuffers {
    /// Whether [`dispatch_into`](Self::dispatch_into) takes rows of H elements with K experts, in these numbers from
    /// each rank. All ranks get the same answer.
    pub fn fits_dispatch(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let (Some(row_slots), Ok(top_k)) = (row_slots(dtype, hidden), u32::try_from(top_k)) else {
            return false;
        };
        // SAFETY: a pure function of four numbers.
        let most =
            unsafe { ffi::moe_peer_dispatch_rows(self.ranks, self.capacity as usize, row_slots, top_k) };
        let fits = |rows: &usize| i64::try_from(*rows).is_ok_and(|rows| rows <= most);
        most > 0 && counts.len() == self.ranks as usize && counts.iter().all(fits)
    }

    /// For each pair: concatenates every rank's input in rank order into the output. Of `rows`
    /// [counts\[rank\], H] a rank gets only those with an expert that it owns, and its own; other rows of the output
    /// are not written. `ids` u32 and `weights` f32 are [counts\[rank\], K] and arrive complete. `owners` \[P\] u32 is
    /// the rank of each expert, the same on all ranks; ids that are not below P name no expert. NaNs may lose their
    /// payload.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a view that is not on the context's device; rows whose address is not a multiple of 16
    /// bytes; what [`fits_dispatch`](Self::fits_dispatch) refuses.
    pub fn dispatch_into(
        &self,
        (rows, mut all_rows): (View, ViewMut),
        (ids, mut all_ids): (View, ViewMut),
        (weights, mut all_weights): (View, ViewMut),
        counts: &[usize],
        owners: View,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "peer dispatch";
        let cuda = ex.cuda("peer dispatch")?;
        let (own, hidden) = expect_matrix(op, "rows", &rows)?;
        let (_, top_k) = expect_matrix(op, "ids", &ids)?;
        let total = counts.iter().sum::<usize>();
        expect(op, "ids", &ids, DType::U32, &[own, top_k])?;
        expect(op, "weights", &weights, DType::F32, &[own, top_k])?;
        expect(op, "all rows", &all_rows, rows.dtype(), &[total, hidden])?;
        expect(op, "all ids", &all_ids, DType::U32, &[total, top_k])?;
        expect(op, "all weights", &all_weights, DType::F32, &[total, top_k])?;
        expect_dtype(op, "owners", &owners, DType::U32)?;
        let fits = self.fits_dispatch(counts, top_k, hidden, rows.dtype());
        if !fits || counts[self.rank as usize] != own || !aligned(&[rows, all_rows.as_view()]) {
            bail!(
                "{op}: expected rows of floats in whole slots of 16 bytes at multiples of 16 bytes, the counts of {} ranks \
                 that fit their buffers, and up to 32 ids; got dims [{own}, {hidden}], {counts:?} rows and {top_k} ids",
                self.ranks
            )
        }
        let tokens = PeerTokens {
            rows: cuda.read(op, "rows", rows)?,
            all_rows: cuda.write(op, "all rows", &mut all_rows)?,
            ids: cuda.read(op, "ids", ids)?,
            all_ids: cuda.write(op, "all ids", &mut all_ids)?,
            weights: cuda.read(op, "weights", weights)?,
            all_weights: cuda.write(op, "all weights", &mut all_weights)?,
            owners: cuda.read(op, "owners", owners)?,
            counts: counts_of_all(counts)?,
            row_slots: row_slots(rows.dtype(), hidden).unwrap_or(0),
            top_k: small(op, top_k)? as u32,
            experts: small(op, owners.elem_count())? as u32,
        };
        // SAFETY: dims, dtypes, alignment and sizes are checked above; the buffers are the promise of `new`.
        cuda.check(op, unsafe { ffi::moe_peer_dispatch(self, &tokens, cuda.raw()?) })
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
        let fits = |counts: &[usize], top_k, hidden| group.fits_dispatch(counts, top_k, hidden, DType::BF16);
        // A row has 256 slots, and 4 of ids and 2 of weights. Half a buffer has 4 MiB for each rank.
        let most = (4 << 20) / 16 / 262;
        assert!(fits(&[most, 0, 1, most], 8, 2048) && !fits(&[most + 1, 0, 0, 0], 8, 2048));
        assert!(!fits(&[1; 3], 8, 2048), "three of four ranks");
        assert!(
            fits(&[1; 4], 32, 8) && !fits(&[1; 4], 33, 8) && !fits(&[1; 4], 0, 8) && !fits(&[1; 4], 2, 12)
        );
        assert!(
            group.fits_dispatch(&[1; 4], 1, 4, DType::F32) && !group.fits_dispatch(&[1; 4], 1, 8, DType::U32)
        );
    }
}
