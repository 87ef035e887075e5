//! Multi-token prediction: a head that predicts the token after the next one from the hidden states of a model.
//!
//! ```text
//! e [T, H]      = norm(embedding of the token after each row)
//! h [T, H]      = norm(hidden state of the model at each row, after its last norm)
//! x [T, H]      = [e, h] · fc                       fc [H, 2 H]
//! logits [R, V] = lm_head(norm(layer(x)))           a decoder layer, with a KV cache of its own
//! ```
//!
//! Embedding and vocabulary projection are the model's. Qwen3-Next and Qwen3.5 have such a head; the definition is that
//! of vLLM 0.33 (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`).

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use moe_comm::{Geometry, GeometryError};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Exec, StepContext, TensorView, Unread, View, ViewMut, Weight, embedding_into, linear_into,
};
use moe_layer::load_weight;

use super::forward::Entered;
use super::layer::Decoder;
use super::load::DecoderOptions;
use super::model::DecoderModel;
use crate::checkpoint::TensorLayout;
use crate::kv_cache::KvCache;
use crate::layers::RmsNorm;
use crate::model::{CausalLm, LogitsOut, ModelInfo, Observe, Observer};
use crate::step::StepViews;

/// A head as a family's config describes it.
#[derive(Clone, Debug)]
pub struct MtpConfig {
    /// Its layer and last norm, as a decoder of one layer. Embedding and vocabulary projection are named as in the
    /// model, which lends them.
    pub decoder: DecoderModel,
    /// The names of the other tensors.
    pub names: MtpNames,
}

/// The tensors before a head's layer, from the root of a checkpoint. Each has `.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpNames {
    /// Product, [H, 2 H].
    pub fc: &'static str,
    /// Norm of embeddings, `[H]`.
    pub embedding_norm: &'static str,
    /// Norm of hidden states, `[H]`.
    pub hidden_norm: &'static str,
}

impl MtpConfig {
    /// The tensors of the head alone; the rest as in [`DecoderModel::layout`].
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut.
    pub fn layout(
        &self,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> std::result::Result<TensorLayout, GeometryError> {
        let h = self.decoder.decoder.hidden_size;
        let mut list = TensorLayout::new(geometry);
        list.whole(format!("{}.weight", self.names.fc), &[h, 2 * h]);
        for norm in [self.names.embedding_norm, self.names.hidden_norm] {
            list.whole(format!("{norm}.weight"), &[h]);
        }
        self.decoder.layers_layout(has, &mut list)?;
        Ok(list)
    }

    /// Loads the head for a model, which lends it embedding and vocabulary projection. `vb` is at the root of the
    /// checkpoint, has the model dtype and contains the tensors of [`layout`](Self::layout).
    ///
    /// # Errors
    /// A model of another width, vocabulary or dtype; any error of [`DecoderModel::load`].
    pub fn load(&self, model: &Decoder, options: &DecoderOptions, vb: VarBuilder) -> Result<MtpHead> {
        let config = &self.decoder.decoder;
        let expected = (config.hidden_size, config.vocab_size, vb.dtype());
        let got = (model.info.hidden_size, model.info.vocab_size, model.info.dtype);
        if expected != got {
            bail!("multi-token prediction: expected a model of (H, V, dtype) {expected:?}, got {got:?}")
        }
        let h = config.hidden_size;
        let norm = |name: &str| config.norm(vb.pp(name));
        let [embedding_norm, hidden_norm] = [norm(self.names.embedding_norm)?, norm(self.names.hidden_norm)?];
        let fc = vb.pp(self.names.fc);
        let mut unread = Unread::under(&fc);
        unread.bias("bias");
        unread.scales("weight");
        unread.refuse("product of multi-token prediction", "it has no bias")?;
        let fc = load_weight(&fc, &[("", h)], 2 * h, QuantUse::Linear, options.context)?;
        let fc = fc.packed(options.context.cpu_isa, h)?;
        let (decoder, _) = self.decoder.load_between(Some(model.ends.clone()), options, vb)?;
        Ok(MtpHead { embedding_norm, hidden_norm, fc, decoder })
    }
}

/// A loaded head.
pub struct MtpHead {
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    fc: Weight,
    decoder: Decoder,
}

impl MtpHead {
    /// The facts of the head: one layer, and what it keeps of a sequence.
    pub fn info(&self) -> &ModelInfo {
        &self.decoder.info
    }

    /// The head as a model for one step, to be run by [`run_step`](crate::run_step) with a KV cache for the states of
    /// [`info`](Self::info). The rows of the step have the positions of the model's rows whose hidden states are in
    /// `hidden` [T, H] (after the last norm, in the model dtype or f32). The token of a row is the one that follows it,
    /// and the logits are for the token after that.
    pub fn after<'a>(&'a self, hidden: &'a Tensor) -> MtpStep<'a> {
        MtpStep { head: self, hidden }
    }

    /// `out` [T, H] f32: what the layer reads.
    fn enter(&self, token_ids: View, hidden: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let ModelInfo { hidden_size: h, dtype, .. } = self.decoder.info;
        let t = token_ids.elem_count();
        if hidden.dims() != [t, h] {
            bail!(
                "multi-token prediction: expected hidden states {:?} of the step's rows, got {:?}",
                [t, h],
                hidden.dims()
            )
        }
        let mut embedded = ex.scratch(dtype, &[t, h])?;
        self.decoder.ends.embedding.forward_into(token_ids, embedded.view_mut(), ex)?;
        let mut norms = ex.scratch(dtype, &[2 * t, h])?;
        let (of_embeddings, of_hidden) = norms.view_mut().split_at(t)?;
        self.embedding_norm.forward_into(embedded.view(), of_embeddings, ex)?;
        self.hidden_norm.forward_into(hidden, of_hidden, ex)?;
        // The two norms of a row follow each other.
        let order: Vec<u32> = (0..t as u32).flat_map(|row| [row, row + t as u32]).collect();
        let mut pairs = ex.scratch(dtype, &[2 * t, h])?;
        embedding_into(norms.view(), View::new(&order, &[2 * t])?, pairs.view_mut(), ex)?;
        let fc = self.fc.read()?;
        linear_into(pairs.view().reshape(&[t, 2 * h])?, fc.view()?, None, out, ex)
    }
}

/// A head with the hidden states of a step's rows.
pub struct MtpStep<'a> {
    head: &'a MtpHead,
    hidden: &'a Tensor,
}

impl CausalLm for MtpStep<'_> {
    fn info(&self) -> &ModelInfo {
        self.head.info()
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let decoder = &self.head.decoder;
        let mut residual = decoder.residual(step, ex)?;
        let hidden = TensorView::new(self.hidden)?;
        self.head.enter(step.token_ids, hidden.view()?, residual.stream.view_mut(), ex)?;
        let entered = Entered { step, residual };
        decoder.forward_from(entered, kv, logits, Observe(observer), context, ex)
    }
}
