//! `bench`: prefill and decode rates, measured by the protocol of the scripts for other programs.
//!
//! Random prompt tokens, temperature 1 over the whole vocabulary (so that routing stays spread),
//! end-of-sequence ignored. A decode figure is a run with all output tokens minus a run with one;
//! medians of `--repeat` runs. A decode row also counts the distinct experts per layer and step,
//! because a model whose routing collapsed would read fewer weights and look fast.
//!
//! With `--workload` it runs a file of requests instead: the module `workload`.

mod arrivals;
mod facts;
mod report;
mod requests;
mod sizes;
mod workload;

use std::sync::OnceLock;
use std::time::Instant;

use anyhow::{Result, ensure};
use model_runtime::sampling::random_bits;
use model_runtime::{MoeInfo, SamplingParams};
use moe_engine::Session;
use moe_engine::engine::{DpEngine, EngineConfig, Request};
use moe_engine::terminal::note;
use serde_json::{Value, json};
use tracing::info;

use crate::Program;
use crate::cli::BenchArgs;
use crate::error::usage;
use crate::output::{check_writable, write_json};
use crate::preflight::{Asks, Known, check_device_flags};
use crate::roofline;
use crate::session;

use facts::{BLOCK_SIZE, facts, model};
use sizes::{LONG_OUTPUT, check_sizes};

pub use requests::Workload;
pub use sizes::Sizes;

static START: OnceLock<Instant> = OnceLock::new();

/// Notes the start of the process, for `start_s`.
pub fn mark_start() {
    START.get_or_init(Instant::now);
}

/// Runs the command.
pub fn run(program: &Program, args: &BenchArgs) -> Result<()> {
    if args.output.is_some_and(|output| output < 2) || args.prompt == Some(0) || args.repeat == 0 {
        return Err(usage("bench needs --output of at least 2, --prompt and --repeat of at least 1"));
    }
    let json = args.json.as_ref().and_then(|file| file.as_deref());
    json.map_or(Ok(()), |path| check_writable("--json", path))?;
    check_device_flags(&args.run, None, &[("--gpu-memory", args.gpu_memory.is_some())])?;
    if let Some(file) = &args.workload {
        return workload::run(program, args, file);
    }
    let check = |model: &Known| check_sizes(args, &Sizes::new(args, model.context), model.context);
    let session = session::open(program, model(args), &args.run, false, &Asks::default().with(&check))?;
    // A config may omit values that only the family knows.
    let context = session.model.info().max_context_len;
    let sizes = Sizes::new(args, context);
    check_sizes(args, &sizes, context)?;
    let default = session.engine_defaults().max_num_batched_tokens;
    let max_num_batched_tokens = args.max_num_batched_tokens.unwrap_or(default);
    let mut bench = Bench { session, max_num_batched_tokens, runs: 0 };
    bench.time(1, 1, 1)?;
    let mut result = facts(args, &bench.session);
    result["start_s"] = START.get().map(|start| start.elapsed().as_secs_f64()).into();
    result["max_num_batched_tokens"] = max_num_batched_tokens.into();
    for rows in ["prefill", "decode", "distinct_experts"] {
        result[rows] = json!({});
    }
    for &length in &sizes.lengths {
        bench.time(1, length, 1)?;
        let rate = length as f64 / bench.median(args.repeat, 1, length, 1)?;
        note(format_args!("prefill {length}: {rate:.1} tok/s"));
        result["prefill"][length.to_string()] = rate.into();
    }
    for &batch in &args.batches {
        let row = bench.decode(batch, args.repeat, &sizes)?;
        match row["tok_s"].as_f64() {
            Some(rate) => note(format_args!("decode {batch}: {rate:.2} tok/s")),
            None => note(format_args!(
                "decode {batch}: lost in the noise of this machine; raise --output or --repeat"
            )),
        }
        if let Some(moe) = bench.session.model.info().moe.clone() {
            result["distinct_experts"][batch.to_string()] =
                bench.distinct_experts(batch, sizes.prompt, &moe)?;
        }
        result["decode"][batch.to_string()] = row;
    }
    if args.long_context > 0 {
        let one = bench.median(args.repeat, 1, args.long_context, 1)?;
        let full = bench.median(args.repeat, 1, args.long_context, LONG_OUTPUT)?;
        result["decode_long"] = long_row(args.long_context, one, full);
    }
    // The first rank's activations and scratch, without weights and KV cache.
    result["workspace_bytes"] = bench.session.ex.workspace().bytes().into();
    bench.session.finish()?;
    info!("measuring what this machine can do at most");
    result["roofline"] = roofline::measure(program, args, &sizes, &result, bench.session)?;
    write_json(json, &result)
}

struct Bench {
    session: Session,
    max_num_batched_tokens: usize,
    runs: u64,
}

impl Bench {
    fn decode(&mut self, batch: usize, repeat: usize, sizes: &Sizes) -> Result<Value> {
        ensure!(batch > 0, "a batch needs at least one sequence");
        self.time(batch, sizes.prompt, 2)?;
        let one = self.median(repeat, batch, sizes.prompt, 1)?;
        let full = self.median(repeat, batch, sizes.prompt, sizes.output)?;
        Ok(decode_row(batch, sizes.output, one, full))
    }

    fn median(&mut self, repeat: usize, batch: usize, prompt: usize, output: usize) -> Result<f64> {
        let mut seconds =
            (0..repeat).map(|_| self.time(batch, prompt, output)).collect::<Result<Vec<_>>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }

    /// Seconds to generate `output` tokens for `batch` random prompts.
    fn time(&mut self, batch: usize, prompt: usize, output: usize) -> Result<f64> {
        let requests = self.requests(batch, prompt, output);
        let warm_up = self.requests(batch, 1, (prompt + output - 1).min(4));
        let mut engine = self.engine(batch, prompt + output, false)?;
        // Before the clock starts, scratch memory is allocated, and on a GPU the decode graph is captured.
        warm_up.into_iter().try_for_each(|request| engine.add(request).map(drop))?;
        engine.run(drop)?;
        let start = Instant::now();
        requests.into_iter().try_for_each(|request| engine.add(request).map(drop))?;
        let mut tokens = 0;
        engine.run(|output| tokens += usize::from(output.token_id.is_some()))?;
        ensure!(
            tokens == batch * output,
            "a request ended early: {tokens} tokens; is the context too short?"
        );
        Ok(start.elapsed().as_secs_f64())
    }

    /// The mean number of distinct experts per layer and decode step, and whether that is as many as with uniform
    /// routing, within 3 %. A step counts for all ranks in lockstep, otherwise for one rank with its share of the
    /// batch.
    fn distinct_experts(&mut self, batch: usize, prompt: usize, moe: &MoeInfo) -> Result<Value> {
        const STEPS: usize = 16;
        let requests = self.requests(batch, prompt, STEPS + 1);
        let mut engine = self.engine(batch, prompt + STEPS + 1, true)?;
        requests.into_iter().try_for_each(|request| engine.add(request).map(drop))?;
        let e = moe.num_experts as f64;
        let k = moe.top_k as f64;
        let mut layers = 0;
        let mut distinct = 0;
        let mut uniform = 0.;
        while !engine.is_idle() {
            engine.step()?;
            for step in engine.take_step_loads().iter().filter(|s| s.prefill_rows == 0 && s.decode_rows > 0) {
                let used = |layer| step.counts.layer(layer).iter().filter(|count| **count > 0).count();
                layers += step.counts.layers();
                distinct += (0..step.counts.layers()).map(used).sum::<usize>();
                let expected = e * (1. - (1. - k / e).powi(step.decode_rows as i32));
                uniform += step.counts.layers() as f64 * expected;
            }
        }
        let [mean, uniform] = [distinct as f64, uniform].map(|sum| sum / layers.max(1) as f64);
        Ok(json!({"mean": mean, "uniform": uniform, "valid": layers > 0 && mean >= 0.97 * uniform}))
    }

    fn requests(&mut self, batch: usize, prompt: usize, output: usize) -> Vec<Request> {
        self.runs += 1;
        let vocab = self.session.model.info().vocab_size as u64;
        let token = |i: usize| (random_bits(self.runs, i as u64) % vocab) as u32;
        (0..batch)
            .map(|b| Request {
                sampling: SamplingParams {
                    temperature: 1.,
                    seed: self.runs << 32 | b as u64,
                    ..SamplingParams::default()
                },
                max_tokens: Some(output),
                ..Request::new((0..prompt).map(|i| token(b * prompt + i)).collect())
            })
            .collect()
    }

    /// The engine that generation uses, with a KV cache of the size that the row needs.
    fn engine(&self, batch: usize, length: usize, count_experts: bool) -> Result<DpEngine<'_>> {
        let info = self.session.model.info();
        let blocks = batch.saturating_mul(length.div_ceil(BLOCK_SIZE));
        let tokens = (blocks * BLOCK_SIZE).saturating_mul(info.states.bytes_per_token()?);
        // States take half of the memory at most.
        let states = batch.saturating_mul(2 * info.states.bytes_per_sequence()?);
        let config = EngineConfig {
            max_num_seqs: batch,
            max_model_len: Some(length.min(info.max_context_len)),
            block_size: BLOCK_SIZE,
            kv_cache_memory: Some(tokens.saturating_add(states)),
            prefix_state_memory: Some(0),
            count_experts,
            max_num_batched_tokens: self.max_num_batched_tokens,
            ..self.session.engine_defaults()
        };
        Ok(self.session.engine(None, &config)?)
    }
}

/// A decode row from the seconds of a run with one new token and of a run with all of them. If noise hides the
/// difference, no time per step is given.
fn decode_row(batch: usize, output: usize, one: f64, full: f64) -> Value {
    let step = Some((full - one) / (output - 1) as f64).filter(|step| *step > 0.);
    json!({
        "tok_s": step.map(|step| batch as f64 / step),
        "step_ms": step.map(|step| step * 1e3),
        "end_to_end_tok_s": (batch * output) as f64 / full,
    })
}

/// The row for one sequence after a long prompt.
fn long_row(context: usize, one: f64, full: f64) -> Value {
    json!({"context": context, "tok_s": decode_row(1, LONG_OUTPUT, one, full)["tok_s"]})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_speed_is_negative() {
        let row = |one, full| decode_row(2, 5, one, full);
        assert_eq!(row(1., 3.), json!({"tok_s": 4., "step_ms": 500., "end_to_end_tok_s": 10. / 3.}));
        let lost = json!({"tok_s": null, "step_ms": null, "end_to_end_tok_s": 10.});
        assert_eq!((row(2., 1.), row(1., 1.)), (lost.clone(), lost));
        assert_eq!(long_row(4096, 1., 2.), json!({"context": 4096, "tok_s": 127.}));
        let lost = json!({"context": 4096, "tok_s": null});
        assert_eq!((long_row(4096, 2., 1.), long_row(4096, 1., 1.)), (lost.clone(), lost));
    }
}
