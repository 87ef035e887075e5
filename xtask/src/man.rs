//! `cargo xtask man`: the man pages of the programs. Each program writes its own, so that this crate depends
//! on none of them.

use anyhow::{Result, ensure};

use crate::workspace;

#[derive(clap::Args)]
pub struct Args {
    /// Only this program.
    #[arg(long)]
    program: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let dir = workspace::target_dir().join("man");
    let all = workspace::model_programs()?;
    let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    if let Some(program) = &args.program {
        ensure!(
            names.contains(&program.as_str()),
            "--program {program}: expected one of {}",
            names.join(", ")
        );
    }
    for (program, package) in &all {
        if args.program.as_ref().is_none_or(|only| only == program) {
            let run = ["run", "--release", "--quiet", "-p", package, "--", "man"];
            workspace::run(workspace::cargo().args(run).arg(&dir))?;
        }
    }
    println!("{}", dir.display());
    Ok(())
}
