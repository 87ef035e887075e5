//! From the oracle's choice to experts that run.

use candle_core::{Result, bail};

use crate::cpu::{BatchLimits, CpuBatchedExperts, CpuExperts};
use crate::experts::{AnyExperts, Experts};
use crate::oracle::{Backend, Selection};
use crate::weights::ExpertWeights;

/// Builds the chosen backend over its weights. Batched experts for a layer need
/// [`build_batched`], which also tells them their limits.
///
/// # Errors
/// Weights that are not what the selection's specification describes (local experts, sizes,
/// dtype, biases), or on a device that the backend does not run on.
pub fn build(selection: &Selection, weights: ExpertWeights) -> Result<AnyExperts> {
    build_with(selection, weights, None)
}

/// Builds the chosen backend, of the BatchedExperts format, for blocks of at most these limits.
///
/// # Errors
/// As [`build`]; a backend of the Standard format, whose rows have no fixed number.
pub fn build_batched(
    selection: &Selection,
    weights: ExpertWeights,
    limits: BatchLimits,
) -> Result<AnyExperts> {
    build_with(selection, weights, Some(limits))
}

fn build_with(
    selection: &Selection,
    weights: ExpertWeights,
    limits: Option<BatchLimits>,
) -> Result<AnyExperts> {
    let spec = &selection.spec;
    let shape = weights.shape();
    for (name, expected, got) in [
        ("local experts", spec.num_local_experts, shape.num_local_experts),
        ("hidden size", spec.hidden_size, shape.hidden_size),
        ("intermediate size", spec.intermediate_size, shape.intermediate_size),
    ] {
        if expected != got {
            bail!("{} experts: expected weights of {name} {expected}, got {got}", selection.chosen)
        }
    }
    if shape.dtype != spec.dtype || weights.has_bias() != spec.has_bias {
        let describe = |dtype: candle_core::DType, bias| {
            format!("{} with{} bias", dtype.as_str(), if bias { "" } else { "out" })
        };
        bail!(
            "{} experts: expected weights in {}, got {}",
            selection.chosen,
            describe(spec.dtype, spec.has_bias),
            describe(shape.dtype, weights.has_bias())
        )
    }
    let experts: Box<dyn Experts> = match (selection.chosen, limits) {
        (Backend::Cpu, None) => Box::new(CpuExperts::new(weights, spec.activation)?.with_tp(spec.tp_size)?),
        (Backend::Cpu, Some(limits)) => {
            bail!("{} experts take the Standard format, which has no {limits:?}", selection.chosen)
        }
        #[cfg(feature = "cuda")]
        (Backend::CudaFused, None) => Box::new(crate::cuda::CudaFusedExperts::new(weights)?),
        #[cfg(not(feature = "cuda"))]
        (Backend::CudaFused, None) => {
            bail!("{} experts need a build with the feature `cuda`", selection.chosen)
        }
        (Backend::CudaFused, Some(limits)) => {
            bail!("{} experts take the Standard format, which has no {limits:?}", selection.chosen)
        }
        (Backend::CpuBatched, None) => Box::new(CpuBatchedExperts::new(weights, spec.activation)?),
        (Backend::CpuBatched, Some(limits)) => {
            Box::new(CpuBatchedExperts::new(weights, spec.activation)?.with_limits(limits))
        }
    };
    Ok(experts.into())
}
