//! Experts over batched rows: each expert has a block of rows, filled from the front.

use candle_core::{DType, Result, bail};
use moe_kernels::door::{expect_dims, expect_dtype, expect_rank3};
use moe_kernels::{
    Activation, ActivationFormat, Dispatched, Exec, ExpertGroups, ExpertsSpec, ViewMut, number_rows_into,
};

use super::GroupedMlp;
use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::weights::{ExpertWeights, ExpertsShape};
use moe_kernels::plan::Reason;

/// Experts in the BatchedExperts format: one block of rows per local expert, of which the first
/// `expert_num_tokens[e]` are computed. On the CPU bit-equal per row to [`GroupedExperts`](super::GroupedExperts).
///
/// A layer takes only experts that were told their [`limits`](Self::with_limits).
#[derive(Clone, Debug)]
pub struct GroupedBatchedExperts {
    mlp: GroupedMlp,
    limits: Option<BatchLimits>,
}

/// What the row blocks of batched experts are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// The most tokens that one dispatcher brings.
    pub max_num_tokens: usize,
    /// Ranks whose tokens arrive.
    pub num_dispatchers: usize,
}

impl BatchLimits {
    /// Rows of one expert's block.
    pub(crate) fn rows(self) -> usize {
        self.max_num_tokens.saturating_mul(self.num_dispatchers)
    }
}

impl GroupedBatchedExperts {
    /// Experts with these weights, on whose device they run: the CPU or a CUDA device.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let mlp = GroupedMlp::new([Backend::CpuBatched, Backend::CudaBatched], weights, activation)?;
        Ok(Self { mlp, limits: None })
    }

    /// States what the experts are built for: larger blocks are refused.
    pub fn with_limits(mut self, limits: BatchLimits) -> Self {
        self.limits = Some(limits);
        self
    }

    fn check_limits(&self, rows: usize) -> Result<()> {
        match self.limits.filter(|limits| rows > limits.rows()) {
            Some(limits) => {
                bail!("{} experts: got blocks of {rows} rows, but were built for {limits:?}", self.name())
            }
            None => Ok(()),
        }
    }
}

impl Experts for GroupedBatchedExperts {
    fn name(&self) -> &str {
        self.mlp.backend.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::BatchedExperts
    }

    fn shape(&self) -> ExpertsShape {
        self.mlp.shape()
    }

    fn supports(&self, spec: &ExpertsSpec) -> std::result::Result<(), Reason> {
        self.mlp.backend.supports(spec)
    }

    fn max_num_tokens(&self) -> Option<usize> {
        self.limits.map(|limits| limits.max_num_tokens)
    }

    fn num_dispatchers(&self) -> Option<usize> {
        self.limits.map(|limits| limits.num_dispatchers)
    }

    fn workspace(&self, max_tokens: usize, _top_k: usize) -> Result<Reservation> {
        let shape = self.shape();
        Reservation::new()
            .with(DType::U32, &[shape.num_local_experts + 1])?
            .with(DType::U32, &[shape.num_local_experts, max_tokens])?
            .with(shape.dtype, &[shape.num_local_experts, max_tokens, shape.intermediate_size])
    }

    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (name, shape) = (self.name(), self.shape());
        self.mlp.check_rows(name, self.activation_format(), dispatched)?;
        let rows = dispatched.rows.view();
        let (experts, max_tokens, hidden) = expect_rank3(name, "rows", &rows)?;
        expect_dims(name, "rows", &rows, &[shape.num_local_experts, max_tokens, hidden])?;
        self.check_limits(max_tokens)?;
        let counts = dispatched.expert_num_tokens()?;
        expect_dtype(name, "expert_num_tokens", &counts, DType::U32)?;
        expect_dims(name, "expert_num_tokens", &counts, &[experts])?;
        expect_dtype(name, "out", &out, DType::F32)?;
        expect_dims(name, "out", &out, rows.dims())?;

        let mut offsets = ex.scratch(DType::U32, &[experts + 1])?;
        let mut numbers = ex.scratch(DType::U32, &[experts.saturating_mul(max_tokens)])?;
        number_rows_into(counts, max_tokens, offsets.view_mut(), numbers.view_mut(), ex)?;
        let groups =
            ExpertGroups { offsets: offsets.view(), in_rows: numbers.view(), out_rows: numbers.view() };
        let flat = [experts * max_tokens, hidden];
        self.mlp.run(rows.reshape(&flat)?, &groups, out.reshape(&flat)?, ex)
    }
}
