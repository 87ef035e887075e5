//! Loading tensors into one pack, so that the host never holds a part of a large model and its copy at once.

use candle_nn::VarBuilder;
use moe_kernels::candle::{Device, Result, Tensor};
use moe_kernels::{Buffer, Exec, TensorView, copy_rows_into};

/// The tensors `names`, each [rows, columns], under each other: [names * rows, columns]. Beside the
/// pack, one of them at a time is in host memory.
pub(crate) fn load_rows(vb: &VarBuilder, names: &[&str], rows: usize, columns: usize) -> Result<Tensor> {
    if !vb.device().is_cpu() && !names.is_empty() {
        // Parts come to a device without a stop on the host, and are copied there.
        let parts = names.iter().map(|name| vb.get((rows, columns), name)).collect::<Result<Vec<_>>>()?;
        return Tensor::cat(&parts, 0);
    }
    let host = vb.clone().set_device(Device::Cpu);
    let mut parts = names.iter().enumerate();
    // The first part is read before the pack is allocated, so that a size that the checkpoint does
    // not have is an error that names a tensor.
    let Some((_, first)) = parts.next() else {
        return Tensor::zeros((0, columns), vb.dtype(), vb.device());
    };
    let first = host.get((rows, columns), first)?.contiguous()?;
    let mut pack = Buffer::zeros(vb.dtype(), &[names.len() * rows, columns])?;
    let mut put = |index: usize, part: &Tensor| {
        let to = pack.view_mut().narrow(index * rows, rows)?;
        copy_rows_into(TensorView::new(part)?.view()?, to, &mut Exec::cpu())
    };
    put(0, &first)?;
    drop(first);
    for (index, name) in parts {
        put(index, &host.get((rows, columns), name)?.contiguous()?)?;
    }
    pack.into_tensor()?.to_device(vb.device())
}
