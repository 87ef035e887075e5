//! `cargo xtask standalone`: each library by itself.
//!
//! A crate that works in the workspace may still lean on a sibling's dependency or feature. So
//! the examples of its README are compiled and run in a project of their own, outside the
//! workspace, whose only dependencies are candle and that crate by path. Unoptimised, as
//! `cargo package` builds: features differ from crate to crate, so candle is compiled several times,
//! and this is about what is there, not about speed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, Package, cargo, root};

#[derive(clap::Args)]
pub struct Args {
    /// Only these crates (default: every library).
    crates: Vec<String>,
}

fn run_examples(package: &Package, dir: &Path) -> Result<usize> {
    let path = package.dir.join("README.md");
    let readme = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let examples = workspace::rust_blocks(&readme);
    if examples.is_empty() {
        bail!("{}: README.md has no example", package.name)
    }
    fs::create_dir_all(dir.join("src/bin"))?;
    fs::write(dir.join("Cargo.toml"), manifest(package))?;
    // The workspace's lock file, so that the versions are those that are tested.
    fs::copy(root().join("Cargo.lock"), dir.join("Cargo.lock"))?;
    for (i, example) in examples.iter().enumerate() {
        fs::write(dir.join(format!("src/bin/example{i}.rs")), program(example))?;
    }
    for i in 0..examples.len() {
        workspace::run(
            cargo()
                .current_dir(dir)
                .args(["run", "-q", "--bin", &format!("example{i}")])
                .env("CARGO_TARGET_DIR", workspace::target_dir()),
        )
        .with_context(|| format!("{}: README example {i} fails alone", package.name))?;
    }
    Ok(examples.len())
}

fn run_all(packages: &[&Package]) -> Result<()> {
    let base = std::env::temp_dir().join(format!("moe-standalone-{}", std::process::id()));
    for package in packages {
        let dir = base.join(&package.name);
        let examples = run_examples(package, &dir)?;
        println!("standalone: {} runs its {examples} README example(s) alone", package.name);
    }
    Ok(fs::remove_dir_all(base)?)
}

pub fn run(args: &Args) -> Result<()> {
    let packages = workspace::packages()?;
    let libraries: Vec<&Package> = packages
        .iter()
        .filter(|p| p.has_lib && p.publish)
        .filter(|p| args.crates.is_empty() || args.crates.contains(&p.name))
        .collect();
    if let Some(unknown) = args.crates.iter().find(|c| !libraries.iter().any(|p| p.name == **c)) {
        bail!("{unknown} is not a library of the workspace")
    }
    run_all(&libraries)
}

fn manifest(package: &Package) -> String {
    let candle = if package.deps.iter().any(|d| d.starts_with("candle")) {
        "candle-core = \"=0.11.1\"\ncandle-nn = \"=0.11.1\"\n"
    } else {
        ""
    };
    format!(
        "[package]\nname = \"scratch-{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\n{name} = {{ path = {path:?} }}\n{candle}\n[workspace]\n",
        name = package.name,
        path = package.dir,
    )
}

/// A README example as a program, wrapped the way rustdoc wraps it.
fn program(example: &str) -> String {
    let body: Vec<&str> =
        example.lines().map(|l| l.strip_prefix("# ").unwrap_or(if l == "#" { "" } else { l })).collect();
    let body = body.join("\n");
    if body.contains("fn main()") {
        return body;
    }
    if body.trim_end().ends_with("(())") {
        return format!(
            "fn main() {{\n    run().unwrap();\n}}\nfn run() -> Result<(), impl std::fmt::Debug> {{\n{body}\n}}\n"
        );
    }
    format!("fn main() {{\n{body}\n}}\n")
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn examples_become_programs() {
        assert_eq!(program("fn main() {}"), "fn main() {}");
        assert!(program("# let x = 1;\nOk::<(), E>(())").contains("impl std::fmt::Debug> {\nlet x = 1;"));
        assert!(program("assert!(true);").starts_with("fn main() {\nassert!"));
    }
}
