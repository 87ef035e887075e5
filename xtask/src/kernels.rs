//! `cargo xtask kernels`: builds every CUDA kernel and prints what each one costs.
//!
//! Each .cu of crates/moe-kernels/cuda becomes one object for all supported architectures; together they
//! are target/kernels/libmoe_kernels.so, which carries its own copy of the CUDA runtime. ptxas reports
//! registers, shared memory and spills of each kernel: a spill fails the build unless it is listed
//! with a reason.

mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::toolkit::{self, Toolkit};
use crate::workspace::{self, root, target_dir};
use report::Usage;

/// Architectures with machine code of their own. 90a is Hopper with all its instructions.
const ARCHITECTURES: &[&str] = &["80", "90a"];

/// Kernels that may spill: a part of the demangled name, and why it is worth it.
const ALLOWED_SPILLS: &[(&str, &str)] = &[];

#[derive(clap::Args)]
pub struct Args {
    /// Print only kernels whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Python interpreter that fetches the toolkit where no CUDA is installed.
    #[arg(long, default_value = "python3")]
    python: String,
}

pub fn run(args: &Args) -> Result<()> {
    let toolkit = toolkit::find_or_install(&args.python)?;
    let sources = root().join("crates/moe-kernels/cuda");
    let out = target_dir().join("kernels");
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;

    let files = files_with(&sources, "cu")?;
    if files.is_empty() {
        bail!("{} holds no .cu file", sources.display())
    }
    let headers = newest(&files_with(&sources, "cuh")?)?;
    let (mut objects, mut usage) = (Vec::new(), Vec::new());
    for file in &files {
        let (object, log) = compile(&toolkit, file, headers, &out)?;
        objects.push(object);
        usage.extend(report::parse(&log));
    }
    report::demangle(&mut usage);
    usage.sort_by(|a, b| (&a.kernel, &a.arch).cmp(&(&b.kernel, &b.arch)));
    let shown = usage.iter().filter(|u| args.only.as_ref().is_none_or(|part| u.kernel.contains(part)));
    print!("{}", report::table(shown));

    let library = out.join("libmoe_kernels.so");
    link(&toolkit, &objects, &library)?;
    check_spills(&usage)?;
    println!("{}", library.display());
    Ok(())
}

fn files_with(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let paths: Vec<PathBuf> = entries.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    let mut paths: Vec<_> =
        paths.into_iter().filter(|p| p.extension().is_some_and(|e| e == extension)).collect();
    paths.sort();
    Ok(paths)
}

fn newest(files: &[PathBuf]) -> Result<SystemTime> {
    let mut time = SystemTime::UNIX_EPOCH;
    for file in files {
        time = time.max(fs::metadata(file)?.modified()?);
    }
    Ok(time)
}

fn flags() -> Vec<String> {
    let mut flags: Vec<String> =
        ["-std=c++17", "-O3", "-lineinfo", "--threads", "2", "-Werror", "all-warnings"]
            .iter()
            .map(|f| f.to_string())
            .collect();
    flags.extend(["-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror", "-Xptxas", "-v"].map(String::from));
    for arch in ARCHITECTURES {
        flags.push("-gencode".to_string());
        flags.push(format!("arch=compute_{arch},code=sm_{arch}"));
    }
    flags
}

/// The object of a source file and the compiler's log. The log is written last and begins with the
/// command, so an object with a log of the same command that is newer than its sources is up to date.
fn compile(toolkit: &Toolkit, source: &Path, headers: SystemTime, out: &Path) -> Result<(PathBuf, String)> {
    let name = source.file_stem().and_then(|s| s.to_str()).context("a kernel file has no name")?;
    let (object, log) = (out.join(format!("{name}.o")), out.join(format!("{name}.log")));
    let mut command = Command::new(toolkit.nvcc());
    command.args(flags()).arg("-c").arg(source).arg("-o").arg(&object);
    let head = format!("{command:?}\n");
    let sources = headers.max(fs::metadata(source)?.modified()?);
    if let (Ok(text), Ok(meta)) = (fs::read_to_string(&log), fs::metadata(&log))
        && object.exists()
        && text.starts_with(&head)
        && meta.modified()? > sources
    {
        return Ok((object, text));
    }
    eprintln!("compiling {name}.cu");
    let output = command.output().with_context(|| format!("cannot start {}", toolkit.nvcc().display()))?;
    let messages =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        bail!("{command:?} failed:\n{messages}")
    }
    let text = head + &messages;
    fs::write(&log, &text)?;
    Ok((object, text))
}

fn link(toolkit: &Toolkit, objects: &[PathBuf], library: &Path) -> Result<()> {
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
    use super::*;

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
