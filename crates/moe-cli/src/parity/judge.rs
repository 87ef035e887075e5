//! The verdict of parity: which tensors were compared, how far apart they are, and whether that
//! is within the rules of docs/parity.md.

use anyhow::Result;
use model_runtime::ModelInfo;
use moe_layer::DType;
use serde::Serialize;

use super::compare::{argmax, max_difference, relative_error, same_set};
use super::reference::Reference;
use super::run::Observations;

/// bf16 must stay within this factor of transformers' own bf16 error.
const NOISE_FACTOR: f64 = 1.5;
/// The bound if a reference does not contain the noise of bf16.
const DEFAULT_BF16_BOUND: f64 = 2e-2;

/// The largest number of failures that are listed.
const MAX_FAILURES: usize = 20;

/// The error of one compared tensor.
#[derive(Debug, Serialize)]
pub struct LayerError {
    /// Name in the reference.
    pub name: String,
    /// `||ours - reference|| / ||reference||`.
    pub relative_error: f64,
}

/// The result of a comparison; the JSON of `parity --json`.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The device on which it ran.
    pub device: String,
    /// The dtype it ran in.
    pub dtype: String,
    /// Largest absolute difference of a logit.
    pub max_logit_diff: f64,
    /// The worst tensor's relative error.
    pub relative_error: f64,
    /// What `relative_error` may be.
    pub tolerance: f64,
    /// Share of positions whose likeliest token agrees.
    pub argmax_agreement: f64,
    /// Whether all greedy tokens are equal; null if the reference has none.
    pub generated_match: Option<bool>,
    /// Share of (token, layer) pairs whose expert sets agree, from our own logits.
    pub router_topk_agreement: Option<f64>,
    /// (token, layer) pairs whose expert sets differ.
    pub routing_flips: usize,
    /// Every compared tensor, in the order of execution.
    pub layers: Vec<LayerError>,
    /// Why it did not pass; the first layer that differs comes first.
    pub failures: Vec<String>,
    /// The verdict.
    pub passed: bool,
}

/// How strictly a run is judged.
pub struct Rules {
    /// Bound of the relative error.
    pub tolerance: f64,
    /// f32: argmax and greedy tokens must be equal, and router logits are held to the bound too.
    pub exact: bool,
}

impl Rules {
    /// The rules of a dtype on a device.
    pub fn new(dtype: DType, on_cpu: bool, bf16_noise: Option<f32>) -> Self {
        match dtype {
            DType::F32 => Self { tolerance: if on_cpu { 1e-5 } else { 1e-4 }, exact: true },
            _ => {
                let noise = bf16_noise.map(|noise| NOISE_FACTOR * noise as f64);
                Self { tolerance: noise.unwrap_or(DEFAULT_BF16_BOUND), exact: false }
            }
        }
    }

    /// Whether experts must agree if the reference's selection has this gap. In bf16 the gap is relative to the row's
    /// largest logit, because its noise is proportional to that.
    fn is_clear(&self, row: &[f32], gap: f32) -> bool {
        match self.exact {
            true => gap > 1e-5,
            false => gap > row.iter().fold(0f32, |m, x| m.max(x.abs())) * 2f32.powi(-6),
        }
    }
}

/// The model's selection rule, by decoder layer.
pub trait Selection {
    /// The expert ids that it chooses from router logits [T, E]: [T, K].
    fn ids(&self, layer: usize, logits: &[f32]) -> Result<Vec<u32>>;
    /// The gap between the chosen experts of one row \[E\] and the others, in logits.
    fn gap(&self, layer: usize, row: &[f32]) -> Result<f32>;
}

/// Compares a teacher-forced run, and greedy tokens if the reference has any.
pub fn judge(
    info: &ModelInfo,
    reference: &Reference,
    ours: &Observations,
    generated: &[u32],
    rules: &Rules,
    selection: &dyn Selection,
) -> Result<Report> {
    let mut report = Report {
        max_logit_diff: max_difference(&ours.logits, &reference.logits),
        tolerance: rules.tolerance,
        ..Report::default()
    };
    tensors(info, reference, ours, rules, &mut report);
    tokens(info, reference, ours, rules, &mut report);
    routing(info, reference, ours, rules, selection, &mut report)?;
    if let Some((count, expected)) = &reference.generated {
        let got = generated;
        report.generated_match = Some(expected.as_slice() == got);
        let first = expected.iter().zip(got).position(|(a, b)| a != b);
        if rules.exact && expected.len() != got.len() {
            report.failures.push(format!("generated: expected {} tokens, got {}", expected.len(), got.len()));
        }
        if let (true, Some(at)) = (rules.exact, first) {
            report.failures.push(format!(
                "generated: sequence {}, token {}: expected {}, got {}",
                at / count,
                at % count,
                expected[at],
                got[at]
            ));
        }
    }
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// Relative errors in the order of execution; the first tensor above the bound is a failure.
fn tensors(info: &ModelInfo, reference: &Reference, ours: &Observations, rules: &Rules, report: &mut Report) {
    let empty = Vec::new();
    let mut compare = |name: String, a: Option<&Vec<f32>>, b: &[f32], judged: bool| {
        let error = relative_error(a.unwrap_or(&empty), b);
        if judged {
            report.relative_error = report.relative_error.max(error);
            // The comparison is written so that a NaN on either side fails.
            let within = error <= rules.tolerance;
            if !within && report.failures.is_empty() {
                report.failures.push(format!(
                    "{name} is the first tensor that differs: relative error {error:.2e}, at most {:.2e} is allowed",
                    rules.tolerance
                ));
            }
        }
        report.layers.push(LayerError { name, relative_error: error });
    };
    for index in 0..=info.num_layers {
        // Entry i of the hidden states is the input of decoder layer i, and its router follows.
        if let Some(expected) = reference.hidden_states.get(&index) {
            let got = ours.hidden_states.get(&index);
            compare(format!("hidden_states.{index}"), got, expected, true);
        }
        if let Some(expected) = reference.router_logits.get(&index) {
            let got = ours.router_logits.get(&index);
            compare(format!("router_logits.{index}"), got, expected, rules.exact);
        }
    }
    compare("logits".to_string(), Some(&ours.logits), &reference.logits, true);
}

fn tokens(info: &ModelInfo, reference: &Reference, ours: &Observations, rules: &Rules, report: &mut Report) {
    let rows = ours.logits.chunks_exact(info.vocab_size).zip(reference.logits.chunks_exact(info.vocab_size));
    let differing: Vec<usize> =
        rows.enumerate().filter(|(_, (a, b))| argmax(a) != argmax(b)).map(|(row, _)| row).collect();
    let total = reference.batch * reference.length;
    report.argmax_agreement = 1. - differing.len() as f64 / total as f64;
    if let (true, Some(row)) = (rules.exact, differing.first()) {
        report.failures.push(format!(
            "argmax: sequence {}, position {} differs ({} of {total} positions do)",
            row / reference.length,
            row % reference.length,
            differing.len()
        ));
    }
}

/// Compares the expert sets of our own logits with the reference's.
fn routing(
    info: &ModelInfo,
    reference: &Reference,
    ours: &Observations,
    rules: &Rules,
    selection: &dyn Selection,
    report: &mut Report,
) -> Result<()> {
    let Some(moe) = &info.moe else { return Ok(()) };
    let mut compared = 0;
    for (&layer, expected) in &reference.router_logits {
        let Some(got) = ours.router_logits.get(&layer) else { continue };
        let a = selection.ids(layer, got)?;
        let b = selection.ids(layer, expected)?;
        let rows = a.chunks_exact(moe.top_k).zip(b.chunks_exact(moe.top_k));
        for (row, (a, b)) in rows.enumerate() {
            compared += 1;
            if same_set(a, b) {
                continue;
            }
            report.routing_flips += 1;
            let keys = &expected[row * moe.num_experts..(row + 1) * moe.num_experts];
            let gap = selection.gap(layer, keys)?;
            if rules.is_clear(keys, gap) && report.failures.len() < MAX_FAILURES {
                report.failures.push(format!(
                    "experts of layer {layer}, row {row}: expected {b:?}, got {a:?}, though the reference's gap \
                     of {gap:.2e} is clear"
                ));
            }
        }
    }
    if compared > 0 {
        report.router_topk_agreement = Some(1. - report.routing_flips as f64 / compared as f64);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
