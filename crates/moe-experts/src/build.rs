//! Builds experts that can run from the oracle's choice.

use candle_core::Result;
use moe_kernels::ActivationFormat;

use crate::error::refuse;
use crate::experts::Experts;
use crate::grouped::GroupedExperts;
use crate::oracle::{Backend, Selection, select};
use crate::weights::ExpertWeights;

/// Builds the chosen backend over its weights. Batched experts for a layer need
/// [`build_batched`], which also tells them the size of their blocks.
///
/// # Errors
/// Weights that do not have the properties in the selection's specification (local experts, sizes, dtype, biases), or
/// that are on a device on which the backend does not run.
pub fn build(selection: &Selection, weights: ExpertWeights) -> Result<Box<dyn Experts>> {
    build_with(selection, weights, None)
}

/// Builds the chosen backend, of the BatchedExperts format, for blocks of at most `max_rows` rows.
///
/// # Errors
/// The errors of [`build`]; a backend of another format, because its number of rows is not fixed.
pub fn build_batched(
    selection: &Selection,
    weights: ExpertWeights,
    max_rows: usize,
) -> Result<Box<dyn Experts>> {
    build_with(selection, weights, Some(max_rows))
}

fn build_with(
    selection: &Selection,
    weights: ExpertWeights,
    max_rows: Option<usize>,
) -> Result<Box<dyn Experts>> {
    if selection.chosen == Backend::Emulation {
        return build_with(&select(&selection.computed(), None)?, weights.dequantised()?, max_rows);
    }
    let spec = &selection.spec;
    if weights.scheme() != spec.quant {
        let chosen = selection.chosen;
        let wanted = spec.quant;
        let got = weights.scheme();
        refuse!(Weights, "{chosen} experts: expected weights of quantisation scheme {wanted}, got {got}")
    }
    let shape = weights.shape();
    for (name, expected, got) in [
        ("local experts", spec.num_local_experts, shape.num_local_experts),
        ("hidden size", spec.hidden_size, shape.hidden_size),
        ("intermediate size", spec.intermediate_size, shape.intermediate_size),
    ] {
        if expected != got {
            refuse!(Weights, "{} experts: expected weights of {name} {expected}, got {got}", selection.chosen)
        }
    }
    if shape.dtype != spec.dtype || weights.has_bias() != spec.has_bias {
        let describe = |dtype: candle_core::DType, bias| {
            format!("{} with{} bias", dtype.as_str(), if bias { "" } else { "out" })
        };
        refuse!(
            Weights,
            "{} experts: expected weights in {}, got {}",
            selection.chosen,
            describe(spec.dtype, spec.has_bias),
            describe(shape.dtype, weights.has_bias())
        )
    }
    if weights.device().is_cuda() != spec.gpu.is_some() {
        refuse!(
            Weights,
            "{} experts: expected weights on the device of the specification, got {:?}",
            selection.chosen,
            weights.device().location()
        )
    }
    if max_rows.is_some() && spec.activation_format != ActivationFormat::BatchedExperts {
        refuse!(
            Weights,
            "{} experts take the {:?} format, whose rows have no limit",
            selection.chosen,
            spec.activation_format
        )
    }
    Ok(match selection.chosen {
        #[cfg(feature = "cuda")]
        Backend::CudaFusedListed => {
            Box::new(crate::cuda::CudaFusedExperts::listed(weights, spec.activation)?)
        }
        #[cfg(feature = "cuda")]
        Backend::CudaFused => Box::new(crate::cuda::CudaFusedExperts::new(weights, spec.activation)?),
        #[cfg(not(feature = "cuda"))]
        Backend::CudaFused | Backend::CudaFusedListed => {
            refuse!(Weights, "{} experts need a build with the feature `cuda`", selection.chosen)
        }
        Backend::Emulation => refuse!(Weights, "emulation emulates itself"),
        Backend::Cuda | Backend::Cpu | Backend::CudaBatched | Backend::CpuBatched => {
            let experts = GroupedExperts::new(weights, spec.activation)?.with_tp(spec.tp_size)?;
            let experts = experts.with_format(spec.activation_format);
            Box::new(match max_rows {
                Some(rows) => experts.with_max_rows(rows),
                None => experts,
            })
        }
    })
}
