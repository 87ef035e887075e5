//! The launches of an attention layer in a step, and what a plan says of them.

use candle_core::{DType, Result, Tensor, bail};
use moe_comm::RowParallel;
use moe_kernels::arguments::expect_rows;
use moe_kernels::plan::{AttentionCall, Fusion, Machine, MixedCall, Reason, Stage};
use moe_kernels::{
    AttentionMeta, Exec, ProductRows, QkNormRope, RowsViewMut, StepRows, ViewMut, forward_rows,
    rope_attention_into,
};
use moe_layer::PlanStep;
use tracing::trace_span;

use super::check::{ATTENTION, expect_count};
use super::config::{AttentionConfig, QkNorm};
use super::layer::Attention;
use crate::config::RopeConfig;
use crate::kv_cache::{KvLayer, LayerCache, LayerState};
use crate::mixer::{Mixer, MixerIo};
use crate::projection::{Lock, fits_products};
use crate::rope::{Rope, RopeRows};
use crate::step::StepViews;

impl Mixer for Attention {
    fn state(&self) -> LayerState {
        LayerState::Paged(self.config.kv_layout(self.weights.qkv.weight.dtype()))
    }

    fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(|ranks| ranks.output.defer_sum()).is_some()
    }

    fn input_rows(&self, dims: &[usize], _: DType, ex: &Exec) -> Result<ProductRows> {
        let qkv = &self.weights.qkv;
        ProductRows::of_product(dims[0], qkv.weight.read()?.view()?, qkv.bias.is_some(), ex)
    }

    fn fits(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        let products = [&self.weights.qkv, &self.weights.o];
        fits_products(fusion, products, self.output_ranks(), step.rows, machine)
    }

    fn forward_into(
        &self,
        io: MixerIo,
        step: &StepViews,
        rope: &RopeRows,
        cache: &mut LayerCache,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let attended = self.attended(&io, step, rope, cache.paged()?, ex)?;
        self.weights.o.last_into(attended.rows(), io, self.output_ranks(), ex)
    }

    fn stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let qkv: &[&str] = if fusion == Fusion::NormAdd { &["norm", "qkv"] } else { &["qkv"] };
        let mut stages = vec![self.weights.qkv.stage(qkv, fusion, step.rows, machine)];
        if self.config.qk_norm == QkNorm::AllHeads {
            stages.push(self.all_heads_stage());
        }
        stages.extend(self.rows_call(step).stages(machine));
        stages.extend(self.weights.o.last_stages(fusion, step.rows, self.output_ranks(), machine));
        stages
    }
}

impl Attention {
    /// `attended` [T, Hq * D] from the products `qkv` f32 of q, k, v and gates.
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
        let q_norm = Lock::new(norms.map(|n| &n.0))?;
        let k_norm = Lock::new(norms.map(|n| &n.1))?;
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
        let sinks = Lock::new(self.weights.sinks.as_ref())?;
        let meta = AttentionMeta {
            query_start_loc: step.query_start_loc,
            positions: step.positions,
            block_tables: step.block_tables,
            scale: self.scale,
            sliding_window: self.config.sliding_window,
            sinks: sinks.view()?,
            gates: self.config.output_gate.then_some(args.qkv),
        };
        let (k_cache, Some(v_cache)) = kv.kv_mut() else {
            bail!("attention: expected a KV cache with value rows, got one of keys only")
        };
        let [decode_scores, prompt_scores] = step.attention_scores;
        let rows = StepRows { decode: step.decode_rows, decode_scores, prompt_scores };
        rope_attention_into(&args, &meta, rows, k_cache, v_cache, attended, ex)
    }

    /// Attention on candle tensors: `x` [T, H] in the weights' dtype and on their device, in any layout, to a new
    /// tensor [T, H], where T is the number of the step's tokens. `cache` is on that device, too; the arrays of `step`
    /// may be in host memory ([`Step::views`]) and are then copied.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices; a `rope` or a `cache` of other heads.
    ///
    /// [`Step::views`]: crate::Step::views
    pub fn forward(
        &self,
        x: &Tensor,
        step: &StepViews,
        rope: &Rope,
        cache: &mut LayerCache,
    ) -> Result<Tensor> {
        let dtype = self.weights.qkv.weight.dtype();
        expect_rows(ATTENTION, "x", x, self.config.hidden_size, dtype)?;
        self.config.check_cache(cache.paged()?, dtype)?;
        let rows: usize = x.dims().iter().rev().skip(1).product();
        expect_count("the rows of x", "as many as the step has tokens", step.num_tokens(), rows)?;
        let RopeConfig { head_dim, dim, .. } = *rope.config();
        expect_count("the head_dim of rope", "the layer's head_dim", self.config.head_dim, head_dim)?;
        expect_count("the dim of rope", "the layer's rotary_dim", self.config.rotary_dim, dim)?;
        forward_rows(x, self.config.hidden_size, x.dtype(), |x, out, ex| {
            let positions = ex.lend(step.positions)?;
            let rope_len = ex.lend(step.rope_len)?;
            let slots = ex.lend(step.slot_mapping)?;
            let tables = ex.lend(step.block_tables)?;
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
            self.forward_into(MixerIo::Store { x: x.into(), out }, &step, &rows, cache, ex)
        })
    }

    /// What the output product reads.
    fn attended(
        &self,
        io: &MixerIo,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<ProductRows> {
        let t = step.num_tokens();
        let w = &self.weights;
        // q, k and v are rounded once: k and v when they enter the cache, q never.
        let mut qkv = ex.scratch(DType::F32, &[t, self.config.qkv_rows()])?;
        w.qkv.first_into(io, qkv.view_mut(), ex)?;
        let mut attended = match io.fusion() == Fusion::NormAdd {
            true => {
                let width = self.config.num_heads * self.config.head_dim;
                ProductRows::Floats(ex.scratch(w.qkv.weight.dtype(), &[t, width])?)
            }
            false => ProductRows::of_product(t, w.o.weight.read()?.view()?, w.o.bias.is_some(), ex)?,
        };
        self.attend_into(qkv.view_mut(), step, rope, kv, attended.rows_mut(), ex)?;
        Ok(attended)
    }

    /// The ranks that add up the output product, if there are some.
    fn output_ranks(&self) -> Option<&RowParallel> {
        self.ranks.as_ref().map(|ranks| &ranks.output)
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
            sinks: self.config.sinks,
            gates: self.config.output_gate,
            dtype: self.weights.qkv.weight.dtype(),
            block_size: None,
            aligned: true,
        };
        let decode = AttentionCall { rows: step.decode_rows, one_row_each: true, ..prompts };
        let [decode_scores, prompt_scores] = step.attention_scores;
        MixedCall { decode, num_kv_heads, prompts, decode_scores, prompt_scores }
    }
}
