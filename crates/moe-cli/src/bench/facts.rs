//! The common part of all measurements: the model, the size of a KV block, and the description of the run in a result.

use moe_engine::Session;
use serde_json::{Value, json};

use crate::cli::BenchArgs;
use crate::cli::version::COMMIT;
use crate::model::Model;

/// Tokens of a KV block.
pub const BLOCK_SIZE: usize = 16;

/// The model that is measured.
pub fn model(args: &BenchArgs) -> Model<'_> {
    match &args.config {
        Some(config) => Model::Random(config),
        None => Model::Checkpoint(args.model.as_deref()),
    }
}

/// The description of the program, the machine and the settings of the run, for a result.
pub fn facts(args: &BenchArgs, session: &Session) -> Value {
    json!({
        "engine": "moe-engine",
        "version": env!("CARGO_PKG_VERSION"),
        "device": args.run.device.to_string(),
        "tp": args.run.parallel.tp,
        "dp": args.run.parallel.dp,
        "enable_expert_parallel": args.run.parallel.enable_expert_parallel,
        "moe_ep_backend": args.run.parallel.moe_ep_backend.to_string(),
        "cpu_isa": session.ex.isa().name(),
        "num_threads": session.ex.num_threads(),
        "dtype": session.model.info().dtype.as_str(),
        "commit": COMMIT,
    })
}
