//! Pages made by hand, with links that lead somewhere and links that do not.

use std::collections::BTreeMap;

use super::{Link, anchors, link_faults, links, resolve, source_faults};

/// The faults of pages among further files.
fn faults(pages: &[(&'static str, &str)], others: &[&'static str]) -> Vec<String> {
    let files: Vec<&str> = pages.iter().map(|(name, _)| *name).chain(others.iter().copied()).collect();
    let pages: BTreeMap<&str, String> = pages.iter().map(|(name, text)| (*name, text.to_string())).collect();
    link_faults(&files, &pages)
}

#[test]
fn links_that_lead_somewhere_are_no_fault() {
    let a = "# A\n[b](docs/b.md#two-words), [folder](src), [here](#a)\n\
             [web](https://example.org/x.md), ![i](docs/images/i.svg)\n";
    let b = "## Two words\n`[code](nowhere.md)`\n```\n[code](nowhere.md)\n```\n[up](../a.md), [raw](raw/r.json)\n";
    let others = ["src/lib.rs", "docs/images/i.svg", "docs/raw/r.json"];
    assert_eq!(faults(&[("a.md", a), ("docs/b.md", b)], &others), [""; 0]);
}

#[test]
fn a_missing_page_or_anchor_is_a_fault_with_its_line() {
    let found = faults(&[("docs/a.md", "# A\n\n[x](b.md)\n"), ("docs/c.md", "[y](a.md#b)\n")], &[]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("docs/a.md:3: links to b.md, but there is no docs/b.md"), "{found:?}");
    assert!(found[1].starts_with("docs/c.md:1: ") && found[1].contains("no heading #b"), "{found:?}");
}

#[test]
fn a_raw_file_or_picture_that_no_page_shows_is_a_fault() {
    let pages = [("docs/a.md", "[r](raw/r.json), `[s](raw/s.json)`\n")];
    let found =
        faults(&pages, &["docs/raw/r.json", "docs/raw/s.json", "docs/images/x/i.svg", "src/unshown.rs"]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("docs/raw/s.json: no page links to it"), "{found:?}");
    assert!(found[1].starts_with("docs/images/x/i.svg: "), "{found:?}");
}

#[test]
fn links_are_found_in_prose_alone() {
    let page = "[a](x.md) and [`b`](y.md#z)\n[c](mailto:x@y)\n";
    let link = |target: &str| Link { line: 1, target: target.to_string() };
    assert_eq!(links(page), [link("x.md"), link("y.md#z")]);
}

#[test]
fn paths_begin_at_the_page() {
    assert_eq!(resolve("docs/lessons/a.md", "../raw/b.json"), "docs/raw/b.json");
    assert_eq!(resolve("a.md", "./b/../c.md"), "c.md");
    assert_eq!(resolve("a.md", "../outside.md"), "../outside.md");
}

#[test]
fn anchors_are_those_of_a_forge() {
    let page = "# One `code` (x)\n## GLM-4.5, a_b\n## Same\n```\n# no heading\n```\n### Same\n#hash\n";
    let found: Vec<String> = anchors(page).into_iter().collect();
    assert_eq!(found, ["glm-45-a_b", "one-code-x", "same", "same-1"]);
}

#[test]
fn a_source_may_only_name_pages_that_exist() {
    let text =
        "//! see docs/a.md.\n/// [b](../../docs/b.md)\n// github.com/x/docs/c.md\n// other/docs/d.md\n";
    let found = source_faults("x.rs", text, &["docs/a.md"]);
    assert_eq!(found, ["x.rs:2: names docs/b.md, which does not exist"]);
}
