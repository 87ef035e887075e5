//! The plan of a decoder layer: which launches compute its two sub-layers in a step, and why nothing faster runs.
//!
//! It is chosen from the layer's parts, the step and the machine alone, by the functions that execution asks too
//! (`moe_kernels::plan`, `moe_layer::plan`), so that a plan for any machine can be made on any other.

use moe_comm::Communicator;
use moe_kernels::names::AttentionNames;
use moe_kernels::plan::{
    Form, FusedLinearForm, Fusion, LinearCall, LinearForm, Machine, Reason, Rejected, Stage,
};
use moe_layer::{MoeForm, PlanStep};
use serde::Serialize;

use super::{Decoder, DecoderLayer, Mlp, SelfAttention};

/// What a plan calls an attention's last product.
pub(crate) const OUTPUT: &[&str] = &[AttentionNames::USUAL.o];
/// That product with the addition to the residual stream.
pub(crate) const OUTPUT_ADD: &[&str] = &[AttentionNames::USUAL.o, "add"];

/// What the attention's launches contain beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AroundAttention {
    /// The norm before it and the addition behind it.
    NormAdd,
    /// The addition.
    Add,
    /// Nothing: the norm behind it adds.
    Nothing,
}

/// What runs a layer in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerForm {
    /// What the attention's launches contain of what is around it.
    pub attention: AroundAttention,
    /// The experts of a sparse layer.
    pub mlp: MoeForm,
}

/// The kernels of a layer in a step, in their order, with the faster ones that do not run and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerPlan {
    /// Norm, attention and addition.
    pub attention: Vec<Stage>,
    /// Norm, MLP or experts, and addition.
    pub mlp: Vec<Stage>,
}

/// What experts may compute beside themselves in a decoder layer, in the order of trial.
const FUSIONS: &[Fusion] = &[Fusion::NormAdd, Fusion::AddNorm, Fusion::Nothing];

impl<A: SelfAttention> DecoderLayer<A> {
    /// What runs this layer in such a step.
    pub(super) fn choose(&self, step: &PlanStep, machine: &Machine) -> LayerForm {
        let mlp = match &self.mlp {
            Mlp::Dense(_) => MoeForm::Modular(Fusion::Nothing),
            Mlp::Sparse(sparse) => sparse.choose(step, FUSIONS, machine),
        };
        let attention = if self.fuses_attention(mlp, step, machine).is_ok() {
            AroundAttention::NormAdd
        } else if self.adds_attention(mlp, step, machine).is_ok() {
            AroundAttention::Add
        } else {
            AroundAttention::Nothing
        };
        LayerForm { attention, mlp }
    }

    /// The kernels of norm and attention in such a step; `normed`: whether the launch before has taken the norm, and here the
    /// attention's last.
    fn attention_stages(&self, form: LayerForm, around: &mut Around, step: &PlanStep) -> Vec<Stage> {
        let machine = around.machine;
        let mut stages = self.attention.stages(form.attention == AroundAttention::NormAdd, step, machine);
        if form.attention == AroundAttention::NormAdd {
            around.normed = false;
            return stages;
        }
        if let (Err(reason), Some(first)) =
            (self.fuses_attention(form.mlp, step, machine), stages.first_mut())
        {
            let kernel = format!("{} with norm and addition", FusedLinearForm::Stream.name());
            first.rejected.insert(0, Rejected { kernel, reason });
        }
        if let Some(last) = stages.last_mut() {
            match self.adds_attention(form.mlp, step, machine) {
                Ok(()) => last.computes = OUTPUT_ADD,
                Err(reason) => {
                    let kernel = format!("{} with addition", LinearForm::Blas.name());
                    last.rejected.insert(0, Rejected { kernel, reason });
                }
            }
        }
        let norm = around.norm();
        around.normed = form.attention == AroundAttention::Nothing;
        norm.into_iter().chain(stages).collect()
    }

    /// The kernels of the MLP or the experts in such a step, with the norm before and the norm after them.
    fn mlp_stages(&self, mlp: MoeForm, around: &mut Around, step: &PlanStep) -> Vec<Stage> {
        let mut stages = Vec::new();
        let own = match &self.mlp {
            Mlp::Dense(mlp) => mlp.stages(step.rows, around.machine),
            Mlp::Sparse(sparse) => sparse.plan(step, FUSIONS, around.machine).stages,
        };
        if mlp.fusion() == Fusion::NormAdd {
            around.normed = false;
            return own;
        }
        stages.extend(around.norm());
        stages.extend(own);
        around.normed = true;
        if mlp.fusion() == Fusion::Nothing {
            stages.push(norm_stage(NEXT_NORM, around.sums.filter(|_| self.deferred[1])));
        }
        stages
    }

    /// The addition inside the attention's last launch pays where a norm of its own follows.
    fn adds_attention(&self, mlp: MoeForm, step: &PlanStep, machine: &Machine) -> Result<(), Reason> {
        self.attention.fits_added(step, machine)?;
        match mlp.fusion() {
            Fusion::NormAdd => Err(Reason::NoGain("the experts' launches add")),
            Fusion::AddNorm | Fusion::Nothing => Ok(()),
        }
    }

    /// Norm and addition inside the attention's launches pay where the experts before and behind it leave no norm to share.
    fn fuses_attention(&self, mlp: MoeForm, step: &PlanStep, machine: &Machine) -> Result<(), Reason> {
        self.attention.fits_fused(step, machine)?;
        match mlp.fusion() {
            Fusion::NormAdd => Ok(()),
            _ => Err(Reason::NoGain("the norm behind it is a launch of its own, which also adds")),
        }
    }
}

impl<A: SelfAttention> Decoder<A> {
    /// The kernels of all layers in such a step, and why faster ones do not run.
    pub(super) fn layer_plans(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        let shares = self.shares_residual(step);
        let sums = self.sums.as_deref().map(|ranks| RankSums { ranks, shares });
        let mut around = Around { normed: false, sums: sums.as_ref(), machine };
        let mut plans = Vec::with_capacity(self.layers.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let form = layer.choose(step, machine);
            let attention = layer.attention_stages(form, &mut around, step);
            let mut mlp = Vec::new();
            if form.attention == AroundAttention::Nothing {
                mlp.push(norm_stage(OWN_NORM, around.sums.filter(|_| layer.deferred[0])));
            }
            let is_last = index + 1 == self.layers.len();
            if is_last && self.drops_rows(step) {
                if step.logits > 0 {
                    let kept = PlanStep { rows: step.logits, ..*step };
                    mlp.extend(layer.mlp_stages(layer.choose(&kept, machine).mlp, &mut around, &kept));
                }
            } else {
                mlp.extend(layer.mlp_stages(form.mlp, &mut around, step));
                if is_last {
                    mlp.extend(around.norm());
                }
            }
            plans.push(LayerPlan { attention, mlp });
        }
        plans
    }
}

impl<A> Decoder<A> {
    /// Whether the rows of such a step that need no logits end with the last layer's attention, which caches them.
    pub(super) fn drops_rows(&self, step: &PlanStep) -> bool {
        let routes_by_number = match self.layers.last().map(|layer| &layer.mlp) {
            Some(Mlp::Sparse(sparse)) => sparse.routes_by_number(),
            _ => false,
        };
        let few = step.logits < step.rows && step.scored == 0;
        self.ends_few && few && step.asks().is_none() && !routes_by_number
    }

    /// Whether the ranks that add up in norms keep the residual stream of some of a step's rows each, or why all keep all of it.
    ///
    /// # Errors
    /// The reason.
    pub(super) fn shares_residual(&self, step: &PlanStep) -> Result<(), Reason> {
        let Some(ranks) = &self.sums else { return Err(Reason::NoGain("no rank shares the tokens")) };
        if step.whole_residual {
            return Err(Reason::NoGain("the hidden states of all rows are asked for"));
        }
        if self.layers.iter().any(|layer| layer.deferred != [true; 2]) {
            return Err(Reason::Part { part: "a sum over ranks that is not left to the norm" });
        }
        let Some(fused) = ranks.fused() else {
            return Err(Reason::NoGain("ranks that share host memory copy rows as fast as they add them"));
        };
        fused.shares_residual(step.rows, self.info.hidden_size, self.info.dtype).map_err(Reason::NoGain)
    }
}

/// What the norm after a sub-layer computes.
const OWN_NORM: NormParts =
    NormParts { whole: &["add", "norm"], over_ranks: &["sum over ranks", "add", "norm"] };
const NEXT_NORM: NormParts =
    NormParts { whole: &["add", "next norm"], over_ranks: &["sum over ranks", "add", "next norm"] };

struct NormParts {
    whole: &'static [&'static str],
    over_ranks: &'static [&'static str],
}

/// What is around the sub-layers of a step.
struct Around<'a> {
    /// Whether the next sub-layer's norm has been taken.
    normed: bool,
    /// The ranks whose sums layers leave to the norms.
    sums: Option<&'a RankSums<'a>>,
    machine: &'a Machine,
}

impl Around<'_> {
    /// The launch of a norm alone, where it has not been taken.
    fn norm(&mut self) -> Option<Stage> {
        let taken = std::mem::replace(&mut self.normed, true);
        (!taken).then(|| Stage::new(&["norm"], "rms_norm"))
    }
}

/// The ranks that add up in norms, and whether each does so for its share of a step's rows.
struct RankSums<'a> {
    ranks: &'a dyn Communicator,
    shares: Result<(), Reason>,
}

/// The name of a norm that adds up what ranks hold; `shared`: each of its share of the rows.
pub(super) fn sum_norm(ranks: &dyn Communicator, shared: bool) -> String {
    let medium = ranks.medium();
    if shared { format!("{medium}: each rank its share of the rows") } else { medium }
}

/// The norm behind a sub-layer, which also adds.
fn norm_stage(parts: NormParts, sums: Option<&RankSums>) -> Stage {
    let Some(RankSums { ranks, shares }) = sums else { return Stage::new(parts.whole, "add_rms_norm") };
    let shared = sum_norm(*ranks, true);
    match shares {
        Ok(()) => Stage::new(parts.over_ranks, shared),
        Err(reason) => Stage::new(parts.over_ranks, sum_norm(*ranks, false))
            .after([Rejected { kernel: shared, reason: reason.clone() }]),
    }
}

/// The product of `rows` rows with a weight [n, k].
pub(crate) fn linear_stage(
    computes: &'static [&'static str],
    fused: bool,
    call: &LinearCall,
    machine: &Machine,
) -> Stage {
    match fused {
        true => FusedLinearForm::stage(computes, call, machine),
        false => LinearForm::stage(computes, call, machine),
    }
}

#[cfg(test)]
mod tests {
    use moe_comm::SelfComm;

    use super::*;

    #[test]
    fn a_norm_behind_a_sum_says_which_rows_a_rank_adds_up() {
        let ranks = SelfComm::new();
        let stage = |shares| norm_stage(OWN_NORM, Some(&RankSums { ranks: &ranks, shares }));
        let shared = stage(Ok(()));
        assert_eq!(
            (shared.kernel.as_str(), shared.rejected.len()),
            ("host memory: each rank its share of the rows", 0)
        );
        let whole = stage(Err(Reason::NoGain("few rows")));
        assert_eq!(whole.kernel, "host memory");
        let [rejected] = &whole.rejected[..] else { panic!("{whole:?}") };
        assert_eq!(rejected.kernel, shared.kernel);
        assert_eq!(rejected.reason.to_string(), "saves nothing here: few rows");
        assert_eq!(norm_stage(OWN_NORM, None).computes, ["add", "norm"]);
    }
}
