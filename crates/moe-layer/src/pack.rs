//! Loading tensors into one pack, so that the host never holds a part of a large model and its copy at once.

use candle_nn::VarBuilder;
use moe_kernels::candle::{Result, Tensor};
use moe_kernels::{Buffer, TensorView};

/// Loads tensors of shape [rows, row...] under each other into one pack. `parts` are names with their
/// rows; `row` is `[columns]` for matrices and empty for vectors. Beside the pack, one of them at a
/// time is in host memory.
///
/// # Errors
/// A missing tensor, or one of another shape, by name.
pub fn load_packed<S: AsRef<str>>(vb: &VarBuilder, parts: &[(S, usize)], row: &[usize]) -> Result<Tensor> {
    let dims = |rows: usize| [&[rows], row].concat();
    let load = |vb: &VarBuilder, (name, rows): &(S, usize)| vb.get(dims(*rows), name.as_ref());
    let Some((first, rest)) = parts.split_first() else {
        return Tensor::zeros(dims(0), vb.dtype(), vb.device());
    };
    if !vb.device().is_cpu() {
        // Parts come to a device without a stop on the host, and are copied there.
        return Tensor::cat(&parts.iter().map(|part| load(vb, part)).collect::<Result<Vec<_>>>()?, 0);
    }
    // The first part is read before the pack is allocated, so that a size that the checkpoint does
    // not have is an error that names a tensor.
    let first = load(vb, first)?.contiguous()?;
    let mut pack = Buffer::zeros(vb.dtype(), &dims(parts.iter().map(|(_, rows)| rows).sum()))?;
    let mut start = 0;
    let mut put = |part: &Tensor| {
        let rows = part.dims()[0];
        start += rows;
        pack.view_mut().narrow(start - rows, rows)?.copy_from(TensorView::new(part)?.view()?)
    };
    put(&first)?;
    drop(first);
    rest.iter().try_for_each(|part| put(&load(vb, part)?.contiguous()?))?;
    pack.into_tensor()
}
