//! Tells the program which commit it is built from: `MOE_COMMIT` if that is set, else what cargo noted in a package,
//! else what git says. Without any of them the program does not say.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=MOE_COMMIT");
    if let Some(commit) = std::env::var("MOE_COMMIT").ok().or_else(packaged).or_else(git) {
        println!("cargo::rustc-env=MOE_COMMIT={commit}");
    }
}

/// The commit in `.cargo_vcs_info.json`, which `cargo package` writes.
fn packaged() -> Option<String> {
    let text = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = text.split_once("\"sha1\":")?;
    let hash = rest.split('"').nth(1)?;
    Some(hash.chars().take(7).collect())
}

fn git() -> Option<String> {
    let log = git_says(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git_says(&["rev-parse", "--short", "HEAD"])
}

fn git_says(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}
