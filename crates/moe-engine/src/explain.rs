//! Which kernels run, and why others do not: a loaded model's plans for every number of rows, as text and as JSON.
//!
//! Plans that use the same kernels are shown once, with their rows and layers.

use std::fmt::{self, Write};

use model_runtime::{CausalLm, LayerPlan};
use moe_layer::{Machine, PlanStep, Stage};
use serde::Serialize;

/// Up to this number every number of rows is queried. Above it only powers of two are queried, because nothing else
/// changes.
const EACH: usize = 1024;
/// The largest number of rows that is queried.
const MOST: usize = 1 << 16;

/// Numbers of decoding rows of the mixed steps that are queried, and the number of positions to which each row attends.
const DECODING: [usize; 4] = [1, 8, 64, 256];
const POSITIONS: usize = 1024;

/// The first and last of consecutive layers that run the same kernels, and these kernels.
type LayerRun = ((usize, usize), LayerPlan);

/// The kernels of some layers in steps of some numbers of rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    /// `decode`: one new row of each sequence; `prefill`: rows of prompts; `mixed`: decoding rows, then rows of a
    /// prompt.
    pub step: &'static str,
    /// The smallest and largest number of rows; `None` means no limit. In a mixed step these are the rows of the
    /// prompt.
    pub rows: (usize, Option<usize>),
    /// The smallest and largest number of rows that decode in a mixed step, each of which attends to 1,024 positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_rows: Option<(usize, usize)>,
    /// First and last decoder layer.
    pub layers: (usize, usize),
    /// The kernels that run. Rejected kernels are listed for the smallest number of rows.
    #[serde(flatten)]
    pub plan: LayerPlan,
}

/// The places of the experts of some MoE layers, if a map places them.
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
    /// Consecutive MoE layers whose experts are in the same places; empty if no map places them.
    pub placements: Vec<Placed>,
    /// By step, rows and layers, ascending.
    pub plans: Vec<Explained>,
}

impl Explanation {
    /// The plans as JSON, together with the choice of an expert backend that was made when the model was loaded.
    pub fn with_backend(&self, backend: &serde_json::Value) -> serde_json::Result<serde_json::Value> {
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
        let of_step = |step: PlanStep| by_layers(model.plan(&step, machine));
        let powers = |first: usize| std::iter::successors(Some(first), |rows| Some(2 * rows));
        let powers = |first: usize| powers(first).take_while(|rows| *rows <= MOST);
        let mut plans = Vec::new();
        let rows = || (1..=EACH).chain(powers(2 * EACH));
        for (step, ranges) in [
            ("decode", ranges(rows(), |rows| of_step(PlanStep::decode(rows)))),
            ("prefill", ranges(rows(), |rows| of_step(PlanStep::prompts(rows)))),
        ] {
            ranges.into_iter().for_each(|range| plans.extend(range.explained(step, None)));
        }
        let mut mixed: Vec<((usize, usize), Vec<RowRange>)> = Vec::new();
        for decoding in DECODING {
            let ranges = ranges(powers(1), |rows| of_step(mixed_step(decoding, rows)));
            match mixed.last_mut() {
                Some(((_, most), last)) if same_ranges(last, &ranges) => *most = decoding,
                _ => mixed.push(((decoding, decoding), ranges)),
            }
        }
        for (decoding, ranges) in mixed {
            ranges.into_iter().for_each(|range| plans.extend(range.explained("mixed", Some(decoding))));
        }
        Self { placements: placements(model), plans }
    }
}

/// Decoding rows, then a prompt from its beginning.
fn mixed_step(decode_rows: usize, rows: usize) -> PlanStep {
    let attention_scores = [decode_rows * POSITIONS, rows * (rows + 1) / 2];
    PlanStep { attention_scores, ..PlanStep::mixed(decode_rows, rows) }
}

/// Numbers of rows for which layers run the same kernels.
struct RowRange {
    least: usize,
    most: Option<usize>,
    layers: Vec<LayerRun>,
}

impl RowRange {
    fn explained(
        self,
        step: &'static str,
        decode_rows: Option<(usize, usize)>,
    ) -> impl Iterator<Item = Explained> {
        let rows = (self.least, self.most);
        self.layers.into_iter().map(move |(layers, plan)| Explained { step, rows, decode_rows, layers, plan })
    }
}

/// Groups `rows`, which ascend, into ranges with the same plans of the layers. The last range has no end.
fn ranges(rows: impl Iterator<Item = usize>, of_rows: impl Fn(usize) -> Vec<LayerRun>) -> Vec<RowRange> {
    let mut ranges: Vec<RowRange> = Vec::new();
    for rows in rows {
        let layers = of_rows(rows);
        match ranges.last_mut() {
            Some(last) if same(&last.layers, &layers) => last.most = Some(rows),
            _ => ranges.push(RowRange { least: rows, most: Some(rows), layers }),
        }
    }
    if let Some(last) = ranges.last_mut() {
        last.most = None;
    }
    ranges
}

fn same_ranges(a: &[RowRange], b: &[RowRange]) -> bool {
    let same =
        |(a, b): (&RowRange, &RowRange)| (a.least, a.most) == (b.least, b.most) && same(&a.layers, &b.layers);
    a.len() == b.len() && a.iter().zip(b).all(same)
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

/// The parts of a model that use the kernels for any dtype and shape on a GPU, and why, for the log.
pub fn any_shape_stages(model: &dyn CausalLm, machine: &Machine) -> Vec<String> {
    let mut found = Vec::new();
    for step in [PlanStep::decode(1), PlanStep::prompts(EACH)] {
        let plans = model.plan(&step, machine);
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

/// The number of rows from which a step of prompts quantises activations, among the powers of two; `None` means never.
pub fn quantised_activations(model: &dyn CausalLm, machine: &Machine) -> Option<usize> {
    let quantises = |rows: &usize| {
        let plans = model.plan(&PlanStep::prompts(*rows), machine);
        plans
            .iter()
            .flat_map(|plan| plan.attention.iter().chain(&plan.mlp))
            .any(|stage| stage.kernel.contains("W8A8"))
    };
    std::iter::successors(Some(1), |rows| Some(rows * 2)).take_while(|rows| *rows <= MOST).find(quantises)
}

/// Groups consecutive layers that use the same kernels.
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

/// Whether both run the same kernels. Rejected kernels may differ by the number of rows in their reason, and rows may
/// be computed in a different number of parts.
fn same_kernels(a: &LayerPlan, b: &LayerPlan) -> bool {
    let same = |(a, b): (&Stage, &Stage)| {
        (a.computes, &a.kernel, a.parts.is_some()) == (b.computes, &b.kernel, b.parts.is_some())
    };
    let all_same = |a: &[Stage], b: &[Stage]| a.len() == b.len() && a.iter().zip(b).all(same);
    all_same(&a.attention, &b.attention) && all_same(&a.mlp, &b.mlp)
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
        for Explained { step, rows, decode_rows, layers, plan } in &self.plans {
            let mut rows = counted(*rows);
            if let Some((least, most)) = *decode_rows {
                rows = format!("{} that decode and {rows} of a prompt", counted((least, Some(most))));
            }
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

/// Fewest and most rows in words.
fn counted(rows: (usize, Option<usize>)) -> String {
    match rows {
        (1, Some(1)) => "1 row".to_string(),
        (least, Some(most)) if least == most => format!("{least} rows"),
        (least, Some(most)) => format!("{least} to {most} rows"),
        (1, None) => "any number of rows".to_string(),
        (least, None) => format!("{least} rows and more"),
    }
}

fn line(stage: &Stage) -> Result<String, fmt::Error> {
    let mut line = String::new();
    let chunks = stage.parts.as_ref().map(|_| "for each chunk of rows".to_string());
    let notes: Vec<String> = stage.note.clone().into_iter().chain(chunks).collect();
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
    writeln!(line, "  {:44} {}{notes}", stage.computes.join(", "), stage.kernel)?;
    for rejected in &stage.rejected {
        writeln!(line, "  {:44}   not {}: {}", "", rejected.kernel, rejected.reason)?;
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(kernel: &str) -> Stage {
        Stage::new(&["experts"], kernel)
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
        let plan = || plan("experts_stream");
        let of = |rows| Explained { step: "decode", rows, decode_rows: None, layers: (0, 3), plan: plan() };
        let mut mixed = Explained { step: "mixed", decode_rows: Some((1, 64)), ..of((16, None)) };
        mixed.plan.mlp[0].parts = Some(0..2);
        let plans = vec![of((1, Some(1))), of((5, Some(7))), of((8, None)), mixed];
        let places = Placed { moe_layers: (0, 2), experts: 3, slots_by_rank: vec![vec![2, 0], vec![1, 0]] };
        let text = Explanation { placements: vec![places], plans }.to_string();
        let placed = "MoE layers 0 to 2: 3 experts in 4 slots of 2 ranks\n  rank 0: 2 0\n  rank 1: 1 0\n\n";
        assert!(text.starts_with(placed), "{text}");
        for want in [
            "decode, 1 row, layers 0 to 3\n",
            "5 to 7 rows",
            "8 rows and more",
            "experts_stream\n",
            "mixed, 1 to 64 rows that decode and 16 rows and more of a prompt, layers 0 to 3\n",
            "experts_stream (for each chunk of rows)\n",
        ] {
            assert!(text.contains(want), "{want} in {text}");
        }
    }
}
