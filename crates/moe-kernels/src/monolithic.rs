//! What sub-layers take and give, and what launches that contain the router take: a gate and its rule.

use candle_core::{DType, Result, bail};

use crate::align::Log2Phy;
use crate::door::{expect, expect_dims, expect_optional};
use crate::plan::Fusion;
use crate::rows_view::{RowsView, RowsViewMut};
use crate::step_routing::LayerRouting;
use crate::tags::GateScoring;
use crate::view::{View, ViewMut};

/// A gate and how experts are chosen by its logits.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// [E, H] model dtype.
    pub weight: View<'a>,
    /// \[E\] model dtype, part of the logits.
    pub bias: Option<View<'a>>,
    /// \[E\] f32, added to the scores for the choice only.
    pub correction_bias: Option<View<'a>>,
    /// Experts of a token that are chosen, K.
    pub top_k: usize,
    /// Shared experts S, of the ids E and on: every token gets them in its last slots.
    pub shared: usize,
    /// The weight of each of them, neither renormalised nor scaled.
    pub shared_weight: f32,
    /// How logits become scores.
    pub scoring: GateScoring,
    /// Choose by logits and score only the chosen (softmax over them).
    pub raw_logits: bool,
    /// Divide the chosen weights by their sum.
    pub renormalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Logits become cap · tanh(x / cap); `None` leaves them.
    pub softcap: Option<f32>,
    /// Whether rows beyond the valid ones, whose number lies on the device (`cuda::upload_step_into` writes it), are
    /// padding and get no expert.
    pub padded: bool,
    /// Where the choices are left, and what is forced, in this layer: experts, not their copies.
    pub routing: LayerRouting<'a>,
    /// Where the choices become copies of experts, of E + S; else the ids of experts stay.
    pub log2phy: Option<Log2Phy<'a>>,
}

impl Gate<'_> {
    /// Slots of a token, K + S.
    pub fn slots(&self) -> usize {
        self.top_k + self.shared
    }

    /// Fails unless weight and biases are those of `experts` experts over rows of `hidden` columns.
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub fn check(&self, op: &str, experts: usize, hidden: usize, dtype: DType) -> Result<()> {
        expect(op, "gate", &self.weight, dtype, &[experts, hidden])?;
        expect_optional(op, "gate_bias", self.bias.as_ref(), dtype, &[experts])?;
        expect_optional(op, "correction_bias", self.correction_bias.as_ref(), DType::F32, &[experts])?;
        let Some(log2phy) = &self.log2phy else { return Ok(()) };
        let (_, width) = log2phy.check(op)?;
        expect_dims(op, "log2phy", &log2phy.ids, &[experts + self.shared, width.max(1)])
    }
}

/// RMS norm before a sub-layer.
#[derive(Clone, Copy, Debug)]
pub struct PreNorm<'a> {
    /// \[H\] model dtype.
    pub weight: View<'a>,
    /// Epsilon.
    pub eps: f32,
}

/// What a sub-layer reads, attention or experts, and where its result goes; `X`: the rows that it takes. Each variant has the arrays
/// of one [`Fusion`].
#[derive(Debug)]
pub enum SublayerIo<'a, X = View<'a>> {
    /// `out` = result for `x`. Over ranks it is this rank's part.
    Store {
        /// [T, H] model dtype, normed.
        x: X,
        /// [T, H] f32.
        out: ViewMut<'a>,
    },
    /// `residual` += result for `x`.
    Add {
        /// [T, H] model dtype, normed.
        x: X,
        /// The residual stream, [T, H] f32.
        residual: ViewMut<'a>,
    },
    /// `residual` += result for norm(`residual`).
    NormAdd {
        /// The norm of this sub-layer.
        norm: PreNorm<'a>,
        /// The residual stream, [T, H] f32.
        residual: ViewMut<'a>,
    },
    /// `residual` += result for `x`, then `out` = norm(`residual`).
    AddNorm {
        /// [T, H] model dtype, normed.
        x: X,
        /// The residual stream, [T, H] f32.
        residual: ViewMut<'a>,
        /// The norm of the next sub-layer.
        norm: PreNorm<'a>,
        /// [T, H] for the product behind the norm.
        out: RowsViewMut<'a>,
    },
}

impl<X: Copy> SublayerIo<'_, X> {
    /// The normed rows.
    ///
    /// # Errors
    /// Where `op` would have to take the norm itself.
    pub fn x(&self, op: &str) -> Result<X> {
        match self {
            Self::Store { x, .. } | Self::Add { x, .. } | Self::AddNorm { x, .. } => Ok(*x),
            Self::NormAdd { .. } => bail!("{op}: expected normed rows, got a norm to take"),
        }
    }

    /// What is fused around the sub-layer.
    pub fn fusion(&self) -> Fusion {
        match self {
            Self::Store { .. } => Fusion::Nothing,
            Self::Add { .. } => Fusion::Add,
            Self::NormAdd { .. } => Fusion::NormAdd,
            Self::AddNorm { .. } => Fusion::AddNorm,
        }
    }
}

impl SublayerIo<'_> {
    /// The rows that are read.
    pub fn rows(&self) -> View<'_> {
        match self {
            Self::Store { x, .. } | Self::Add { x, .. } | Self::AddNorm { x, .. } => *x,
            Self::NormAdd { residual, .. } => residual.as_view(),
        }
    }
}

impl<'a> SublayerIo<'a, RowsView<'a>> {
    /// With rows in the model dtype.
    ///
    /// # Errors
    /// Rows in FP8, which `op` does not read.
    pub fn floats(self, op: &str) -> Result<SublayerIo<'a>> {
        Ok(match self {
            Self::Store { x, out } => SublayerIo::Store { x: x.floats(op)?, out },
            Self::Add { x, residual } => SublayerIo::Add { x: x.floats(op)?, residual },
            Self::NormAdd { norm, residual } => SublayerIo::NormAdd { norm, residual },
            Self::AddNorm { x, residual, norm, out } => {
                SublayerIo::AddNorm { x: x.floats(op)?, residual, norm, out }
            }
        })
    }
}
