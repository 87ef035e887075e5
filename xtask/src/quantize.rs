//! `cargo xtask quantize` and `cargo xtask random-checkpoint`: build and run the program `moe-quantize`. This crate
//! must not link candle.

use anyhow::{Context, Result};

use crate::workspace::{cargo, root};

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of `moe-quantize`; `--help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub fn run(command: &str, args: &Args) -> Result<()> {
    let status = cargo()
        // Relative paths are relative to the caller's folder.
        .current_dir(std::env::current_dir()?)
        .args(["run", "--release", "-q", "-p", "moe-quantize", "--manifest-path"])
        .arg(root().join("Cargo.toml"))
        .args(["--", command])
        .args(&args.arguments)
        .status()
        .context("cannot start cargo")?;
    // The program has already printed the error.
    std::process::exit(status.code().unwrap_or(1))
}
