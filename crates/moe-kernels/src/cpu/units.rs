//! What products are cut into: units of 32 rows of w, times the rows of a piece of x; and what becomes of their sums.

use super::simd::LANES;
use super::tile::{UNIT, UnitSums};

/// Which rows of a matrix form a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Units {
    /// 32 consecutive rows of n.
    Rows(usize),
    /// 16 consecutive gate rows and the 16 up rows that belong to them, of a matrix of
    /// `width` gate rows and then `width` up rows.
    GateUp(usize),
}

impl Units {
    #[inline]
    pub(super) fn count(self) -> usize {
        match self {
            Self::Rows(n) => n.div_ceil(UNIT),
            Self::GateUp(width) => width.div_ceil(LANES),
        }
    }

    /// The matrix row of place j of a unit. Places after the last row repeat it.
    #[inline]
    pub(super) fn row(self, unit: usize, j: usize) -> usize {
        match self {
            Self::Rows(n) => (unit * UNIT + j).min(n - 1),
            Self::GateUp(width) => j / LANES * width + (unit * LANES + j % LANES).min(width - 1),
        }
    }

    /// Rows from a unit to the next.
    #[inline]
    pub(super) fn stride(self) -> usize {
        match self {
            Self::Rows(_) => UNIT,
            Self::GateUp(_) => LANES,
        }
    }
}

/// What becomes of the sums.
pub(crate) trait Epilogue: Sync {
    /// Takes the sums of consecutive rows, from `row`, with one unit of the matrix of `group`.
    /// Called once per row and unit, from any thread.
    fn take(&self, group: usize, row: usize, unit: usize, sums: &[UnitSums]);
}

/// The weights of a unit: the columns that are multiplied. Missing rows repeat others.
#[derive(Clone, Copy)]
pub(crate) enum UnitWeights<'a, T> {
    /// Its rows.
    Rows(&'a [&'a [T]; UNIT]),
    /// Its panels of 16 rows; see [`super::panel`].
    Panels([&'a [T]; 2]),
}

/// One unit of a matrix and the rows of x that it is multiplied with.
pub(crate) struct Work<'a, T> {
    pub weights: UnitWeights<'a, T>,
    /// The distance, in values, from a row (or panel) to the same one of the unit that this thread is likely to take
    /// next.
    pub next: usize,
    /// Packed rows of x, tile by tile.
    pub x: &'a [u32],
    /// Rows of x, at least one.
    pub m: usize,
    /// Segments of K.
    pub segments: usize,
}

/// How rows of x are packed and a unit is computed.
pub(crate) trait Method<T>: Sync {
    /// The most rows of x that share the weights of a unit.
    const PIECE_ROWS: usize;
    /// First row and number of rows of the tiles of m rows of x; a tile has at most 16.
    fn tiles(&self, m: usize) -> impl Iterator<Item = (usize, usize)>;
    /// Words of a packed row.
    fn row_words(&self, k: usize, segments: usize) -> usize;
    /// Packs a tile of `m` rows; missing rows repeat another. Word i of row j goes to
    /// `panel[i * m + j]`.
    fn pack(&self, rows: &[&[T]; LANES], m: usize, segments: usize, panel: &mut [u32]);
    /// Computes a unit and hands over the sums of its m rows.
    fn unit(&self, work: &Work<T>, take: impl FnOnce(&[UnitSums]));
}

/// Start and length of `parts` parts of `total`, which differ by one at most.
#[inline]
pub(crate) fn even_parts(total: usize, parts: usize) -> impl Iterator<Item = (usize, usize)> {
    // The division is done once, because the loops over tiles are short.
    let least = total.checked_div(parts).unwrap_or(0);
    let longer = total - least * parts;
    (0..parts).scan(0, move |start, i| {
        let len = least + usize::from(i < longer);
        *start += len;
        Some((*start - len, len))
    })
}
