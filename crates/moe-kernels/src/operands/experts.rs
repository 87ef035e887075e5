//! Arguments of the grouped products of experts.

use crate::view::View;

/// Which rows each local expert computes.
///
/// Grouped slots are numbered 0..P; expert e has the slots `offsets[e]..offsets[e + 1]`.
///
/// The CPU checks every index. On CUDA a row number beyond its array reads zeros or writes nothing.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups<'a> {
    /// [E_local + 1] u32, ascending, from 0 to at most P: the slots of each local expert.
    pub offsets: View<'a>,
    /// \[P\] u32: the row of x that a grouped slot reads.
    pub in_rows: View<'a>,
    /// \[P\] u32: the row of out that a grouped slot writes; no row twice.
    pub out_rows: View<'a>,
}
