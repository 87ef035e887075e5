//! Inputs and outputs of sub-layers, and the gate of launches that contain the router.

use candle_core::{DType, Result, bail};

use crate::align::Log2Phy;
use crate::arguments::{expect, expect_dims, expect_optional};
use crate::plan::Fusion;
use crate::rows_view::{RowsView, RowsViewMut};
use crate::step_routing::LayerRouting;
use crate::tags::GateScoring;
use crate::view::{View, ViewMut};

/// Equal groups of consecutive experts. A token chooses its experts from the best groups (DeepSeek-V2, DeepSeek-V3).
/// The key of a group is the key of its best expert, or, with a correction bias, the sum of its two best keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateGroups {
    /// Number of groups; it divides the number of experts.
    pub count: usize,
    /// Groups that a token keeps, at least 1.
    pub kept: usize,
}

impl GateGroups {
    /// Most groups that launches with a router know: each lane of a warp holds the key of one.
    pub const MOST: usize = 32;
}

/// A gate, and the rule by which its logits choose experts.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// [E, H] model dtype.
    pub weight: View<'a>,
    /// \[E\] model dtype, part of the logits.
    pub bias: Option<View<'a>>,
    /// \[E\] f32, added to the scores for the choice only.
    pub correction_bias: Option<View<'a>>,
    /// Number of experts that are chosen for a token, K.
    pub top_k: usize,
    /// Number of shared experts, S. Their ids follow after E, and every token gets them in its last slots.
    pub shared: usize,
    /// The weight of each shared expert. It is neither renormalised nor scaled.
    pub shared_weight: f32,
    /// How logits become scores.
    pub scoring: GateScoring,
    /// Choose by logits and score only the chosen (softmax over them).
    pub raw_logits: bool,
    /// The groups that limit the choice; `None`: every expert may be chosen.
    pub groups: Option<GateGroups>,
    /// Divide the chosen weights by their sum.
    pub renormalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Logits become cap · tanh(x / cap); with `None` they stay unchanged.
    pub softcap: Option<f32>,
    /// Whether rows after the valid ones are padding and get no expert. The number of valid rows is in device memory
    /// (`cuda::upload_step_into` writes it).
    pub padded: bool,
    /// The arrays of this layer for choices to record and to force. They contain experts, not their copies.
    pub routing: LayerRouting<'a>,
    /// The copies of E + S experts, if choices become copies; otherwise the ids of experts stay.
    pub log2phy: Option<Log2Phy<'a>>,
}

impl Gate<'_> {
    /// Slots of a token, K + S.
    pub fn slots(&self) -> usize {
        self.top_k + self.shared
    }

    /// Fails unless weight and biases belong to `experts` experts over rows of `hidden` columns, and its groups divide
    /// the experts.
    ///
    /// # Errors
    /// Wrong dims or dtypes; groups that no launch takes.
    pub fn check(&self, op: &str, experts: usize, hidden: usize, dtype: DType) -> Result<()> {
        expect(op, "gate", &self.weight, dtype, &[experts, hidden])?;
        expect_optional(op, "gate_bias", self.bias.as_ref(), dtype, &[experts])?;
        expect_optional(op, "correction_bias", self.correction_bias.as_ref(), DType::F32, &[experts])?;
        if let Some(GateGroups { count, kept }) = self.groups {
            let most = GateGroups::MOST;
            if !(1..=most).contains(&count) || !experts.is_multiple_of(count) || !(1..=count).contains(&kept)
            {
                bail!(
                    "{op}: expected at most {most} groups that divide {experts} experts, and at least one that is kept, got \
                     {kept} of {count}"
                )
            }
        }
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

/// The input of a sub-layer (attention or experts), and where its result goes. `X` is the type of the rows that it
/// reads. Each variant has the arrays of one [`Fusion`].
// This enum is exhaustive: a layer must say of each form whether it computes it.
#[derive(Debug)]
pub enum SublayerIo<'a, X = View<'a>> {
    /// `out` = result for `x`. With several ranks it is this rank's part.
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
        /// [T, H] for the product after the norm.
        out: RowsViewMut<'a>,
    },
}

impl<X: Copy> SublayerIo<'_, X> {
    /// The normed rows.
    ///
    /// # Errors
    /// The sub-layer contains the norm, which `op` does not support.
    pub fn x(&self, op: &str) -> Result<X> {
        match self {
            Self::Store { x, .. } | Self::Add { x, .. } | Self::AddNorm { x, .. } => Ok(*x),
            Self::NormAdd { .. } => bail!("{op}: expected normed rows, got a norm to take"),
        }
    }

    /// What is fused with the sub-layer.
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
    /// The rows that the sub-layer reads.
    pub fn rows(&self) -> View<'_> {
        match self {
            Self::Store { x, .. } | Self::Add { x, .. } | Self::AddNorm { x, .. } => *x,
            Self::NormAdd { residual, .. } => residual.as_view(),
        }
    }
}

impl<'a> SublayerIo<'a, RowsView<'a>> {
    /// The same, with rows in the model dtype.
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
