//! Commands about models that run none.

use clap::Args;

/// Flags of `inspect`.
#[derive(Args, Debug, Clone)]
pub struct InspectArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub; no weight is downloaded.
    pub model: String,
    /// Write JSON.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `download`.
#[derive(Args, Debug, Clone)]
pub struct DownloadArgs {
    /// ORG/NAME or ORG/NAME@REVISION on the hub.
    pub model: String,
    /// Download nothing: report which files in the cache lack or are damaged.
    #[arg(long)]
    pub check: bool,
}
