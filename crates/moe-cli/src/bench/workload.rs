//! `bench --workload`: a file of requests, all submitted at once, and how fast the engine answers them.
//!
//! ```text
//! file ─► checks ─► model ─► engine ─► warm-up ─► run 1 .. n ─► a row each, JSON with all and the best
//! ```
//!
//! One engine runs all of them. Prefix caching is off, so a run leaves only warm buffers to the next one.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use moe_engine::engine::{DpEngine, EngineConfig, FinishReason, Request};
use moe_engine::terminal::note;
use serde_json::json;

use crate::Program;
use crate::batch::{Progress, Total};
use crate::cli::BenchArgs;
use crate::error::usage;
use crate::output::write_json;
use crate::preflight::{Asks, Known};
use crate::{routing, session};

use super::arrivals::Arrivals;
use super::facts::{BLOCK_SIZE, facts, model};
use super::report::{self, Figures};
use super::requests::Workload;

/// The number of requests of the warm-up, and the largest number of new tokens of each: on a GPU enough to record a
/// decode graph.
const WARM_UP: (usize, usize) = (64, 4);
/// Time between two log lines with the progress of a run.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Runs the workload of a file.
pub fn run(program: &Program, args: &BenchArgs, file: &Path) -> Result<()> {
    let workload = Workload::read(file, args.limit)?;
    let settings = engine_config(args, &workload, EngineConfig::default());
    settings.check(usize::MAX).map_err(|e| usage(e.to_string()))?;
    let recording = args.replay_routed_experts.as_deref().map(routing::read).transpose()?;
    let check = |model: &Known| {
        recording.as_ref().map_or(Ok(()), |recording| routing::check(recording, model.config))?;
        workload.check(model.vocab_size, model.context)
    };
    let asks = Asks::within(args.gpu_memory).with(&check);
    let mut session = session::open(program, model(args), &args.run, false, &asks)?;
    // A config may omit values that only the family knows.
    let info = session.model.info();
    workload.check(info.vocab_size, info.max_context_len)?;
    let workload = match &recording {
        Some(recording) => workload.replaying(recording, info.moe.as_ref())?,
        None => workload,
    };
    let config = engine_config(args, &workload, session.engine_defaults());
    let mut engine = session.engine(None, &config).map_err(|e| usage(format!("{e:#}")))?;
    warm_up(&mut engine, &workload)?;
    note(format_args!(
        "{} requests with {} prompt tokens and {} new ones, at most {} at once; the first token counts from the start \
         of the run, when all are submitted",
        workload.num_requests(),
        workload.input_tokens(),
        workload.output_tokens(),
        config.max_num_seqs.saturating_mul(args.run.parallel.dp).min(workload.num_requests()),
    ));
    note(report::HEAD);
    let mut runs = Vec::with_capacity(args.repeat.min(1024));
    for run in 1..=args.repeat {
        let figures = measure(&mut engine, &workload)?;
        note(figures.row(run));
        runs.push(figures);
    }
    let best = report::best(&runs);
    note(format_args!("best: run {}, {:.1} total tok/s", best + 1, runs[best].total_tok_s));
    let kv_cache_tokens = engine.stats().kv_blocks * BLOCK_SIZE;
    note(crate::parallel::experts_report(&engine));
    let balance = engine.eplb_stats();
    drop(engine);
    session.finish()?;
    let mut result = facts(args, &session);
    result["workload"] = json!({
        "file": file.display().to_string(),
        "requests": workload.num_requests(),
        "longest_sequence": workload.longest(),
    });
    result["max_num_seqs"] = config.max_num_seqs.into();
    result["max_num_batched_tokens"] = config.max_num_batched_tokens.into();
    result["scheduling_policy"] = json!(config.scheduling_policy);
    result["kv_cache_tokens"] = kv_cache_tokens.into();
    result["eplb"] = json!(balance);
    result["best"] = json!(runs[best]);
    result["runs"] = json!(runs);
    write_json(args.json.as_ref().and_then(|file| file.as_deref()), &result)
}

/// The flags over the defaults of the device, with room for at most what the workload needs.
fn engine_config(args: &BenchArgs, workload: &Workload, default: EngineConfig) -> EngineConfig {
    EngineConfig {
        max_num_seqs: args.max_num_seqs.unwrap_or(default.max_num_seqs).min(workload.num_requests()),
        max_num_batched_tokens: args.max_num_batched_tokens.unwrap_or(default.max_num_batched_tokens),
        scheduling_policy: args.scheduling_policy.into(),
        max_model_len: Some(workload.longest()),
        block_size: BLOCK_SIZE,
        kv_cache_memory: args.kv_cache_memory,
        gpu_memory: args.gpu_memory.map(|bytes| bytes as u64),
        enable_prefix_caching: false,
        ..default
    }
}

/// Allocates scratch, and on a GPU records graphs, before the clock starts.
fn warm_up(engine: &mut DpEngine, workload: &Workload) -> Result<()> {
    let (requests, tokens) = WARM_UP;
    for request in workload.requests().take(requests) {
        let max_tokens = request.max_tokens.map(|max| max.min(tokens));
        engine.add(Request { max_tokens, ..request })?;
    }
    Ok(engine.run(drop)?)
}

/// Submits all requests and runs until the last one is answered.
fn measure(engine: &mut DpEngine, workload: &Workload) -> Result<Figures> {
    let total = Total::default();
    total.is(workload.num_requests() as u64);
    let mut progress = Progress::new(total, LOG_EVERY);
    let before = engine.stats();
    let traffic = engine.expert_traffic()?;
    let answered = answer(engine, workload, &mut progress);
    progress.finish();
    let (elapsed, arrivals) = answered?;
    let mut figures = Figures::new(workload, elapsed, arrivals, &before, &engine.stats());
    let traffic = engine.expert_traffic()?.zip(traffic);
    figures.expert_traffic = traffic.map(|(after, before)| after.since(&before));
    Ok(figures)
}

/// Runs the engine with the clock: returns how long it took, and when each token arrived.
fn answer(
    engine: &mut DpEngine,
    workload: &Workload,
    progress: &mut Progress,
) -> Result<(Duration, Arrivals)> {
    let requests: Vec<Request> = workload.requests().collect();
    let mut arrivals = Arrivals::new(requests.len());
    let mut places = HashMap::with_capacity(requests.len());
    let start = Instant::now();
    for (place, request) in requests.into_iter().enumerate() {
        let id = engine.add(request).map_err(|e| anyhow!("{}: {e}", workload.name_of(place)))?;
        places.insert(id, place);
    }
    while !engine.is_idle() {
        let outputs = engine.step()?;
        let now = start.elapsed();
        for output in outputs {
            let Some(&place) = places.get(&output.request) else { continue };
            if output.token_id.is_some() {
                arrivals.add(place, now);
                progress.tokens += 1;
            }
            match output.finish {
                None => {}
                Some(FinishReason::Length) => progress.answered += 1,
                Some(other) => return Err(anyhow!("{}: it ended early: {other:?}", workload.name_of(place))),
            }
        }
        progress.show();
    }
    let elapsed = start.elapsed();
    let got = arrivals.tokens();
    let expected = workload.output_tokens();
    ensure!(got == expected, "expected {expected} new tokens, got {got}");
    Ok((elapsed, arrivals))
}
