//! `cargo xtask kernels`: builds every CUDA kernel and prints what each one costs.
//!
//! Each .cu below crates/moe-kernels/cuda becomes one object for all supported architectures; together they
//! are target/kernels/libmoe_kernels.so, which carries its own copy of the CUDA runtime. ptxas reports
//! registers, shared memory and spills of each kernel: a spill fails the build unless it is listed
//! with a reason.

#[path = "../../crates/moe-kernels/build/nvcc.rs"]
mod nvcc;
mod report;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::toolkit::{self, Toolkit};
use crate::workspace::{self, root};
use report::Usage;

/// Kernels that may spill: a part of the demangled name, and why the spill is accepted.
const ALLOWED_SPILLS: &[(&str, &str)] = &[
    ("attention_latent", "one word, outside of loops, of the warp that loads and lives on 24 registers"),
    ("Contiguous", "the same in attention_expanded"),
    (
        "experts_tensor<16, experts_tensor::QuantWeights<(QuantFormat)0, 128>",
        "two words, so that three blocks share an SM",
    ),
    (
        "experts_tensor<16, experts_tensor::FewWeights<",
        "up to four words, most of the warps that load, so that three blocks share an SM",
    ),
    (
        "experts_tensor<16, experts_tensor::DigitWeights<",
        "some words, most of the warps that load and none in a loop over stages, so that three blocks share an SM",
    ),
    (
        "experts_tensor<32, experts_tensor::DigitWeights<(QuantFormat)0, 32, BiasedSwiglu>",
        "up to nine words, so that two blocks share an SM",
    ),
    (
        "experts_tensor<32, experts_tensor::DigitWeights<(QuantFormat)1, 32, BiasedSwiglu>",
        "the same with int8",
    ),
    ("fp8_product<fp8::StoreSlotRows", "two words of the warp that loads, once a work tile"),
    (
        "fp8_product<fp8::StoreActivations",
        "one word of the warps that multiply, after the loop over stages, once per work tile; by row also two words of the warp that loads",
    ),
    ("dequantise<", "a word around the subroutine of a 64-bit division, once before the loop"),
    ("quant_product<", "up to ten words, in the tier \"any\", which is not made for speed"),
];

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
    let out = toolkit::objects_dir();
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
    Ok(())
}

/// Where the kernels are.
fn sources() -> PathBuf {
    root().join("crates/moe-kernels/cuda")
}

/// All sources of the kernels, headers too.
pub fn files() -> Result<Vec<PathBuf>> {
    let all = |extension| nvcc::files_with(&sources(), extension).map_err(anyhow::Error::msg);
    Ok([all("cu")?, all("cuh")?].concat())
}

/// The objects of all kernels, which a build with this toolkit has compiled.
pub fn objects() -> Result<Vec<PathBuf>> {
    let files = nvcc::files_and_objects(&sources(), &toolkit::objects_dir()).map_err(anyhow::Error::msg)?;
    Ok(files.into_iter().map(|(_, object)| object).collect())
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
