//! The loop: the experts on this rank have separate matrices and are computed one after the other.
//!
//! Rows of an expert are gathered, multiplied by dense products, and written back to their slots. Several ranks can run
//! the loop, too. Each has its own experts, or its part of every expert.

use moe_comm::RowShard;
use moe_experts::{ExpertWeights, Experts, ExpertsShape, Reservation};
use moe_kernels::arguments::{expect_dims, expect_dtype, expect_rank3};
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::{
    Activation, ActivationFormat, Buffer, Dispatched, Exec, Segment, TensorView, View, ViewMut,
    embedding_into, fill_into, gated_activation_into, group_slots_into, linear_into,
    linear_row_parallel_into, linear_segment_into, zero_absent_into,
};

/// The matrices of one expert: `down(act(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct ExpertMlp {
    /// [I, H].
    pub gate: Tensor,
    /// [I, H].
    pub up: Tensor,
    /// [H, I].
    pub down: Tensor,
}

/// The experts of a rank with separate weights. Cloning shares the weights.
#[derive(Clone, Debug)]
pub struct ExpertLoop {
    experts: Vec<ExpertMlp>,
    shape: ExpertsShape,
    activation: Activation,
    /// This rank's segments of the intermediate size, if tensor parallelism cuts the experts.
    segments: Option<usize>,
    format: ActivationFormat,
    /// The largest number of rows of a block, in the BatchedExperts format.
    max_rows: Option<usize>,
}

const NAME: &str = "legacy experts";

impl ExpertLoop {
    /// Makes experts of this shape. A rank may have none.
    ///
    /// # Errors
    /// Another number of experts; matrices of other dims or another dtype.
    pub fn new(experts: Vec<ExpertMlp>, shape: ExpertsShape, activation: Activation) -> Result<Self> {
        let ExpertsShape { num_local_experts, hidden_size: h, intermediate_size: i, dtype } = shape;
        if experts.len() != num_local_experts {
            bail!("{NAME}: expected {num_local_experts} experts, got {}", experts.len())
        }
        for (e, expert) in experts.iter().enumerate() {
            let ExpertMlp { gate, up, down } = expert;
            for (name, tensor, dims) in [("gate", gate, [i, h]), ("up", up, [i, h]), ("down", down, [h, i])] {
                if tensor.dims() != dims || tensor.dtype() != dtype {
                    bail!(
                        "{NAME}: expected {name} of expert {e} with dims {dims:?} of dtype {}, got {:?} of {}",
                        dtype.as_str(),
                        tensor.dims(),
                        tensor.dtype().as_str()
                    )
                }
            }
        }
        Ok(Self {
            experts,
            shape,
            activation,
            segments: None,
            format: ActivationFormat::Standard,
            max_rows: None,
        })
    }

    /// Makes experts whose matrices are parts of the packs.
    pub(super) fn of_packs(weights: &ExpertWeights, activation: Activation) -> Result<Self> {
        let ExpertsShape { num_local_experts, intermediate_size: i, .. } = weights.shape();
        let w13 = weights.w13().to_tensor()?;
        let w2 = weights.w2().to_tensor()?;
        let expert = |slot| {
            let w13 = w13.get(slot)?;
            let down = w2.get(slot)?;
            Ok(ExpertMlp { gate: w13.narrow(0, 0, i)?, up: w13.narrow(0, i, i)?, down })
        };
        let experts = (0..num_local_experts).map(expert).collect::<Result<_>>()?;
        Self::new(experts, weights.shape(), activation)
    }

    /// Marks these as the parts of experts that ranks cut along their intermediate size.
    pub(super) fn with_shard(self, shard: &RowShard) -> Self {
        let local = shard.local_segments.len();
        Self { segments: (local < shard.segments).then_some(local), ..self }
    }

    /// Returns the same experts for rows in this format. Blocks of the BatchedExperts format have at most `max_rows`
    /// rows.
    pub(crate) fn with_format(self, format: ActivationFormat, max_rows: Option<usize>) -> Self {
        Self { format, max_rows, ..self }
    }

    /// Runs every expert on this rank that a slot names. `out` [S, T, K, H] f32 receives their unweighted rows: S sums
    /// for each row if the experts are cut, and otherwise one. Rows without an expert on this rank become zero.
    fn slots_into(
        &self,
        hidden: View,
        topk_ids: View,
        expert_map: Option<View>,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let t = topk_ids.dims()[0];
        let k = topk_ids.dims()[1];
        let h = self.shape.hidden_size;
        let slots = t * k;
        let segments = self.segments.unwrap_or(1);
        let mut offsets = ex.scratch(DType::U32, &[self.experts.len() + 1])?;
        let mut order = ex.scratch(DType::U32, &[slots])?;
        group_slots_into(topk_ids, expert_map, offsets.view_mut(), order.view_mut(), ex)?;
        let offsets = on_host(offsets.view(), ex)?;
        let order = on_host(order.view(), ex)?;
        let offsets = offsets.view().cpu::<u32>()?;
        let order = order.view().cpu::<u32>()?;
        let used = offsets.last().map_or(0, |&end| end as usize);
        if used == 0 {
            return fill_into(0., out, ex);
        }
        let (place, tokens) = invert(&order[..used], k, slots);
        let place = ex.lend(View::new(&place, &[slots])?)?;
        let tokens = ex.lend(View::new(&tokens, &[used])?)?;
        let mut grouped = ex.scratch(DType::F32, &[segments * used, h])?;
        for (expert, range) in self.experts.iter().zip(offsets.windows(2)) {
            let start = range[0] as usize;
            let rows = (range[1] - range[0]) as usize;
            if rows > 0 {
                let mut x = ex.scratch(hidden.dtype(), &[rows, h])?;
                embedding_into(hidden, tokens.view().narrow(start, rows)?, x.view_mut(), ex)?;
                self.expert_into(expert, x.view(), grouped.view_mut(), (start, used), ex)?;
            }
        }
        let mut out = out.reshape(&[segments * t, k, h])?;
        for segment in 0..segments {
            let mut part = out.reborrow().narrow(segment * t, t)?;
            let rows = grouped.view().narrow(segment * used, used)?;
            embedding_into(rows, place.view(), part.reborrow().reshape(&[slots, h])?, ex)?;
            zero_absent_into(topk_ids, expert_map, self.experts.len(), part, ex)?;
        }
        Ok(())
    }

    /// Computes the expert's rows of `x` [R, H], and writes them from row `start` of `out` [S * stride, H] f32 on.
    /// There is one sum for each segment, at a distance of `stride` rows.
    fn expert_into(
        &self,
        expert: &ExpertMlp,
        x: View,
        mut out: ViewMut,
        (start, stride): (usize, usize),
        ex: &mut Exec,
    ) -> Result<()> {
        let dims = [x.rows(), self.shape.intermediate_size];
        let mut gate = ex.scratch(DType::F32, &dims)?;
        let mut up = ex.scratch(DType::F32, &dims)?;
        linear_into(x, TensorView::new(&expert.gate)?.view()?, None, gate.view_mut(), ex)?;
        linear_into(x, TensorView::new(&expert.up)?.view()?, None, up.view_mut(), ex)?;
        let mut activated = ex.scratch(x.dtype(), &dims)?;
        gated_activation_into(gate.view(), up.view(), self.activation, activated.view_mut(), ex)?;
        let x = activated.view();
        let down = TensorView::new(&expert.down)?;
        let Some(of) = self.segments else {
            return linear_row_parallel_into(x, down.view()?, None, out.narrow(start, x.rows())?, ex);
        };
        for index in 0..of {
            let to = out.reborrow().narrow(index * stride + start, x.rows())?;
            linear_segment_into(x, down.view()?, Segment { index, of }, to, ex)?;
        }
        Ok(())
    }

    /// Computes batched rows [E_local, max_tokens, H]. Each expert computes the first rows of its block.
    fn batches_into(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let rows = dispatched.rows.view();
        let counts = dispatched.expert_num_tokens()?;
        let (experts, max_tokens, h) = expect_rank3(NAME, "rows", &rows)?;
        expect_dims(NAME, "rows", &rows, &[self.experts.len(), max_tokens, h])?;
        expect_dims(NAME, "expert_num_tokens", &counts, &[experts])?;
        let rows = rows.reshape(&[experts * max_tokens, h])?;
        let mut out = out.reshape(&[experts * max_tokens, h])?;
        let counts = on_host(counts, ex)?;
        for (e, (expert, &count)) in self.experts.iter().zip(counts.view().cpu::<u32>()?).enumerate() {
            let x = rows.narrow(e * max_tokens, count as usize)?;
            if count > 0 {
                self.expert_into(expert, x, out.reborrow(), (e * max_tokens, 0), ex)?;
            }
        }
        Ok(())
    }
}

impl Experts for ExpertLoop {
    fn name(&self) -> &str {
        NAME
    }

    fn activation_format(&self) -> ActivationFormat {
        self.format
    }

    fn shape(&self) -> ExpertsShape {
        self.shape
    }

    fn max_rows(&self) -> Option<usize> {
        self.max_rows
    }

    fn products(&self) -> &'static str {
        match self.experts.iter().any(|expert| !expert.gate.device().is_cpu()) {
            false => "dense products, one expert after the other",
            true => {
                "dense products, one expert after the other, counts read on the host, so without CUDA graphs"
            }
        }
    }

    fn segments(&self) -> Option<usize> {
        self.segments
    }

    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation> {
        let ExpertsShape { hidden_size: h, intermediate_size: i, dtype, .. } = self.shape;
        let one_expert = Reservation::new()
            .with(DType::F32, &[max_tokens, i])?
            .with(DType::F32, &[max_tokens, i])?
            .with(dtype, &[max_tokens, i])?;
        if self.format == ActivationFormat::BatchedExperts {
            return Ok(one_expert);
        }
        one_expert
            .with(DType::U32, &[self.experts.len() + 1])?
            .with(DType::U32, &[3, max_tokens, top_k])?
            .with(dtype, &[max_tokens, h])?
            .with(DType::F32, &[self.segments.unwrap_or(1), max_tokens, top_k, h])
    }

    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let rows = dispatched.rows.view();
        let wanted = self.activation_format();
        if dispatched.format != wanted {
            bail!("{NAME}: expected rows in the {wanted:?} format, got {:?}", dispatched.format)
        }
        expect_dtype(NAME, "rows", &rows, self.shape.dtype)?;
        if rows.dims().last() != Some(&self.shape.hidden_size) {
            bail!("{NAME}: expected rows of hidden size {}, got {:?}", self.shape.hidden_size, rows.dims())
        }
        expect_dtype(NAME, "out", &out, DType::F32)?;
        expect_dims(NAME, "out", &out, &self.out_dims(dispatched)?)?;
        match wanted {
            ActivationFormat::Standard | ActivationFormat::Listed => {
                let ids = dispatched.topk_ids()?;
                self.slots_into(rows, ids, dispatched.expert_map, out, ex)
            }
            ActivationFormat::BatchedExperts => self.batches_into(dispatched, out, ex),
        }
    }
}

/// Returns the grouped row of each of `slots` slots, and the token of each grouped row. Slots without a group first
/// read row 0, and are set to zero afterwards.
fn invert(order: &[u32], top_k: usize, slots: usize) -> (Vec<u32>, Vec<u32>) {
    let mut place = vec![0; slots];
    for (row, &slot) in order.iter().enumerate() {
        place[slot as usize] = row as u32;
    }
    (place, order.iter().map(|slot| slot / top_k as u32).collect())
}

/// Copies a view to the host, which must know the experts that have rows. On a GPU it waits for the copy, so a graph
/// cannot record it.
fn on_host(view: View, ex: &Exec) -> Result<Buffer> {
    if ex.is_cuda() && ex.workspace().is_frozen() {
        bail!("{NAME} read counts of rows on the host, so their steps run without CUDA graphs")
    }
    ex.to_host(view)
}
