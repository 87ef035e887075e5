//! `cargo xtask tidy`: checks the rules of the workspace that no compiler checks.

mod circles;
mod comments;
mod families;
mod links;
mod pages;
mod prose;
mod words;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::workspace::{self, Package};
use crate::{api, flags, names};

/// A file with more lines probably holds more than one idea.
const MAX_LINES: usize = 400;

/// The crates of the workspace on which each crate depends, exactly. `tests` may use anything.
const EDGES: &[(&str, &[&str])] = &[
    ("moe-kernels", &[]),
    ("moe-eplb", &[]),
    ("moe-chunking", &[]),
    ("moe-router", &["moe-kernels"]),
    ("moe-quant", &["moe-kernels"]),
    ("moe-experts", &["moe-kernels"]),
    ("moe-comm", &["moe-kernels"]),
    ("moe-dispatch", &["moe-comm", "moe-kernels"]),
    (
        "moe-layer",
        &[
            "moe-router",
            "moe-dispatch",
            "moe-experts",
            "moe-quant",
            "moe-chunking",
            "moe-comm",
            "moe-kernels",
        ],
    ),
    ("model-runtime", &["moe-layer", "moe-comm", "moe-quant", "moe-kernels"]),
    ("moe-engine", &["model-runtime", "moe-layer", "moe-comm", "moe-eplb"]),
    ("moe-cli", &["moe-engine", "model-runtime", "moe-layer", "moe-comm"]),
    ("model-families", &["moe-engine", "model-runtime", "moe-layer"]),
    ("model-moe", &["moe-cli", "model-families"]),
    ("model-qwen3moe", &["moe-cli", "model-families"]),
    ("model-deepseekv2-legacy", &["moe-cli", "model-families"]),
    (
        "moe-quantize",
        &["moe-quant", "moe-kernels", "moe-layer", "model-runtime", "moe-engine", "model-families"],
    ),
    ("moe-examples", &["moe-engine", "moe-layer"]),
    ("xtask", &["moe-eplb"]),
];

/// Packages that a crate must not depend on, directly or through others, with any of its features.
const FORBIDDEN: &[(&str, &[&str])] = &[
    ("moe-eplb", &["candle-core"]),
    ("moe-chunking", &["candle-core"]),
    ("xtask", &["candle-core"]),
    // This is a library: flags, downloads and terminals belong to moe-cli.
    ("moe-engine", &["clap", "hf-hub", "indicatif", "rustyline", "tracing-subscriber", "ureq"]),
];

/// The largest number of crates from which a program is built, because the first build takes as long as they do
/// (docs/benchmarks.md). A change that needs one more says here what it is for. Six read compressed batch files
/// (flate2, ruzstd), two catch signals (signal-hook), one proves that a rank knows the secret of its world (hmac), one
/// computes git's hash of small files of the hub (sha1).
const MOST_CRATES: &[(&str, usize)] = &[(workspace::PROGRAM_PACKAGE, 233)];

pub fn run() -> Result<()> {
    let packages = workspace::packages()?;
    let mut faults = Vec::new();
    let ours: BTreeSet<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    for package in &packages {
        check_dependencies(package, &ours, &mut faults);
        if package.has_lib && package.publish {
            check_library(package, &mut faults);
        }
    }
    for (name, forbidden) in FORBIDDEN {
        let pulled = workspace::dependencies(name)?;
        let found = forbidden.iter().filter(|dep| pulled.contains(**dep));
        faults.extend(
            found.map(|dep| format!("{name}: must not pull in {dep} (cargo tree -p {name} -i {dep})")),
        );
    }
    for (name, most) in MOST_CRATES {
        faults.extend(crate_fault(name, workspace::crates(name)?, *most));
    }
    let files = tracked_files(&workspace::root())?;
    check_files(&workspace::root(), &files, &mut faults);
    families::check(&workspace::root(), &files, &mut faults)?;
    pages::check(&workspace::root(), &files, &mut faults);
    comments::check(&workspace::root(), &files, &mut faults);
    circles::check(&workspace::root(), &packages, &mut faults)?;
    links::check(&workspace::root(), &files, &mut faults);
    api::check(&packages, &mut faults)?;
    if faults.is_empty() {
        println!("tidy: {} packages, no faults", packages.len());
        return Ok(());
    }
    for fault in &faults {
        eprintln!("tidy: {fault}");
    }
    bail!("{} faults", faults.len())
}

fn crate_fault(name: &str, count: usize, most: usize) -> Option<String> {
    (count > most).then(|| {
        format!("{name}: is built from {count} crates, at most {most} (cargo tree -p {name} -e normal,build); cut, or raise the limit in xtask/src/tidy.rs")
    })
}

fn check_dependencies(package: &Package, ours: &BTreeSet<&str>, faults: &mut Vec<String>) {
    let name = package.name.as_str();
    if name != "moe-tests" {
        let edges = EDGES.iter().find(|(n, _)| *n == name).map(|(_, allowed)| *allowed);
        let deps: Vec<&str> = package.deps.iter().map(String::as_str).filter(|d| ours.contains(d)).collect();
        faults.extend(edge_faults(name, &deps, edges));
    }
    for dep in package.deps.iter().filter(|dep| *dep == "cudarc" || *dep == "nccl") {
        faults.push(format!("{name}: use cudarc through candle_core::cuda_backend::cudarc, not {dep}"));
    }
}

/// The differences between a crate's dependencies and the list that is allowed for it.
fn edge_faults(name: &str, deps: &[&str], allowed: Option<&[&str]>) -> Vec<String> {
    let Some(allowed) = allowed else {
        return vec![format!("{name}: not in the list of dependency edges (xtask/src/tidy.rs)")];
    };
    let extra = deps.iter().filter(|dep| !allowed.contains(dep));
    let unused = allowed.iter().filter(|dep| !deps.contains(dep));
    extra
        .map(|dep| format!("{name}: may not depend on {dep}; allowed: {allowed:?}"))
        .chain(
            unused
                .map(|dep| format!("{name}: may depend on {dep} but does not; take the edge from the list")),
        )
        .collect()
}

fn check_library(package: &Package, faults: &mut Vec<String>) {
    let name = &package.name;
    for key in ["description", "license", "documentation", "readme", "rust_version"] {
        if package.field(key).is_none() {
            faults.push(format!("{name}: its manifest lacks {key}"));
        }
    }
    if !package.has_docs_rs() {
        faults.push(format!("{name}: its manifest lacks [package.metadata.docs.rs]"));
    }
    for file in ["LICENSE-MIT", "LICENSE-APACHE"] {
        if !package.dir.join(file).exists() {
            faults.push(format!("{name}: lacks {file}"));
        }
    }
    let readme = fs::read_to_string(package.dir.join("README.md")).unwrap_or_default();
    if workspace::rust_blocks(&readme).is_empty() {
        faults.push(format!("{name}: README.md has no compiled rust example"));
    }
    let lib = fs::read_to_string(package.dir.join("src/lib.rs")).unwrap_or_default();
    if !lib.contains("include_str!(\"../README.md\")") {
        faults.push(format!("{name}: src/lib.rs does not include README.md, so its example is not tested"));
    }
}

fn check_files(root: &Path, files: &[String], faults: &mut Vec<String>) {
    for file in files {
        let Some(extension) = Path::new(file).extension().and_then(|e| e.to_str()) else { continue };
        let source = matches!(extension, "rs" | "cu" | "cuh" | "py" | "sh");
        if !source && !matches!(extension, "md" | "toml") {
            continue;
        }
        // git still lists a file that was deleted but not committed.
        let Ok(text) = fs::read_to_string(root.join(file)) else { continue };
        faults.extend(print_fault(file, &text));
        faults.extend(names::fault(file, &text));
        faults.extend(flags::fault(file, &text));
        if source && text.lines().count() > MAX_LINES {
            faults.push(format!("{file}: {} lines, at most {MAX_LINES}", text.lines().count()));
        }
        if extension == "rs" && !text.starts_with("//!") {
            faults.push(format!("{file}: does not begin with a //! header that says what and why"));
        }
        if let Some(n) = text.lines().position(|l| l.ends_with([' ', '\t'])) {
            faults.push(format!("{file}:{}: trailing white space", n + 1));
        }
        if !text.is_empty() && !text.ends_with('\n') {
            faults.push(format!("{file}: does not end with a newline"));
        }
    }
}

/// A place where product code prints by a macro, which panics if stdout or stderr is full or closed.
fn print_fault(file: &str, text: &str) -> Option<String> {
    const MACROS: [&str; 5] = ["println!", "print!", "eprintln!", "eprint!", "dbg!"];
    let is_product = file.ends_with(".rs")
        && (file.starts_with("crates/") || file.starts_with("models/"))
        && file.split('/').nth(2) == Some("src");
    let prints = |line: &str| {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '!');
        !line.trim_start().starts_with("//") && words.into_iter().any(|word| MACROS.contains(&word))
    };
    let at = text.lines().position(prints).filter(|_| is_product)?;
    Some(format!(
        "{file}:{}: prints by a macro, which panics where stdout or stderr is gone; use moe_engine::terminal",
        at + 1
    ))
}

fn tracked_files(root: &Path) -> Result<Vec<String>> {
    let output = std::process::Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr))
    }
    Ok(String::from_utf8(output.stdout)?.lines().map(str::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::{crate_fault, edge_faults, print_fault};

    #[test]
    fn one_crate_more_is_a_fault() {
        assert_eq!(crate_fault("a", 7, 7), None);
        let fault = crate_fault("a", 8, 7).unwrap();
        assert!(fault.contains("8 crates, at most 7") && fault.contains("cargo tree -p a"), "{fault}");
    }

    #[test]
    fn product_code_prints_by_no_macro() {
        let fault = |file, text| print_fault(file, text);
        assert!(fault("crates/a/src/b.rs", "//! x\n    eprintln!(\"{x}\");\n").unwrap().contains("b.rs:2:"));
        assert!(fault("models/a/src/main.rs", "_ => println!(\"x\"),\n").is_some());
        assert_eq!(fault("crates/a/src/b.rs", "/// `println!` is not used.\nsprintln!()\n"), None);
        for tool in ["crates/a/build.rs", "crates/a/examples/x.rs", "xtask/src/main.rs", "tests/gpu/x.rs"] {
            assert_eq!(fault(tool, "println!()\n"), None);
        }
    }

    #[test]
    fn edges_are_those_of_the_list_and_no_others() {
        assert_eq!(edge_faults("a", &["b", "c"], Some(&["c", "b"])), [""; 0]);
        for (deps, allowed, part) in [
            (&["b"][..], None, "not in the list"),
            (&["b"], Some(&[][..]), "may not depend on b"),
            (&[], Some(&["b"]), "may depend on b but does not"),
        ] {
            let faults = edge_faults("a", deps, allowed);
            assert!(faults.len() == 1 && faults[0].contains(part), "{faults:?}");
        }
    }
}
