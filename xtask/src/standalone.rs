//! `cargo xtask standalone`: tests each library by itself, as its users would get it.
//!
//! A crate that works in the workspace may still depend on a dependency or feature of another crate, or on a file that
//! its package lacks. So all libraries are packed as for publishing, and the examples of each README are compiled and
//! run in a separate project outside the workspace. The dependencies of this project are the ones in the README's
//! `cargo add` lines. Our libraries among them, direct or not, are the unpacked packages. The build is unoptimised:
//! features differ from crate to crate, so candle is compiled several times, and the check is whether the examples
//! work, not how fast they are.
//!
//! `cargo xtask dist --scratch` builds one such project with the feature `cuda`, to be run on a GPU.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::packaged;
use crate::workspace::{self, Package, cargo, root};

#[derive(clap::Args)]
pub struct Args {
    /// Only these crates (default: every library).
    crates: Vec<String>,
}

/// Writes the project of a crate's README to `dir`, one program per example, and returns the number of examples.
fn write_project(package: &Package, libraries: &[&Package], dir: &Path, cuda: bool) -> Result<usize> {
    let path = packaged::path(package)?.join("README.md");
    let readme = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let examples = workspace::rust_blocks(&readme);
    if examples.is_empty() {
        bail!("{}: README.md has no example", package.name)
    }
    fs::create_dir_all(dir.join("src/bin"))?;
    fs::write(dir.join("Cargo.toml"), manifest(package, libraries, &readme, cuda)?)?;
    // The lock file of the workspace is used, so that the versions are the tested ones.
    fs::copy(root().join("Cargo.lock"), dir.join("Cargo.lock"))?;
    for (i, example) in examples.iter().enumerate() {
        fs::write(dir.join(format!("src/bin/example{i}.rs")), program(example))?;
    }
    Ok(examples.len())
}

fn run_examples(package: &Package, libraries: &[&Package], dir: &Path) -> Result<usize> {
    let examples = write_project(package, libraries, dir, false)?;
    for i in 0..examples {
        workspace::run(
            cargo()
                .current_dir(dir)
                .args(["run", "-q", "--bin", &format!("example{i}")])
                .env("CARGO_TARGET_DIR", workspace::target_dir()),
        )
        .with_context(|| format!("{}: README example {i} fails alone", package.name))?;
    }
    Ok(examples)
}

/// Builds the program of the first example in a library's README with the feature `cuda`, in a separate project.
pub fn build_on_cuda(name: &str, environment: &[(&str, OsString)]) -> Result<PathBuf> {
    let packages = workspace::packages()?;
    let libraries = libraries(&packages);
    let package = libraries.iter().find(|p| p.name == name).with_context(|| format!("no library {name}"))?;
    packaged::unpack(&libraries)?;
    // The build is optimised, because users of a GPU build this way.
    let dir = workspace::target_dir().join("scratch");
    let target = workspace::target_dir();
    write_project(package, &libraries, &dir, true)?;
    let mut build = cargo();
    build.current_dir(&dir).args(["build", "--release", "--bin", "example0"]);
    workspace::run(build.env("CARGO_TARGET_DIR", &target).envs(environment.iter().cloned()))?;
    Ok(target.join("release/example0"))
}

fn run_all(chosen: &[&Package], libraries: &[&Package]) -> Result<()> {
    packaged::unpack(libraries)?;
    let base = std::env::temp_dir().join(format!("moe-standalone-{}", std::process::id()));
    for package in chosen {
        let dir = base.join(&package.name);
        let examples = run_examples(package, libraries, &dir)?;
        println!("standalone: {} runs its {examples} README example(s) alone", package.name);
    }
    Ok(fs::remove_dir_all(base)?)
}

/// The packages that others can use.
fn libraries(packages: &[Package]) -> Vec<&Package> {
    packages.iter().filter(|p| p.has_lib && p.publish).collect()
}

pub fn run(args: &Args) -> Result<()> {
    let packages = workspace::packages()?;
    let libraries = libraries(&packages);
    if let Some(unknown) = args.crates.iter().find(|c| !libraries.iter().any(|p| p.name == **c)) {
        bail!("{unknown} is not a library of the workspace")
    }
    let chosen = |p: &&&Package| args.crates.is_empty() || args.crates.contains(&p.name);
    let chosen: Vec<&Package> = libraries.iter().filter(chosen).copied().collect();
    run_all(&chosen, &libraries)
}

/// The project's manifest: the dependencies that the README says to add, without features unless `cuda` is set.
fn manifest(package: &Package, libraries: &[&Package], readme: &str, cuda: bool) -> Result<String> {
    // As in cargo, a later line for the same crate adds features to it.
    let mut dependencies = BTreeMap::new();
    for line in readme.lines().filter_map(|line| line.strip_prefix("cargo add ")) {
        let words: Vec<&str> = line.split('#').next().unwrap_or("").split_whitespace().collect();
        let (names, features) = match words.iter().position(|word| *word == "--features") {
            Some(at) => {
                (&words[..at], words[at + 1..].iter().filter(|feature| cuda && **feature == "cuda").count())
            }
            None => (&words[..], 0),
        };
        let features = if features > 0 { "\"cuda\"" } else { "" };
        for name in names {
            let (name, source) = match name.split_once('@') {
                Some((name, version)) => (name, format!("version = \"{version}\"")),
                None if *name == package.name => (*name, format!("path = {:?}", packaged::path(package)?)),
                None => bail!("{}: README.md adds {name} without a version", package.name),
            };
            dependencies.insert(name, format!("{name} = {{ {source}, features = [{features}] }}"));
        }
    }
    if !dependencies.contains_key(package.name.as_str()) {
        bail!("{}: README.md has no line `cargo add {}`", package.name, package.name)
    }
    Ok(format!(
        "[package]\nname = \"scratch-{}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\n{}\n\n[workspace]\n\n{}",
        package.name,
        dependencies.into_values().collect::<Vec<_>>().join("\n"),
        packaged::patches(libraries, package)?
    ))
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
