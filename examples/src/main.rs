//! Three models of candle-transformers 0.11.1 as they are, and with their sparse block replaced by moe-layer's
//! `SparseMoeBlock`: equal logits, how fast each runs, and how much memory each takes at most.
//!
//!     cargo run --release -p moe-examples                      # the CPU
//!     cargo run --release -p moe-examples --features cuda      # a GPU, if there is one
//!
//! `changes.rs` holds the lines that change. Each run is a process of its own, whose peak memory is the model's.

// The name by which candle-transformers calls it.
extern crate candle_core as candle;

mod changes;
mod memory;
mod model;
// Sources of another crate, with their own ways.
#[allow(warnings, missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
mod models;
mod weights;

// What the changed sources take from their crate.
use candle_transformers::{fused_moe, utils};

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use changes::CHANGES;
use model::{Forward, Model, VOCAB};

/// Sequences, tokens of their prompts, tokens after them.
const BATCH: usize = 2;
const PROMPT: usize = 96;
const OUTPUT: usize = 32;
/// Most lines that may change in a model.
const MOST_LINES: usize = 15;
/// The largest relative difference of logits in f32.
const TOLERANCE: f64 = 1e-5;
/// How many times candle-transformers' own error in bf16 ours may be.
const BF16_FACTOR: f64 = 1.25;

/// What a process measured.
#[derive(Serialize, Deserialize)]
struct Measured {
    /// Logits of the prompts' last tokens and of each step after them.
    logits: Vec<Vec<f32>>,
    /// Tokens per second.
    prefill: f64,
    decode: f64,
    /// Peak memory of the process in MiB; `None` where the system does not tell. With a GPU, of the tensors there.
    peak: Option<f64>,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.as_slice() {
        [] => compare_all(),
        [model, dtype, whose] => {
            println!("{}", serde_json::to_string(&measure(model, dtype, whose)?)?);
            Ok(())
        }
        _ => bail!("expected no arguments, got {args:?}"),
    }
}

fn compare_all() -> Result<()> {
    let device = device()?;
    for change in CHANGES {
        let lines = change.lines();
        println!("{}: {lines} lines changed", change.file);
        ensure!(lines <= MOST_LINES, "more than {MOST_LINES} lines change in {}", change.file);
    }
    println!("{:?}, {BATCH} sequences, {PROMPT} tokens in, {OUTPUT} out", device.location());
    for model in Model::ALL {
        for dtype in ["f32", "bf16"] {
            compare(model, dtype)?;
        }
    }
    Ok(())
}

/// The first GPU in a build with the feature `cuda`, if the machine has one; else the CPU.
fn device() -> Result<Device> {
    if !cfg!(feature = "cuda") {
        return Ok(Device::Cpu);
    }
    Device::new_cuda(0).or_else(|e| {
        let reason = e.to_string();
        eprintln!("no GPU, so the CPU is used: {}", reason.lines().next().unwrap_or(""));
        Ok(Device::Cpu)
    })
}

/// Runs a model both ways, each in a process of its own.
fn compare(model: Model, dtype: &str) -> Result<()> {
    let run_as = |dtype: &str, whose: &str| -> Result<Measured> {
        let program = std::env::current_exe()?;
        let output = Command::new(program).args([model.name(), dtype, whose]).output()?;
        ensure!(
            output.status.success(),
            "{} {dtype} {whose}: {}",
            model.name(),
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).context("cannot read what a process measured")
    };
    let run = |whose: &str| run_as(dtype, whose);
    let print = |whose: &str, m: &Measured| {
        let peak = m.peak.map_or("unknown".to_string(), |peak| format!("{peak:.0} MiB"));
        println!(
            "{:9} {dtype:4} {whose}: prompt {:6.0} tok/s, decode {:6.0} tok/s, peak memory {peak}",
            model.name(),
            m.prefill,
            m.decode
        );
    };
    let ours = run("ours")?;
    let theirs = match run("theirs") {
        Ok(theirs) => theirs,
        Err(e) if dtype == "bf16" => {
            // Some of its models mix dtypes; then there is nothing to compare with.
            let reason = e.to_string();
            println!(
                "{:9} {dtype:4} candle-transformers fails: {}",
                model.name(),
                reason.lines().next().unwrap_or("")
            );
            print("with SparseMoeBlock", &ours);
            return Ok(());
        }
        Err(e) => return Err(e),
    };
    print("candle-transformers", &theirs);
    print("with SparseMoeBlock", &ours);
    if dtype == "f32" {
        let difference = error(&ours.logits, &theirs.logits);
        println!("{:9} {dtype:4} relative difference of the logits: {difference:.1e}", model.name());
        return check(difference, TOLERANCE);
    }
    // In bf16 each side rounds at its own places, and a token near the edge may go to other experts. So both are
    // compared with the same weights in f32.
    let exact = run_as("rounded", "theirs")?;
    let their_error = error(&theirs.logits, &exact.logits);
    let our_error = error(&ours.logits, &exact.logits);
    println!(
        "{:9} {dtype:4} relative errors of the logits: candle-transformers {their_error:.1e}, with SparseMoeBlock {our_error:.1e}",
        model.name()
    );
    check(our_error, BF16_FACTOR * their_error)
}

/// Fails unless an error is within its bound.
fn check(error: f64, bound: f64) -> Result<()> {
    ensure!(error <= bound, "the logits are off by {error:e}, more than {bound:e}");
    Ok(())
}

/// The relative error of all logits together, in the Euclidean norm; not a number where one is.
fn error(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = got.iter().flatten().zip(want.iter().flatten()).map(|(a, b)| square(a - b)).sum();
    let all: f64 = want.iter().flatten().map(|&x| square(x)).sum();
    (off / all).sqrt()
}

fn measure(model: &str, dtype: &str, whose: &str) -> Result<Measured> {
    let found = Model::ALL.into_iter().find(|known| known.name() == model);
    let model = found.with_context(|| format!("no model {model}"))?;
    let device = device()?;
    let load = || -> Result<Forward> {
        let vb = match dtype {
            "bf16" => model.tensors().checkpoint(DType::BF16, &device),
            "rounded" => model.tensors().rounded().checkpoint(DType::F32, &device),
            _ => model.tensors().checkpoint(DType::F32, &device),
        };
        if whose == "ours" { model.ours(vb) } else { model.theirs(vb) }
    };
    // Once to warm up, then to measure.
    run(load()?, &device)?;
    run(load()?, &device)
}

fn run(mut forward: Forward, device: &Device) -> Result<Measured> {
    let token = |i: usize| ((i * 7919 + 13) % VOCAB) as u32;
    let ids = |range: std::ops::Range<usize>| {
        let rows = range.len();
        let ids = (0..BATCH).flat_map(|b| range.clone().map(move |t| token(b * 1000 + t)));
        Tensor::from_vec(ids.collect::<Vec<u32>>(), (BATCH, rows), device)
    };
    let host = |logits: Tensor| logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let start = Instant::now();
    let mut logits = vec![host(forward(&ids(0..PROMPT)?, 0)?)?];
    let prefill = start.elapsed().as_secs_f64();
    for t in PROMPT..PROMPT + OUTPUT {
        logits.push(host(forward(&ids(t..t + 1)?, t)?)?);
    }
    let decode = start.elapsed().as_secs_f64() - prefill;
    Ok(Measured {
        logits,
        prefill: (BATCH * PROMPT) as f64 / prefill,
        decode: (BATCH * OUTPUT) as f64 / decode,
        peak: memory::peak(device),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_lines_change_and_the_logits_do_not() -> Result<()> {
        let device = Device::Cpu;
        for (model, change) in Model::ALL.into_iter().zip(CHANGES) {
            assert_eq!(change.file, format!("{}.rs", model.name()));
            assert!(change.lines() <= MOST_LINES, "{}: {} lines", change.file, change.lines());
            let vb = || model.tensors().checkpoint(DType::F32, &device);
            let theirs = run(model.theirs(vb())?, &device)?;
            let ours = run(model.ours(vb())?, &device)?;
            check(error(&ours.logits, &theirs.logits), TOLERANCE)?;
        }
        Ok(())
    }
}
