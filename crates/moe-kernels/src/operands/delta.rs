//! Arguments of linear attention by the gated delta rule.

use candle_core::DType;

use crate::view::{View, ViewMut};

/// The heads of a layer, and where they are in a row of its input product.
///
/// Such a row of P columns holds q of all key heads, k of all key heads, v of all value heads, the output gates z of
/// all value heads, and the numbers b and a of each value head. The first C columns, q, k and v, go through the
/// convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of q and of k, Hk.
    pub key_heads: usize,
    /// Heads of v, Hv: a multiple of Hk. As many neighbouring ones as the quotient share a key head.
    pub value_heads: usize,
    /// Dimensions of a head of q or of k, Dk.
    pub key_dim: usize,
    /// Dimensions of a head of v, Dv.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Columns of q, or of k: Hk · Dk.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Columns of v, or of the output gates: Hv · Dv.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Columns that go through the convolution, C: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Columns of a row of the input product, P: q, k, v, z, b, a.
    pub fn projected(&self) -> usize {
        self.channels() + self.value_width() + 2 * self.value_heads
    }

    /// The first column of b. The columns of a follow.
    pub(crate) fn gates_start(&self) -> usize {
        self.channels() + self.value_width()
    }
}

/// Which rows belong to which sequence, and where its state is.
///
/// A sequence whose first row is at position 0 starts with an empty state, whatever the memory of its state holds. No
/// two sequences of a step may have the same state.
#[derive(Clone, Copy, Debug)]
pub struct StateRows<'a> {
    /// [S + 1] u32, ascending from 0 to at most T: the rows of each sequence.
    pub query_start_loc: View<'a>,
    /// \[T\] u32: each row's position in its sequence.
    pub positions: View<'a>,
    /// \[S\] u32: the number of each sequence's state.
    pub states: View<'a>,
}

/// Arguments of [`causal_conv_into`](crate::causal_conv_into).
#[derive(Clone, Copy, Debug)]
pub struct CausalConv<'a> {
    /// [T, P] f32, of which the first C columns are read.
    pub projected: View<'a>,
    /// [W, C] f32: the weight of each channel for the rows W - 1 before, .., 1 before, and the row itself.
    pub weight: View<'a>,
    /// The rows of the sequences.
    pub rows: StateRows<'a>,
}

/// Arguments of [`gated_delta_into`](crate::gated_delta_into).
#[derive(Clone, Copy, Debug)]
pub struct GatedDelta<'a> {
    /// The heads.
    pub heads: DeltaHeads,
    /// [T, C] f32: q, k and v after the convolution.
    pub mixed: View<'a>,
    /// [T, P] f32, of which b and a are read.
    pub projected: View<'a>,
    /// \[Hv\] f32: the logarithm of each head's rate of decay.
    pub a_log: View<'a>,
    /// \[Hv\] f32: added to a.
    pub dt_bias: View<'a>,
    /// The rows of the sequences.
    pub rows: StateRows<'a>,
    /// How many rows of the step are rows of prompts, and not the one new row of a sequence.
    pub prompt_rows: usize,
    /// Dtype of the model. With bf16 a GPU may round the keys and queries of prompts to bf16.
    pub dtype: DType,
}

/// Arguments of [`gated_rms_norm_into`](crate::gated_rms_norm_into).
#[derive(Clone, Copy, Debug)]
pub struct GatedRmsNorm<'a> {
    /// The heads.
    pub heads: DeltaHeads,
    /// [T, Hv · Dv] f32.
    pub x: View<'a>,
    /// [T, P] f32, of which z is read.
    pub projected: View<'a>,
    /// \[Dv\] f32: the weight of every head.
    pub weight: View<'a>,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// States of a kind in a layer, and the array that gets some of them: both of one dtype. Arguments of
/// [`copy_states_into`](crate::copy_states_into).
#[derive(Debug)]
pub struct StateArrays<'a> {
    /// [N, D..].
    pub from: View<'a>,
    /// [M, D..].
    pub to: ViewMut<'a>,
}
