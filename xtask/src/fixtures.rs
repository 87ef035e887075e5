//! `cargo xtask fixtures`: recreates tests/fixtures with pinned transformers.
//!
//! The reference scripts need PyTorch, which nothing else in the project needs. So they run in a virtual environment
//! under target/.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::workspace::{self, root};

#[derive(clap::Args)]
pub struct Args {
    /// Only these fixtures, comma separated.
    #[arg(long)]
    only: Option<String>,
    /// Python interpreter that makes the virtual environment.
    #[arg(long, default_value = "python3")]
    python: String,
    /// Where the fixtures are written.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// The interpreter of the virtual environment, made or renewed when the requirements changed.
fn interpreter(python: &str) -> Result<PathBuf> {
    let scripts = root().join("tests/reference");
    let venv = workspace::target_dir().join("reference-venv");
    let stamp = venv.join("requirements.txt");
    let wanted = std::fs::read(scripts.join("requirements.txt"))?;
    let interpreter = venv.join("bin/python");
    if std::fs::read(&stamp).ok().as_ref() != Some(&wanted) {
        workspace::run(Command::new(python).args(["-m", "venv"]).arg(&venv))?;
        workspace::run(
            Command::new(&interpreter)
                .args(["-m", "pip", "install", "-q", "-r"])
                .arg(scripts.join("requirements.txt")),
        )?;
        std::fs::write(&stamp, wanted)?;
    }
    Ok(interpreter)
}

pub fn run(args: &Args) -> Result<()> {
    let interpreter = interpreter(&args.python)?;
    let out = args.out.clone().unwrap_or_else(|| root().join("tests/fixtures"));
    let mut command = Command::new(interpreter);
    command.arg(root().join("tests/reference/make_fixtures.py")).arg("--out").arg(out);
    if let Some(only) = &args.only {
        command.args(["--only", only]);
    }
    workspace::run(&mut command)
}
