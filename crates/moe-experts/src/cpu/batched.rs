//! CPU experts over batched rows: each expert has a block of rows, filled from the front.

use candle_core::{DType, Result, bail};
use moe_kernels::door::{expect_dims, expect_dtype, expect_rank3};
use moe_kernels::{Activation, ActivationFormat, Dispatched, Exec, ExpertGroups, ExpertsSpec, ViewMut};
use rayon::prelude::*;

use super::CpuMlp;
use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::reason::Reason;
use crate::weights::{ExpertWeights, ExpertsShape};

/// Experts on the CPU in the BatchedExperts format: one block of rows per local expert, of which
/// the first `expert_num_tokens[e]` are computed. Bit-equal per row to [`CpuExperts`](super::CpuExperts).
///
/// A layer takes only experts that were told their [`limits`](Self::with_limits).
#[derive(Clone, Debug)]
pub struct CpuBatchedExperts {
    mlp: CpuMlp,
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
    fn rows(self) -> usize {
        self.max_num_tokens.saturating_mul(self.num_dispatchers)
    }
}

impl CpuBatchedExperts {
    /// Experts with these weights, which must be on the CPU.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let mlp = CpuMlp::new(Backend::CpuBatched.name(), weights, activation)?;
        Ok(Self { mlp, limits: None })
    }

    /// States what the experts are built for: larger blocks are refused.
    pub fn with_limits(mut self, limits: BatchLimits) -> Self {
        self.limits = Some(limits);
        self
    }
}

impl Experts for CpuBatchedExperts {
    fn name(&self) -> &str {
        Backend::CpuBatched.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::BatchedExperts
    }

    fn shape(&self) -> ExpertsShape {
        self.mlp.shape()
    }

    fn supports(&self, spec: &ExpertsSpec) -> std::result::Result<(), Reason> {
        Backend::CpuBatched.supports(spec)
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

    fn apply(&self, dispatched: &Dispatched, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (name, shape) = (self.name(), self.shape());
        self.mlp.check_rows(name, self.activation_format(), dispatched)?;
        let rows = dispatched.rows.view();
        let (experts, max_tokens, hidden) = expect_rank3(name, "rows", &rows)?;
        expect_dims(name, "rows", &rows, &[shape.num_local_experts, max_tokens, hidden])?;
        if let Some(limits) = self.limits.filter(|limits| max_tokens > limits.rows()) {
            bail!("{name} experts: got blocks of {max_tokens} rows, but were built for {limits:?}")
        }
        let counts = dispatched.expert_num_tokens()?;
        expect_dtype(name, "expert_num_tokens", &counts, DType::U32)?;
        expect_dims(name, "expert_num_tokens", &counts, &[experts])?;
        expect_dtype(name, "out", &out, DType::F32)?;
        expect_dims(name, "out", &out, rows.dims())?;
        let counts = counts.cpu::<u32>()?;
        let used = checked_rows(name, counts, max_tokens)?;

        let mut offsets = ex.scratch(DType::U32, &[experts + 1])?;
        let mut numbers = ex.scratch(DType::U32, &[used])?;
        number_rows(counts, max_tokens, offsets.view_mut().cpu_mut()?, numbers.view_mut().cpu_mut()?);
        zero_unused(counts, max_tokens * hidden, hidden, &mut out, ex)?;
        let groups =
            ExpertGroups { offsets: offsets.view(), in_rows: numbers.view(), out_rows: numbers.view() };
        let flat = [experts * max_tokens, hidden];
        self.mlp.run(rows.reshape(&flat)?, &groups, out.reshape(&flat)?, ex)
    }
}

/// Rows of all experts together; fails where an expert has more than its block holds, or where a
/// row number would not fit in u32.
fn checked_rows(name: &str, counts: &[u32], max_tokens: usize) -> Result<usize> {
    if let Some((e, n)) = counts.iter().enumerate().find(|(_, n)| **n as usize > max_tokens) {
        bail!("{name} experts: expert_num_tokens[{e}] is {n}; expected at most max_tokens = {max_tokens}")
    }
    match counts.len().checked_mul(max_tokens).map(u32::try_from) {
        Some(Ok(_)) => Ok(counts.iter().map(|&n| n as usize).sum()),
        _ => bail!("{name} experts: {} x {max_tokens} rows do not fit in u32", counts.len()),
    }
}

/// Group offsets [E_local + 1], and the row number e * max_tokens + r of every used row.
fn number_rows(counts: &[u32], max_tokens: usize, offsets: &mut [u32], numbers: &mut [u32]) {
    let used = counts.iter().enumerate().flat_map(|(e, &n)| {
        let first = (e * max_tokens) as u32;
        first..first + n
    });
    numbers.iter_mut().zip(used).for_each(|(number, row)| *number = row);
    let mut end = 0;
    for (offset, n) in offsets.iter_mut().zip([0].iter().chain(counts)) {
        end += n;
        *offset = end;
    }
}

/// Zeroes the rows of each expert's block after its count.
fn zero_unused(counts: &[u32], block: usize, hidden: usize, out: &mut ViewMut, ex: &Exec) -> Result<()> {
    let out = out.cpu_mut::<f32>()?;
    if block == 0 {
        return Ok(());
    }
    ex.install(|| {
        let blocks = out.par_chunks_mut(block).zip(counts);
        blocks.for_each(|(rows, &n)| rows[n as usize * hidden..].fill(0.));
    });
    Ok(())
}
