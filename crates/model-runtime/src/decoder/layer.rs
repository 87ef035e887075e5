//! A loaded decoder: its layers, and the embedding, norm and projection around them.

use std::sync::Arc;

use candle_core::{Result, bail};
use moe_comm::Communicator;
use moe_kernels::plan::{Fusion, Machine, Reason};
use moe_kernels::{Exec, StepContext, SublayerIo, View};
use moe_layer::{GatedMlp, MoeForm, PlanStep, SparseMoeBlock};
use tracing::trace_span;

use crate::layers::{Embedding, LmHead, RmsNorm};
use crate::mixer::Mixer;
use crate::model::ModelInfo;
use crate::rope::LayerRopes;

/// Which of the ops before and after them experts may compute, in the order of trial.
const EXPERT_FUSIONS: &[Fusion] = &[Fusion::NormAdd, Fusion::AddNorm, Fusion::Nothing];
/// Which of the ops before and after it a mixer may compute, in the order of trial.
const MIXER_FUSIONS: &[Fusion] = &[Fusion::NormAdd, Fusion::Add, Fusion::Nothing];

/// A loaded decoder, or one rank's part of it.
pub struct Decoder {
    pub(super) info: ModelInfo,
    pub(super) ends: Ends,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: RmsNorm,
    pub(super) ropes: LayerRopes,
    /// The ranks that share each token, if norms add their sums.
    pub(super) sums: Option<Arc<dyn Communicator>>,
    /// Whether the last layer computes its MLP only for the rows whose logits are wanted. It does so on the CPU, where
    /// a row has the same bits without the others, if no other rank waits for the other rows.
    pub(super) ends_few: bool,
}

/// What is before the first layer and after the last norm. Clones share their weights.
#[derive(Clone)]
pub(super) struct Ends {
    pub embedding: Embedding,
    pub lm_head: LmHead,
}

pub(super) struct DecoderLayer {
    pub input_norm: RmsNorm,
    pub mixer: Box<dyn Mixer>,
    pub post_attention_norm: RmsNorm,
    pub mlp: Mlp,
    /// Whether mixer and MLP leave the sum over ranks to the norm that follows.
    pub deferred: [bool; 2],
}

pub(super) enum Mlp {
    Dense(GatedMlp),
    Sparse(Box<SparseMoeBlock>),
}

impl DecoderLayer {
    /// The form that computes the MLP in this step.
    pub fn choose_mlp(&self, step: &PlanStep, machine: &Machine) -> MoeForm {
        match &self.mlp {
            Mlp::Dense(_) => MoeForm::modular(Fusion::Nothing),
            Mlp::Sparse(sparse) => sparse.choose(step, self.expert_fusions(machine), machine),
        }
    }

    /// Which of the norms around the experts their launches may compute.
    pub fn expert_fusions(&self, machine: &Machine) -> &'static [Fusion] {
        if self.has_separate_norms(machine) { &[Fusion::Nothing] } else { EXPERT_FUSIONS }
    }

    /// Whether norms are launches of their own: the fused launches of GPUs read norm weights in the model dtype alone.
    fn has_separate_norms(&self, machine: &Machine) -> bool {
        machine.gpu.is_some() && self.post_attention_norm.has_wide_weight()
    }

    /// The fusion of the mixer's launches in this step, before an MLP with the fusion `mlp`.
    pub fn choose_mixer(&self, mlp: Fusion, step: &PlanStep, machine: &Machine) -> Fusion {
        let fits = |fusion: &Fusion| self.mixer_fits(*fusion, mlp, step, machine).is_ok();
        MIXER_FUSIONS.iter().copied().find(fits).unwrap_or(Fusion::Nothing)
    }

    /// Whether the mixer's launches support this fusion, and whether it is faster before an MLP with the fusion `mlp`.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn mixer_fits(
        &self,
        fusion: Fusion,
        mlp: Fusion,
        step: &PlanStep,
        machine: &Machine,
    ) -> std::result::Result<(), Reason> {
        self.mixer.fits(fusion, step, machine)?;
        match (fusion, mlp) {
            (Fusion::NormAdd, _) if self.has_separate_norms(machine) => {
                Err(Reason::Part { part: "norms with weights in f32" })
            }
            (Fusion::Add, Fusion::NormAdd) => Err(Reason::NoGain("the experts' launches add")),
            // This fusion is faster only if the launch of the experts, before or after it, contains the norm.
            (Fusion::NormAdd, Fusion::Nothing | Fusion::Add | Fusion::AddNorm) => {
                Err(Reason::NoGain("the norm after it is a launch of its own, which also adds"))
            }
            _ => Ok(()),
        }
    }
}

impl Mlp {
    #[must_use = "true means that the caller must add the sum"]
    pub fn defer_sum(&mut self) -> bool {
        match self {
            Self::Dense(mlp) => mlp.defer_sum(),
            Self::Sparse(sparse) => sparse.defer_sum(),
        }
    }

    /// The MLP in a form that was chosen; `observe` gets the router logits of experts that have them.
    pub fn forward_as(
        &self,
        form: MoeForm,
        io: SublayerIo<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        match (self, io) {
            (Self::Sparse(sparse), io) => sparse.forward_as(form, io, observe, context, ex),
            (Self::Dense(mlp), SublayerIo::Store { x, out }) => {
                trace_span!("mlp").in_scope(|| mlp.forward_into(x, out, ex))
            }
            (Self::Dense(_), io) => bail!("a dense MLP has no form{}", io.fusion().suffix()),
        }
    }
}
