//! Checks that what pages name exists: relative links with their anchors, pages that sources name, and that each raw
//! file and picture is shown by a page.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use super::prose::prose;

/// The folders whose files are there for pages.
const SHOWN: [&str; 2] = ["docs/raw/", "docs/images/"];

/// The tests of this file, which name pages that do not exist.
const TESTS: &str = "xtask/src/tidy/links/tests.rs";

/// Checks the files of the workspace.
pub fn check(root: &Path, files: &[String], faults: &mut Vec<String>) {
    // git still lists a file that was deleted but not committed.
    let files: Vec<&str> = files.iter().map(String::as_str).filter(|file| root.join(file).exists()).collect();
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    let is_page = |file: &str| file.ends_with(".md");
    let pages: BTreeMap<&str, String> =
        files.iter().filter(|file| is_page(file)).map(|file| (*file, read(file))).collect();
    faults.extend(link_faults(&files, &pages));
    let is_source = |file: &str| {
        let extension = Path::new(file).extension().and_then(|e| e.to_str()).unwrap_or_default();
        matches!(extension, "rs" | "cu" | "cuh" | "py" | "sh" | "toml")
    };
    for file in files.iter().filter(|file| is_source(file) && **file != TESTS) {
        faults.extend(source_faults(file, &read(file), &files));
    }
}

/// What is wrong with the links of pages, and the files that no page shows.
fn link_faults(files: &[&str], pages: &BTreeMap<&str, String>) -> Vec<String> {
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|(page, text)| (*page, anchors(text))).collect();
    let mut faults = Vec::new();
    let mut shown = BTreeSet::new();
    for (page, text) in pages {
        for Link { line, target } in links(text) {
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let found = if path.is_empty() { page.to_string() } else { resolve(page, path) };
            if !exists(files, &found) {
                faults.push(format!("{page}:{line}: links to {target}, but there is no {found}"));
            } else if !anchor.is_empty() && anchors.get(found.as_str()).is_some_and(|a| !a.contains(anchor)) {
                faults
                    .push(format!("{page}:{line}: links to {target}, but {found} has no heading #{anchor}"));
            }
            shown.insert(found);
        }
    }
    let unread = files.iter().filter(|file| SHOWN.iter().any(|folder| file.starts_with(folder)));
    let unread = unread.filter(|file| !shown.contains(**file));
    faults.extend(unread.map(|file| format!("{file}: no page links to it; delete it, or link to it")));
    faults
}

/// Whether this is a file, or a folder with files.
fn exists(files: &[&str], path: &str) -> bool {
    let folder = format!("{}/", path.trim_end_matches('/'));
    files.iter().any(|file| *file == path || file.starts_with(&folder))
}

/// A relative link and where it is, counted from 1.
#[derive(Debug, PartialEq)]
struct Link {
    line: usize,
    target: String,
}

/// The relative links of a page.
fn links(page: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (at, line) in prose(page).lines().enumerate() {
        let ends = line.match_indices("](").map(|(start, mark)| &line[start + mark.len()..]);
        let targets = ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        let relative = targets.filter(|target| !target.contains(':'));
        found.extend(relative.map(|target| Link { line: at + 1, target: target.to_string() }));
    }
    found
}

/// The path from the root of the workspace to what a page calls by `path`.
fn resolve(page: &str, path: &str) -> String {
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let mut resolved = PathBuf::new();
    for part in folder.join(path).components() {
        match part {
            Component::ParentDir if resolved.parent().is_some() => {
                resolved.pop();
            }
            Component::CurDir => {}
            part => resolved.push(part),
        }
    }
    resolved.display().to_string()
}

/// The anchors that a forge makes of the headings of a page.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut fenced = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor = anchor(heading.trim());
        let again = (1..).map(|n| format!("{anchor}-{n}"));
        let name = std::iter::once(anchor.clone()).chain(again).find(|name| !found.contains(name));
        found.extend(name);
    }
    found
}

/// The anchor of a heading: letters in lower case, blanks as hyphens, no other marks.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The pages below `docs/` that a source names and that do not exist.
fn source_faults(file: &str, text: &str, files: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for (start, _) in line.match_indices("docs/") {
            let is_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '-' | '_');
            let before = line[..start].trim_end_matches("../");
            // A longer path, or the address of another project.
            if before.ends_with(|c: char| is_path(c) || c == ':') {
                continue;
            }
            let named: String = line[start..].chars().take_while(|c| is_path(*c)).collect();
            let named = named.trim_end_matches('.');
            if named.ends_with(".md") && !exists(files, named) {
                faults.push(format!("{file}:{}: names {named}, which does not exist", at + 1));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests;
