//! Which kernels run, and why not others: a loaded model's plans for every number of rows, for people and as JSON.
//!
//! Plans that use the same kernels are shown once, with the rows and the layers that they are for.

use std::fmt::{self, Write};

use model_runtime::{CausalLm, LayerPlan};
use moe_layer::{Machine, PlanStep, Stage};
use serde::Serialize;

/// Most rows that are asked one by one. Beyond them nothing changes but by doubling.
const EACH: usize = 1024;
/// Most rows that are asked at all.
const MOST: usize = 1 << 16;

/// First and last of some layers that run the same kernels, and these.
type LayerRun = ((usize, usize), LayerPlan);

/// The kernels of some layers in steps of some numbers of rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    /// `decode`: one new row of each sequence; `prefill`: rows of prompts among them.
    pub step: &'static str,
    /// Fewest and most rows; no most: without limit.
    pub rows: (usize, Option<usize>),
    /// First and last decoder layer.
    pub layers: (usize, usize),
    /// What runs; rejected kernels are listed for the fewest rows.
    #[serde(flatten)]
    pub plan: LayerPlan,
}

/// Where the experts of some MoE layers are, where a map places them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placed {
    /// First and last MoE layer.
    pub moe_layers: (usize, usize),
    /// Logical experts.
    pub experts: usize,
    /// The experts in the slots of each rank.
    pub slots_by_rank: Vec<Vec<u32>>,
}

/// A model's plans.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Runs of MoE layers whose experts are in the same places; empty where no map places them.
    pub placements: Vec<Placed>,
    /// By step, rows and layers, ascending.
    pub plans: Vec<Explained>,
}

impl Explanation {
    /// The plans as JSON, beside the choice of an expert backend that was made when the model was loaded.
    pub fn beside(&self, backend: &serde_json::Value) -> serde_json::Result<serde_json::Value> {
        let mut all = backend.clone();
        if let Some(object) = all.as_object_mut() {
            object.insert("plans".to_string(), serde_json::to_value(&self.plans)?);
            if !self.placements.is_empty() {
                object.insert("placements".to_string(), serde_json::to_value(&self.placements)?);
            }
        }
        Ok(all)
    }

    /// The plans of a model on a machine.
    pub fn of(model: &dyn CausalLm, machine: &Machine) -> Self {
        let mut plans = Vec::new();
        for (step, one_row_each) in [("decode", true), ("prefill", false)] {
            let of_rows = |rows| {
                let step = PlanStep { rows, one_row_each, observed: None };
                by_layers(model.plan(&step, machine))
            };
            let mut ranges: Vec<(usize, Option<usize>, Vec<LayerRun>)> = Vec::new();
            let doubled = std::iter::successors(Some(2 * EACH), |rows| Some(2 * rows));
            for rows in (1..=EACH).chain(doubled.take_while(|rows| *rows <= MOST)) {
                let plans = of_rows(rows);
                match ranges.last_mut() {
                    Some((_, most, last)) if same(last, &plans) => *most = Some(rows),
                    _ => ranges.push((rows, Some(rows), plans)),
                }
            }
            if let Some((_, most, _)) = ranges.last_mut() {
                *most = None;
            }
            for (least, most, layers) in ranges {
                let explained = |(layers, plan)| Explained { step, rows: (least, most), layers, plan };
                plans.extend(layers.into_iter().map(explained));
            }
        }
        Self { placements: placements(model), plans }
    }
}

/// Where the model's experts are now.
fn placements(model: &dyn CausalLm) -> Vec<Placed> {
    let mut runs: Vec<Placed> = Vec::new();
    let layers = model.info().moe.as_ref().map_or(0, |moe| moe.layers.len());
    for layer in 0..layers {
        let Some(map) = model.placed_experts(layer).map(|placed| placed.map()) else { continue };
        let slots_by_rank: Vec<Vec<u32>> =
            (0..map.num_ranks()).map(|rank| map.experts(rank).to_vec()).collect();
        match runs.last_mut() {
            Some(run) if run.slots_by_rank == slots_by_rank => run.moe_layers.1 = layer,
            _ => runs.push(Placed { moe_layers: (layer, layer), experts: map.num_experts(), slots_by_rank }),
        }
    }
    runs
}

/// The parts of a model that run on the kernels for any dtype and shape on a GPU, and why: what a log should say.
pub fn any_shape_stages(model: &dyn CausalLm, machine: &Machine) -> Vec<String> {
    let mut found = Vec::new();
    for (rows, one_row_each) in [(1, true), (EACH, false)] {
        let plans = model.plan(&PlanStep { rows, one_row_each, observed: None }, machine);
        for stage in plans.iter().flat_map(|plan| plan.attention.iter().chain(&plan.mlp)) {
            let Some(last) = stage.rejected.last().filter(|_| stage.kernel.starts_with("any_")) else {
                continue;
            };
            let text = format!(
                "{} runs on kernels for any shape, which are slow: {} {}",
                stage.computes.join(", "),
                last.kernel,
                last.reason
            );
            if !found.contains(&text) {
                found.push(text);
            }
        }
    }
    found
}

/// From how many rows on a step of prompts quantises activations, among the powers of two; `None`: never.
pub fn quantised_activations(model: &dyn CausalLm, machine: &Machine) -> Option<usize> {
    let quantises = |rows: &usize| {
        let plans = model.plan(&PlanStep { rows: *rows, one_row_each: false, observed: None }, machine);
        plans
            .iter()
            .flat_map(|plan| plan.attention.iter().chain(&plan.mlp))
            .any(|stage| stage.kernel.contains("W8A8"))
    };
    std::iter::successors(Some(1), |rows| Some(rows * 2)).take_while(|rows| *rows <= MOST).find(quantises)
}

/// Runs of layers that use the same kernels.
fn by_layers(plans: Vec<LayerPlan>) -> Vec<LayerRun> {
    let mut runs: Vec<LayerRun> = Vec::new();
    for (layer, plan) in plans.into_iter().enumerate() {
        match runs.last_mut() {
            Some((layers, last)) if same_kernels(last, &plan) => layers.1 = layer,
            _ => runs.push(((layer, layer), plan)),
        }
    }
    runs
}

fn same(a: &[LayerRun], b: &[LayerRun]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && same_kernels(&a.1, &b.1))
}

/// Whether both run the same kernels; what was rejected may differ by the number of rows in its reason.
fn same_kernels(a: &LayerPlan, b: &LayerPlan) -> bool {
    let kernels = |plan: &LayerPlan| -> Vec<(&[&str], String)> {
        let stages = plan.attention.iter().chain(&plan.mlp);
        stages.map(|stage| (stage.computes, stage.kernel.clone())).collect()
    };
    kernels(a) == kernels(b)
}

impl fmt::Display for Explanation {
    /// A table for each range of rows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Placed { moe_layers: (first, last), experts, slots_by_rank } in &self.placements {
            let slots: usize = slots_by_rank.iter().map(Vec::len).sum();
            let layers = if first == last {
                format!("MoE layer {first}")
            } else {
                format!("MoE layers {first} to {last}")
            };
            writeln!(f, "{layers}: {experts} experts in {slots} slots of {} ranks", slots_by_rank.len())?;
            for (rank, slots) in slots_by_rank.iter().enumerate() {
                let slots: Vec<String> = slots.iter().map(u32::to_string).collect();
                writeln!(f, "  rank {rank}: {}", slots.join(" "))?;
            }
            f.write_char('\n')?;
        }
        for Explained { step, rows, layers, plan } in &self.plans {
            let rows = match *rows {
                (1, Some(1)) => "1 row".to_string(),
                (least, Some(most)) if least == most => format!("{least} rows"),
                (least, Some(most)) => format!("{least} to {most} rows"),
                (1, None) => "any number of rows".to_string(),
                (least, None) => format!("{least} rows and more"),
            };
            let layers = match *layers {
                (first, last) if first == last => format!("layer {first}"),
                (first, last) => format!("layers {first} to {last}"),
            };
            writeln!(f, "{step}, {rows}, {layers}")?;
            for stage in plan.attention.iter().chain(&plan.mlp) {
                f.write_str(&line(stage)?)?;
            }
            f.write_char('\n')?;
        }
        Ok(())
    }
}

fn line(stage: &Stage) -> Result<String, fmt::Error> {
    let mut line = String::new();
    writeln!(line, "  {:44} {}", stage.computes.join(", "), stage.kernel)?;
    for rejected in &stage.rejected {
        writeln!(line, "  {:44}   not {}: {}", "", rejected.kernel, rejected.reason)?;
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(kernel: &str) -> Stage {
        Stage { computes: &["experts"], kernel: kernel.to_string(), rejected: Vec::new() }
    }

    fn plan(kernel: &str) -> LayerPlan {
        LayerPlan { attention: vec![stage("a")], mlp: vec![stage(kernel)] }
    }

    #[test]
    fn layers_of_the_same_kernels_are_one_run() {
        let runs = by_layers([plan("dense"), plan("x"), plan("x"), plan("dense")].to_vec());
        let layers: Vec<_> = runs.iter().map(|(layers, _)| *layers).collect();
        assert_eq!(layers, [(0, 0), (1, 2), (3, 3)]);
    }

    #[test]
    fn tables_name_rows_layers_and_kernels() {
        let of = |rows| Explained { step: "decode", rows, layers: (0, 3), plan: plan("experts_stream") };
        let plans = vec![of((1, Some(1))), of((5, Some(7))), of((8, None))];
        let places = Placed { moe_layers: (0, 2), experts: 3, slots_by_rank: vec![vec![2, 0], vec![1, 0]] };
        let text = Explanation { placements: vec![places], plans }.to_string();
        let placed = "MoE layers 0 to 2: 3 experts in 4 slots of 2 ranks\n  rank 0: 2 0\n  rank 1: 1 0\n\n";
        assert!(text.starts_with(placed), "{text}");
        for want in ["decode, 1 row, layers 0 to 3\n", "5 to 7 rows", "8 rows and more", "experts_stream"] {
            assert!(text.contains(want), "{want} in {text}");
        }
    }
}
