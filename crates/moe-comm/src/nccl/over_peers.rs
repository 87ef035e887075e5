//! Decides which collectives of a group use peer memory.

use candle_core::{DType, Result};
use moe_kernels::{Exec, ViewMut};

use crate::collective::ReduceOp;
use crate::parts::Request;
use crate::peer::PeerAllReduce;

/// Runs a collective over peer memory if that is possible: gathers and scattered sums of any size, and sums of small
/// arrays. The decision depends only on what is the same on all ranks.
pub(super) fn over_peers(
    peers: Option<&PeerAllReduce>,
    request: &mut Request<'_, '_>,
    ex: &mut Exec,
) -> Result<bool> {
    let Some(peers) = peers else { return Ok(false) };
    match request {
        Request::Reduce { data, op: ReduceOp::Sum } if peers.fits(data.dtype(), data.elem_count()) => {
            peers.all_reduce_into(data.reborrow(), ex)?;
        }
        Request::Scatter { input, counts, out, op: ReduceOp::Sum, needs }
            if out.dtype() == DType::F32 && peers.fits_scatter(DType::F32, &parts(out, counts)) =>
        {
            peers.reduce_scatter_into(*input, counts, *needs, out.reborrow(), ex)?;
        }
        Request::Gather { arrays, counts, needs } => {
            let sizes: Vec<_> = arrays.iter().map(|(_, out)| (out.dtype(), parts(out, counts))).collect();
            if !peers.fits_gather(sizes.iter().map(|(dtype, parts)| (*dtype, &parts[..]))) {
                return Ok(false);
            }
            let arrays = arrays.iter_mut().map(|(input, out)| (*input, out.reborrow())).collect();
            peers.all_gather_into(arrays, counts, *needs, ex)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Number of elements in each rank's rows, which have the row dims of `like`.
fn parts(like: &ViewMut<'_>, counts: &[usize]) -> Vec<usize> {
    let width: usize = like.dims().iter().skip(1).product();
    counts.iter().map(|rows| rows * width).collect()
}
