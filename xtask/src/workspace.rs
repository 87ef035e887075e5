//! Reads the workspace as cargo sees it, and runs cargo from a task.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A package of this workspace.
pub struct Package {
    pub name: String,
    pub dir: PathBuf,
    /// Normal and build dependencies by package name, external ones too.
    pub deps: Vec<String>,
    pub has_lib: bool,
    /// Names of its programs.
    pub programs: Vec<String>,
    /// Whether it may be published, which means that it is a library for others.
    pub publish: bool,
    manifest: Value,
}

impl Package {
    /// A string field of the manifest as cargo resolved it.
    pub fn field(&self, key: &str) -> Option<&str> {
        self.manifest[key].as_str()
    }

    /// Whether the manifest says how docs.rs builds the documentation.
    pub fn has_docs_rs(&self) -> bool {
        self.manifest["metadata"]["docs"]["rs"].is_object()
    }
}

/// The program that runs every model family, and its package.
pub const PROGRAM: &str = "moe";
pub const PROGRAM_PACKAGE: &str = "model-moe";

/// The workspace's root folder.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Where cargo builds: `CARGO_TARGET_DIR` or the workspace's target folder.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// A cargo command that runs in the workspace's root.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// The commit that is checked out, with a `+` if files differ from it.
pub fn commit() -> Result<String> {
    let git = |args: &[&str]| Command::new("git").args(args).current_dir(root()).output();
    let commit = git(&["rev-parse", "--short", "HEAD"]).context("cannot ask git for the commit")?;
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.stdout.is_empty();
    let commit = String::from_utf8_lossy(&commit.stdout).trim().to_string();
    Ok(if changed { commit + "+" } else { commit })
}

/// Runs a command; a failure names it.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed with {status}")
    }
    Ok(())
}

/// The programs that run models, each with its package.
pub fn model_programs() -> Result<Vec<(String, String)>> {
    let models = root().join("models");
    let packages = packages()?.into_iter().filter(|package| package.dir.starts_with(&models));
    let named = |package: Package| package.programs.into_iter().map(move |name| (name, package.name.clone()));
    Ok(packages.flat_map(named).collect())
}

/// All packages of the workspace.
pub fn packages() -> Result<Vec<Package>> {
    let output = cargo().args(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr))
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    packages.iter().map(package).collect()
}

/// The names of all packages that one of ours is built from, with all of its features.
pub fn dependencies(package: &str) -> Result<BTreeSet<String>> {
    let tree = tree(package, &["--all-features"])?;
    Ok(tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_string).collect())
}

/// How many crates a program of ours is built from with its default features, itself included.
pub fn crates(package: &str) -> Result<usize> {
    let tree = tree(package, &[])?;
    let named = tree.lines().map(|line| line.trim_end_matches(" (*)")).filter(|line| !line.is_empty());
    Ok(named.collect::<BTreeSet<_>>().len())
}

/// The packages that a package is built from, one a line.
fn tree(package: &str, features: &[&str]) -> Result<String> {
    let arguments = ["tree", "--package", package, "--edges", "normal,build"];
    let output =
        cargo().args(arguments).args(["--prefix", "none", "--format", "{p}"]).args(features).output()?;
    if !output.status.success() {
        bail!("cargo tree failed: {}", String::from_utf8_lossy(&output.stderr))
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn package(p: &Value) -> Result<Package> {
    let manifest = p["manifest_path"].as_str().context("a package has no manifest path")?;
    let array = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let deps = array(&p["dependencies"])
        .iter()
        .filter(|d| d["kind"].as_str() != Some("dev"))
        .filter_map(|d| d["name"].as_str().map(str::to_string))
        .collect();
    let targets = array(&p["targets"]);
    let is = |target: &Value, kind: &str| array(&target["kind"]).iter().any(|k| k.as_str() == Some(kind));
    let has_lib = targets.iter().any(|target| is(target, "lib"));
    let programs = targets.iter().filter(|target| is(target, "bin"));
    let programs = programs.filter_map(|target| target["name"].as_str().map(str::to_string)).collect();
    Ok(Package {
        name: p["name"].as_str().unwrap_or_default().to_string(),
        dir: Path::new(manifest).parent().context("a manifest has no folder")?.to_path_buf(),
        deps,
        has_lib,
        programs,
        publish: p["publish"].is_null(),
        manifest: p.clone(),
    })
}

/// The examples of a README: the contents of its fenced `rust` blocks that are compiled.
pub fn rust_blocks(markdown: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut current: Option<Vec<&str>> = None;
    let mut skipping = false;
    for line in markdown.lines() {
        let fence = line.trim_start().strip_prefix("```");
        match (fence, current.as_mut()) {
            (Some(_), Some(block)) => {
                blocks.push(block.join("\n"));
                current = None;
            }
            (Some(_), None) if skipping => skipping = false,
            (Some(info), None) => match info.trim() {
                "" | "rust" => current = Some(Vec::new()),
                _ => skipping = true,
            },
            (None, Some(block)) => block.push(line),
            (None, None) => {}
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::rust_blocks;

    #[test]
    fn only_compiled_rust_blocks_are_examples() {
        let text = "a\n```sh\nls\n```\n```rust\nlet x = 1;\n```\nb\n```text\n```\n```\ny\n```\n";
        assert_eq!(rust_blocks(text), ["let x = 1;", "y"]);
    }
}
