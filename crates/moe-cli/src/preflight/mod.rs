//! What is checked before a weight is downloaded or read.
//!
//! ```text
//! flags ─► config.json, generation_config.json, tokenizer.json, chat template ─► device ─► weights
//! ```
//!
//! Weights take minutes and gigabytes. Whatever refuses a run says so before: every flag, every small
//! file of the checkpoint, which a download brings first, and what the command adds: its prompts, its rows, its reference.

mod asks;
mod device_flags;
mod files;

use std::path::Path;

use anyhow::{Result, bail};
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
pub use files::{NUM_EXPERTS, check_required, config};

/// A model that passed.
pub struct Checked {
    /// Where the weights come from.
    pub source: Source,
    /// Its configs.
    pub files: Files,
    /// The model's tokenizer, if text is asked for.
    pub tokenizer: Option<Tokenizer>,
}

/// What is known of a model before its weights are read.
pub struct Known<'a> {
    /// Its config.json.
    pub config: &'a Config,
    /// Its folder; `None`: it is in the program, or random.
    pub dir: Option<&'a Path>,
    /// Its tokenizer, if the command makes text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Number of token ids; `usize::MAX` where only the family knows.
    pub vocab_size: usize,
    /// The longest sequence; `usize::MAX` where only the family knows.
    pub context: usize,
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
    let (source, files) = match model {
        Model::Checkpoint(Some(name)) => {
            let located = hub::locate(name)?;
            let files = Files::read(located.dir())?;
            (Source::Checkpoint(located), files)
        }
        Model::Checkpoint(None) => (Source::Embedded, Files::embedded(&F::embedded().ok_or_else(no_model)?)?),
        Model::Random(path) => {
            let config = Config::read(path).map_err(|e| usage(format!("--config: {e}")))?;
            (Source::Random(config.clone()), Files::random(config)?)
        }
    };
    files.check::<F>(args, asks)?;
    let name = match model {
        Model::Checkpoint(name) => name,
        Model::Random(_) => None,
    };
    asks.check_template(source.dir(), name)?;
    let tokenizer = asks.tokenizes().then(|| source.tokenizer::<F>()).transpose()?;
    asks.check_structured_output(tokenizer.as_ref())?;
    asks.check_further(&files.known(source.dir(), tokenizer.as_ref())?)?;
    Ok(Checked { source, files, tokenizer })
}

impl Source {
    /// The folder of a checkpoint.
    fn dir(&self) -> Option<&Path> {
        match self {
            Self::Checkpoint(located) => Some(located.dir()),
            Self::Embedded | Self::Random(_) => None,
        }
    }

    fn tokenizer<F: ModelFamily>(&self) -> Result<Tokenizer> {
        match self {
            Self::Checkpoint(located) => Tokenizer::from_dir(located.dir()),
            Self::Embedded => Tokenizer::from_bytes(F::embedded().ok_or_else(no_model)?.tokenizer),
            Self::Random(_) => bail!("a model with random weights has no tokenizer"),
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
