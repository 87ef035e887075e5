//! Loads tensors into one pack, so that the host never holds a part of a large model together with its copy. Loads
//! quantised matrices without conversion, if kernels can read them.

use candle_nn::VarBuilder;
use moe_kernels::candle::{Result, Tensor, bail};
use moe_kernels::quant::{Opened, QuantPacking, QuantUse};
use moe_kernels::{Buffer, Exec, TensorView, Weight, gradient};
use tracing::{debug, warn};

use crate::context::BlockContext;

/// Loads the weight of a product, [rows of all modules, columns]. `modules` are names with their numbers of rows; the
/// rows of the modules follow each other. A matrix that is quantised in the checkpoint stays quantised. If kernels
/// cannot read the modules together, they are converted to floats.
///
/// # Errors
/// A tensor that is missing or has another shape, with its name; quantised tensors that do not match the header.
pub fn load_weight<S: AsRef<str>>(
    vb: &VarBuilder,
    modules: &[(S, usize)],
    columns: usize,
    usage: QuantUse,
    context: &BlockContext,
) -> Result<Weight> {
    let rows: usize = modules.iter().map(|(_, rows)| rows).sum();
    if let Some(source) = &context.quant {
        let prefix = vb.prefix();
        let name = |name: &str| {
            [prefix.as_str(), name].into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join(".")
        };
        let names = modules.iter().map(|(module, _)| name(module.as_ref())).collect();
        let ex = Exec::on(vb.device())?;
        match Weight::quantised(source.as_ref(), &[names], usage, vb.dtype(), &ex)? {
            Opened::Packed(weight) if weight.dims().ends_with(&[rows, columns]) => {
                note_packing(&prefix, &weight);
                return Ok(weight);
            }
            Opened::Packed(weight) => {
                bail!("{prefix}: expected a quantised matrix [{rows}, {columns}], got {:?}", weight.dims())
            }
            Opened::Apart(why) => warn!("loaded as floats: {why}"),
            Opened::Floats => {}
        }
    }
    let weight = |(module, rows): &(S, usize)| match module.as_ref() {
        "" => ("weight".to_string(), *rows),
        module => (format!("{module}.weight"), *rows),
    };
    let parts: Vec<_> = modules.iter().map(weight).collect();
    match parts.as_slice() {
        [(name, rows)] => Weight::new(vb.get((*rows, columns), name)?),
        parts => Weight::new(load_packed(vb, parts, &[columns])?),
    }
}

/// Logs that the host packed a weight of the device, which takes longer, and the reason.
pub(crate) fn note_packing(name: &str, weight: &Weight) {
    if let (false, Some(QuantPacking::Host(why))) = (weight.device().is_cpu(), weight.packing()) {
        debug!("{name}: quantised weights packed by the host: {why}");
    }
}

/// Loads tensors of shape [rows, row...] into one pack, one after the other. `parts` are names with their rows. `row`
/// is `[columns]` for matrices and empty for vectors. Host memory holds the pack and one of the tensors at a time.
///
/// # Errors
/// A tensor that is missing or has another shape, with its name.
pub fn load_packed<S: AsRef<str>>(vb: &VarBuilder, parts: &[(S, usize)], row: &[usize]) -> Result<Tensor> {
    let dims = |rows: usize| [&[rows], row].concat();
    let load = |vb: &VarBuilder, (name, rows): &(S, usize)| vb.get(dims(*rows), name.as_ref());
    let Some((first, rest)) = parts.split_first() else {
        return Tensor::zeros(dims(0), vb.dtype(), vb.device());
    };
    if !vb.device().is_cpu() {
        // Parts are loaded to the device without a copy on the host, and are joined there.
        return Tensor::cat(&parts.iter().map(|part| load(vb, part)).collect::<Result<Vec<_>>>()?, 0);
    }
    // The first part is read before the pack is allocated. If the checkpoint does not have this size, the error names a
    // tensor.
    let first = load(vb, first)?.contiguous()?;
    let mut pack = Buffer::zeros(vb.dtype(), &dims(parts.iter().map(|(_, rows)| rows).sum()))?;
    let mut start = 0;
    let mut has_variable = false;
    let mut put = |part: &Tensor| {
        has_variable |= gradient::has_variable(part);
        let rows = part.dims()[0];
        start += rows;
        pack.view_mut().narrow(start - rows, rows)?.copy_from(TensorView::new(part)?.view()?)
    };
    put(&first)?;
    drop(first);
    rest.iter().try_for_each(|part| put(&load(vb, part)?.contiguous()?))?;
    gradient::copy_of(has_variable, pack.into_tensor()?)
}
