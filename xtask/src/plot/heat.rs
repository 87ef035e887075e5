//! `xtask plot heat`: plots how a run distributed its tokens over the experts of each layer.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use moe_eplb::Loads;

use super::heatmap::{self, Bar, Grid};
use crate::trace;

/// What to plot.
#[derive(Args)]
pub struct Options {
    /// Heat trace (JSON lines `{v, step, stage, layer, counts}`), as `--expert-heat` writes it.
    #[arg(long)]
    trace: PathBuf,
    /// The picture (SVG).
    #[arg(long)]
    out: PathBuf,
    /// Steps to count: all, prefill or decode.
    #[arg(long, default_value = "all")]
    stage: String,
}

/// Loads of more than eight times the mean, or less than an eighth of it, have the same colour.
const DOUBLINGS: f64 = 3.0;

/// Makes the map.
pub fn run(options: &Options) -> Result<()> {
    let loads = trace::read(&options.trace, &options.stage)?;
    let heat: Vec<Vec<f64>> = (0..loads.layers()).map(|layer| over_mean(&loads, layer)).collect();
    let steps = match options.stage.as_str() {
        "all" => format!("{} steps", loads.steps()),
        stage => format!("{} {stage} steps", loads.steps()),
    };
    let grid = Grid {
        title: format!("Tokens of each expert over the mean of its layer, {steps}"),
        width: loads.experts(),
        height: loads.layers(),
        cell: &|expert, layer| heat[layer][expert].log2(),
    };
    let bar = Bar { range: (-DOUBLINGS, DOUBLINGS), label: &factor };
    heatmap::draw(&options.out, ("expert", "MoE layer"), &[grid], &bar)
        .with_context(|| format!("cannot write the picture {}", options.out.display()))
}

/// The tokens of each expert of a layer over all steps, where 1 is the mean expert. A layer without tokens counts as
/// even.
fn over_mean(loads: &Loads, layer: usize) -> Vec<f64> {
    let experts = loads.experts();
    let mut sum = vec![0.0; experts];
    for step in loads.layer(layer).chunks(experts) {
        sum.iter_mut().zip(step).for_each(|(sum, tokens)| *sum += tokens);
    }
    let mean = sum.iter().sum::<f64>() / experts as f64;
    sum.iter().map(|tokens| if mean > 0.0 { tokens / mean } else { 1.0 }).collect()
}

/// A power of two as a person writes it.
fn factor(exponent: &f64) -> String {
    let factor = exponent.abs().exp2();
    match exponent {
        _ if exponent.fract() != 0.0 => String::new(),
        e if *e < 0.0 => format!("1/{factor}"),
        _ => format!("{factor}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(lines: &str, stage: &str) -> Result<String> {
        let dir = tempfile::tempdir()?;
        let trace = dir.path().join("heat.jsonl");
        let out = dir.path().join("heat.svg");
        std::fs::write(&trace, lines)?;
        run(&Options { trace, out: out.clone(), stage: stage.into() })?;
        Ok(std::fs::read_to_string(out)?)
    }

    const TRACE: &str = r#"{"v":1,"step":0,"stage":"prefill","layer":0,"counts":[8,0,0,0]}
{"v":1,"step":0,"stage":"prefill","layer":1,"counts":[2,2,2,2]}
{"v":1,"step":1,"stage":"decode","layer":0,"counts":[0,0,0,2]}
{"v":1,"step":1,"stage":"decode","layer":1,"counts":[0,0,1,1]}
"#;

    #[test]
    fn a_map_has_a_cell_for_every_layer_and_expert() {
        let svg = draw(TRACE, "all").unwrap();
        let cells = |colour: &str| svg.matches(&format!("fill=\"{colour}\"")).count();
        assert!(svg.contains("2 steps") && svg.contains("MoE layer") && svg.contains("1/8"), "{svg}");
        // Layer 0 has loads of 8, 0, 0 and 2 with a mean of 2.5: one expert far above the mean, two without tokens, one
        // at 0.8.
        let coldest = cells("#213C82");
        let prefill = draw(TRACE, "prefill").unwrap();
        assert!(prefill.contains("1 prefill steps"));
        let in_prefill = prefill.matches("fill=\"#213C82\"").count();
        assert_eq!((coldest, in_prefill), (2, 3));
    }

    #[test]
    fn shares_are_over_the_mean_of_the_layer() {
        let loads = Loads::episodes(2, 1, 4, &[8., 0., 0., 0., 0., 0., 0., 2.]).unwrap();
        assert_eq!(over_mean(&loads, 0), [3.2, 0.0, 0.0, 0.8]);
        let idle = Loads::episodes(1, 1, 2, &[0., 0.]).unwrap();
        assert_eq!(over_mean(&idle, 0), [1.0, 1.0]);
        assert_eq!([-3.0, 0.0, 2.0, 0.5].map(|e| factor(&e)), ["1/8", "1", "4", ""]);
    }

    #[test]
    fn a_trace_without_such_steps_is_an_error() {
        let decode_only = TRACE.lines().skip(2).collect::<Vec<_>>().join("\n");
        let error = format!("{:#}", draw(&decode_only, "prefill").unwrap_err());
        assert!(error.contains("prefill steps of the trace") && error.contains("heat.jsonl"), "{error}");
        assert!(format!("{:#}", draw("{}", "all").unwrap_err()).contains("line 1"));
        assert!(draw(TRACE, "night").unwrap_err().to_string().contains("expected all, prefill or decode"));
    }
}
