//! `cargo xtask dist`: one compressed archive for a machine with a GPU and without Rust.
//!
//! target/dist/moe.tar.xz contains the program `moe`, the GPU tests and the unit tests of CUDA code (stripped), the
//! kernels as a library, the fixtures and the scripts of tests/gpu and tests/cuda. On the target machine `tar xJf
//! moe.tar.xz && moe/tests/gpu/run.sh` runs the checks. Other scripts in that folder: `rivals.sh` compares with other
//! software, `offload.sh` tests experts in host memory, `nccl.sh` and `ranks.sh` need several GPUs, `sanitize.sh` needs
//! an archive made with `--sanitizer`, `scratch.sh` one made with `--scratch`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{self, PROGRAM, PROGRAM_PACKAGE, cargo, root, target_dir};
use crate::{kernels, sanitizer, standalone, toolkit};

/// The largest archive, so that it can be copied to a machine.
const MAX_BYTES: u64 = 60 << 20;

/// The features of the build: one GPU and several.
const FEATURES: &str = "cuda,nccl";

/// Libraries with unit tests of code that is only compiled with the feature `cuda`. tests/gpu/run.sh lists the same
/// names.
const UNIT_TESTED: [&str; 2] = ["moe-engine", "moe-kernels"];

/// The source files that the archive contains.
const FILES: &[&str] = &[
    "tests/fixtures",
    "tests/reference",
    "tests/gpu",
    "tests/cuda",
    // The structs that tests/cuda fills.
    "crates/moe-kernels/cuda/*/args.cuh",
    "tests/bench/configs",
    "tests/bench/mixed_workload.py",
    "tests/bench/skewed_routing.py",
    "tests/bench/peers",
    // The checkpoint that tests/gpu/ranks_quantised.sh quantises. The program contains the same bytes, so the archive
    // hardly grows.
    "models/families/checkpoint",
];

#[derive(clap::Args)]
pub struct Args {
    /// Python interpreter that fetches the toolkit where no CUDA is installed.
    #[arg(long, default_value = "python3")]
    python: String,
    /// Also pack the program of moe-layer's README, built in a project outside of the workspace.
    #[arg(long)]
    scratch: bool,
    /// Also pack compute-sanitizer.
    #[arg(long)]
    sanitizer: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let toolkit = toolkit::find_or_install(&args.python)?;
    let mut environment = toolkit.environment()?;
    // Benchmarks print the commit; where they run there is no repository.
    environment.push(("MOE_COMMIT", workspace::commit()?.into()));
    // All programs are built with one selection of packages: another selection would have other features and compile
    // candle again.
    let mut selected = vec!["moe-tests", PROGRAM_PACKAGE];
    selected.extend(UNIT_TESTED);
    let build = |command: &[&str], targets: &[&str]| {
        let mut build = cargo();
        build.args(command).args(["--release", "--features", FEATURES]).args(targets);
        messages(build.args(selected.iter().flat_map(|name| ["-p", name])).envs(environment.iter().cloned()))
    };
    let built = build(&["build"], &["--bins", "--test", "gpu"])?;
    let units = build(&["test", "--no-run"], &["--lib"])?;

    let folder = target_dir().join("dist").join("moe");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(folder.join("bin")).with_context(|| format!("cannot make {}", folder.display()))?;
    strip(&target_dir().join("release").join(PROGRAM), &folder.join("bin").join(PROGRAM))?;
    let units = test_programs(&units)?
        .into_iter()
        .filter(|(name, _)| UNIT_TESTED.iter().any(|package| package.replace('-', "_") == *name));
    for (name, path) in test_programs(&built)?.into_iter().chain(units) {
        strip(&path, &folder.join("bin").join(name))?;
    }
    if args.scratch {
        strip(&standalone::build_on_cuda("moe-layer", &environment)?, &folder.join("bin/scratch"))?;
    }
    pack_kernels(&toolkit, &kernels::objects()?, &folder.join("lib"))?;
    if args.sanitizer {
        sanitizer::pack(&args.python, &folder)?;
    }
    for path in FILES {
        copy_tracked(path, &folder)?;
    }

    let archive = target_dir().join("dist").join("moe.tar.xz");
    let parent = folder.parent().unwrap_or(&folder);
    // The dictionary spans all binaries, because they share the kernels, which are the largest part of each, and the
    // checkpoint.
    let options = "--lzma2=preset=1,dict=512MiB";
    let mut tar = Command::new("tar");
    workspace::run(tar.env("XZ_OPT", options).arg("cJf").arg(&archive).arg("-C").arg(parent).arg("moe"))?;
    let bytes = fs::metadata(&archive)?.len();
    println!("{} ({:.1} MiB)", archive.display(), bytes as f64 / (1 << 20) as f64);
    if bytes > MAX_BYTES {
        bail!("the archive has {bytes} bytes; at most {MAX_BYTES} are wanted")
    }
    Ok(())
}

/// A copy without debug information.
fn strip(from: &Path, to: &Path) -> Result<()> {
    workspace::run(Command::new("strip").arg("-o").arg(to).arg(from))
}

/// The messages that cargo prints while it builds.
fn messages(command: &mut Command) -> Result<Vec<Value>> {
    command.args(["--message-format", "json-render-diagnostics"]);
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        bail!("{command:?} failed with {}", output.status)
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Test programs that cargo built, by the names of their targets.
fn test_programs(messages: &[Value]) -> Result<Vec<(String, PathBuf)>> {
    let tests = messages.iter().filter(|m| m["profile"]["test"] == true);
    let named =
        tests.filter_map(|m| Some((m["target"]["name"].as_str()?.into(), m["executable"].as_str()?.into())));
    let programs: Vec<(String, PathBuf)> = named.collect();
    if programs.is_empty() {
        bail!("cargo reported no test program")
    }
    Ok(programs)
}

/// The kernels as one library, for tests/cuda.
fn pack_kernels(toolkit: &toolkit::Toolkit, objects: &[PathBuf], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let library = target_dir().join("dist/libmoe_kernels.so");
    let packed = folder.join("libmoe_kernels.so");
    kernels::link(toolkit, objects, &library)?;
    // Only host code is stripped: kernels keep their line numbers.
    strip(&library, &packed)
}

/// Copies the files below a path that git tracks.
fn copy_tracked(path: &str, folder: &Path) -> Result<()> {
    let output = Command::new("git").args(["ls-files", path]).current_dir(root()).output()?;
    for file in String::from_utf8(output.stdout)?.lines() {
        let to = folder.join(file);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::copy(root().join(file), &to).with_context(|| format!("cannot copy {file}"))?;
    }
    Ok(())
}
