//! Which collectives of a group go over peer memory.

use candle_core::Result;
use moe_kernels::{Exec, View, ViewMut};

use crate::communicator::ReduceOp;
use crate::parts::{Part, Verb};
use crate::peer::PeerAllReduce;

/// Runs small parts over peer memory, if they can; what decides is the same on all ranks.
pub(super) fn over_peers(
    peers: Option<&PeerAllReduce>,
    parts: &mut [Part<'_>],
    ex: &mut Exec,
) -> Result<bool> {
    let Some(peers) = peers else { return Ok(false) };
    match parts {
        [Part { verb: Verb::AllReduce(ReduceOp::Sum), out: Some(data), .. }]
            if peers.fits(data.dtype(), data.elem_count()) =>
        {
            peers.all_reduce_into(data.reborrow(), ex)?;
        }
        [Part { verb: Verb::ReduceScatter(ReduceOp::Sum), input: Some(input), out: Some(out) }]
            if peers.fits_scatter(out.dtype(), out.elem_count()) =>
        {
            peers.reduce_scatter_into(*input, out.reborrow(), ex)?;
        }
        _ => {
            let arrays: Option<Vec<_>> = parts.iter_mut().map(gathered).collect();
            let sizes = |(input, _): &(View, ViewMut)| (input.dtype(), input.elem_count());
            match arrays.filter(|arrays| peers.fits_gather(arrays.iter().map(sizes))) {
                Some(arrays) => peers.all_gather_into(arrays, ex)?,
                None => return Ok(false),
            }
        }
    }
    Ok(true)
}

/// The input and output of a gather of equal parts.
fn gathered<'v>(part: &'v mut Part<'_>) -> Option<(View<'v>, ViewMut<'v>)> {
    match part {
        Part { verb: Verb::AllGather, input: Some(input), out: Some(out) } => Some((*input, out.reborrow())),
        _ => None,
    }
}
