//! Flags of commands that do not run a model.

use std::path::PathBuf;

use clap::Args;

/// Flags of `inspect`.
#[derive(Args, Debug, Clone)]
pub struct InspectArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub; no weight is downloaded.
    pub model: String,
    /// Branch, tag or commit of the model on the hub, as by ORG/NAME@REVISION.
    #[arg(long)]
    pub revision: Option<String>,
    /// Describe a run that loads quantised weights as floats.
    #[arg(long)]
    pub dequantise: bool,
    /// Write JSON, to stdout or FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,
}

/// Flags of `download`.
#[derive(Args, Debug, Clone)]
pub struct DownloadArgs {
    /// ORG/NAME or ORG/NAME@REVISION on the hub, or its address there. What the cache has of it is compared with the
    /// hub's sizes and hashes, and files that differ are downloaded again.
    pub model: String,
    /// Branch, tag or commit of the model, as by ORG/NAME@REVISION.
    #[arg(long)]
    pub revision: Option<String>,
    /// Download nothing: report which files in the cache are missing or damaged.
    #[arg(long)]
    pub check: bool,
    /// Download every file again, whatever the cache has.
    #[arg(long, conflicts_with = "check")]
    pub force: bool,
}
