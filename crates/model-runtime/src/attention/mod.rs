//! Grouped-query attention over the paged KV cache.
//!
//! One pass: packed q, k, v product; per-head norm, rotation and KV write fused; paged attention;
//! row-parallel output product. Prefill, chunked prefill and decode are the same code and give
//! the same bits.

mod config;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;

use moe_comm::RowParallel;
use moe_kernels::names::AttentionNames;
use moe_kernels::plan::{
    AttentionCall, AttentionForm, Form, FusedLinearForm, LinearCall, LinearForm, Machine, Reason, Stage,
};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    AttentionMeta, CpuIsa, Exec, PreNorm, ProductRows, QkNormRope, RowsView, RowsViewMut, StepRows,
    TensorView, View, ViewMut, Weight, Workspace, forward_rows, linear_add_into, linear_into,
    linear_row_parallel_into, norm_linear_into, rope_attention_into,
};
use moe_layer::{BlockContext, PlanStep, load_packed, load_weight};
use tracing::trace_span;

pub use config::{AttentionConfig, AttentionWeights};

use crate::decoder::{OUTPUT, OUTPUT_ADD, SelfAttention, linear_stage, plain};
use crate::kv_cache::KvLayer;
use crate::rope::{Rope, RopeRows};
use crate::step::StepViews;

/// [`AttentionWeights`] as a layer holds them.
#[derive(Clone, Debug)]
struct Held {
    qkv: Weight,
    qkv_bias: Option<Tensor>,
    o: Weight,
    o_bias: Option<Tensor>,
    qk_norm: Option<(Tensor, Tensor)>,
}

/// An attention layer.
#[derive(Clone, Debug)]
pub struct Attention {
    config: AttentionConfig,
    weights: Held,
    scale: f32,
    /// The ranks that cut the heads, if these are a part of them.
    ranks: Option<RowParallel>,
    workspace: Workspace,
}

impl Attention {
    /// From weights whose shapes match the config.
    pub fn new(config: AttentionConfig, weights: AttentionWeights) -> Result<Self> {
        let AttentionWeights { qkv, qkv_bias, o, o_bias, qk_norm } = weights;
        Self::of(config, Held { qkv: Weight::new(qkv)?, qkv_bias, o: Weight::new(o)?, o_bias, qk_norm })
    }

    fn of(config: AttentionConfig, weights: Held) -> Result<Self> {
        config.check()?;
        let (h, n, q) = (config.hidden_size, config.qkv_rows(), config.num_heads * config.head_dim);
        let dtype = weights.qkv.dtype();
        let check_of = |name: &str, got: (&[usize], DType), dims: &[usize]| -> Result<()> {
            if got != (dims, dtype) {
                bail!(
                    "attention: expected {name} {dims:?} of dtype {}, got {:?} of {}",
                    dtype.as_str(),
                    got.0,
                    got.1.as_str()
                )
            }
            Ok(())
        };
        let check = |name: &str, tensor: &Tensor, dims: &[usize]| {
            check_of(name, (tensor.dims(), tensor.dtype()), dims)
        };
        check_of("qkv", (weights.qkv.dims(), dtype), &[n, h])?;
        check_of("o", (weights.o.dims(), weights.o.dtype()), &[h, q])?;
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
        Self::load_on(config, names, vb, &BlockContext::default())
    }

    /// [`load`](Self::load) on a rank, where projections may be quantised.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; quantised ones that are not what the header says; tensors that `config` does not
    /// ask for and that would change the results, by name: biases, norms of q and k, `sinks`.
    pub fn load_on(
        config: AttentionConfig,
        names: AttentionNames,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        config.check()?;
        config.refuse_unread(&names, &vb)?;
        let (h, d) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.num_heads * d, config.num_kv_heads * d);
        let modules = [(names.q, q), (names.k, kv), (names.v, kv)];
        let biases = modules.map(|(name, rows)| (format!("{name}.bias"), rows));
        let norm = |name: &str| vb.get(d, &format!("{name}.weight"));
        let weights = Held {
            qkv: load_weight(&vb, &modules, h, QuantUse::Linear, context)?,
            qkv_bias: config.qkv_bias.then(|| load_packed(&vb, &biases, &[])).transpose()?,
            o: load_weight(&vb, &[(names.o, h)], q, context.row_parallel_use(q), context)?,
            o_bias: config.o_bias.then(|| vb.get(h, &format!("{}.bias", names.o))).transpose()?,
            qk_norm: match config.qk_norm {
                true => Some((norm(names.q_norm)?, norm(names.k_norm)?)),
                false => None,
            },
        };
        Self::of(config, weights)
    }

    /// `attended` [T, Hq * D] from the products `qkv` [T, (Hq + 2 Hkv) * D] f32.
    fn attend_into(
        &self,
        qkv: View,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        attended: RowsViewMut,
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

    fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(RowParallel::defer_sum).is_some()
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
            Some(ranks) => ranks.linear_into(attended.rows(), o.view()?, bias.view()?, out, ex),
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
        let AttentionConfig { num_heads, head_dim, .. } = self.config;
        let call = AttentionCall {
            rows: step.rows,
            one_row_each: step.one_row_each,
            num_heads,
            head_dim,
            value_dim: head_dim,
            latent: false,
            dtype: self.weights.qkv.dtype(),
            block_size: None,
            aligned: true,
        };
        let (qkv, o): (&[&str], &[&str]) =
            if fused { (&["norm", "qkv"], OUTPUT_ADD) } else { (&["qkv"], OUTPUT) };
        let mut stages = vec![
            linear_stage(qkv, fused, &self.qkv_call(step.rows), machine),
            AttentionForm::stage(&["head norm", "rope", "kv write", "attention"], &call, machine),
            linear_stage(o, fused, &self.o_call(step.rows), machine),
        ];
        if self.ranks.as_ref().is_some_and(|ranks| !ranks.is_deferred()) {
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
        let (packed, bias) = (w.qkv.read()?, Lock::new(&w.qkv_bias)?);
        norm_linear_into(residual.as_view(), norm, packed.view()?, bias.view()?, qkv.view_mut(), ex)?;
        let mut attended = ex.scratch(w.qkv.dtype(), &[t, self.config.num_heads * self.config.head_dim])?;
        self.attend_into(qkv.view(), step, rope, kv, attended.view_mut().into(), ex)?;
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
        self.attend_into(qkv.view(), step, rope, kv, attended.rows_mut(), ex)?;
        Ok(attended)
    }

    fn expect_one_rank(&self) -> std::result::Result<(), Reason> {
        match self.ranks {
            None => Ok(()),
            Some(_) => Err(Reason::Part { part: "the sum over ranks behind its output product" }),
        }
    }

    fn qkv_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, &self.weights.qkv, self.config.qkv_bias)
    }

    fn o_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, &self.weights.o, self.config.o_bias)
    }
}

/// The product of so many rows with a weight [n, k].
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
