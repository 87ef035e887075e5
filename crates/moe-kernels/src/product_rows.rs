//! Rows between the launch that writes them and the product that reads them. They are in the model dtype or, if FP8
//! weights use FP8 activations, already quantised. This saves a launch of the product, and memory traffic between the
//! two launches.

use candle_core::{Result, bail};

use crate::buffer::Scratch;
use crate::exec::Exec;
use crate::rows_view::{Fp8Rows, RowsView, RowsViewMut};
use crate::weight::WeightView;

/// Rows with their memory.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProductRows {
    /// [T, K] in the model dtype.
    Floats(Scratch),
    /// Quantised for the product.
    Fp8(Box<Fp8Rows>),
}

impl ProductRows {
    /// Unspecified rows for a product of `rows` rows with `w` [N, K], in the form that the product reads.
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
