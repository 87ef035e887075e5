//! Makes a run of the engine from the flags: its settings, and the source of its weights.

use std::path::Path;

use anyhow::Result;
use model_runtime::Checkpoint;
use moe_engine::explain::Explanation;
use moe_engine::terminal::note;
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{Run, RunConfig, Session, Weights};
use moe_layer::Fp8Activations;
use serde_json::Value;

use crate::Program;
use crate::cli::RunArgs;
use crate::interrupt;
use crate::model::Model;
use crate::output::write_json;
use crate::preflight::{self, Asks, Checked, Source};
use crate::watch::{Unit, Watch};

/// Opens the model of a command on the process that runs the command.
pub fn open(
    program: &Program,
    model: Model,
    args: &RunArgs,
    check_weights: bool,
    asks: &Asks,
) -> Result<Session> {
    let Started { run, weights, tokenizer } = start(program, model, args, check_weights, asks)?;
    let loading = loading(&run, &weights)?;
    let mut session = run.session(weights)?;
    drop(loading);
    if let Some(tokenizer) = tokenizer {
        session.keep_tokenizer(tokenizer)?;
    }
    if let Some(file) = &args.explain_backends {
        explain(&session, file.as_deref())?;
    }
    Ok(session)
}

/// Shows the progress of loading the weights of a checkpoint.
fn loading(run: &Run, weights: &Weights) -> Result<Option<Watch>> {
    let Weights::Checkpoint(checkpoint) = weights else { return Ok(None) };
    let bytes = run.bytes_to_read(checkpoint)?;
    let tensors = checkpoint.tensors.clone();
    Ok(Some(Watch::start("loading weights", Unit::Bytes, bytes, move || tensors.bytes_read())))
}

/// Shows which kernels run, and why others do not: as a table on stderr, or as JSON in a file.
fn explain(session: &Session, file: Option<&Path>) -> Result<()> {
    let plans = Explanation::of(session.model.as_ref(), &session.ex.machine());
    if let Some(file) = file {
        return write_json(Some(file), &plans.with_backend(&session.backend)?);
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    note(format_args!("expert backend: {}", text(&session.backend["chosen"])));
    for rejected in session.backend["rejected"].as_array().into_iter().flatten() {
        note(format_args!("  not {}: {}", text(&rejected["backend"]), text(&rejected["reason"]["text"])));
    }
    note(format_args!("\n{plans}"));
    Ok(())
}

/// Runs this process's rank of the command until rank 0 ends it.
pub fn serve(
    program: &Program,
    model: Model,
    args: &RunArgs,
    check_weights: bool,
    asks: &Asks,
) -> Result<()> {
    let Started { run, weights, .. } = start(program, model, args, check_weights, asks)?;
    // The ranks have met, so Ctrl-C is now left to rank 0. Before this point it ends this process.
    interrupt::leave_to_rank_0()?;
    Ok(run.serve(weights)?)
}

/// A run and the data that it loads.
struct Started {
    run: Run,
    weights: Weights,
    tokenizer: Option<Tokenizer>,
}

/// Checks the run on every rank before anything is downloaded, so that no rank downloads a model that another rank
/// refuses.
fn start(
    program: &Program,
    model: Model,
    args: &RunArgs,
    check_weights: bool,
    asks: &Asks,
) -> Result<Started> {
    let survive_lost_replicas = asks.survives_lost_replicas();
    let config = RunConfig { check_weights, survive_lost_replicas, ..args.config() };
    let Checked { source, files, tokenizer } = preflight::check(program, model, args, asks)?;
    let run = Run::start(&config, program.families, &model.name())?;
    if !args.skip_memory_check {
        files.check_memory(&run, asks)?;
    }
    let weights = match source {
        Source::Checkpoint(located) => Weights::Checkpoint(Checkpoint::open(located.weights()?)?),
        Source::Embedded(embedded) => Weights::Embedded(embedded),
        Source::Random(config) => Weights::Random(config),
    };
    Ok(Started { run, weights, tokenizer })
}

impl RunArgs {
    /// Converts the flags to settings.
    pub fn config(&self) -> RunConfig {
        RunConfig {
            device: self.device,
            dtype: self.dtype.dtype(),
            num_threads: self.num_threads,
            cpu_isa: self.cpu_isa,
            moe_backend: self.moe_backend.clone(),
            moe_path: self.moe_path,
            mla: self.mla,
            shared_experts_stream: self.shared_experts_stream.unwrap_or_default(),
            batch_invariant: self.batch_invariant,
            fp8_activations: self.fp8_activations.unwrap_or(Fp8Activations::Auto),
            dequantise: self.dequantise,
            check_weights: false,
            parallel: self.parallel.config(),
            executor: self.parallel.distributed_executor_backend,
            chunked_moe: self.parallel.chunked_moe(),
            placements: self.parallel.placements.config(),
            eplb: self.parallel.placements.eplb(),
            expert_offload: self.expert_offload,
            survive_lost_replicas: false,
            skip_memory_check: self.skip_memory_check,
        }
    }
}
