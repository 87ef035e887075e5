//! A decoder as it is held: its layers, and what is around them.

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

/// What experts may compute of what is around them, in the order of trial.
pub(super) const EXPERT_FUSIONS: &[Fusion] = &[Fusion::NormAdd, Fusion::AddNorm, Fusion::Nothing];
/// What a mixer may compute of what is around it, in the order of trial.
const MIXER_FUSIONS: &[Fusion] = &[Fusion::NormAdd, Fusion::Add, Fusion::Nothing];

/// A loaded decoder, or one rank's part of it.
pub struct Decoder {
    pub(super) info: ModelInfo,
    pub(super) embedding: Embedding,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: RmsNorm,
    pub(super) lm_head: LmHead,
    pub(super) ropes: LayerRopes,
    /// The ranks that share each token, where norms add their sums.
    pub(super) sums: Option<Arc<dyn Communicator>>,
    /// Whether the last layer computes its MLP for the rows alone whose logits are wanted: on the CPU, where a row has the same bits
    /// without the others, and where no other rank waits for them.
    pub(super) ends_few: bool,
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
    /// What computes the MLP in such a step.
    pub fn choose_mlp(&self, step: &PlanStep, machine: &Machine) -> MoeForm {
        match &self.mlp {
            Mlp::Dense(_) => MoeForm::modular(Fusion::Nothing),
            Mlp::Sparse(sparse) => sparse.choose(step, EXPERT_FUSIONS, machine),
        }
    }

    /// What the mixer's launches contain in such a step, before an MLP that contains `mlp`.
    pub fn choose_mixer(&self, mlp: Fusion, step: &PlanStep, machine: &Machine) -> Fusion {
        let fits = |fusion: &Fusion| self.mixer_fits(*fusion, mlp, step, machine).is_ok();
        MIXER_FUSIONS.iter().copied().find(fits).unwrap_or(Fusion::Nothing)
    }

    /// Whether the mixer's launches take this, and whether it pays before an MLP that contains `mlp`.
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
            (Fusion::Add, Fusion::NormAdd) => Err(Reason::NoGain("the experts' launches add")),
            // It pays where neither the experts before it nor the experts after it leave a norm to share.
            (Fusion::NormAdd, Fusion::Nothing | Fusion::Add | Fusion::AddNorm) => {
                Err(Reason::NoGain("the norm behind it is a launch of its own, which also adds"))
            }
            _ => Ok(()),
        }
    }
}

impl Mlp {
    pub fn defer_sum(&mut self) -> bool {
        match self {
            Self::Dense(mlp) => mlp.defer_sum(),
            Self::Sparse(sparse) => sparse.defer_sum(),
        }
    }

    /// The MLP in a form that was chosen; `observe` sees the router logits of experts that show them.
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
