//! Rows that a product reads, or that are made for it: in the model dtype, or already quantised to FP8.

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, bail};

#[cfg(feature = "cuda")]
use crate::buffer::Scratch;
#[cfg(feature = "cuda")]
use crate::exec::Exec;
#[cfg(feature = "cuda")]
use crate::fp8::{FP8_GROUP, Fp8Order};
use crate::view::{View, ViewMut};

/// The number of rows in a line of scales is a multiple of this.
#[cfg(feature = "cuda")]
const LINE_STEP: usize = 4;

/// Rows [R, K] as E4M3, with a scale for each row and 128 columns, on a GPU.
#[derive(Debug)]
pub struct Fp8Rows {
    /// [R, K] bytes.
    #[cfg(feature = "cuda")]
    pub(crate) q: Scratch,
    /// [K / 128, R rounded up to 4] f32.
    #[cfg(feature = "cuda")]
    pub(crate) scales: Scratch,
    #[cfg(feature = "cuda")]
    pub(crate) order: Fp8Order,
    dims: [usize; 2],
}

impl Fp8Rows {
    /// Rows with unspecified contents; `columns` is a multiple of 128.
    #[cfg(feature = "cuda")]
    pub(crate) fn unspecified([rows, columns]: [usize; 2], order: Fp8Order, ex: &Exec) -> Result<Self> {
        let q = ex.scratch(DType::U8, &[rows, columns])?;
        let scales = ex.scratch(DType::F32, &[columns / FP8_GROUP, rows.next_multiple_of(LINE_STEP)])?;
        Ok(Self { q, scales, order, dims: [rows, columns] })
    }

    /// R and K.
    pub fn dims(&self) -> [usize; 2] {
        self.dims
    }

    /// Number of rows in a line of scales.
    #[cfg(feature = "cuda")]
    pub(crate) fn lines(&self) -> usize {
        self.dims[0].next_multiple_of(LINE_STEP)
    }
}

/// Rows that a product reads.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RowsView<'a> {
    /// [T, K] in the model dtype.
    Floats(View<'a>),
    /// Quantised for the product.
    Fp8(&'a Fp8Rows),
}

impl<'a> From<View<'a>> for RowsView<'a> {
    fn from(rows: View<'a>) -> Self {
        Self::Floats(rows)
    }
}

impl<'a> RowsView<'a> {
    /// T.
    pub fn len(&self) -> usize {
        match self {
            Self::Floats(rows) => rows.rows(),
            Self::Fp8(rows) => rows.dims[0],
        }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows in the model dtype.
    ///
    /// # Errors
    /// Rows in FP8, which `op` does not read.
    pub fn floats(self, op: &str) -> Result<View<'a>> {
        match self {
            Self::Floats(rows) => Ok(rows),
            Self::Fp8(_) => bail!("{op}: expected rows in the model dtype, got rows in FP8"),
        }
    }
}

/// Rows to be written.
#[derive(Debug)]
#[non_exhaustive]
pub enum RowsViewMut<'a> {
    /// [T, K] in the model dtype.
    Floats(ViewMut<'a>),
    /// Quantised for the product that follows.
    Fp8(&'a mut Fp8Rows),
}

impl<'a> From<ViewMut<'a>> for RowsViewMut<'a> {
    fn from(rows: ViewMut<'a>) -> Self {
        Self::Floats(rows)
    }
}

impl<'a> RowsViewMut<'a> {
    /// Rows in the model dtype.
    ///
    /// # Errors
    /// Rows in FP8, which `op` does not make.
    pub fn floats(self, op: &str) -> Result<ViewMut<'a>> {
        match self {
            Self::Floats(rows) => Ok(rows),
            Self::Fp8(_) => bail!("{op}: expected to make rows in the model dtype, got a place for FP8"),
        }
    }
}
