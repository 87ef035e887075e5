//! The small modules of a decoder around its blocks: embedding, norm, vocabulary projection.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

use moe_kernels::arguments::{
    expect_dims, expect_dtype, expect_float, expect_matrix, expect_rows, expect_stream,
};
use moe_kernels::names::TensorNames;
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    ArgumentError, CpuIsa, Exec, PreNorm, TensorView, Unread, View, ViewMut, Weight, add_rms_norm_into,
    embedding_into, forward_rows, linear_into, rms_norm_into,
};
use tracing::trace_span;

pub use moe_layer::load_packed;
use moe_layer::{BlockContext, load_weight};

use crate::vocab::VocabParallel;

/// What errors call these modules.
const NORM: &str = "RMS norm";
const EMBEDDING: &str = "embedding";
const LM_HEAD: &str = "vocabulary projection";

/// RMS norm with a weight, `x / rms(x) * weight`, in f32 inside.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// The weight, in the dtype of the results or in f32.
    weight: Tensor,
    eps: f32,
    /// The dtype of the results.
    dtype: DType,
}

impl RmsNorm {
    /// A norm with a weight `[H]`, f32, bf16 or f16.
    ///
    /// # Errors
    /// A `weight` of another rank or dtype; an `eps` that is not a number from 0 on.
    pub fn new(weight: Tensor, eps: f64) -> Result<Self> {
        expect_dims(NORM, "weight", &weight, &[weight.elem_count()])?;
        expect_float(NORM, "weight", &weight)?;
        // `eps` is used in f32, in which a large one is infinite.
        if !(eps as f32).is_finite() || eps < 0.0 {
            return Err(ArgumentError::Value {
                op: NORM.to_string(),
                name: "eps".to_string(),
                expected: "0 or a positive number of f32".to_string(),
                got: eps.to_string(),
            }
            .into());
        }
        let dtype = weight.dtype();
        Ok(Self { weight: weight.contiguous()?, eps: eps as f32, dtype })
    }

    /// Loads `weight` `[size]`.
    ///
    /// # Errors
    /// A missing or wrongly shaped tensor; a bias other than zero, which this norm does not have.
    pub fn load(size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        Self::refuse_unread(&vb)?;
        Self::new(vb.get(size, "weight")?, eps)
    }

    /// Loads a norm that multiplies by 1 + `weight` `[size]`, with results in the dtype of `vb`: `x / rms(x) * (1 +
    /// weight)`, where the sum keeps the digits of f32 (Gemma, Qwen3-Next).
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub fn load_zero_centred(size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        Self::refuse_unread(&vb)?;
        let weight = (vb.to_dtype(DType::F32).get(size, "weight")? + 1.0)?;
        Ok(Self { dtype: vb.dtype(), ..Self::new(weight, eps)? })
    }

    fn refuse_unread(vb: &VarBuilder) -> Result<()> {
        let mut unread = Unread::under(vb);
        unread.bias("bias");
        unread.refuse(NORM, "it has a weight alone")
    }

    /// Whether the weight is in f32 although the results are not.
    pub(crate) fn has_wide_weight(&self) -> bool {
        self.weight.dtype() != self.dtype
    }

    /// The factors of each row, `[H]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Passes the norm to a launch that contains it.
    pub fn with_pre_norm<R>(&self, launch: impl FnOnce(PreNorm<'_>) -> Result<R>) -> Result<R> {
        let weight = TensorView::new(&self.weight)?;
        launch(PreNorm { weight: weight.view()?, eps: self.eps })
    }

    /// `out` [T, H] (the model dtype) = norm of `x` [T, H] (the same or f32).
    pub fn forward_into(&self, x: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
        rms_norm_into(x, TensorView::new(&self.weight)?.view()?, self.eps, out, ex)
    }

    /// `residual` += `delta`, then `out` = norm of `residual`. All are [T, H]; `out` has the model
    /// dtype, the other two either that or both f32.
    pub fn add_forward_into(
        &self,
        delta: View,
        residual: ViewMut,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        add_rms_norm_into(delta, TensorView::new(&self.weight)?.view()?, self.eps, residual, out, ex)
    }

    /// The norm of `x` [.., H] (the model dtype or f32, in any layout) as a new tensor of the model dtype.
    ///
    /// # Errors
    /// Another dtype, width or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden_size = self.weight.elem_count();
        expect_rows(NORM, "x", x, hidden_size, x.dtype())?;
        expect_stream(NORM, "x", x, self.dtype)?;
        forward_rows(x, hidden_size, self.dtype, |x, out, ex| self.forward_into(x, out, ex))
    }
}

impl candle_nn::Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        RmsNorm::forward(self, x)
    }
}

/// The token embedding.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Weight,
    /// The ranks that hold the table, if this is only a part of its rows.
    ranks: Option<VocabParallel>,
}

impl Embedding {
    /// An embedding with a table [V, H], f32, bf16 or f16.
    ///
    /// # Errors
    /// A `weight` of another rank or dtype.
    pub fn new(weight: Tensor) -> Result<Self> {
        Self::named(EMBEDDING, weight)
    }

    /// [`new`](Self::new) with the module's name for errors.
    fn named(op: &str, weight: Tensor) -> Result<Self> {
        expect_matrix(op, "weight", &weight)?;
        expect_float(op, "weight", &weight)?;
        Ok(Self::of(Weight::new(weight)?))
    }

    fn of(weight: Weight) -> Self {
        Self { weight, ranks: None }
    }

    /// Loads `weight` [vocab_size, hidden_size].
    pub fn load(vocab_size: usize, hidden_size: usize, vb: VarBuilder) -> Result<Self> {
        Self::new(vb.get((vocab_size, hidden_size), "weight")?)
    }

    /// [`load`](Self::load) on a rank. On the CPU a table that the file has quantised stays so. Devices look rows up in
    /// floats.
    ///
    /// # Errors
    /// A missing or wrongly shaped tensor; a quantised one that is not what the header says.
    pub fn load_on(
        vocab_size: usize,
        hidden_size: usize,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        if !vb.device().is_cpu() {
            return Self::load(vocab_size, hidden_size, vb);
        }
        load_weight(&vb, &[("", vocab_size)], hidden_size, QuantUse::Linear, context).map(Self::of)
    }

    /// Makes this one rank's part of the rows of a table.
    #[must_use]
    pub fn with_vocab_parallel(self, ranks: impl Into<Option<VocabParallel>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// The table, [V, H]: also the vocabulary projection of models with tied embeddings.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// This embedding with its table in the order that products on a path read best: for tied embeddings.
    ///
    /// # Errors
    /// No memory left.
    pub fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let rows = self.weight.dims()[0];
        Ok(Self { weight: self.weight.packed(isa, rows)?, ..self })
    }

    /// `out` [T, H] (the table's dtype or f32) = the rows of `token_ids` `[T]` u32; an id outside of the
    /// table is an error.
    pub fn forward_into(&self, token_ids: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let weight = self.weight.read()?;
        match &self.ranks {
            None => embedding_into(weight.view()?, token_ids, out, ex),
            Some(ranks) => ranks.embed_into(weight.view()?, token_ids, out, ex),
        }
    }

    /// The rows of `token_ids` (u32, any dims and layout) as a new tensor with one more dimension. On a CUDA device
    /// ids are not checked: they must be below V.
    ///
    /// # Errors
    /// Another dtype or device; on the CPU an id outside of the table.
    pub fn forward(&self, token_ids: &Tensor) -> Result<Tensor> {
        expect_dtype(EMBEDDING, "token_ids", token_ids, DType::U32)?;
        let ids = token_ids.unsqueeze(token_ids.rank())?;
        forward_rows(&ids, self.weight.dims()[1], self.weight.dtype(), |ids, out, ex| {
            self.forward_into(ids.reshape(&[ids.elem_count()])?, out, ex)
        })
    }
}

impl candle_nn::Module for Embedding {
    fn forward(&self, token_ids: &Tensor) -> Result<Tensor> {
        Embedding::forward(self, token_ids)
    }
}

/// The vocabulary projection: hidden states to logits in f32, by a table like an embedding's.
#[derive(Clone, Debug)]
pub struct LmHead(Embedding);

impl LmHead {
    /// A projection with a weight [V, H], f32, bf16 or f16.
    ///
    /// # Errors
    /// A `weight` of another rank or dtype.
    pub fn new(weight: Tensor) -> Result<Self> {
        Embedding::named(LM_HEAD, weight).map(Self)
    }

    /// A projection with the table of an embedding: tied embeddings.
    pub fn tied(embedding: &Embedding) -> Self {
        Self(Embedding::of(embedding.weight.clone()))
    }

    /// This projection with its weight in the order that a path reads best.
    ///
    /// # Errors
    /// No memory left.
    pub fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        self.0.packed(isa).map(Self)
    }

    /// Loads `weight` [vocab_size, hidden_size].
    pub fn load(vocab_size: usize, hidden_size: usize, vb: VarBuilder) -> Result<Self> {
        Self::load_on(vocab_size, hidden_size, vb, &BlockContext::default())
    }

    /// [`load`](Self::load) on a rank, where the projection may be quantised.
    ///
    /// # Errors
    /// A missing or wrongly shaped tensor; quantised ones that are not what the header says; a bias other than zero.
    pub fn load_on(
        vocab_size: usize,
        hidden_size: usize,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let mut unread = Unread::under(&vb);
        unread.bias("bias");
        unread.scales("weight");
        unread.refuse(LM_HEAD, "it has no bias here")?;
        let weight = load_weight(&vb, &[("", vocab_size)], hidden_size, QuantUse::Linear, context)?;
        Ok(Self(Embedding::of(weight)))
    }

    /// Makes this one rank's part of the vocabulary; every rank gets all logits.
    #[must_use]
    pub fn with_vocab_parallel(self, ranks: impl Into<Option<VocabParallel>>) -> Self {
        Self(self.0.with_vocab_parallel(ranks))
    }

    /// Whether ranks compute the logits together, each for its part of the vocabulary.
    pub fn is_shared(&self) -> bool {
        self.0.ranks.is_some()
    }

    /// `logits` [R, V] f32 = `hidden` [R, H] times the weight's transpose, not rounded to the
    /// model dtype.
    pub fn forward_into(&self, hidden: View, logits: ViewMut, ex: &mut Exec) -> Result<()> {
        let _span = trace_span!(TensorNames::USUAL.lm_head).entered();
        let weight = self.0.weight.read()?;
        let Some(ranks) = &self.0.ranks else { return linear_into(hidden, weight.view()?, None, logits, ex) };
        let mut local = ex.scratch(DType::F32, &[hidden.rows(), ranks.num_local()])?;
        linear_into(hidden, weight.view()?, None, local.view_mut(), ex)?;
        ranks.gather_logits(local.view(), logits, ex)
    }

    /// Logits [.., V] f32 of `hidden` [.., H] (the weight's dtype, in any layout) as a new tensor.
    ///
    /// # Errors
    /// Another dtype, width or device.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let weight = &self.0.weight;
        expect_rows(LM_HEAD, "hidden", hidden, weight.dims()[1], weight.dtype())?;
        let vocab = self.0.ranks.as_ref().map_or(self.0.weight.dims()[0], VocabParallel::vocab_size);
        forward_rows(hidden, vocab, DType::F32, |x, out, ex| self.forward_into(x, out, ex))
    }
}
