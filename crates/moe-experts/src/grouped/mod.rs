//! Grouped products over the slots of each local expert, on the CPU or a CUDA device.
//!
//! Both formats are the same two kernel calls over different row numbers. On the CPU a row's bits depend on
//! the row, its expert's weights and the sizes H and I only, so the formats agree bit for bit, and
//! neither batch nor threads nor the placement of experts on ranks shows in a row. On CUDA every dtype and
//! size runs, and nothing is read on the host, so that the calls can be captured into a graph.

mod batched;
mod standard;

pub use batched::{BatchLimits, GroupedBatchedExperts};
pub use standard::GroupedExperts;

use candle_core::{DType, Result, bail};
use moe_kernels::door::{expect_dims, expect_dtype, expect_matrix};
use moe_kernels::{
    Activation, ActivationFormat, Dims, Dispatched, Exec, ExpertGroups, Segment, TensorView, View, ViewMut,
    group_token_slots_into, grouped_down_into, grouped_down_segment_into, grouped_gate_up_into,
    row_parallel_segments, zero_absent_into,
};

use crate::oracle::Backend;
use crate::weights::{ExpertWeights, ExpertsShape};

/// Weights and activation: what both formats compute with.
#[derive(Clone, Debug)]
struct GroupedMlp {
    backend: Backend,
    weights: ExpertWeights,
    activation: Activation,
    /// This rank's segments of the intermediate size, where tensor parallelism cuts the experts.
    segments: Option<usize>,
}

impl GroupedMlp {
    /// With `cpu` or `cuda`, by the device of the weights.
    fn new([cpu, cuda]: [Backend; 2], weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let backend = if weights.device().is_cuda() { cuda } else { cpu };
        if !(weights.device().is_cpu() || weights.device().is_cuda()) {
            bail!("{cpu} experts: expected weights on the CPU, got {:?}", weights.device().location())
        }
        Ok(Self { backend, weights, activation, segments: None })
    }

    /// The part of experts that `tp_size` ranks cut along their intermediate size.
    fn cut(self, tp_size: usize) -> Result<Self> {
        let name = self.backend.name();
        let segments = row_parallel_segments(self.shape().intermediate_size * tp_size);
        if tp_size == 0 || !segments.is_multiple_of(tp_size) {
            bail!(
                "{name} experts: tp_size {tp_size} does not divide the {segments} segments of the intermediate size {}",
                self.shape().intermediate_size * tp_size
            )
        }
        if tp_size > 1 && self.weights.w2_bias().is_some() {
            bail!("{name} experts: a bias of w2 cannot be cut over {tp_size} ranks; use expert parallelism")
        }
        // On a device each rank sums all of its columns: the ranks' sums are added in the transport's order.
        let apart = tp_size > 1 && self.weights.device().is_cpu();
        Ok(Self { segments: apart.then_some(segments / tp_size), ..self })
    }

    fn shape(&self) -> ExpertsShape {
        self.weights.shape()
    }

    /// Fails unless rows of this format, width and dtype are what the experts take.
    fn check_rows(&self, name: &str, wanted: ActivationFormat, dispatched: &Dispatched) -> Result<()> {
        if dispatched.format != wanted {
            bail!("{name} experts: expected rows in the {wanted:?} format, got {:?}", dispatched.format)
        }
        let rows = dispatched.rows.view();
        expect_dtype(name, "rows", &rows, self.shape().dtype)?;
        match rows.dims().last() {
            Some(&hidden) if hidden == self.shape().hidden_size => Ok(()),
            _ => bail!(
                "{name} experts: expected rows of hidden size {}, got dims {:?}",
                self.shape().hidden_size,
                rows.dims()
            ),
        }
    }

    /// The rows of all slots, [T', K, H] f32 ([segments * T', K, H] of cut experts), from token rows with their ids; rows of slots
    /// without a local expert become zero.
    fn run_slots(
        &self,
        format: ActivationFormat,
        dispatched: &Dispatched,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let (name, num_local) = (self.backend.name(), self.shape().num_local_experts);
        self.check_rows(name, format, dispatched)?;
        let rows = dispatched.rows.view();
        let (tokens, hidden) = expect_matrix(name, "rows", &rows)?;
        let ids = dispatched.topk_ids()?;
        let (_, top_k) = expect_matrix(name, "topk_ids", &ids)?;
        expect_dims(name, "topk_ids", &ids, &[tokens, top_k])?;
        expect_dtype(name, "out", &out, DType::F32)?;
        expect_dims(name, "out", &out, &self.out_dims(dispatched)?)?;

        let (map, slots) = (dispatched.expert_map, ids.elem_count());
        let mut offsets = ex.scratch(DType::U32, &[num_local + 1])?;
        let (mut grouped, mut in_rows) =
            (ex.scratch(DType::U32, &[slots])?, ex.scratch(DType::U32, &[slots])?);
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

    /// Dims of what the experts return for these rows.
    fn out_dims(&self, dispatched: &Dispatched) -> Result<Dims> {
        let dims = dispatched.expert_out_dims()?;
        match self.segments {
            None => Ok(dims),
            Some(segments) => Dims::new(&[&[segments], &*dims].concat()),
        }
    }

    /// `out[out_rows[i]] = MLP(expert e, x[in_rows[i]])` for every grouped slot i of e. `x` [R, H]
    /// in the model dtype, `out` [S, H] f32 ([segments * S, H] of cut experts); rows of `out` that no
    /// slot names are untouched.
    fn run(&self, x: View, groups: &ExpertGroups, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let dims = [groups.in_rows.elem_count(), self.shape().intermediate_size];
        let mut activated = ex.scratch(self.shape().dtype, &dims)?;
        let (w13, w2) = (TensorView::new(self.weights.w13())?, TensorView::new(self.weights.w2())?);
        let w13_bias = self.weights.w13_bias().map(TensorView::new).transpose()?;
        let w2_bias = self.weights.w2_bias().map(TensorView::new).transpose()?;
        let w13_bias = w13_bias.as_ref().map(TensorView::view).transpose()?;
        let w2_bias = w2_bias.as_ref().map(TensorView::view).transpose()?;
        grouped_gate_up_into(x, groups, w13.view()?, w13_bias, self.activation, activated.view_mut(), ex)?;
        let Some(of) = self.segments else {
            return grouped_down_into(activated.view(), groups, w2.view()?, w2_bias, out, ex);
        };
        let rows = out.rows() / of;
        for index in 0..of {
            let (x, to) = (activated.view(), out.reborrow().narrow(index * rows, rows)?);
            grouped_down_segment_into(x, groups, w2.view()?, Segment { index, of }, to, ex)?;
        }
        Ok(())
    }
}
