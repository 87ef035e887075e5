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
    /// ORG/NAME or ORG/NAME@REVISION on the hub, or its address there. What the cache has of it is compared with the
    /// hub's sizes and hashes, and files that differ are downloaded again.
    pub model: String,
    /// Download nothing: report which files in the cache are missing or damaged.
    #[arg(long)]
    pub check: bool,
    /// Download every file again, whatever the cache has.
    #[arg(long, conflicts_with = "check")]
    pub force: bool,
}
