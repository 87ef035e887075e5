//! `cargo xtask kernels`: builds every CUDA kernel and prints what each one costs.
//!
//! Each .cu of crates/moe-kernels/cuda becomes one object for all supported architectures; together they
//! are target/kernels/libmoe_kernels.so, which carries its own copy of the CUDA runtime. ptxas reports
//! registers, shared memory and spills of each kernel: a spill fails the build unless it is listed
//! with a reason. `--racecheck` builds a second library whose warps arrive at barriers lane by lane (`warp_arrive` of
//! ptx.cuh), for compute-sanitizer alone.

#[path = "../../crates/moe-kernels/build/nvcc.rs"]
mod nvcc;
mod report;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::toolkit::{self, Toolkit};
use crate::workspace::{self, root, target_dir};
use report::Usage;

/// Kernels that may spill: a part of the demangled name, and why it is worth it.
const ALLOWED_SPILLS: &[(&str, &str)] = &[];

/// Sources that arrive at barriers by `warp_arrive` of ptx.cuh.
const WARP_ARRIVALS: &[&str] = &["experts_stream", "layer_stream", "linear_stream"];

#[derive(clap::Args)]
pub struct Args {
    /// Print only kernels whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Also build target/kernels-racecheck/libmoe_kernels.so, which only compute-sanitizer's racecheck should see.
    #[arg(long)]
    racecheck: bool,
    /// Python interpreter that fetches the toolkit where no CUDA is installed.
    #[arg(long, default_value = "python3")]
    python: String,
}

pub fn run(args: &Args) -> Result<()> {
    let toolkit = toolkit::find_or_install(&args.python)?;
    let out = target_dir().join("kernels");
    let objects = nvcc::compile_all(&toolkit.nvcc(), &sources(), &out).map_err(anyhow::Error::msg)?;
    let mut usage: Vec<Usage> = objects.iter().flat_map(|object| report::parse(&object.log)).collect();
    report::demangle(&mut usage);
    usage.sort_by(|a, b| (&a.kernel, &a.arch).cmp(&(&b.kernel, &b.arch)));
    let shown = usage.iter().filter(|u| args.only.as_ref().is_none_or(|part| u.kernel.contains(part)));
    print!("{}", report::table(shown));

    let paths: Vec<PathBuf> = objects.into_iter().map(|object| object.path).collect();
    link(&toolkit, &paths, &out.join("libmoe_kernels.so"))?;
    check_spills(&usage)?;
    println!("{}", out.join("libmoe_kernels.so").display());
    if args.racecheck {
        let library = target_dir().join("kernels-racecheck/libmoe_kernels.so");
        link(&toolkit, &for_racecheck(&toolkit, &paths)?, &library)?;
        println!("{}", library.display());
    }
    Ok(())
}

/// Where the kernels are.
pub fn sources() -> PathBuf {
    root().join("crates/moe-kernels/cuda")
}

/// Objects of all kernels, those of `WARP_ARRIVALS` replaced by ones in which every lane arrives.
pub fn for_racecheck(toolkit: &Toolkit, objects: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let out = target_dir().join("kernels-racecheck");
    let flags = ["-DMOE_RACECHECK"];
    let replaced = |name: &str| WARP_ARRIVALS.contains(&name);
    let built = nvcc::compile_some(&toolkit.nvcc(), &sources(), &out, &flags, replaced);
    let built = built.map_err(anyhow::Error::msg)?.into_iter().map(|object| object.path);
    let is_replaced =
        |path: &&PathBuf| path.file_stem().is_some_and(|name| replaced(&name.to_string_lossy()));
    Ok(objects.iter().filter(|path| !is_replaced(path)).cloned().chain(built).collect())
}

/// Links objects of kernels and the CUDA runtime into a library.
pub fn link(toolkit: &Toolkit, objects: &[PathBuf], library: &Path) -> Result<()> {
    let mut command = Command::new(toolkit.nvcc());
    command.args(["-shared", "-cudart", "static", "-o"]).arg(library).args(objects);
    for dir in &toolkit.libraries {
        command.arg("-L").arg(dir);
    }
    workspace::run(&mut command)
}

fn check_spills(usage: &[Usage]) -> Result<()> {
    let allowed = |u: &Usage| ALLOWED_SPILLS.iter().any(|(part, _)| u.kernel.contains(part));
    let faults: Vec<String> = usage
        .iter()
        .filter(|u| u.spills > 0 && !allowed(u))
        .map(|u| format!("{} for sm_{} spills {} bytes", u.kernel, u.arch, u.spills))
        .collect();
    if faults.is_empty() {
        return Ok(());
    }
    bail!("spills without a reason in ALLOWED_SPILLS (xtask/src/kernels.rs):\n{}", faults.join("\n"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_source_with_warp_arrivals_is_built_for_racecheck() {
        let mut found: Vec<String> = fs::read_dir(sources())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| fs::read_to_string(path).unwrap().contains("warp_arrive("))
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .filter(|name| name != "ptx")
            .collect();
        // Headers are named after the kernel that they belong to.
        found.retain(|name| !WARP_ARRIVALS.iter().any(|source| name.starts_with(source)));
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn an_unlisted_spill_is_a_fault() {
        let usage = |spills| Usage {
            kernel: "moe::k<8>".into(),
            arch: "90a".into(),
            registers: 255,
            shared: 0,
            stack: 0,
            spills,
        };
        assert!(check_spills(&[usage(0)]).is_ok());
        let e = check_spills(&[usage(0), usage(16)]).unwrap_err().to_string();
        assert!(e.contains("moe::k<8> for sm_90a spills 16 bytes"), "{e}");
    }
}
