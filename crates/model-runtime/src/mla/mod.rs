//! Multi-head latent attention (DeepSeek-V2) over the paged KV cache, in two forms.
//!
//! One latent row per token stands for the keys and values of all heads. The naive form expands
//! it to every head before caching; the absorbed form caches the row itself and attends in latent
//! space, with the up-projections moved to the query and behind the sum. A run uses one form for
//! prefill and decode alike, so that a token's bits do not depend on how its prompt was chunked.

mod attend;
mod plan;
mod projections;

use std::str::FromStr;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;

use moe_comm::RowParallel;
use moe_kernels::names::MlaNames;
use moe_kernels::plan::{Form, FusedLinearForm, Machine, Reason, Stage};
use moe_kernels::{
    CpuIsa, Exec, MlaLatent, PreNorm, RowsView, TensorView, View, ViewMut, linear_add_into,
    linear_row_parallel_into, mla_cache_into, mla_latent_into, norm_linear_into,
};
use moe_layer::{BlockContext, PlanStep};
use tracing::trace_span;

use attend::Source;

use crate::attention::Lock;
use crate::decoder::SelfAttention;
use crate::kv_cache::{KvLayer, KvLayout, LayerState};
use crate::rope::RopeRows;
use crate::step::StepViews;
use projections::{Down, Projection, Up};

/// What the KV cache holds, and where the up-projections happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MlaForm {
    /// Latent rows: L + R values per token and layer.
    #[default]
    Absorbed,
    /// Keys and values of every head.
    Naive,
}

impl FromStr for MlaForm {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "absorbed" => Ok(Self::Absorbed),
            "naive" => Ok(Self::Naive),
            other => Err(format!("unknown form of MLA {other:?}; expected absorbed or naive")),
        }
    }
}

/// Sizes and options of an MLA layer, named as in DeepSeek's config.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// Width of the residual stream H.
    pub hidden_size: usize,
    /// Query heads Hq.
    pub num_heads: usize,
    /// Width of the query's down-projection; `None`: queries are projected at once.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent row, L.
    pub kv_lora_rank: usize,
    /// Dimensions of a head's query and key that are not rotated, N.
    pub qk_nope_head_dim: usize,
    /// Dimensions that are rotated, R; even.
    pub qk_rope_head_dim: usize,
    /// Dimensions of a head's value, V.
    pub v_head_dim: usize,
    /// Whether the down-projections and the output product have biases.
    pub bias: bool,
    /// Epsilon of the norms of both latents.
    pub norm_eps: f64,
    /// Factor of the scores: 1 / sqrt(N + R), times what YaRN adds.
    pub softmax_scale: f64,
    /// The form.
    pub form: MlaForm,
}

impl MlaConfig {
    /// This config for a rank that holds `num_heads` of the heads.
    pub fn with_heads(self, num_heads: usize) -> Self {
        Self { num_heads, ..self }
    }

    /// What a layer of this form caches of a token.
    pub fn kv_layout(&self, dtype: DType) -> KvLayout {
        let rope = self.qk_rope_head_dim;
        let (num_kv_heads, head_dim, value_dim) = match self.form {
            MlaForm::Absorbed => (1, self.kv_lora_rank + rope, None),
            MlaForm::Naive => (self.num_heads, self.qk_nope_head_dim + rope, Some(self.v_head_dim)),
        };
        KvLayout { num_kv_heads, head_dim, value_dim, dtype }
    }

    /// Rows of the matrix that makes queries.
    fn query_rows(&self) -> usize {
        self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
    }

    fn check(&self) -> Result<()> {
        for (name, size) in [
            ("num_heads", self.num_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ] {
            if size == 0 {
                bail!("MLA: expected {name} of at least 1, got 0")
            }
        }
        if !self.qk_rope_head_dim.is_multiple_of(2) {
            bail!("MLA: expected an even qk_rope_head_dim, got {}", self.qk_rope_head_dim)
        }
        Ok(())
    }
}

/// An MLA layer.
#[derive(Clone, Debug)]
pub struct MlaAttention {
    config: MlaConfig,
    down: Down,
    kv_a_norm: Tensor,
    up: Up,
    o: Projection,
    /// The ranks that cut the heads, if these are a part of them.
    ranks: Option<RowParallel>,
}

impl MlaAttention {
    /// Loads the tensors of a layer, in the model dtype.
    ///
    /// # Errors
    /// Sizes of zero; an odd rotated part; missing or wrongly shaped tensors; tensors that `config` does not ask for and
    /// that would change the results, by name.
    pub fn load(config: MlaConfig, names: MlaNames, vb: VarBuilder) -> Result<Self> {
        Self::load_on(config, names, vb, &BlockContext::default())
    }

    /// [`load`](Self::load) on a rank, where projections may be quantised.
    ///
    /// # Errors
    /// As `load`; quantised tensors that are not what the header says.
    pub fn load_on(
        config: MlaConfig,
        names: MlaNames,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        config.check()?;
        config.refuse_unread(&names, &vb)?;
        let (h, l) = (config.hidden_size, config.kv_lora_rank);
        let out = config.num_heads * config.v_head_dim;
        Ok(Self {
            down: Down::load(&config, &names, &vb, context)?,
            kv_a_norm: vb.pp(names.kv_a_norm).get(l, "weight")?,
            up: Up::load(&config, vb.pp(names.kv_b), context)?,
            o: Projection::load(
                [h, out],
                config.bias,
                vb.pp(names.o),
                context.row_parallel_use(out),
                context,
            )?,
            ranks: None,
            config,
        })
    }

    /// Makes this the part of a layer whose heads some ranks share: the config counts this rank's heads,
    /// `q_b` (or `q`) and `kv_b` have their rows, `o` has their columns, and all else is whole. In the
    /// absorbed form every rank caches the same latent rows.
    pub fn with_row_parallel(self, ranks: impl Into<Option<RowParallel>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// The config.
    pub fn config(&self) -> &MlaConfig {
        &self.config
    }

    /// Writes the rows' cache entries, where the latents have a product of their own.
    fn cache(
        &self,
        kv_a: &Projection,
        x: View,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let (t, dtype) = (x.rows(), x.dtype());
        let mut compressed = ex.scratch(DType::F32, &[t, l + r])?;
        kv_a.forward_into(x, compressed.view_mut(), ex)?;
        let norm = TensorView::new(&self.kv_a_norm)?;
        let args = MlaLatent {
            compressed: compressed.view(),
            norm: norm.view()?,
            eps: self.config.norm_eps as f32,
            cos: rope.cos(),
            sin: rope.sin(),
        };
        let (mut latent, mut rotated) = (ex.scratch(dtype, &[t, l])?, ex.scratch(dtype, &[t, r])?);
        mla_latent_into(&args, latent.view_mut(), rotated.view_mut(), ex)?;
        let (k_cache, v_cache) = kv.kv_mut();
        match &self.up {
            Up::Absorbed { .. } => {
                let rows = latent.view().reshape(&[t, 1, l])?;
                mla_cache_into(rows, rotated.view(), step.slot_mapping, k_cache, v_cache, ex)
            }
            Up::Naive(up) => {
                let width = self.config.qk_nope_head_dim + self.config.v_head_dim;
                let mut heads = ex.scratch(DType::F32, &[t, num_heads * width])?;
                up.forward_into(latent.view(), heads.view_mut(), ex)?;
                let rows = heads.view().reshape(&[t, num_heads, width])?;
                mla_cache_into(rows, rotated.view(), step.slot_mapping, k_cache, v_cache, ex)
            }
        }
    }
}

/// `rope` has R dimensions; the layout of `kv` is [`MlaConfig::kv_layout`].
impl SelfAttention for MlaAttention {
    fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let (down, o) = (self.down.packed(isa)?, self.o.packed(isa)?);
        Ok(Self { down, o, ..self })
    }

    fn state(&self) -> LayerState {
        LayerState::Paged(self.config.kv_layout(self.o.weight.dtype()))
    }

    fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(RowParallel::defer_sum).is_some()
    }

    fn fits_fused(&self, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        let Down::Packed(packed) = &self.down else {
            return Err(Reason::Part { part: "queries and latents out of products of their own" });
        };
        if self.ranks.is_some() {
            return Err(Reason::Part { part: "the sum over ranks behind its output product" });
        }
        FusedLinearForm::Stream.fits(&packed.call(step.rows), machine)?;
        FusedLinearForm::Stream.fits(&self.o.call(step.rows), machine)
    }

    fn stages(&self, fused: bool, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        self.step_stages(fused, step, machine)
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
        let x = x.floats("latent attention")?;
        let (t, r) = (x.rows(), self.config.qk_rope_head_dim);
        let mut attended = ex.scratch(x.dtype(), &[t, self.config.num_heads * self.config.v_head_dim])?;
        match &self.down {
            Down::Apart { query, kv_a } => {
                self.cache(kv_a, x, step, rope, kv, ex)?;
                let mut q = ex.scratch(DType::F32, &[t, self.config.query_rows()])?;
                query.forward_into(x, q.view_mut(), ex)?;
                let rows = self.rows(Source::Queries(q.view()), rope);
                self.attend_into(&rows, step, kv, attended.view_mut(), ex)?;
            }
            Down::Packed(packed) => {
                let width = self.config.query_rows() + self.config.kv_lora_rank + r;
                let mut products = ex.scratch(DType::F32, &[t, width])?;
                packed.forward_into(x, products.view_mut(), ex)?;
                self.attend_packed_into(products.view(), step, rope, kv, attended.view_mut(), ex)?;
            }
        }
        let (attended, bias) = (attended.view(), Lock::new(&self.o.bias)?);
        let (o, bias) = (self.o.weight.read()?, bias.view()?);
        match &self.ranks {
            None => linear_row_parallel_into(attended, o.view()?, bias, out, ex),
            Some(ranks) => ranks.linear_into(attended, o.view()?, bias, out, ex),
        }
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
        let Down::Packed(packed) = &self.down else {
            bail!("latent attention: queries and latents out of products of their own take no norm")
        };
        let MlaConfig { num_heads, v_head_dim, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let t = residual.rows();
        let mut products = ex.scratch(DType::F32, &[t, self.config.query_rows() + l + r])?;
        let weight = packed.weight.read()?;
        norm_linear_into(residual.as_view(), norm, weight.view()?, None, products.view_mut(), ex)?;
        let mut attended = ex.scratch(self.o.weight.dtype(), &[t, num_heads * v_head_dim])?;
        self.attend_packed_into(products.view(), step, rope, kv, attended.view_mut(), ex)?;
        let (o, bias) = (self.o.weight.read()?, Lock::new(&self.o.bias)?);
        linear_add_into(attended.view(), o.view()?, bias.view()?, residual.reborrow(), ex)
    }
}
