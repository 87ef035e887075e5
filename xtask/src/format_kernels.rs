//! `cargo xtask format-kernels`: clang-format, pinned, over the CUDA sources, in the style of the workspace's
//! .clang-format. With `--check` it changes nothing and fails where something would change.

use std::process::Command;

use anyhow::Result;

use crate::workspace::{self, root};
use crate::{kernels, wheel};

const WHEEL: &str = "clang-format==23.1.5";

#[derive(clap::Args)]
pub struct Args {
    /// Change nothing; fail if a file is not formatted.
    #[arg(long)]
    check: bool,
    /// Python interpreter that fetches clang-format.
    #[arg(long, default_value = "python3")]
    python: String,
}

pub fn run(args: &Args) -> Result<()> {
    let program = wheel::fetch(&args.python, "clang-format", WHEEL, "clang_format/data/bin/clang-format")?;
    let mut command = Command::new(program);
    command.current_dir(root()).args(["--style=file", "-i"]);
    if args.check {
        command.args(["--dry-run", "-Werror"]);
    }
    workspace::run(command.args(kernels::files()?))
}
