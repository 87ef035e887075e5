//! Checks that run before any weight is downloaded or read.
//!
//! ```text
//! flags ─► config.json, generation_config.json, tokenizer.json, chat template ─► device ─► weights
//! ```
//!
//! Weights take minutes and gigabytes. So everything that can refuse a run is checked first: every flag, every small
//! file of the checkpoint, which is downloaded first, and the command's own inputs: its prompts, rows or reference.

mod asks;
mod device_flags;
mod files;
mod known;

use std::path::Path;

use anyhow::{Result, bail};
use model_runtime::{BlockContext, Config};
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{Embedded, LoadOptions, ModelSpec};
use moe_layer::Backend;

use crate::Program;
use crate::cli::RunArgs;
use crate::error::usage;
use crate::hub::{self, Located};
use crate::model::Model;

use files::Files;

pub use asks::{Asks, no_template};
pub use device_flags::check_device_flags;
pub use files::check_required;
pub use known::Known;

/// A model that passed.
pub struct Checked {
    /// The source of the weights.
    pub source: Source,
    /// Its configs.
    pub files: Files,
    /// The model's tokenizer, if the command makes text.
    pub tokenizer: Option<Tokenizer>,
}

/// The source of weights.
pub enum Source {
    /// A checkpoint whose weights may not be downloaded yet.
    Checkpoint(Located),
    /// The checkpoint in the program.
    Embedded(Embedded),
    /// No file: random weights for this config.
    Random(Config),
}

/// Checks a run on a model as far as it can be checked without weights.
///
/// # Errors
/// An error that would stop the run later: a flag ([`UsageError`](moe_engine::UsageError)), a file that is missing or
/// wrong, a model or a format that this program cannot run.
pub fn check(program: &Program, model: Model, args: &RunArgs, asks: &Asks) -> Result<Checked> {
    check_device_flags(args, asks.engine(), &[])?;
    let options = check_run(args)?;
    asks.check_flags()?;
    let (source, files) = match model {
        Model::Checkpoint(Some(name)) => {
            let located = hub::locate(name)?;
            let files = Files::read(located.dir())?;
            (Source::Checkpoint(located), files)
        }
        Model::Checkpoint(None) => {
            let embedded = program.own_model()?;
            (Source::Embedded(embedded), Files::embedded(&embedded)?)
        }
        Model::Random(path) => {
            let config = Config::read(path).map_err(|e| usage(format!("--config: {e}")))?;
            (Source::Random(config.clone()), Files::random(config)?)
        }
    };
    let files = files.held(args)?;
    let spec = program.families.parse(files.config())?;
    check_options(spec.as_ref(), &options, args)?;
    files.check(spec.as_ref(), args, asks)?;
    let name = match model {
        Model::Checkpoint(name) => name,
        Model::Random(_) => None,
    };
    asks.check_template(source.dir(), name)?;
    let tokenizer = asks.tokenizes().then(|| source.tokenizer()).transpose()?;
    asks.check_structured_output(tokenizer.as_ref())?;
    asks.check_further(&files.known(source.dir(), tokenizer.as_ref())?)?;
    Ok(Checked { source, files, tokenizer })
}

impl Source {
    /// The folder of a checkpoint.
    fn dir(&self) -> Option<&Path> {
        match self {
            Self::Checkpoint(located) => Some(located.dir()),
            Self::Embedded(_) | Self::Random(_) => None,
        }
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        match self {
            Self::Checkpoint(located) => Ok(Tokenizer::from_dir(located.dir())?),
            Self::Embedded(embedded) => Ok(Tokenizer::from_bytes(embedded.tokenizer)?),
            Self::Random(_) => bail!("a model with random weights has no tokenizer"),
        }
    }
}

/// Checks the device and settings of a run; returns the options for loading.
fn check_run(args: &RunArgs) -> Result<LoadOptions> {
    args.config().check()?;
    match args.moe_backend.as_deref() {
        None | Some("auto") => {}
        Some(name) => {
            name.parse::<Backend>().map_err(|e| usage(format!("--moe-backend {name}: {e}")))?;
        }
    }
    let geometry = args.config().parallel.geometry(0).map_err(|e| usage(e.to_string()))?;
    let context = BlockContext { geometry, ..BlockContext::default() };
    Ok(LoadOptions { moe_path: args.moe_path, mla: args.mla, context, ..LoadOptions::default() })
}

/// Refuses options that the model's family does not support.
fn check_options(model: &dyn ModelSpec, options: &LoadOptions, args: &RunArgs) -> Result<()> {
    model.refuse(options, args.device).map_or(Ok(()), |reason| Err(usage(reason)))
}
