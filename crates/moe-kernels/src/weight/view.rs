//! Weights as ops take them.

use candle_core::{DType, Result, bail};

use super::order::WeightOrder;
use super::quantised::QuantView;
use crate::arguments::Shaped;
use crate::view::View;

/// The weight of a product in the form that ops take. Any [`View`] is a weight in rows.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum WeightView<'a> {
    /// Row by row.
    Rows(View<'a>),
    /// In panels of 16 rows.
    Panels(PanelsView<'a>),
    /// Quantised.
    Quantised(QuantView<'a>),
}

/// A weight in panels. Only [`Weight::packed`](crate::Weight::packed) makes it.
#[derive(Clone, Copy, Debug)]
pub struct PanelsView<'a>(pub(super) View<'a>);

impl<'a> From<View<'a>> for WeightView<'a> {
    fn from(rows: View<'a>) -> Self {
        Self::Rows(rows)
    }
}

impl<'a> WeightView<'a> {
    /// Its rows, for a kernel that accepts no other order.
    ///
    /// # Errors
    /// A weight in another order.
    pub fn rows(&self, op: &str) -> Result<View<'a>> {
        match self {
            Self::Rows(view) => Ok(*view),
            Self::Panels(_) => bail!("{op}: expected a weight in rows, got one in panels of 16 rows"),
            Self::Quantised(q) => {
                bail!("{op}: expected a weight of floats in rows, got {}", q.scheme())
            }
        }
    }

    /// The matrix [N, K] of a pack with one expert, [1, N, K].
    ///
    /// # Errors
    /// A pack with several experts; panels.
    pub fn only_matrix(&self, op: &str) -> Result<Self> {
        match (self, self.dims()) {
            (Self::Quantised(q), &[1, _, _]) => Ok(Self::Quantised(QuantView { dims: &q.dims[1..], ..*q })),
            (Self::Rows(view), &[1, n, k]) => Ok(Self::Rows(view.reshape(&[n, k])?)),
            (_, dims) => bail!("{op}: expected a pack [1, N, K] in rows or quantised, got {dims:?}"),
        }
    }

    /// [N, K] or [E, N, K].
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Rows(view) | Self::Panels(PanelsView(view)) => view.dims(),
            Self::Quantised(q) => q.dims,
        }
    }

    /// The dtype; for a quantised weight, the dtype of the activations that it is multiplied with.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Rows(view) | Self::Panels(PanelsView(view)) => view.dtype(),
            Self::Quantised(q) => q.weight.dtype,
        }
    }

    /// The values in their order, and the order.
    ///
    /// # Errors
    /// A quantised weight.
    pub(crate) fn values(&self, op: &str) -> Result<(View<'a>, WeightOrder)> {
        match self {
            Self::Panels(PanelsView(view)) => Ok((*view, WeightOrder::Panels)),
            _ => Ok((self.rows(op)?, WeightOrder::Rows)),
        }
    }
}

impl Shaped for WeightView<'_> {
    fn dims(&self) -> &[usize] {
        WeightView::dims(self)
    }
    fn dtype(&self) -> DType {
        WeightView::dtype(self)
    }
}
