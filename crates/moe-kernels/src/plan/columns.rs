//! The order of a quantised matrix's columns.

use std::fmt;

/// In which order the columns of a quantised matrix lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ColumnOrder {
    /// In the order of x.
    #[default]
    Input,
    /// Sorted by group, each with as many columns as the scheme says (act-order): kernels that take rows of x in this
    /// order read it as any other.
    Sorted,
    /// Sorted by group, where a rank has only some columns of each, or the last one has fewer: columns of weight zero
    /// fill them up.
    Filled,
}

impl fmt::Display for ColumnOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Input => "in the order of x",
            Self::Sorted => "sorted by group (act-order)",
            Self::Filled => "sorted by groups that are filled up (act-order; a rank's part of each group, or a last one that is shorter)",
        })
    }
}
