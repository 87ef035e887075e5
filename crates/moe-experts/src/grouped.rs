//! Grouped products over the slots of each local expert, on the CPU or a CUDA device.
//!
//! All formats use the same two kernel calls over different row numbers. On the CPU a row's bits depend only on the
//! row, its expert's weights and the sizes H and I. So the formats agree bit for bit, and a row does not depend on the
//! batch, the threads or the placement of experts on ranks. On CUDA every dtype and size is supported. The host reads
//! nothing, so the calls can be captured into a graph.

use candle_core::{DType, Result, Tensor, bail};
use moe_kernels::arguments::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use moe_kernels::plan::{EpilogueCall, QuantWeights};
use moe_kernels::{
    Activation, ActivationFormat, Dispatched, Exec, ExpertGroups, Segment, TensorView, View, ViewMut,
    group_token_slots_into, grouped_down_into, grouped_down_segment_into, grouped_gate_up_into,
    number_rows_into, row_parallel_segments, zero_absent_into,
};

use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::weights::{ExpertWeights, ExpertsShape};

/// Experts by grouped products. Weights are in f32, bf16 or f16, sums in f32; the activation is rounded once to the
/// weights' dtype.
///
/// | format | what is computed |
/// |---|---|
/// | Standard | slots are sorted by expert, and each row is written to its own slot |
/// | Listed | the same: one sorted list serves products of any shape better than a list for each expert |
/// | BatchedExperts | the first `expert_num_tokens[e]` rows of each expert's block |
#[derive(Clone, Debug)]
pub struct GroupedExperts {
    weights: ExpertWeights,
    activation: Activation,
    format: ActivationFormat,
    /// The largest number of rows of a block, in the BatchedExperts format.
    max_rows: Option<usize>,
    /// This rank's segments of the intermediate size, if tensor parallelism cuts the experts.
    segments: Option<usize>,
}

impl GroupedExperts {
    /// Makes experts with these weights, for rows in the Standard format. They run on the device of the weights.
    ///
    /// # Errors
    /// A device that is neither the CPU nor a CUDA device.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        if !(weights.device().is_cpu() || weights.device().is_cuda()) {
            bail!(
                "grouped experts: expected weights on the CPU or CUDA, got {:?}",
                weights.device().location()
            )
        }
        Ok(Self { weights, activation, format: ActivationFormat::Standard, max_rows: None, segments: None })
    }

    /// Returns these experts for rows in this format.
    #[must_use]
    pub fn with_format(self, format: ActivationFormat) -> Self {
        Self { format, ..self }
    }

    /// Sets the largest number of rows of a block in the BatchedExperts format. Larger blocks are refused, and a layer
    /// accepts only experts with such a limit.
    #[must_use]
    pub fn with_max_rows(self, rows: usize) -> Self {
        Self { max_rows: Some(rows), ..self }
    }

    /// Sets that `tp_size` ranks hold an equal part of the intermediate size of each expert. On the CPU the experts
    /// then return the sums of their segments separately. The caller gathers them, adds all of them in order, and then
    /// adds the [bias of w2](Experts::deferred_bias). On a device each rank adds its own bias of w2, so this bias must
    /// be zero on all ranks but one.
    ///
    /// # Errors
    /// A size whose segments cannot be divided among the ranks.
    pub fn with_tp(self, tp_size: usize) -> Result<Self> {
        let name = self.name();
        let whole = self.shape().intermediate_size * tp_size;
        let segments = row_parallel_segments(whole);
        if tp_size == 0 || !segments.is_multiple_of(tp_size) {
            bail!(
                "{name} experts: tp_size {tp_size} does not divide the {segments} segments of the intermediate size {whole}"
            )
        }
        // On a device each rank sums all of its columns, and the transport adds the ranks' sums in its own order.
        let apart = tp_size > 1 && self.weights.device().is_cpu();
        Ok(Self { segments: apart.then_some(segments / tp_size), ..self })
    }

    /// Computes the rows of all slots, [T', K, H] f32 ([segments * T', K, H] if the experts are cut), from token rows
    /// with their ids. Rows of slots without a local expert become zero.
    fn slots_into(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let name = self.name();
        let num_local = self.shape().num_local_experts;
        let rows = dispatched.rows.view();
        let (tokens, hidden) = expect_matrix(name, "rows", &rows)?;
        let ids = dispatched.topk_ids()?;
        let (_, top_k) = expect_matrix(name, "topk_ids", &ids)?;
        expect_dims(name, "topk_ids", &ids, &[tokens, top_k])?;
        expect_dims(name, "out", &out, &self.out_dims(dispatched)?)?;

        let map = dispatched.expert_map;
        let slots = ids.elem_count();
        let mut offsets = ex.scratch(DType::U32, &[num_local + 1])?;
        let mut grouped = ex.scratch(DType::U32, &[slots])?;
        let mut in_rows = ex.scratch(DType::U32, &[slots])?;
        let groups = (offsets.view_mut(), grouped.view_mut(), in_rows.view_mut());
        group_token_slots_into(ids, map, groups.0, groups.1, groups.2, ex)?;
        let segments = self.segments.unwrap_or(1);
        let mut out = out.reshape(&[segments * tokens, top_k, hidden])?;
        for segment in 0..segments {
            let part = out.reborrow().narrow(segment * tokens, tokens)?;
            zero_absent_into(ids, map, num_local, part, ex)?;
        }
        let groups =
            ExpertGroups { offsets: offsets.view(), in_rows: in_rows.view(), out_rows: grouped.view() };
        self.run(rows, &groups, out.reshape(&[segments * slots, hidden])?, ex)
    }

    /// Computes the rows in use of each expert's block, [E_local, max_tokens, H] f32.
    fn blocks_into(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let name = self.name();
        let rows = dispatched.rows.view();
        let (experts, max_tokens, hidden) = expect_rank3(name, "rows", &rows)?;
        expect_dims(name, "rows", &rows, &[self.shape().num_local_experts, max_tokens, hidden])?;
        if let Some(most) = self.max_rows.filter(|most| max_tokens > *most) {
            bail!("{name} experts: got blocks of {max_tokens} rows, but were built for {most}")
        }
        let counts = dispatched.expert_num_tokens()?;
        expect_dtype(name, "expert_num_tokens", &counts, DType::U32)?;
        expect_dims(name, "expert_num_tokens", &counts, &[experts])?;
        expect_dims(name, "out", &out, rows.dims())?;

        let mut offsets = ex.scratch(DType::U32, &[experts + 1])?;
        let mut numbers = ex.scratch(DType::U32, &[experts.saturating_mul(max_tokens)])?;
        number_rows_into(counts, max_tokens, offsets.view_mut(), numbers.view_mut(), ex)?;
        let groups =
            ExpertGroups { offsets: offsets.view(), in_rows: numbers.view(), out_rows: numbers.view() };
        let flat = [experts * max_tokens, hidden];
        self.run(rows.reshape(&flat)?, &groups, out.reshape(&flat)?, ex)
    }

    /// Computes `out[out_rows[i]] = MLP(expert e, x[in_rows[i]])` for every slot i in the group of e. `x` is [R, H] in
    /// the model dtype, and `out` is [S, H] f32 ([segments * S, H] if the experts are cut). Rows of `out` that no slot
    /// names stay unchanged.
    fn run(&self, x: View, groups: &ExpertGroups, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let dims = [groups.in_rows.elem_count(), self.shape().intermediate_size];
        let mut activated = ex.scratch(self.shape().dtype, &dims)?;
        let w13 = self.weights.w13().read()?;
        let w2 = self.weights.w2().read()?;
        let biases = self.weights.bias_views()?;
        let [w13_bias, w2_bias] = biases.each_ref().map(Option::as_ref);
        let w13_bias = w13_bias.map(TensorView::view).transpose()?;
        let w2_bias = w2_bias.map(TensorView::view).transpose()?;
        grouped_gate_up_into(x, groups, w13.view()?, w13_bias, self.activation, activated.view_mut(), ex)?;
        let Some(of) = self.segments else {
            return grouped_down_into(activated.view(), groups, w2.view()?, w2_bias, out, ex);
        };
        let rows = out.rows() / of;
        for index in 0..of {
            let x = activated.view();
            let to = out.reborrow().narrow(index * rows, rows)?;
            grouped_down_segment_into(x, groups, w2.view()?, Segment { index, of }, to, ex)?;
        }
        Ok(())
    }
}

impl Experts for GroupedExperts {
    fn name(&self) -> &str {
        let batched = self.format == ActivationFormat::BatchedExperts;
        let backend = match (self.weights.device().is_cuda(), batched) {
            (false, false) => Backend::Cpu,
            (false, true) => Backend::CpuBatched,
            (true, false) => Backend::Cuda,
            (true, true) => Backend::CudaBatched,
        };
        backend.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        self.format
    }

    fn shape(&self) -> ExpertsShape {
        self.weights.shape()
    }

    fn quantisation(&self) -> Option<[QuantWeights; 2]> {
        self.weights.quantisation()
    }

    fn epilogue(&self) -> EpilogueCall {
        self.weights.epilogue(self.activation)
    }

    fn max_rows(&self) -> Option<usize> {
        self.max_rows
    }

    fn segments(&self) -> Option<usize> {
        self.segments
    }

    fn deferred_bias(&self) -> Option<&Tensor> {
        self.weights.w2_bias().filter(|_| self.segments.is_some())
    }

    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation> {
        let ExpertsShape { num_local_experts: experts, intermediate_size, dtype, .. } = self.shape();
        let offsets = Reservation::new().with(DType::U32, &[experts + 1])?;
        match self.format {
            ActivationFormat::BatchedExperts => offsets
                .with(DType::U32, &[experts, max_tokens])?
                .with(dtype, &[experts, max_tokens, intermediate_size]),
            _ => offsets
                .with(DType::U32, &[max_tokens, top_k])?
                .with(DType::U32, &[max_tokens, top_k])?
                .with(dtype, &[max_tokens, top_k, intermediate_size]),
        }
    }

    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let name = self.name();
        let wanted = self.format;
        let shape = self.shape();
        if dispatched.format != wanted {
            bail!("{name} experts: expected rows in the {wanted:?} format, got {:?}", dispatched.format)
        }
        let rows = dispatched.rows.view();
        expect_dtype(name, "rows", &rows, shape.dtype)?;
        if rows.dims().last() != Some(&shape.hidden_size) {
            let hidden = shape.hidden_size;
            let got = rows.dims();
            bail!("{name} experts: expected rows of hidden size {hidden}, got dims {got:?}")
        }
        expect_dtype(name, "out", &out, DType::F32)?;
        match wanted {
            ActivationFormat::BatchedExperts => self.blocks_into(dispatched, out, ex),
            _ => self.slots_into(dispatched, out, ex),
        }
    }
}
