//! `cargo xtask toolkit`: provides a CUDA compiler and its link libraries on a machine without CUDA.
//!
//! An installed CUDA 13 is used if there is one (`CUDA_HOME`, else the nvcc on PATH). Otherwise the vendor's wheels,
//! whose versions are pinned here, are unpacked into target/toolkit. Two missing parts are added: library names without
//! a version, and a libcuda to link against (the real one comes with the driver). `cargo xtask toolkit -- COMMAND` runs
//! a command with it, for example a build with `--features cuda`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, target_dir};

/// The wheels, matched to a CUDA 13.0 driver.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cublas==13.1.0.3",
    "nvidia-curand==10.4.0.35",
    "nvidia-nccl-cu13==2.28.9",
];

/// The major version that the kernels are written for.
const CUDA_MAJOR: &str = "13";

#[derive(clap::Args)]
pub struct Args {
    /// Python interpreter that makes the virtual environment.
    #[arg(long, default_value = "python3")]
    python: String,
    /// A command to run with the compiler and the libraries in its environment.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Where a CUDA compiler and its libraries are.
pub struct Toolkit {
    /// The value for `CUDA_HOME`: the folder that contains bin/nvcc and include/.
    pub home: PathBuf,
    /// Folders that a linker has to search.
    pub libraries: Vec<PathBuf>,
}

impl Toolkit {
    pub fn nvcc(&self) -> PathBuf {
        self.home.join("bin/nvcc")
    }

    /// The variables by which the builds of this workspace and of candle find this toolkit. Paths, capability and
    /// threads that are already set are kept.
    pub fn environment(&self) -> Result<Vec<(&'static str, OsString)>> {
        let before = |dirs: &[PathBuf], name: &str| {
            let old = std::env::var_os(name).unwrap_or_default();
            let old = std::env::split_paths(&old).filter(|dir| !dir.as_os_str().is_empty());
            std::env::join_paths(dirs.iter().cloned().chain(old))
        };
        // candle's own kernels are compiled to PTX, which newer cards translate, so the build needs no card.
        let capability = std::env::var_os("CUDA_COMPUTE_CAP").unwrap_or_else(|| "80".into());
        // These builds take minutes, and by default use only half of the cores.
        let threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
        let threads = std::env::var_os("CUDAFORGE_THREADS").unwrap_or_else(|| threads.into());
        Ok(vec![
            ("CUDA_HOME", self.home.clone().into()),
            ("PATH", before(&[self.home.join("bin")], "PATH")?),
            ("LIBRARY_PATH", before(&self.libraries, "LIBRARY_PATH")?),
            ("CUDA_COMPUTE_CAP", capability),
            ("CUDAFORGE_THREADS", threads),
            ("MOE_KERNELS_OBJECTS", objects_dir().into()),
        ])
    }
}

/// Where compiled kernels are kept.
pub fn objects_dir() -> PathBuf {
    target_dir().join("kernels")
}

pub fn run(args: &Args) -> Result<()> {
    let toolkit = find_or_install(&args.python)?;
    if let Some((program, arguments)) = args.command.split_first() {
        let mut command = Command::new(program);
        return workspace::run(command.args(arguments).envs(toolkit.environment()?));
    }
    println!("CUDA_HOME={}", toolkit.home.display());
    for dir in &toolkit.libraries {
        println!("link with -L{}", dir.display());
    }
    Ok(())
}

/// The installed CUDA, or the pinned one in target/toolkit, fetched if it is not there yet.
pub fn find_or_install(python: &str) -> Result<Toolkit> {
    match installed()? {
        Some(toolkit) => Ok(toolkit),
        None => pinned(python),
    }
}

/// An installed CUDA of the right version. A `CUDA_HOME` that points at anything else is an error.
fn installed() -> Result<Option<Toolkit>> {
    if let Some(home) = std::env::var_os("CUDA_HOME").filter(|h| !h.is_empty()) {
        let home = PathBuf::from(home);
        if home.starts_with(pinned_dir()) {
            // target/toolkit, set by the output of `cargo xtask toolkit`: its libraries are in another folder.
            return Ok(None);
        }
        return match nvcc_version(&home.join("bin/nvcc")) {
            Some(v) if is_suitable(&v) => Ok(Some(system(home))),
            Some(v) => bail!("CUDA_HOME={} holds CUDA {v}; expected {CUDA_MAJOR}.x", home.display()),
            None => bail!("CUDA_HOME={} has no bin/nvcc that runs; unset it to use wheels", home.display()),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file());
    let Some(nvcc) = on_path else { return Ok(None) };
    // The nvcc on PATH is often a link into the toolkit.
    let nvcc = nvcc.canonicalize().unwrap_or(nvcc);
    let home = nvcc.parent().and_then(Path::parent);
    let suitable = nvcc_version(&nvcc).is_some_and(|v| is_suitable(&v));
    Ok(home.filter(|_| suitable).map(|home| system(home.to_path_buf())))
}

fn system(home: PathBuf) -> Toolkit {
    let libraries = ["lib64", "lib", "lib64/stubs", "lib/stubs"].map(|dir| home.join(dir));
    Toolkit { home, libraries: libraries.into_iter().filter(|dir| dir.is_dir()).collect() }
}

fn is_suitable(version: &str) -> bool {
    version.split('.').next() == Some(CUDA_MAJOR)
}

/// The release that an nvcc reports; `None` if it does not run.
fn nvcc_version(nvcc: &Path) -> Option<String> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    parse_release(&String::from_utf8_lossy(&output.stdout))
}

/// "13.0" of "... release 13.0, V13.0.88".
fn parse_release(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("release ")?;
    let version: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    (!version.is_empty()).then_some(version)
}

fn pinned_dir() -> PathBuf {
    target_dir().join("toolkit")
}

/// target/toolkit, complete. A stamp file is written last, so that an interrupted installation is resumed.
fn pinned(python: &str) -> Result<Toolkit> {
    let dir = pinned_dir();
    let venv = dir.join("venv");
    let lib = dir.join("lib");
    let stamp = dir.join("installed.txt");
    let wanted = WHEELS.join("\n");
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
        eprintln!("no CUDA {CUDA_MAJOR} found: fetching the pinned wheels into {}", dir.display());
        let make = workspace::run(Command::new(python).args(["-m", "venv"]).arg(&venv));
        make.context("a virtual environment is needed (python3 with its venv module)")?;
        workspace::run(
            Command::new(venv.join("bin/python"))
                .args(["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"])
                .args(WHEELS),
        )?;
        let nvidia = nvidia_folder(&venv)?;
        recreate(&lib)?;
        for wheel_libs in [nvidia.join("cu13/lib"), nvidia.join("nccl/lib")] {
            link_unversioned(&wheel_libs, &lib)?;
        }
        libcuda_stub(&nvidia.join("cu13/include/cuda.h"), &lib)?;
        fs::write(&stamp, &wanted)?;
    }
    Ok(Toolkit { home: nvidia_folder(&venv)?.join("cu13"), libraries: vec![lib] })
}

fn recreate(dir: &Path) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}

/// site-packages/nvidia of the environment, whatever Python version made it.
fn nvidia_folder(venv: &Path) -> Result<PathBuf> {
    let lib = venv.join("lib");
    let pythons = fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))?;
    let candidates = pythons.filter_map(|e| Some(e.ok()?.path().join("site-packages/nvidia")));
    let found = candidates.into_iter().find(|dir| dir.join("cu13/bin/nvcc").is_file());
    found
        .with_context(|| format!("{} holds no cu13/bin/nvcc; remove the folder and run again", lib.display()))
}

/// Links every library of `from` into `to`, also under its name without a version.
fn link_unversioned(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let mut names = BTreeSet::from([name.to_string()]);
        names.extend(unversioned(name));
        for name in names.iter().filter(|n| n.ends_with(".a") || n.contains(".so")) {
            let link = to.join(name);
            std::os::unix::fs::symlink(&path, &link)
                .with_context(|| format!("cannot link {} to {}", link.display(), path.display()))?;
        }
    }
    Ok(())
}

/// "libcublas.so" of "libcublas.so.13".
fn unversioned(name: &str) -> Option<String> {
    name.split_once(".so.").map(|(stem, _)| format!("{stem}.so"))
}

/// Makes a libcuda.so.1 that defines every function of the driver interface. It is only used for linking, so that a
/// program depends on libcuda.so.1 and loads the driver's library at its start.
fn libcuda_stub(header: &Path, lib: &Path) -> Result<()> {
    let text = fs::read_to_string(header).with_context(|| format!("cannot read {}", header.display()))?;
    let names = driver_functions(&text);
    if names.is_empty() {
        bail!("{} declares no driver functions", header.display())
    }
    let source = lib.join("libcuda_stub.c");
    let body: Vec<String> = names.iter().map(|name| format!("int {name}(void) {{ return 34; }}")).collect();
    let why = "/* Linked against, never loaded; 34 is CUDA_ERROR_STUB_LIBRARY. */\n";
    fs::write(&source, format!("{why}{}\n", body.join("\n")))?;
    workspace::run(
        Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(lib.join("libcuda.so.1"))
            .arg(&source),
    )?;
    let link = lib.join("libcuda.so");
    std::os::unix::fs::symlink(lib.join("libcuda.so.1"), &link)
        .with_context(|| format!("cannot make {}", link.display()))
}

/// Every name by which the header declares or renames a driver function, for example cuInit. This includes the symbols
/// that macros such as cuMemAlloc_v2 stand for, and the _v1 forms that older callers use.
fn driver_functions(header: &str) -> BTreeSet<String> {
    let words = header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_function = |w: &&str| {
        let rest = w.strip_prefix("cu").and_then(|r| r.chars().next());
        rest.is_some_and(|c| c.is_ascii_uppercase())
    };
    words.filter(is_function).map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_nvcc() {
        let text = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0";
        assert_eq!(parse_release(text).as_deref(), Some("13.0"));
        assert_eq!(parse_release("bash: nvcc: not found"), None);
        assert!(is_suitable("13.4") && !is_suitable("12.9") && !is_suitable("130.1"));
    }

    #[test]
    fn libraries_lose_their_version() {
        assert_eq!(unversioned("libcublas.so.13").as_deref(), Some("libcublas.so"));
        assert_eq!(unversioned("libnccl.so"), None);
        assert_eq!(unversioned("libcudart_static.a"), None);
    }

    #[test]
    fn the_stub_defines_functions_and_nothing_else() {
        let header = "#define cuMemAlloc cuMemAlloc_v2\nCUresult CUDAAPI cuInit(unsigned int Flags);\n\
                      typedef struct CUctx_st *CUcontext; /* cudart */ cuuint32_t";
        let names: Vec<String> = driver_functions(header).into_iter().collect();
        assert_eq!(names, ["cuInit", "cuMemAlloc", "cuMemAlloc_v2"]);
    }

    #[test]
    fn links_carry_both_names() {
        let dir = std::env::temp_dir().join(format!("toolkit-links-{}", std::process::id()));
        let from = dir.join("from");
        let to = dir.join("to");
        fs::create_dir_all(&from).unwrap();
        recreate(&to).unwrap();
        for file in ["libx.so.13", "liby.a", "cmake"] {
            fs::write(from.join(file), "").unwrap();
        }
        link_unversioned(&from, &to).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&to).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["libx.so", "libx.so.13", "liby.a"]);
        fs::remove_dir_all(dir).unwrap();
    }
}
