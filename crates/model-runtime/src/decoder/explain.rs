//! What a step's program launches, kernel by kernel, and why nothing faster is launched. It can be computed for any
//! machine on any other.

use moe_comm::Communicator;
use moe_kernels::plan::{Form, FusedLinearForm, Fusion, LinearForm, Machine, Reason, Rejected, Stage};
use moe_layer::{MoeForm, PlanStep};

use super::layer::{Decoder, DecoderLayer, Mlp};
use super::program::{Part, Reader, Sums};
use crate::model::LayerPlan;

impl Decoder {
    /// The kernels of all layers in this step, and why faster ones do not run.
    pub(super) fn layer_plans(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        let shares = self.shares_residual(step);
        let mut step = *step;
        let mut plans = vec![LayerPlan::default(); self.layers.len()];
        for launch in self.program(&step, machine) {
            let layer = &self.layers[launch.layer];
            let plan = &mut plans[launch.layer];
            match launch.part {
                Part::Norm(reader) => {
                    let stage = Stage::new(&["norm"], "rms_norm");
                    match reader {
                        Reader::Mixer(_) => plan.attention.push(stage),
                        Reader::Mlp(_) | Reader::LmHead => plan.mlp.push(stage),
                    }
                }
                Part::Mixer(fusion) => plan.attention.extend(layer.mixer_stages(fusion, &step, machine)),
                Part::AddNorm(reader, sums) => {
                    let ranks = self.sums.as_deref().filter(|_| sums != Sums::Own);
                    plan.mlp.push(norm_stage(reader, ranks.map(|ranks| (ranks, &shares))));
                }
                Part::Keep { rows, .. } => step.rows = rows,
                Part::Mlp(form) => plan.mlp.extend(layer.mlp_stages(form, &step, machine)),
            }
        }
        plans
    }
}

impl DecoderLayer {
    fn mixer_stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let mut stages = self.mixer.stages(fusion, step, machine);
        let mlp = self.choose_mlp(step, machine).fusion;
        let rejected = |tried: Fusion, kernel: &str| {
            let reason = self.mixer_fits(tried, mlp, step, machine).err()?;
            Some(Rejected { kernel: format!("{kernel}{}", tried.suffix()), reason })
        };
        if fusion == Fusion::NormAdd {
            return stages;
        }
        if let Some(first) = stages.first_mut() {
            first.rejected.splice(0..0, rejected(Fusion::NormAdd, FusedLinearForm::Stream.name()));
        }
        if let Some(last) = stages.last_mut() {
            last.rejected.splice(0..0, rejected(Fusion::Add, LinearForm::Blas.name()));
        }
        stages
    }

    fn mlp_stages(&self, form: MoeForm, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.stages(step.rows, machine),
            Mlp::Sparse(sparse) => sparse.stages(form, step, self.expert_fusions(machine), machine),
        }
    }
}

/// The norm after a sub-layer, with the addition before it. `ranks`: the ranks whose sums it adds, and whether each
/// rank does this only for its share of the rows.
fn norm_stage(reader: Reader, ranks: Option<(&dyn Communicator, &Result<(), Reason>)>) -> Stage {
    let computes: [&[&str]; 2] = match reader {
        Reader::Mlp(_) => [&["add", "norm"], &["sum over ranks", "add", "norm"]],
        Reader::Mixer(_) | Reader::LmHead => [&["add", "next norm"], &["sum over ranks", "add", "next norm"]],
    };
    let Some((ranks, shares)) = ranks else { return Stage::new(computes[0], "add_rms_norm") };
    let shared = Sums::Shared.kernel(ranks);
    match shares {
        Ok(()) => Stage::new(computes[1], shared),
        Err(reason) => Stage::new(computes[1], Sums::OfRanks.kernel(ranks))
            .after([Rejected { kernel: shared, reason: reason.clone() }]),
    }
}

#[cfg(test)]
mod tests {
    use moe_comm::SelfComm;

    use super::*;

    #[test]
    fn a_norm_behind_a_sum_says_which_rows_a_rank_adds_up() {
        let ranks = SelfComm::new();
        let stage = |shares| norm_stage(Reader::Mlp(0), Some((&ranks, &shares)));
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
        assert_eq!(norm_stage(Reader::Mlp(0), None).computes, ["add", "norm"]);
    }
}
