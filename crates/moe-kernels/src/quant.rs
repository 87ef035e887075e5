//! Quantised matrices as a checkpoint hands them over: integers or FP8 bytes with their scales, some rows at a time.
//!
//! A reader of a file format implements [`QuantRows`]; kernels pack what it reads into an order of their own. Between
//! the two lie only the rows that are being packed, so that no second copy of a model ever exists.

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod batches;
mod columns;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod fp4;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod fp4_scales;
mod matrix;
mod ordered;
mod packed;
mod packing;
mod places;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod q4k;
mod scale_lines;
mod slot;
mod sorted;
mod source;
mod stack;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod stored;
mod tile_rows;
mod tile_scales;
mod tiles;

use std::ops::Range;

use candle_core::Result;

use crate::QuantScheme;
#[cfg(feature = "cuda")]
pub(crate) use batches::StoredBatches;
pub(crate) use columns::{BLOCK, Block, Columns, STEP};
#[cfg(feature = "cuda")]
pub(crate) use matrix::check_matrices;
pub use matrix::{QuantMatrix, QuantUse};
pub(crate) use packed::{GroupScales, ScalesView, SharedView};
#[cfg(feature = "cuda")]
pub(crate) use slot::ACT_ORDER;
pub use source::{Opened, QuantSource};
pub use stack::QuantStack;
pub use stored::{StoredBytes, StoredGrid, StoredMatrix, StoredPart, StoredTensor, StoredWords};
#[cfg(feature = "cuda")]
pub(crate) use tile_rows::TILE_ROWS;
#[cfg(feature = "cuda")]
pub(crate) use tile_scales::PackedScales;
pub(crate) use tiles::Tiles;
#[cfg(feature = "cuda")]
pub(crate) use tiles::{TileRow, TileScratch};

/// Rows of a quantised matrix in their logical form, after a format's packing, interleaving and sorting are undone.
///
/// w\[n\]\[k\] = scale\[n\]\[g\] * (value(q\[n\]\[k\]) - zero\[n\]\[g\]) or, with minima,
/// scale\[n\]\[g\] * value(q\[n\]\[k\]) - minimum\[n\]\[g\], in f32; `value` is [`QuantScheme::value`], g = k / group
/// the group of column k, `group` the scheme's columns per scale. Scales that rows share, as in FP8 blocks, are
/// repeated for each row. Scales and minima in two levels are the products, and the levels stand in
/// [`scale_levels`](Self::scale_levels) and [`minimum_levels`](Self::minimum_levels), too.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogicalRows {
    /// [rows, K]: codes of `bits` bits, one per byte.
    pub q: Vec<u8>,
    /// [rows, groups]; groups = K / group, rounded up.
    pub scale: Vec<f32>,
    /// [rows, groups]: zero points of integers; without zero points of its own a scheme has 8 (int4) or 128 (int8)
    /// everywhere. Empty with minima, and for codes that stand for floats.
    pub zero: Vec<u8>,
    /// [rows, groups]: minima, where the scheme has them; else empty.
    pub minimum: Vec<f32>,
    /// What `scale` is the product of, where the scheme has two levels; else empty.
    pub scale_levels: TwoLevels,
    /// What `minimum` is the product of, where the scheme has two levels and minima; else empty.
    pub minimum_levels: TwoLevels,
}

/// Scales, or minima, as products: factor\[n\]\[g\] * shared\[n\]\[g / groups\]. `groups` is the number in
/// [`Levels::Two`](crate::Levels::Two). With [`Levels::Fp8`](crate::Levels::Fp8) it is the number of all groups of a
/// row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TwoLevels {
    /// [rows, groups]: integers with a sign, or E4M3 floats that are not NaN, as bytes.
    pub factor: Vec<u8>,
    /// [rows, groups / `groups`, rounded up]; of `Levels::Two` values that f16 holds.
    pub shared: Vec<f32>,
}

impl TwoLevels {
    fn clear(&mut self) {
        self.factor.clear();
        self.shared.clear();
    }

    fn append(&mut self, rows: &Self) {
        self.factor.extend_from_slice(&rows.factor);
        self.shared.extend_from_slice(&rows.shared);
    }
}

impl LogicalRows {
    /// No rows; the memory stays for the next ones.
    pub fn clear(&mut self) {
        self.q.clear();
        self.scale.clear();
        self.zero.clear();
        self.minimum.clear();
        self.scale_levels.clear();
        self.minimum_levels.clear();
    }

    /// Adds rows under these.
    pub fn append(&mut self, rows: &Self) {
        self.q.extend_from_slice(&rows.q);
        self.scale.extend_from_slice(&rows.scale);
        self.zero.extend_from_slice(&rows.zero);
        self.minimum.extend_from_slice(&rows.minimum);
        self.scale_levels.append(&rows.scale_levels);
        self.minimum_levels.append(&rows.minimum_levels);
    }
}

/// Who brought the integers of a pack into the order of its kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantPacking {
    /// A device, from the bytes of the file.
    Device,
    /// The host, because of this.
    Host(String),
}

/// A quantised matrix [N, K] that can be read some rows at a time, from any thread.
pub trait QuantRows: Send + Sync {
    /// N and K.
    fn shape(&self) -> (usize, usize);

    /// How the matrix is quantised; never `QuantScheme::NONE`.
    fn scheme(&self) -> QuantScheme;

    /// With act-order: columns are handed over sorted by group, and column j of [`read`](Self::read) multiplies
    /// x\[perm\[j\]\]. `None`: in the order of x.
    fn perm(&self) -> Option<&[u32]>;

    /// Reads these rows; `out` is overwritten and keeps its memory from call to call.
    ///
    /// # Errors
    /// What the format finds wrong with its tensors.
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()>;

    /// Where the file keeps the matrix, for a device that packs from its bytes: one part, or several under each other.
    /// They are what [`read`](Self::read) reads.
    ///
    /// # Errors
    /// Why the rows are only to be had one by one.
    fn stored(&self) -> std::result::Result<Vec<StoredPart<'_>>, String> {
        Err("its reader hands over rows, not the bytes of a file".to_string())
    }
}

/// The part of a quantised matrix that a rank holds.
pub struct QuantPart<'a> {
    /// Its rows.
    pub rows: Box<dyn QuantRows + 'a>,
    /// Which inputs of these rows it multiplies: all, or of rows whose groups are spread over all inputs
    /// (act-order) the rank's share.
    pub inputs: Range<usize>,
}
