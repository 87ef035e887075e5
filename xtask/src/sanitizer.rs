//! A pinned compute-sanitizer for a GPU machine.
//!
//! The release of CUDA 13.0 (2025.3) reports false races between a bulk copy and memory accesses that an mbarrier
//! orders with it; the release notes of 2025.4, 2026.1 and 2026.3 name them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::wheel;

/// compute-sanitizer 2026.4.
const WHEEL: &str = "nvidia-cuda-sanitizer-api==13.5.25";

/// Copies the program and its libraries to `folder`/compute-sanitizer; the wheel is fetched if it is not there yet.
pub fn pack(python: &str, folder: &Path) -> Result<()> {
    let from = wheel::fetch(python, "sanitizer", WHEEL, "nvidia/cu13/compute-sanitizer/compute-sanitizer")?;
    let from = from.parent().context("the program has no folder")?;
    let to = folder.join("compute-sanitizer");
    fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    // Its folders contain documentation, headers and the version for 32-bit programs, which are left out.
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            fs::copy(&path, to.join(name)).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}
