//! Makes the changed models out of the source of candle-transformers in cargo's registry, so that no copy of it is
//! here.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[path = "src/changes.rs"]
mod changes;

use changes::{CHANGES, UNFUSED};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=src/changes.rs");
    println!("cargo::rerun-if-changed=Cargo.toml");
    let models = source()?.join("src/models");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for change in CHANGES {
        let path = models.join(change.file);
        fs::write(out.join(change.file), changed(&path, change.replaced)? + change.added)?;
    }
    fs::write(out.join("qwen3_moe_unfused.rs"), changed(&models.join("qwen3_moe.rs"), &[UNFUSED])?)?;
    // Qwen3-MoE takes its attention from here; nothing changes in it.
    fs::write(out.join("qwen3.rs"), read(&models.join("qwen3.rs"))?)?;
    Ok(())
}

/// A source with these texts replaced.
fn changed(path: &Path, replaced: &[[&str; 2]]) -> Result<String, Box<dyn Error>> {
    let mut text = read(path)?;
    for [from, to] in replaced {
        if text.matches(from).count() != 1 {
            return Err(format!("{}: expected `{from}` once", path.display()).into());
        }
        text = text.replace(from, to);
    }
    Ok(text)
}

/// A source without the attributes and comments that must be first in a file, because the file is included in a module.
fn read(path: &Path) -> Result<String, Box<dyn Error>> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let is_inner = |line: &&str| line.starts_with("//!") || line.starts_with("#![");
    Ok(text.lines().filter(|line| !is_inner(line)).collect::<Vec<_>>().join("\n") + "\n")
}

/// The folder of candle-transformers' source.
fn source() -> Result<PathBuf, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").ok_or("cargo sets CARGO for build scripts")?;
    // Of this platform alone: what others need may not be on this machine.
    let target = env::var("TARGET")?;
    let args = ["metadata", "--format-version=1", "--filter-platform", &target];
    let output = Command::new(cargo).args(args).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists packages")?;
    let found = packages.iter().find(|package| package["name"] == "candle-transformers");
    let manifest = found.and_then(|package| package["manifest_path"].as_str());
    let manifest = PathBuf::from(manifest.ok_or("candle-transformers is a dependency")?);
    Ok(manifest.parent().ok_or("a manifest is in a folder")?.to_path_buf())
}
