//! The check of circles on small trees.

use super::{circles, fault};

/// The fault of a crate with these files, if any; the first file is the root.
fn check(files: &[(&str, &str)]) -> Option<String> {
    let read = |path: &str| files.iter().find(|(name, _)| *name == path).map(|(_, text)| text.to_string());
    fault("a", &circles(files[0].0, &read).unwrap())
}

#[test]
fn a_circle_is_named_with_its_names() {
    let root = ("src/lib.rs", "mod a; mod b; mod c;");
    let a = ("src/a.rs", "use crate::b::f; pub struct A; pub fn g(_: crate::c::C) { f() }");
    let c = ("src/c.rs", "pub struct C;");
    assert_eq!(check(&[root, a, ("src/b.rs", "pub fn f() {}"), c]), None);
    let files = [root, a, ("src/b.rs", "pub fn f() { let _ = super::a::A; }"), c];
    let fault = check(&files).unwrap();
    assert!(fault.contains("a: 2 files use each other in circles"), "{fault}");
    assert!(fault.contains("src/a.rs -> src/b.rs: f\n    src/b.rs -> src/a.rs: A"), "{fault}");
    assert!(!fault.contains("c.rs"), "{fault}");
}

#[test]
fn a_re_export_leads_to_the_file_that_defines_the_name() {
    let files = |inside: &'static str| {
        [
            ("src/lib.rs", "mod a; mod b; pub use a::A; pub use b::{B as Renamed, helper};"),
            ("src/a.rs", "use crate::Renamed; pub struct A(Renamed);"),
            ("src/b/mod.rs", "mod inner; pub use inner::*;"),
            ("src/b/inner.rs", inside),
        ]
    };
    // Neither the root nor `b/mod.rs` is in a circle: they only re-export names.
    assert_eq!(check(&files("pub struct B; pub fn helper() { crate::helper() }")), None);
    let fault = check(&files("pub struct B; pub fn f(a: &crate::A) {}")).unwrap();
    assert!(fault.contains("src/a.rs -> src/b/inner.rs: B\n    src/b/inner.rs -> src/a.rs: A"), "{fault}");
    assert!(!fault.contains("mod.rs") && !fault.contains("lib.rs"), "{fault}");
}

#[test]
fn a_parent_and_its_child_are_a_circle_if_they_use_each_other() {
    let files = |parent: &'static str, child: &'static str| [("src/lib.rs", parent), ("src/child.rs", child)];
    assert_eq!(check(&files("mod child; pub struct P;", "use super::P; fn f(_: P) {}")), None);
    assert_eq!(check(&files("mod child; fn f() { child::g() }", "pub fn g() {}")), None);
    let both = files("mod child; pub struct P; fn f() { child::g() }", "use super::P; pub fn g() {}");
    assert!(check(&both).unwrap().contains("src/child.rs -> src/lib.rs: P"));
    let methods =
        files("pub struct P; mod child; use child::C; impl P { fn f(_: C) {} }", "pub struct C(super::P);");
    assert!(check(&methods).is_some());
}

#[test]
fn every_kind_of_path_counts() {
    let uses = [
        "use super::b::{self, X as Y};",
        "fn f() { crate::b::f() }",
        "fn f(x: Option<crate::b::X>) {}",
        "fn f() { use crate::b::g; g() }",
        "use crate::b; fn f() { b::f() }",
        "use crate::b::*; fn f() { g() }",
        "impl crate::b::T for u8 {}",
        "fn f() { println!(\"{}\", crate::b::g()) }",
        "macro_rules! m { () => { $crate::b::g() } }",
        "fn f(e: u8) { match e { crate::b::C => {} _ => {} } }",
        "fn f() { crate::b::E::V.x() }",
        "fn f() { crate::b::by_a_macro() }",
        "mod inner { fn f() { super::super::b::f() } }",
    ];
    let b = "pub fn f(_: crate::a::A) {} pub fn g() {} pub struct X; pub trait T {} pub const C: u8 = 0; pub enum E { V }";
    for code in uses {
        let a = format!("pub struct A; {code}");
        let found = check(&[("src/lib.rs", "mod a; mod b;"), ("src/a.rs", &a), ("src/b.rs", b)]);
        assert!(found.is_some(), "{code}");
    }
}

#[test]
fn what_is_no_use_makes_no_circle() {
    let none = [
        "#[cfg(test)] mod tests { use crate::b::f; }",
        "#[cfg(test)] mod missing;",
        "#[cfg(all(test, feature = \"x\"))] fn f() { crate::b::f() }",
        "impl A { #[cfg(test)] fn f() { crate::b::f() } }",
        "/// [`crate::b::f`]\nfn f() {}",
        "use crate::b;",
        "pub use crate::b::f;",
        "fn f() { std::b::f(); ::b::f() }",
        "pub(in crate::b) struct X;",
        "mod b { pub fn f() {} } fn f() { b::f() }",
    ];
    for code in none {
        let a = format!("pub struct A; {code}");
        let b = ("src/b.rs", "pub fn f(_: crate::a::A) {}");
        assert_eq!(check(&[("src/lib.rs", "mod a; mod b;"), ("src/a.rs", &a), b]), None, "{code}");
    }
}

#[test]
fn modules_are_found_by_path_and_inside_of_modules() {
    let files = [
        ("src/main.rs", "#[path = \"other.rs\"] mod a; mod x { pub mod b; }"),
        ("src/other.rs", "use crate::x::b::f; pub struct A;"),
        ("src/x/b.rs", "pub fn f(_: crate::a::A) {}"),
    ];
    assert!(check(&files).unwrap().contains("src/other.rs -> src/x/b.rs: f"));
    let missing = |_: &str| Some("mod b;".to_string()).filter(|_| false);
    assert!(circles("src/lib.rs", &missing).is_err());
}
