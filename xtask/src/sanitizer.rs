//! compute-sanitizer for a GPU machine, pinned.
//!
//! That of CUDA 13.0 (2025.3) reports races between a bulk copy and what an mbarrier orders with it that are none; the release
//! notes of 2025.4, 2026.1 and 2026.3 name them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, target_dir};

/// compute-sanitizer 2026.4.
const WHEEL: &str = "nvidia-cuda-sanitizer-api==13.5.25";

/// Copies the program and its libraries to `folder`/compute-sanitizer; the wheel is fetched if it is not there yet.
pub fn pack(python: &str, folder: &Path) -> Result<()> {
    let (from, to) = (fetch(python)?, folder.join("compute-sanitizer"));
    fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    // Its folders hold documentation, headers and the form for 32-bit programs.
    for entry in fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            fs::copy(&path, to.join(name)).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// The unpacked wheel in target/sanitizer. The stamp is written last, so an interrupted fetch is repeated.
fn fetch(python: &str) -> Result<PathBuf> {
    let dir = target_dir().join("sanitizer");
    let (stamp, program) = (dir.join("installed.txt"), dir.join("nvidia/cu13/compute-sanitizer"));
    if fs::read_to_string(&stamp).ok().as_deref() != Some(WHEEL) {
        let mut pip = Command::new(python);
        pip.args([
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--upgrade",
            "--target",
        ]);
        workspace::run(pip.arg(&dir).arg(WHEEL)).context("pip is needed (python3 -m pip)")?;
        if !program.join("compute-sanitizer").is_file() {
            bail!("{WHEEL} holds no nvidia/cu13/compute-sanitizer/compute-sanitizer")
        }
        fs::write(&stamp, WHEEL)?;
    }
    Ok(program)
}
