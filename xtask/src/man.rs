//! `cargo xtask man`: the man pages of the programs. Each program writes its own, so that this crate depends
//! on none of them.

use anyhow::Result;

use crate::workspace;

/// The packages that are programs; each is called like its package.
const PROGRAMS: [&str; 2] = ["model-qwen3moe", "model-deepseekv2-legacy"];

#[derive(clap::Args)]
pub struct Args {
    /// Only this program.
    #[arg(long, value_parser = PROGRAMS)]
    program: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let dir = workspace::target_dir().join("man");
    let wanted = |name: &&str| args.program.as_deref().is_none_or(|program| program == *name);
    for program in PROGRAMS.into_iter().filter(wanted) {
        let run = ["run", "--release", "--quiet", "-p", program, "--", "man"];
        workspace::run(workspace::cargo().args(run).arg(&dir))?;
    }
    println!("{}", dir.display());
    Ok(())
}
