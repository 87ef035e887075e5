//! Rows between the launch that makes them and the product that multiplies them: in the model dtype or, where FP8 weights take
//! FP8 activations, quantised already, which saves the product a launch and both the bytes between.

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, bail};

use crate::buffer::Scratch;
use crate::exec::Exec;
#[cfg(feature = "cuda")]
use crate::fp8::FP8_GROUP;
use crate::view::{View, ViewMut};
use crate::weight::WeightView;

/// Lines of scales have a multiple of so many rows.
#[cfg(feature = "cuda")]
const LINE_STEP: usize = 4;

/// In which order each 128 columns of a row in FP8 lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Order {
    /// The order of the second operand in shared memory, and of a pack's rows.
    Rows,
    /// The order of the first operand: a lane's four columns together.
    Quads,
}

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
    /// Unspecified rows; `columns` is a multiple of 128.
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

    /// Rows of a line of scales.
    #[cfg(feature = "cuda")]
    pub(crate) fn lines(&self) -> usize {
        self.dims[0].next_multiple_of(LINE_STEP)
    }
}

/// Rows that a product reads.
#[derive(Clone, Copy, Debug)]
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

/// Rows to be made.
#[derive(Debug)]
pub enum RowsViewMut<'a> {
    /// [T, K] in the model dtype.
    Floats(ViewMut<'a>),
    /// Quantised for the product behind them.
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

/// Rows with their memory.
#[derive(Debug)]
pub enum ProductRows {
    /// [T, K] in the model dtype.
    Floats(Scratch),
    /// Quantised for the product.
    Fp8(Box<Fp8Rows>),
}

impl ProductRows {
    /// Unspecified rows for the product of `rows` rows with `w` [N, K], in the form in which it reads them.
    ///
    /// # Errors
    /// No memory left.
    pub fn of_product<'w>(rows: usize, w: impl Into<WeightView<'w>>, bias: bool, ex: &Exec) -> Result<Self> {
        let w = w.into();
        let [_, k] = *w.dims() else { bail!("a product's rows: expected w [N, K], got {:?}", w.dims()) };
        #[cfg(feature = "cuda")]
        if ex.is_cuda()
            && let Some(order) = crate::cuda::linear::fp8_order(rows, w, bias, ex)?
        {
            return Fp8Rows::unspecified([rows, k], order, ex).map(|rows| Self::Fp8(Box::new(rows)));
        }
        let _ = bias;
        ex.scratch(w.dtype(), &[rows, k]).map(Self::Floats)
    }

    /// The rows, to be read.
    pub fn rows(&self) -> RowsView<'_> {
        match self {
            Self::Floats(rows) => RowsView::Floats(rows.view()),
            Self::Fp8(rows) => RowsView::Fp8(rows),
        }
    }

    /// The rows, to be written.
    pub fn rows_mut(&mut self) -> RowsViewMut<'_> {
        match self {
            Self::Floats(rows) => RowsViewMut::Floats(rows.view_mut()),
            Self::Fp8(rows) => RowsViewMut::Fp8(rows),
        }
    }
}
