//! Flags of commands about the command line itself.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// Flags of `completions`.
#[derive(Args, Debug, Clone)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: Shell,
}

/// Flags of `man`.
#[derive(Args, Debug, Clone)]
pub struct ManArgs {
    /// Folder, made where there is none.
    pub dir: PathBuf,
}
