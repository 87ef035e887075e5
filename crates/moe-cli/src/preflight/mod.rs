//! What is checked before a weight is downloaded or read.
//!
//! ```text
//! flags ─► config.json, generation_config.json, tokenizer.json, chat template ─► device ─► weights
//! ```
//!
//! Weights take minutes and gigabytes. Whatever refuses a run says so before: every flag, and every small
//! file of the checkpoint, which a download brings first.

mod asks;
mod device_flags;
mod files;

use anyhow::Result;
use model_runtime::{BlockContext, Config};
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{LoadOptions, ModelFamily, usage};
use moe_layer::Backend;

use crate::cli::RunArgs;
use crate::hub::{self, Located};
use crate::session::{Model, no_model};

use files::Files;

pub use asks::{Asks, no_template};
pub use device_flags::check_device_flags;
pub use files::config;

/// A model that passed.
pub struct Checked {
    /// Where the weights come from.
    pub source: Source,
    /// Its configs.
    pub files: Files,
    /// The model's tokenizer, if text is asked for.
    pub tokenizer: Option<Tokenizer>,
}

/// Where weights come from.
pub enum Source {
    /// A checkpoint whose weights may not be here yet.
    Checkpoint(Located),
    /// The program.
    Embedded,
    /// Nowhere: random ones for this config.
    Random(Config),
}

/// Checks a run on a model as far as it can be checked without weights.
///
/// # Errors
/// What would refuse the run later: a flag ([`UsageError`](moe_engine::UsageError)), a file that is
/// missing or wrong, a model or a format that this program does not run.
pub fn check<F: ModelFamily>(model: Model, args: &RunArgs, asks: &Asks) -> Result<Checked> {
    check_device_flags(args, asks.engine(), &[])?;
    check_run::<F>(args)?;
    asks.check_flags()?;
    match model {
        Model::Checkpoint(Some(name)) => {
            let located = hub::locate(name)?;
            let files = Files::read(located.dir())?;
            files.check::<F>(args, asks)?;
            asks.check_template(Some(located.dir()), Some(name))?;
            let tokenizer = asks.tokenizes().then(|| Tokenizer::from_dir(located.dir())).transpose()?;
            asks.check_structured_output(tokenizer.as_ref())?;
            Ok(Checked { source: Source::Checkpoint(located), files, tokenizer })
        }
        Model::Checkpoint(None) => {
            let embedded = F::embedded().ok_or_else(no_model)?;
            let files = Files::embedded(&embedded)?;
            files.check::<F>(args, asks)?;
            asks.check_template(None, None)?;
            let tokenizer =
                asks.tokenizes().then(|| Tokenizer::from_bytes(embedded.tokenizer)).transpose()?;
            asks.check_structured_output(tokenizer.as_ref())?;
            Ok(Checked { source: Source::Embedded, files, tokenizer })
        }
        Model::Random(path) => {
            let raw = Config::read(path)?;
            config::<F>(&raw)?;
            let files = Files::random(raw.clone())?;
            files.check_values(asks)?;
            Ok(Checked { source: Source::Random(raw), files, tokenizer: None })
        }
    }
}

/// Checks where and how a model runs.
fn check_run<F: ModelFamily>(args: &RunArgs) -> Result<()> {
    args.config().check()?;
    match args.moe_backend.as_deref() {
        None | Some("auto") => {}
        Some(name) => {
            name.parse::<Backend>().map_err(|e| usage(format!("--moe-backend {name}: {e}")))?;
        }
    }
    let geometry = args.config().parallel.geometry(0).map_err(|e| usage(e.to_string()))?;
    let context = BlockContext { geometry, ..BlockContext::default() };
    let options = LoadOptions { moe_path: args.moe_path, mla: args.mla, context, ..LoadOptions::default() };
    F::refuse(&options, args.device).map_or(Ok(()), |reason| Err(usage(reason)))
}
