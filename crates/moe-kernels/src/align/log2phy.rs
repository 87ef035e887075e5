//! The copies of experts, and the choice of the copy that computes a row.

use candle_core::{DType, Result};

use crate::arguments::{expect, expect_matrix};
use crate::view::View;

/// How the rows of an expert are distributed over its copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Spread {
    /// Copy (row + expert) mod copies.
    #[default]
    InTurns,
    /// Copy hash(row, expert) mod copies.
    Hashed,
}

impl Spread {
    /// The copy, out of `copies`, that computes a row. It depends only on the arguments, so every rank that has the row
    /// chooses the same copy, and a row that names an expert twice uses one copy of it.
    #[inline]
    pub(super) fn copy(self, row: u32, expert: u32, copies: u32) -> u32 {
        let number = match self {
            Self::InTurns => row.wrapping_add(expert),
            // One round of a multiplicative hash for row and expert, of which the high bits are used.
            Self::Hashed => {
                let mixed = row.wrapping_add(0x9e37_79b9).wrapping_mul(0x85eb_ca6b)
                    ^ expert.wrapping_mul(0xc2b2_ae35);
                (mixed ^ mixed >> 15).wrapping_mul(0x2c1b_3c6d) >> 8
            }
        };
        number % copies.max(1)
    }
}

/// The copies of experts, and the choice of the copy that computes a row.
#[derive(Clone, Copy, Debug)]
pub struct Log2Phy<'a> {
    /// [E, W] i32: the physical ids of each expert's copies, then -1; at least one copy each.
    pub ids: View<'a>,
    /// How the rows of an expert are distributed over its copies.
    pub spread: Spread,
    /// The number of row 0, for rows that come in several calls.
    pub first_row: usize,
}

impl Log2Phy<'_> {
    /// Checks the table, and returns the number of experts and W.
    ///
    /// # Errors
    /// A wrong dtype or rank.
    pub(crate) fn check(&self, op: &str) -> Result<(usize, usize)> {
        let (experts, width) = expect_matrix(op, "log2phy", &self.ids)?;
        expect(op, "log2phy", &self.ids, DType::I32, &[experts, width])?;
        Ok((experts, width))
    }
}
