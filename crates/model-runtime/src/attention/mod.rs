//! Grouped-query attention over the paged KV cache.
//!
//! One pass: packed q, k, v product; per-head norm, rotation and KV write fused; paged attention;
//! row-parallel output product. Prefill, chunked prefill and decode are the same code and give
//! the same bits.

mod config;
mod load;
mod partial;
mod ranks;

use candle_core::{DType, Result, Tensor, bail};

use moe_kernels::plan::{
    AttentionCall, Form, FusedLinearForm, LinearCall, LinearForm, Machine, MixedCall, Reason, Stage,
};
use moe_kernels::{
    AttentionMeta, CpuIsa, Exec, PreNorm, ProductRows, QkNormRope, RowsView, RowsViewMut, StepRows,
    TensorView, View, ViewMut, Weight, forward_rows, linear_add_into, linear_into, linear_row_parallel_into,
    norm_linear_into, rope_attention_into,
};
use moe_layer::PlanStep;
use tracing::trace_span;

pub use config::{AttentionConfig, AttentionWeights, QkNorm, RotatedPairs};

use load::Held;
use ranks::HeadRanks;

use crate::decoder::{OUTPUT, OUTPUT_ADD, SelfAttention, linear_stage};
use crate::kv_cache::{KvLayer, LayerState};
use crate::rope::{Rope, RopeRows};
use crate::step::StepViews;

/// An attention layer.
#[derive(Clone, Debug)]
pub struct Attention {
    config: AttentionConfig,
    weights: Held,
    scale: f32,
    /// The ranks that cut the heads, if these are a part of them.
    ranks: Option<HeadRanks>,
}

impl Attention {
    /// `attended` [T, Hq * D] from the products `qkv` [T, (Hq + 2 Hkv) * D] f32.
    fn attend_into(
        &self,
        mut qkv: ViewMut,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        attended: RowsViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = self.config;
        let mut norms = self.weights.qk_norm.as_ref();
        if let Some((q_norm, k_norm)) = norms.filter(|_| self.config.qk_norm == QkNorm::AllHeads) {
            self.norm_all_heads(q_norm, k_norm, qkv.reborrow(), ex)?;
            norms = None;
        }
        let (q_norm, k_norm) = (Lock::of(norms.map(|n| &n.0))?, Lock::of(norms.map(|n| &n.1))?);
        let args = QkNormRope {
            qkv: qkv.as_view(),
            q_norm: q_norm.view()?,
            k_norm: k_norm.view()?,
            eps: self.config.rms_norm_eps as f32,
            cos: rope.cos(),
            sin: rope.sin(),
            slot_mapping: step.slot_mapping,
            num_heads,
            num_kv_heads,
            head_dim,
        };
        let meta = AttentionMeta {
            query_start_loc: step.query_start_loc,
            positions: step.positions,
            block_tables: step.block_tables,
            scale: self.scale,
            sliding_window: self.config.sliding_window,
        };
        let (k_cache, Some(v_cache)) = kv.kv_mut() else {
            bail!("attention: expected a KV cache with value rows, got one of keys only")
        };
        let [decode_scores, prompt_scores] = step.attention_scores;
        let rows = StepRows { decode: step.decode_rows, decode_scores, prompt_scores };
        rope_attention_into(&args, &meta, rows, k_cache, v_cache, attended, ex)
    }

    /// Attention on candle tensors: `x` [T, H] in the weights' dtype and on their device, in any layout, to a new tensor
    /// [T, H]. `kv` lies on that device too; the arrays of `step` may lie in host memory ([`Step::views`]) and are then
    /// copied.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices.
    ///
    /// [`Step::views`]: crate::Step::views
    pub fn forward(&self, x: &Tensor, step: &StepViews, rope: &Rope, kv: &mut KvLayer) -> Result<Tensor> {
        forward_rows(x, self.config.hidden_size, x.dtype(), |x, out, ex| {
            let (positions, rope_len) = (ex.lend(step.positions)?, ex.lend(step.rope_len)?);
            let (slots, tables) = (ex.lend(step.slot_mapping)?, ex.lend(step.block_tables)?);
            let starts = ex.lend(step.query_start_loc)?;
            let step = StepViews {
                positions: positions.view(),
                rope_len: rope_len.view(),
                slot_mapping: slots.view(),
                block_tables: tables.view(),
                query_start_loc: starts.view(),
                ..*step
            };
            let rows = rope.rows(step.positions, step.rope_len, ex)?;
            self.forward_into(x.into(), &step, &rows, kv, out, ex)
        })
    }
}

impl SelfAttention for Attention {
    fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let (rows, hidden) = (self.config.qkv_rows(), self.config.hidden_size);
        let (qkv, o) = (self.weights.qkv.packed(isa, rows)?, self.weights.o.packed(isa, hidden)?);
        Ok(Self { weights: Held { qkv, o, ..self.weights }, ..self })
    }

    fn state(&self) -> LayerState {
        LayerState::Paged(self.config.kv_layout(self.weights.qkv.dtype()))
    }

    fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(|ranks| ranks.output.defer_sum()).is_some()
    }

    fn input_rows(&self, dims: &[usize], _: DType, ex: &Exec) -> Result<ProductRows> {
        ProductRows::of_product(dims[0], self.weights.qkv.read()?.view()?, self.config.qkv_bias, ex)
    }

    fn forward_into(
        &self,
        x: RowsView,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let attended = self.attended(x, step, rope, kv, ex)?;
        let (o, bias) = (self.weights.o.read()?, Lock::new(&self.weights.o_bias)?);
        match &self.ranks {
            None => linear_row_parallel_into(attended.rows(), o.view()?, bias.view()?, out, ex),
            Some(ranks) => ranks.output.linear_into(attended.rows(), o.view()?, bias.view()?, out, ex),
        }
    }

    fn add_into(
        &self,
        x: RowsView,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        residual: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let attended = self.attended(x, step, rope, kv, ex)?;
        let (o, bias) = (self.weights.o.read()?, Lock::new(&self.weights.o_bias)?);
        linear_add_into(attended.rows(), o.view()?, bias.view()?, residual, ex)
    }

    fn fits_added(&self, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        self.expect_one_rank()?;
        match LinearForm::choose(&self.o_call(step.rows), machine) {
            Some(form) => form.adds(step.rows),
            None => Err(Reason::NoGain("no kernel multiplies these")),
        }
    }

    fn fits_fused(&self, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        self.expect_one_rank()?;
        FusedLinearForm::Stream.fits(&self.qkv_call(step.rows), machine)?;
        FusedLinearForm::Stream.fits(&self.o_call(step.rows), machine)
    }

    fn stages(&self, fused: bool, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let (qkv, o): (&[&str], &[&str]) =
            if fused { (&["norm", "qkv"], OUTPUT_ADD) } else { (&["qkv"], OUTPUT) };
        let mut stages = vec![linear_stage(qkv, fused, &self.qkv_call(step.rows), machine)];
        if self.config.qk_norm == QkNorm::AllHeads {
            stages.push(self.all_heads_stage());
        }
        stages.extend(self.rows_call(step).stages(machine));
        stages.push(linear_stage(o, fused, &self.o_call(step.rows), machine));
        stages.extend(self.ranks.as_ref().and_then(|ranks| ranks.output.sum_stage()));
        stages
    }

    fn add_normed_into(
        &self,
        norm: &PreNorm<'_>,
        mut residual: ViewMut,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let (t, w) = (residual.rows(), &self.weights);
        let mut qkv = ex.scratch(DType::F32, &[t, self.config.qkv_rows()])?;
        let (packed, bias) = (w.qkv.read()?, Lock::new(&w.qkv_bias)?);
        norm_linear_into(residual.as_view(), norm, packed.view()?, bias.view()?, qkv.view_mut(), ex)?;
        let mut attended = ex.scratch(w.qkv.dtype(), &[t, self.config.num_heads * self.config.head_dim])?;
        self.attend_into(qkv.view_mut(), step, rope, kv, attended.view_mut().into(), ex)?;
        let (o, bias) = (w.o.read()?, Lock::new(&w.o_bias)?);
        linear_add_into(attended.view(), o.view()?, bias.view()?, residual.reborrow(), ex)
    }
}

impl Attention {
    /// What the output product reads, from `x` on.
    fn attended(
        &self,
        x: RowsView,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<ProductRows> {
        let (t, w) = (x.len(), &self.weights);
        // q, k and v are rounded once: k and v when they enter the cache, q never.
        let mut qkv = ex.scratch(DType::F32, &[t, self.config.qkv_rows()])?;
        let bias = Lock::new(&w.qkv_bias)?;
        linear_into(x, w.qkv.read()?.view()?, bias.view()?, qkv.view_mut(), ex)?;
        let mut attended = ProductRows::of_product(t, w.o.read()?.view()?, w.o_bias.is_some(), ex)?;
        self.attend_into(qkv.view_mut(), step, rope, kv, attended.rows_mut(), ex)?;
        Ok(attended)
    }

    fn expect_one_rank(&self) -> std::result::Result<(), Reason> {
        match self.ranks {
            None => Ok(()),
            Some(_) => Err(Reason::Part { part: "the sum over ranks behind its output product" }),
        }
    }

    /// The rows of a step between the two products.
    fn rows_call(&self, step: &PlanStep) -> MixedCall {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = self.config;
        let prompts = AttentionCall {
            rows: step.prompt_rows(),
            one_row_each: false,
            num_heads,
            head_dim,
            value_dim: head_dim,
            latent: false,
            dtype: self.weights.qkv.dtype(),
            block_size: None,
            aligned: true,
        };
        let decode = AttentionCall { rows: step.decode_rows, one_row_each: true, ..prompts };
        let [decode_scores, prompt_scores] = step.attention_scores;
        MixedCall { decode, num_kv_heads, prompts, decode_scores, prompt_scores }
    }

    fn qkv_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, &self.weights.qkv, self.config.qkv_bias)
    }

    fn o_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, &self.weights.o, self.config.o_bias)
    }
}

/// The product of `rows` rows with a weight [n, k].
fn linear_call(rows: usize, weight: &Weight, bias: bool) -> LinearCall {
    let (n, k) = match *weight.dims() {
        [n, k] => (n, k),
        _ => (0, 0),
    };
    LinearCall { rows, n, k, dtype: weight.dtype(), quant: weight.quantisation(), bias, aligned: true }
}

/// An optional tensor under its read guard.
pub(crate) struct Lock<'a>(Option<TensorView<'a>>);

impl<'a> Lock<'a> {
    pub(crate) fn new(tensor: &'a Option<Tensor>) -> Result<Self> {
        Self::of(tensor.as_ref())
    }

    fn of(tensor: Option<&'a Tensor>) -> Result<Self> {
        Ok(Self(tensor.map(TensorView::new).transpose()?))
    }

    pub(crate) fn view(&self) -> Result<Option<View<'_>>> {
        self.0.as_ref().map(|t| t.view()).transpose()
    }
}
