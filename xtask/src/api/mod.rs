//! `cargo xtask api`: the public items of each library, one a line, in the file `api.txt` of its crate. A change of the
//! public API is then a change of this file, which a reviewer sees; `cargo xtask tidy` refuses a file that is not up to
//! date.
//!
//! The items are read from the sources, with any features: what is reachable from lib.rs through public modules and
//! re-exports. Items that macros make are not seen.

mod describe;
mod surface;
mod text;

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, bail};

use crate::workspace::{Package, packages, root};

/// The file of a crate with its public items.
const FILE: &str = "api.txt";

/// The most changes of a crate that an error lists.
const MOST_LISTED: usize = 40;

#[derive(clap::Args)]
pub struct Args {
    /// Compare the files with the sources, and change none.
    #[arg(long)]
    check: bool,
}

/// Writes or compares the files of all libraries.
///
/// # Errors
/// Sources that cannot be read, files that cannot be written; with `check` a file that differs.
pub fn run(args: &Args) -> Result<()> {
    let packages = packages()?;
    let mut faults = Vec::new();
    if args.check {
        check(&packages, &mut faults)?;
    } else {
        for library in libraries(&packages) {
            let path = library.dir.join(FILE);
            fs::write(&path, page(library)?).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}

/// Compares the files of all libraries with their sources.
///
/// # Errors
/// Sources that cannot be read.
pub fn check(packages: &[Package], faults: &mut Vec<String>) -> Result<()> {
    for library in libraries(packages) {
        let old = fs::read_to_string(library.dir.join(FILE)).unwrap_or_default();
        faults.extend(fault(&library.name, &old, &page(library)?));
    }
    Ok(())
}

fn libraries(packages: &[Package]) -> impl Iterator<Item = &Package> {
    packages.iter().filter(|package| package.has_lib && package.publish)
}

/// What the file of a library has to hold.
fn page(library: &Package) -> Result<String> {
    let root = root();
    let start = library.dir.strip_prefix(&root)?.join("src/lib.rs").display().to_string();
    let lines = surface::public_items(&start, &|file| fs::read_to_string(root.join(file)).ok())?;
    let name = &library.name;
    Ok(format!(
        "Public items of {name}, written by `cargo xtask api` (CONTRIBUTING.md).\n\n{}\n",
        lines.join("\n")
    ))
}

/// How a library differs from its file.
fn fault(name: &str, old: &str, new: &str) -> Option<String> {
    if old == new {
        return None;
    }
    let lines = |text: &str| text.lines().skip(2).map(str::to_string).collect::<BTreeSet<_>>();
    let was = lines(old);
    let is = lines(new);
    let removed = was.difference(&is).map(|line| format!("\n  - {line}"));
    let added = is.difference(&was).map(|line| format!("\n  + {line}"));
    let changes: Vec<String> = removed.chain(added).collect();
    let more = match changes.len().saturating_sub(MOST_LISTED) {
        0 => String::new(),
        more => format!("\n  and {more} more"),
    };
    let listed: String = changes.into_iter().take(MOST_LISTED).collect();
    Some(format!(
        "{name}: {FILE} does not hold its public items; if the change is meant, `cargo xtask api` accepts it{listed}{more}"
    ))
}

#[cfg(test)]
mod tests;
