//! Grouped-query attention over the paged KV cache.
//!
//! One pass: packed q, k, v product; per-head norm, rotation and KV write fused; paged attention;
//! row-parallel output product. Prefill, chunked prefill and decode are the same code and give
//! the same bits.

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;

use moe_comm::RowParallel;
use moe_kernels::plan::{
    AttentionCall, AttentionForm, Form, FusedLinearForm, LinearCall, Machine, Reason, Stage,
};
use moe_kernels::{
    AttentionMeta, Exec, PreNorm, QkNormRope, TensorView, View, ViewMut, Workspace, forward_rows,
    linear_add_into, linear_into, linear_row_parallel_into, norm_linear_into, rope_attention_into,
};
use moe_layer::PlanStep;
use tracing::trace_span;

use crate::decoder::{SelfAttention, linear_stage, plain};
use crate::kv_cache::KvLayer;
use crate::layers::load_packed;
use crate::rope::{Rope, RopeRows};
use crate::step::StepViews;

/// Sizes and options of an attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Width of the residual stream H.
    pub hidden_size: usize,
    /// Query heads Hq; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key-value heads Hkv.
    pub num_kv_heads: usize,
    /// Dimensions of a head D; even.
    pub head_dim: usize,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output product has a bias.
    pub o_bias: bool,
    /// Whether each head of q and k is RMS-normed before its rotation.
    pub qk_norm: bool,
    /// Epsilon of that norm.
    pub rms_norm_eps: f64,
    /// Positions that a row attends to, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// Factor of the scores; `None` for 1 / sqrt(D).
    pub softmax_scale: Option<f64>,
}

/// Names of an attention layer's tensors under its prefix. A projection `q` has `q.weight` and,
/// with a bias, `q.bias`; a norm has `.weight`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionNames<'a> {
    /// Query projection, [Hq*D, H].
    pub q: &'a str,
    /// Key projection, [Hkv*D, H].
    pub k: &'a str,
    /// Value projection, [Hkv*D, H].
    pub v: &'a str,
    /// Output projection, [H, Hq*D].
    pub o: &'a str,
    /// Query norm, `[D]`; unused without `qk_norm`.
    pub q_norm: &'a str,
    /// Key norm, `[D]`; unused without `qk_norm`.
    pub k_norm: &'a str,
}

impl Default for AttentionNames<'_> {
    /// `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`: the names of most models.
    fn default() -> Self {
        Self { q: "q_proj", k: "k_proj", v: "v_proj", o: "o_proj", q_norm: "q_norm", k_norm: "k_norm" }
    }
}

/// The weights of an attention layer; all in the model dtype.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// Rows of q, then k, then v: [(Hq + 2 Hkv) * D, H].
    pub qkv: Tensor,
    /// [(Hq + 2 Hkv) * D].
    pub qkv_bias: Option<Tensor>,
    /// [H, Hq * D].
    pub o: Tensor,
    /// `[H]`.
    pub o_bias: Option<Tensor>,
    /// Norm weight of every q head and of every k head, `[D]` each.
    pub qk_norm: Option<(Tensor, Tensor)>,
}

/// An attention layer.
#[derive(Clone, Debug)]
pub struct Attention {
    config: AttentionConfig,
    weights: AttentionWeights,
    scale: f32,
    /// The ranks that cut the heads, if these are a part of them.
    ranks: Option<RowParallel>,
    workspace: Workspace,
}

impl AttentionConfig {
    /// Rows of the q, k, v pack.
    pub fn qkv_rows(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    fn check(&self) -> Result<()> {
        let Self { num_heads, num_kv_heads, head_dim, .. } = *self;
        if num_heads == 0 || num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            bail!(
                "attention: expected num_heads divisible by num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            bail!("attention: expected an even head_dim, got {head_dim}")
        }
        if self.sliding_window == Some(0) {
            bail!("attention: expected a sliding window of at least 1, got 0")
        }
        Ok(())
    }
}

impl Attention {
    /// From weights whose shapes match the config.
    pub fn new(config: AttentionConfig, weights: AttentionWeights) -> Result<Self> {
        config.check()?;
        let (h, n, q) = (config.hidden_size, config.qkv_rows(), config.num_heads * config.head_dim);
        let dtype = weights.qkv.dtype();
        let check = |name: &str, tensor: &Tensor, dims: &[usize]| -> Result<()> {
            if tensor.dims() != dims || tensor.dtype() != dtype {
                bail!(
                    "attention: expected {name} {dims:?} of dtype {}, got {:?} of {}",
                    dtype.as_str(),
                    tensor.dims(),
                    tensor.dtype().as_str()
                )
            }
            Ok(())
        };
        check("qkv", &weights.qkv, &[n, h])?;
        check("o", &weights.o, &[h, q])?;
        for (name, wanted, bias, rows) in [
            ("qkv_bias", config.qkv_bias, &weights.qkv_bias, n),
            ("o_bias", config.o_bias, &weights.o_bias, h),
        ] {
            match bias {
                Some(bias) if wanted => check(name, bias, &[rows])?,
                None if !wanted => {}
                _ => bail!("attention: expected {name} to be present: {wanted}, got {}", bias.is_some()),
            }
        }
        match &weights.qk_norm {
            Some((q_norm, k_norm)) if config.qk_norm => {
                check("q_norm", q_norm, &[config.head_dim])?;
                check("k_norm", k_norm, &[config.head_dim])?;
            }
            None if !config.qk_norm => {}
            other => bail!(
                "attention: expected qk_norm to be present: {}, got {}",
                config.qk_norm,
                other.is_some()
            ),
        }
        let scale = config.softmax_scale.unwrap_or((config.head_dim as f64).powf(-0.5)) as f32;
        Ok(Self { config, weights, scale, ranks: None, workspace: Workspace::new() })
    }

    /// Makes this the part of a layer whose heads some ranks share: the config counts this rank's
    /// heads, `o` has their columns, and `o_bias` is whole.
    pub fn with_row_parallel(self, ranks: impl Into<Option<RowParallel>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// Loads the tensors of a layer; q, k and v go straight into their pack.
    pub fn load(config: AttentionConfig, names: AttentionNames, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let (h, d) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.num_heads * d, config.num_kv_heads * d);
        let parts = |suffix: &str| {
            [(names.q, q), (names.k, kv), (names.v, kv)]
                .map(|(name, rows)| (format!("{name}.{suffix}"), rows))
        };
        let norm = |name: &str| vb.get(d, &format!("{name}.weight"));
        let weights = AttentionWeights {
            qkv: load_packed(&vb, &parts("weight"), &[h])?,
            qkv_bias: config.qkv_bias.then(|| load_packed(&vb, &parts("bias"), &[])).transpose()?,
            o: vb.get((h, q), &format!("{}.weight", names.o))?,
            o_bias: config.o_bias.then(|| vb.get(h, &format!("{}.bias", names.o))).transpose()?,
            qk_norm: match config.qk_norm {
                true => Some((norm(names.q_norm)?, norm(names.k_norm)?)),
                false => None,
            },
        };
        Self::new(config, weights)
    }

    /// `attended` [T, Hq * D] (model dtype) from the products `qkv` [T, (Hq + 2 Hkv) * D] f32.
    fn attend_into(
        &self,
        qkv: View,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        attended: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = self.config;
        let norms = self.weights.qk_norm.as_ref();
        let (q_norm, k_norm) = (Lock::of(norms.map(|n| &n.0))?, Lock::of(norms.map(|n| &n.1))?);
        let args = QkNormRope {
            qkv,
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
        rope_attention_into(&args, &meta, step.decode_rows, k_cache, v_cache, attended, ex)
    }

    /// The same on candle tensors: `x` [T, H] in the weights' dtype and on their device, in any layout, to a new tensor
    /// [T, H]. `kv` lies on that device too; the arrays of `step` may lie in host memory ([`Step::views`]) and are then
    /// copied.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices.
    ///
    /// [`Step::views`]: crate::Step::views
    pub fn forward(&self, x: &Tensor, step: &StepViews, rope: &Rope, kv: &mut KvLayer) -> Result<Tensor> {
        forward_rows(x, (self.config.hidden_size, x.dtype()), &self.workspace, |x, out, ex| {
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
            self.forward_into(x, &step, &rows, kv, out, ex)
        })
    }
}

impl SelfAttention for Attention {
    fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(RowParallel::defer_sum).is_some()
    }

    fn forward_into(
        &self,
        x: View,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let (t, w) = (x.rows(), &self.weights);
        // q, k and v are rounded once: k and v when they enter the cache, q never.
        let mut qkv = ex.scratch(DType::F32, &[t, self.config.qkv_rows()])?;
        let bias = Lock::new(&w.qkv_bias)?;
        linear_into(x, TensorView::new(&w.qkv)?.view()?, bias.view()?, qkv.view_mut(), ex)?;
        let mut attended = ex.scratch(x.dtype(), &[t, self.config.num_heads * self.config.head_dim])?;
        self.attend_into(qkv.view(), step, rope, kv, attended.view_mut(), ex)?;
        let (o, bias) = (TensorView::new(&w.o)?, Lock::new(&w.o_bias)?);
        match &self.ranks {
            None => linear_row_parallel_into(attended.view(), o.view()?, bias.view()?, out, ex),
            Some(ranks) => ranks.linear_into(attended.view(), o.view()?, bias.view()?, out, ex),
        }
    }

    fn fits_fused(&self, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        if self.ranks.is_some() {
            return Err(Reason::Part { part: "the sum over ranks behind its output product" });
        }
        FusedLinearForm::Stream.fits(&self.qkv_call(step.rows), machine)?;
        FusedLinearForm::Stream.fits(&self.o_call(step.rows), machine)
    }

    fn stages(&self, fused: bool, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let AttentionConfig { num_heads, head_dim, .. } = self.config;
        let call = AttentionCall {
            rows: step.rows,
            one_row_each: step.one_row_each,
            num_heads,
            head_dim,
            dtype: self.weights.qkv.dtype(),
            block_size: None,
            aligned: true,
        };
        let (qkv, o): (&[&str], &[&str]) =
            if fused { (&["norm", "qkv"], &["o_proj", "add"]) } else { (&["qkv"], &["o_proj"]) };
        let mut stages = vec![
            linear_stage(qkv, fused, &self.qkv_call(step.rows), machine),
            AttentionForm::stage(&["head norm", "rope", "kv write", "attention"], &call, machine),
            linear_stage(o, fused, &self.o_call(step.rows), machine),
        ];
        if self.ranks.is_some() {
            stages.push(plain(&["sum over ranks"], "all-reduce", Vec::new()));
        }
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
        let (packed, bias) = (TensorView::new(&w.qkv)?, Lock::new(&w.qkv_bias)?);
        norm_linear_into(residual.as_view(), norm, packed.view()?, bias.view()?, qkv.view_mut(), ex)?;
        let mut attended = ex.scratch(w.qkv.dtype(), &[t, self.config.num_heads * self.config.head_dim])?;
        self.attend_into(qkv.view(), step, rope, kv, attended.view_mut(), ex)?;
        let (o, bias) = (TensorView::new(&w.o)?, Lock::new(&w.o_bias)?);
        linear_add_into(attended.view(), o.view()?, bias.view()?, residual.reborrow(), ex)
    }
}

impl Attention {
    fn qkv_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, &self.weights.qkv, self.config.qkv_bias)
    }

    fn o_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, &self.weights.o, self.config.o_bias)
    }
}

/// The product of so many rows with a weight [n, k].
fn linear_call(rows: usize, weight: &Tensor, bias: bool) -> LinearCall {
    let (n, k) = weight.dims2().unwrap_or_default();
    LinearCall { rows, n, k, dtype: weight.dtype(), bias, aligned: true }
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
