//! With the feature `cuda`: compiles the kernels of `cuda/` with nvcc and links them and the CUDA
//! runtime, both statically.
//!
//! nvcc is looked for in `CUDA_HOME/bin`, then on PATH; the runtime in the folders of the toolkit
//! and of `LIBRARY_PATH`. On a machine without CUDA, `cargo xtask toolkit -- cargo ..` sets these,
//! and `MOE_KERNELS_OBJECTS`: the folder that keeps objects, so that two builds compile a kernel once.

#[path = "build/nvcc.rs"]
mod nvcc;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    for path in ["build.rs", "build", "cuda"] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    println!("cargo:rerun-if-env-changed=MOE_KERNELS_OBJECTS");
    println!("cargo:rustc-env=MOE_KERNEL_IMAGES={}", nvcc::images());
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let home = env::var_os("CUDA_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let compiler = home.as_ref().map_or_else(|| PathBuf::from("nvcc"), |home| home.join("bin/nvcc"));
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run me through cargo")?);
    // Of the checkout that is built, which is not always the one that this program was compiled in.
    let manifest =
        env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set: run me through cargo")?;
    let sources = Path::new(&manifest).join("cuda");
    let kept = env::var_os("MOE_KERNELS_OBJECTS").map_or_else(|| out.join("kernels"), PathBuf::from);
    let objects = nvcc::compile_all(&compiler, &sources, &kept)
        .map_err(|e| format!("{e}\nthe feature `cuda` needs CUDA 13: set CUDA_HOME or put nvcc on PATH"))?;

    let library = out.join("libmoe_kernels_cuda.a");
    let _ = std::fs::remove_file(&library); // An archive of its own name would be added to.
    let mut archive = Command::new(&compiler);
    archive.args(["-lib", "-o"]).arg(&library).args(objects.iter().map(|object| &object.path));
    match archive.status() {
        Ok(status) if status.success() => {}
        other => return Err(format!("{archive:?} failed: {other:?}")),
    }
    println!("cargo:rustc-link-search=native={}", out.display());
    for dir in library_folders(home.as_deref()) {
        println!("cargo:rustc-link-search=native={}", dir.display());
    }
    println!("cargo:rustc-link-lib=static=moe_kernels_cuda");
    println!("cargo:rustc-link-lib=static=cudart_static");
    for library in ["stdc++", "rt", "dl", "pthread"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    Ok(())
}

fn library_folders(home: Option<&Path>) -> Vec<PathBuf> {
    let of_nvcc = || {
        let path = env::var_os("PATH").unwrap_or_default();
        let nvcc = env::split_paths(&path).map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file())?;
        Some(nvcc.canonicalize().ok()?.parent()?.parent()?.to_path_buf())
    };
    let home = home.map(Path::to_path_buf).or_else(of_nvcc);
    let toolkit =
        home.iter().flat_map(|home| ["lib64", "lib", "targets/x86_64-linux/lib"].map(|l| home.join(l)));
    let path = env::var_os("LIBRARY_PATH").unwrap_or_default();
    toolkit.chain(env::split_paths(&path)).filter(|dir| dir.is_dir()).collect()
}
