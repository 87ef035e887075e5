//! The public items of small libraries.

use super::fault;
use super::surface::public_items;

fn items(files: &[(&str, &str)]) -> Vec<String> {
    let read = |path: &str| files.iter().find(|(name, _)| *name == path).map(|(_, text)| text.to_string());
    public_items("src/lib.rs", &read).unwrap()
}

#[test]
fn an_item_is_listed_under_its_public_path_with_what_callers_reach() {
    let lib = "mod a; pub mod b; pub use a::{A, helper as help}; pub use other::{C, D as E}; mod hidden;";
    let a = "#[derive(Clone, std::fmt::Debug)] pub struct A<T: Copy> { pub size: Vec<(u8, T)>, secret: u8 }
        impl<T: Copy> A<T> { pub fn new(a: &mut [T], mut f: impl Fn(&str) -> [u8; 2]) -> Result<Self, Error> { todo!() } fn own() {} }
        impl<T: Copy> std::fmt::Display for A<T> {} impl<T: Copy> Secret for A<T> {} trait Secret {}
        pub fn helper<'a>(x: &'a str) -> (u8, Option<&'a str>) where { (0, None) } pub fn unreached() {}";
    let b = "#[non_exhaustive] pub enum Kind { One, Two(u8), Three { at: usize } } pub const N: usize = 3;
        pub trait Moves: Send + 'static { type Way; fn go(&self, _: u8) -> u8; fn stop(self) where Self: Sized {} }
        impl Moves for f32 {} pub(crate) fn inner() {}";
    let files = [("src/lib.rs", lib), ("src/a.rs", a), ("src/b.rs", b), ("src/hidden.rs", "pub struct H;")];
    let expected = "\
impl Clone for A
impl Debug for A
impl<T: Copy> Display for A<T>
struct A<T: Copy> { .. }
impl<T: Copy> A<T>: fn A::new(a: &mut [T], f: impl Fn(&str) -> [u8; 2]) -> Result<Self, Error>
field A::size: Vec<(u8, T)>
use other::C
use other::D as E
#[non_exhaustive] enum b::Kind
variant b::Kind::One
variant b::Kind::Three
field b::Kind::Three::at: usize
variant b::Kind::Two
field b::Kind::Two::0: u8
impl Moves for f32
trait b::Moves: Send + 'static
type b::Moves::Way
fn b::Moves::go(&self, _: u8) -> u8
fn b::Moves::stop(self) where Self: Sized { .. }
const b::N: usize
fn help<'a>(x: &'a str) -> (u8, Option<&'a str>)";
    assert_eq!(items(&files).join("\n"), expected);
}

#[test]
fn features_hidden_items_macros_and_second_names_are_told() {
    let lib = "#[cfg(feature = \"cuda\")] pub mod gpu; #[doc(hidden)] pub fn internal() {} mod macros; pub use gpu::*;";
    let gpu = "pub struct Stream(u8, pub u16); #[cfg(all(unix, feature = \"nccl\"))] impl Stream { pub fn wait(&self) {} }";
    let macros = "#[macro_export] macro_rules! each { () => {} } macro_rules! own { () => {} }";
    let expected = "\
struct Stream { .. } #[cfg(feature = \"cuda\")]
field Stream::1: u16 #[cfg(feature = \"cuda\")]
fn Stream::wait(&self) #[cfg(feature = \"cuda\")] #[cfg(all(unix, feature = \"nccl\"))]
macro each!
use Stream as gpu::Stream #[cfg(feature = \"cuda\")]";
    assert_eq!(
        items(&[("src/lib.rs", lib), ("src/gpu.rs", gpu), ("src/macros.rs", macros)]).join("\n"),
        expected
    );
}

#[test]
fn derives_under_a_condition_are_told_and_hidden_parts_are_not() {
    let lib = "#[derive(Clone)] #[cfg_attr(feature = \"serde\", derive(serde::Serialize, Deserialize), serde(default))]
        pub struct A { pub a: u8, #[doc(hidden)] pub b: u8 }
        impl A { pub fn shown(&self) {} #[doc(hidden)] pub fn hidden(&self) {} #[doc(hidden)] pub const N: u8 = 0; }
        #[doc(hidden)] impl A { pub fn never(&self) {} }
        pub enum B { One, #[doc(hidden)] Two }
        pub trait C { #[doc(hidden)] fn needed(&self); #[doc(hidden)] fn provided(&self) {} }";
    let expected = "\
impl Clone for A
impl Deserialize for A #[cfg(feature = \"serde\")]
impl Serialize for A #[cfg(feature = \"serde\")]
struct A { .. }
field A::a: u8
fn A::shown(&self)
enum B
variant B::One
trait C
fn C::needed(&self)";
    assert_eq!(items(&[("src/lib.rs", lib)]).join("\n"), expected);
}

#[test]
fn a_fault_lists_what_came_and_went_and_the_command() {
    assert_eq!(fault("a", "h\n\nfn b()\n", "h\n\nfn b()\n"), None);
    let fault = fault("a", "h\n\nfn b()\nfn c()\n", "h\n\nfn b()\nfn d()\n").unwrap();
    assert!(fault.contains("`cargo xtask api` accepts it\n  - fn c()\n  + fn d()"), "{fault}");
}
