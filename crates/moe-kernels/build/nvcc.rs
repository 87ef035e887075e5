//! Compiling the CUDA kernels. Shared by this crate's build script and by `cargo xtask kernels`, so
//! that what is linked is what is reported.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// Architectures with machine code of their own. 90a is Hopper with all its instructions.
const ARCHITECTURES: &[&str] = &["80", "90a"];

/// What a failed step says.
pub type Error = String;

/// A compiled source file.
pub struct Object {
    /// The object file.
    pub path: PathBuf,
    /// What the compiler said: registers, shared memory and spills of each kernel.
    #[allow(dead_code)] // The build script has no report.
    pub log: String,
}

/// Compiles every .cu of `sources` with `nvcc` into `out`; what is up to date is kept.
pub fn compile_all(nvcc: &Path, sources: &Path, out: &Path) -> Result<Vec<Object>, Error> {
    fs::create_dir_all(out).map_err(|e| format!("cannot make {}: {e}", out.display()))?;
    let files = files_with(sources, "cu")?;
    if files.is_empty() {
        return Err(format!("{} holds no .cu file", sources.display()));
    }
    let mut headers = SystemTime::UNIX_EPOCH;
    for header in files_with(sources, "cuh")? {
        headers = headers.max(modified(&header)?);
    }
    let mut command = vec![nvcc.to_string_lossy().into_owned()];
    command.extend(flags());
    files.iter().map(|file| compile(&command, file, headers, out)).collect()
}

fn files_with(dir: &Path, extension: &str) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(|e| format!("cannot read {}: {e}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == extension));
    paths.sort();
    Ok(paths)
}

fn modified(path: &Path) -> Result<SystemTime, Error> {
    let time = fs::metadata(path).and_then(|m| m.modified());
    time.map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn flags() -> Vec<String> {
    let all = "-std=c++17 -O3 -lineinfo --threads 2 -Werror all-warnings \
               -Xcompiler -fPIC,-Wall,-Wextra,-Werror -Xptxas -v";
    let mut flags: Vec<String> = all.split_whitespace().map(str::to_string).collect();
    for arch in ARCHITECTURES {
        flags.push("-gencode".to_string());
        flags.push(format!("arch=compute_{arch},code=sm_{arch}"));
    }
    flags
}

/// The log is written last and begins with the command, so an object with a log of the same command
/// that is newer than its sources is up to date.
fn compile(compiler: &[String], source: &Path, headers: SystemTime, out: &Path) -> Result<Object, Error> {
    let name = source.file_stem().unwrap_or_default().to_string_lossy();
    let (object, log) = (out.join(format!("{name}.o")), out.join(format!("{name}.log")));
    let mut command = Command::new(&compiler[0]);
    command.args(&compiler[1..]).arg("-c").arg(source).arg("-o").arg(&object);
    let head = format!("{command:?}\n");
    let sources = headers.max(modified(source)?);
    if let (Ok(text), Ok(time)) = (fs::read_to_string(&log), modified(&log))
        && object.exists()
        && text.starts_with(&head)
        && time > sources
    {
        return Ok(Object { path: object, log: text });
    }
    eprintln!("compiling {name}.cu");
    let output = command.output().map_err(|e| format!("cannot start {}: {e}", compiler[0]))?;
    let messages =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!("{command:?} failed:\n{messages}"));
    }
    let text = head + &messages;
    fs::write(&log, &text).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
    Ok(Object { path: object, log: text })
}
