//! Experts over token rows: slots are sorted by expert, computed in groups, and each row is
//! written to its own slot of the output.

use candle_core::{DType, Result};
use moe_kernels::{Activation, ActivationFormat, Dispatched, Exec, ExpertsSpec, ViewMut};

use super::GroupedMlp;
use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::weights::{ExpertWeights, ExpertsShape};
use moe_kernels::plan::Reason;

/// Experts in the Standard format: token rows with the ids of their slots; or in the Listed format, whose rows and ids are
/// the same: one sorted list serves products of any shape better than a list for each expert.
///
/// Weights in f32, bf16 or f16; sums in f32; the activation is rounded once to the weights' dtype.
#[derive(Clone, Debug)]
pub struct GroupedExperts(GroupedMlp, ActivationFormat);

impl GroupedExperts {
    /// Experts with these weights, on whose device they run: the CPU or a CUDA device.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let mlp = GroupedMlp::new([Backend::Cpu, Backend::Cuda], weights, activation)?;
        Ok(Self(mlp, ActivationFormat::Standard))
    }

    /// The same for rows in this format, Standard or Listed.
    pub fn with_format(self, format: ActivationFormat) -> Self {
        Self(self.0, format)
    }

    /// Experts of which `tp_size` ranks hold an equal part of the intermediate size each: they
    /// return the sums of their segments apart, so that whoever gathers them adds all in order.
    ///
    /// # Errors
    /// A size whose segments the ranks do not divide; a bias of w2.
    pub fn with_tp(self, tp_size: usize) -> Result<Self> {
        Ok(Self(self.0.cut(tp_size)?, self.1))
    }
}

impl Experts for GroupedExperts {
    fn name(&self) -> &str {
        self.0.backend.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        self.1
    }

    fn shape(&self) -> ExpertsShape {
        self.0.shape()
    }

    fn segments(&self) -> Option<usize> {
        self.0.segments
    }

    fn supports(&self, spec: &ExpertsSpec) -> std::result::Result<(), Reason> {
        self.0.backend.supports(spec)
    }

    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation> {
        let shape = self.shape();
        Reservation::new()
            .with(DType::U32, &[shape.num_local_experts + 1])?
            .with(DType::U32, &[max_tokens, top_k])?
            .with(DType::U32, &[max_tokens, top_k])?
            .with(shape.dtype, &[max_tokens, top_k, shape.intermediate_size])
    }

    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        self.0.run_slots(self.activation_format(), dispatched, out, ex)
    }
}
