//! Copies of rows of several arrays at once: the states of all layers.

use candle_core::{Result, bail};
use rayon::prelude::*;

use crate::exec::Exec;
use crate::operands::StateArrays;

/// Copies row `rows[i][0]` of each array to row `rows[i][1]` of the array that belongs to it. No two copies may have
/// the same place. On a CUDA device all rows of all arrays are copied by one launch, in stream order.
///
/// # Errors
/// A row outside of its array; arrays with other rows than the ones that belong to them, or on another device.
pub fn copy_states_into(mut arrays: Vec<StateArrays>, rows: &[[u32; 2]], ex: &Exec) -> Result<()> {
    for array in &arrays {
        check(array, rows)?;
    }
    if arrays.is_empty() || rows.is_empty() {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::rows::copy_states(arrays, rows, ex);
    }
    let copy = |array: &mut StateArrays| {
        rows.iter().try_for_each(|&[from, to]| {
            let mut to = array.to.reborrow().narrow(to as usize, 1)?;
            to.copy_from(array.from.narrow(from as usize, 1)?)
        })
    };
    ex.install(|| arrays.par_iter_mut().try_for_each(copy))
}

fn check(array: &StateArrays, rows: &[[u32; 2]]) -> Result<()> {
    let from = array.from.dims();
    let to = array.to.dims();
    let same = from.get(1..) == to.get(1..) && array.from.dtype() == array.to.dtype();
    let (Some(&first), Some(&second), true) = (from.first(), to.first(), same) else {
        bail!(
            "copy_states: expected arrays of the same rows, got {from:?} of {} and {to:?} of {}",
            array.from.dtype().as_str(),
            array.to.dtype().as_str()
        )
    };
    let is_outside = |&&[from, to]: &&[u32; 2]| from as usize >= first || to as usize >= second;
    match rows.iter().find(is_outside) {
        Some([from, to]) => {
            bail!("copy_states: row {from} to {to}, but the arrays have {first} and {second}")
        }
        None => Ok(()),
    }
}
