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
            Mlp::Dense(_) => MoeForm::Modular,
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

    /// The kernels of this layer in such a step, and why faster ones do not run; `sums`: the ranks whose sums layers
    /// leave to the norms behind them.
    pub(super) fn plan(&self, step: &PlanStep, sums: Option<&RankSums>, machine: &Machine) -> LayerPlan {
        let form = self.choose(step, machine);
        let fused = form.attention == AroundAttention::NormAdd;
        let mut attention = self.attention.stages(fused, step, machine);
        if !fused {
            attention.insert(0, self.norm_behind(form.mlp, sums));
            if let (Err(reason), Some(qkv)) =
                (self.fuses_attention(form.mlp, step, machine), attention.get_mut(1))
            {
                let kernel = format!("{} with norm and addition", FusedLinearForm::Stream.name());
                qkv.rejected.insert(0, Rejected { kernel, reason });
            }
            if let Some(last) = attention.last_mut() {
                match self.adds_attention(form.mlp, step, machine) {
                    Ok(()) => last.computes = OUTPUT_ADD,
                    Err(reason) => {
                        let kernel = format!("{} with addition", LinearForm::Blas.name());
                        last.rejected.insert(0, Rejected { kernel, reason });
                    }
                }
            }
        }
        let (fusion, mut mlp) = match &self.mlp {
            Mlp::Dense(mlp) => (Fusion::Nothing, mlp.stages(step.rows, machine)),
            Mlp::Sparse(sparse) => (form.mlp.fusion(), sparse.plan(step, FUSIONS, machine).stages),
        };
        match (fusion, form.attention) {
            (Fusion::NormAdd, _) => {}
            (_, AroundAttention::Add) => mlp.insert(0, plain(&["norm"], "rms_norm", Vec::new())),
            _ => mlp.insert(0, norm_stage(sums.filter(|_| self.deferred[0]))),
        }
        LayerPlan { attention, mlp }
    }

    /// The norm behind the layer's MLP or experts.
    fn norm_behind(&self, mlp: MoeForm, sums: Option<&RankSums>) -> Stage {
        match &self.mlp {
            Mlp::Sparse(sparse) if sparse.adds_norm(mlp) => plain(
                &["sums over ranks", "add", "norm"],
                "one launch of few rows over peer memory, else reduce-scatter and add_rms_norm",
                Vec::new(),
            ),
            _ => norm_stage(sums.filter(|_| self.deferred[1])),
        }
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

impl<A> Decoder<A> {
    /// Whether the ranks that add up in norms keep the residual stream of some of a step's rows each, or why all keep all of it.
    ///
    /// # Errors
    /// The reason.
    pub(super) fn shares_residual(&self, rows: usize) -> Result<(), Reason> {
        let Some(ranks) = &self.sums else { return Err(Reason::NoGain("no rank shares the tokens")) };
        if self.layers.iter().any(|layer| layer.deferred != [true; 2]) {
            return Err(Reason::Part { part: "a sum over ranks that is not left to the norm" });
        }
        ranks.shares_residual(rows, self.info.hidden_size, self.info.dtype).map_err(Reason::NoGain)
    }
}

/// The ranks that add up in norms, and whether each does so for its share of a step's rows.
pub(super) struct RankSums<'a> {
    pub ranks: &'a dyn Communicator,
    pub shares: Result<(), Reason>,
}

/// The norm behind a sub-layer, which also adds.
fn norm_stage(sums: Option<&RankSums>) -> Stage {
    let Some(RankSums { ranks, shares }) = sums else {
        return plain(&["add", "norm"], "add_rms_norm", Vec::new());
    };
    let (computes, medium) = (&["sum over ranks", "add", "norm"], ranks.medium());
    let shared = format!("{medium}: each rank its share of the rows");
    match shares {
        Ok(()) => plain(computes, &shared, Vec::new()),
        Err(reason) => plain(computes, &medium, vec![Rejected { kernel: shared, reason: reason.clone() }]),
    }
}

/// A stage whose kernel is named in words.
pub(crate) fn plain(computes: &'static [&'static str], kernel: &str, rejected: Vec<Rejected>) -> Stage {
    Stage { computes, kernel: kernel.to_string(), rejected }
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
        let stage = |shares| norm_stage(Some(&RankSums { ranks: &ranks, shares }));
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
        assert_eq!(norm_stage(None).computes, ["add", "norm"]);
    }
}
