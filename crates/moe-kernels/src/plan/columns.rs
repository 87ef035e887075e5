//! The order of a quantised matrix's columns.

use std::fmt;

/// The order of the columns of a quantised matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ColumnOrder {
    /// In the order of x.
    #[default]
    Input,
    /// Sorted by group, each with the scheme's number of columns (act-order). Kernels that get rows of x in this order
    /// read the matrix like any other.
    Sorted,
    /// Sorted by group, if a rank has only some columns of each group, or the last group has fewer: columns of weight
    /// zero fill the groups up.
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
