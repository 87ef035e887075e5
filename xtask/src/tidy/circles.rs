//! Checks that there are no circles of modules: the files of a crate use each other in one direction only, so each file
//! can be read and changed after the files that it uses. `Tree` (modules.rs) reads the modules of a crate, `arrows`
//! finds which file uses which names of which other file, and this file reports files that reach each other.
//!
//! The check does not see methods, because only a compiler knows their type, and names in files that a build writes.

mod arrows;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::modules::Tree;
use crate::workspace::Package;
use arrows::arrows;

/// Checks every library and program of the workspace.
///
/// # Errors
/// A source that cannot be read or parsed.
pub fn check(root: &Path, packages: &[Package], faults: &mut Vec<String>) -> Result<()> {
    for package in packages {
        let dir = package.dir.strip_prefix(root)?;
        let mut circles = Vec::new();
        for start in ["src/lib.rs", "src/main.rs"] {
            let start = dir.join(start).display().to_string();
            if root.join(&start).exists() {
                circles.extend(self::circles(&start, &|file| fs::read_to_string(root.join(file)).ok())?);
            }
        }
        faults.extend(fault(&package.name, &circles));
    }
    Ok(())
}

/// Files that reach each other, with the arrows between them.
struct Circle {
    files: BTreeSet<String>,
    /// (user, used): the names.
    arrows: BTreeMap<(String, String), BTreeSet<String>>,
}

/// The circles of the crate that begins with this file.
fn circles(start: &str, read: &dyn Fn(&str) -> Option<String>) -> Result<Vec<Circle>> {
    let tree = Tree::read(start, read)?;
    let arrows = arrows(&tree);
    let reached: Vec<BTreeSet<usize>> = (0..tree.files.len()).map(|file| reached(file, &arrows)).collect();
    let mut circles = Vec::new();
    for first in 0..tree.files.len() {
        let members: BTreeSet<usize> =
            reached[first].iter().copied().filter(|other| reached[*other].contains(&first)).collect();
        if members.first() != Some(&first) {
            continue;
        }
        let inside =
            arrows.iter().filter(|((user, used), _)| members.contains(user) && members.contains(used));
        let name = |file: &usize| tree.files[*file].clone();
        circles.push(Circle {
            files: members.iter().map(name).collect(),
            arrows: inside.map(|((user, used), names)| ((name(user), name(used)), names.clone())).collect(),
        });
    }
    Ok(circles)
}

/// The files that a file uses, directly or through other files.
fn reached(file: usize, arrows: &BTreeMap<(usize, usize), BTreeSet<String>>) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut next = vec![file];
    while let Some(user) = next.pop() {
        let used = arrows.range((user, 0)..(user + 1, 0)).map(|((_, used), _)| *used);
        next.extend(used.filter(|used| reached.insert(*used)));
    }
    reached
}

/// What is wrong with the circles of a crate.
fn fault(name: &str, circles: &[Circle]) -> Option<String> {
    if circles.is_empty() {
        return None;
    }
    let files: usize = circles.iter().map(|circle| circle.files.len()).sum();
    let mut text =
        format!("{name}: {files} files use each other in circles; move what two files need to a third");
    for (at, circle) in circles.iter().enumerate() {
        let _ = write!(text, "\n  circle {} of {} files", at + 1, circle.files.len());
        for ((user, used), names) in &circle.arrows {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let _ = write!(text, "\n    {user} -> {used}: {}", names.join(", "));
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests;
