//! Quantised weights: the properties on which the choice of kernels depends.

use candle_core::DType;

use super::checks::{expect_at_most, expect_steps};
use super::columns::ColumnOrder;
use super::reason::Reason;
use crate::scheme::{Codes, Levels, QuantScheme};

/// Columns that every fast kernel takes at a time.
const K_STEP: usize = 64;
/// The smallest number of integers that share a scale.
const INT_GROUP: usize = 32;
/// The smallest number of FP8 weights of a row that share a scale.
const FP8_GROUP: usize = 128;
/// The longest rows that a block of any card can reorder, with 8 bytes of shared memory for a column.
const ORDER_K: usize = 20 << 10;

/// How the weights of a product are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantWeights {
    /// The scheme, not [`QuantScheme::NONE`].
    pub scheme: QuantScheme,
    /// Dtype of the stored scales: f32, bf16 or f16.
    pub scales: DType,
    /// Whether tiles hold gate rows and up rows.
    pub gate_up: bool,
    /// Whether the rows 128 i to 128 i + 127 have the same scales, for every i. If several matrices in blocks were
    /// joined, they may not.
    pub in_blocks: bool,
    /// The order of its columns.
    pub order: ColumnOrder,
}

impl QuantWeights {
    /// Whether the kernels for bf16 activations can read a matrix [n, k] with this quantisation, if rows of x are in
    /// the order of its columns: it must consist of whole tiles, and groups of a power of two.
    ///
    /// # Errors
    /// The first reason why not.
    pub(super) fn expect_fast(&self, n: usize, k: usize) -> Result<(), Reason> {
        let refused = Reason::Quant { got: self.scheme };
        expect_steps("k", k, K_STEP)?;
        match self.order {
            ColumnOrder::Input => {}
            ColumnOrder::Sorted => expect_at_most("k", ORDER_K, k)?,
            got @ ColumnOrder::Filled => return Err(Reason::Columns { got }),
        }
        let (least, rows) = match self.scheme.codes {
            _ if self.scheme.is_q4k() => return expect_steps("n", n, 16),
            Codes::Int(4 | 8) if self.scales == DType::F32 => {
                return Err(Reason::Scales { got: self.scales.as_str(), accepted: vec!["f16", "bf16"] });
            }
            Codes::Int(4 | 8) => (INT_GROUP, 16),
            Codes::E4m3 => (FP8_GROUP, 32),
            Codes::E2m1 if self.scheme.group_size(k) == fp4_group(self.scheme) => {
                return expect_steps("n", n, 16);
            }
            _ => return Err(refused),
        };
        expect_steps("n", n, rows)?;
        let group = self.scheme.group_size(k);
        let is_step = group.is_power_of_two() && group >= least;
        if group >= k || is_step { Ok(()) } else { Err(refused) }
    }

    /// Whether two matrices have the same codes and the same kind of scales, so that one kernel reads both.
    pub(super) fn has_codec_of(&self, other: &Self) -> bool {
        let form = |weights: &Self| (weights.scheme.levels == Levels::Fp8, weights.scheme.is_q4k());
        self.scheme.codes == other.scheme.codes && form(self) == form(other)
    }

    /// This matrix for rows of x that are in the order of its columns.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_pack_order(self) -> Self {
        match self.order {
            ColumnOrder::Sorted => Self { order: ColumnOrder::Input, ..self },
            _ => self,
        }
    }

    /// Fails if rows of x would have to be reordered.
    pub(super) fn expect_order_of_x(&self) -> Result<(), Reason> {
        match self.order {
            ColumnOrder::Input => Ok(()),
            got => Err(Reason::Columns { got }),
        }
    }
}

/// The number of columns that share a scale, for which the fast kernels of FP4 are made: NVFP4's, whose scales have two
/// levels, or MXFP4's.
fn fp4_group(scheme: QuantScheme) -> usize {
    if scheme.levels == Levels::Fp8 { 16 } else { 32 }
}

/// Fails for a number format for which the kernels of the CPU, or of GPUs, have no codec.
///
/// # Errors
/// [`Reason::Quant`].
pub fn expect_codec(scheme: QuantScheme, on_gpu: bool) -> Result<(), Reason> {
    let is_read = match scheme.codes {
        Codes::Floats => false,
        Codes::Int(4 | 8) => !(on_gpu && scheme.has_minima()) || scheme.is_q4k(),
        Codes::Int(bits) => matches!(bits, 5 | 6) && !on_gpu,
        Codes::E4m3 | Codes::E2m1 => true,
        Codes::Iq4Nl => !on_gpu,
    };
    // On GPUs only FP4 keeps scales that are products with E4M3.
    let is_read = is_read && !(on_gpu && scheme.levels == Levels::Fp8 && scheme.codes != Codes::E2m1);
    if is_read { Ok(()) } else { Err(Reason::Quant { got: scheme }) }
}

/// Fails unless weights are floats.
pub(super) fn expect_floats(quant: Option<QuantWeights>) -> Result<(), Reason> {
    match quant {
        None => Ok(()),
        Some(QuantWeights { scheme, .. }) => Err(Reason::Quant { got: scheme }),
    }
}

/// Fails unless weights are quantised.
pub(super) fn expect_quantised(quant: Option<QuantWeights>) -> Result<QuantWeights, Reason> {
    quant.ok_or(Reason::Floats)
}

/// The name of a kernel that has a form for floats and one for quantised weights, which may need rows in another order.
pub(super) fn kernel_name(name: &str, quant: Option<QuantWeights>) -> String {
    match quant {
        None => name.to_string(),
        Some(QuantWeights { order: ColumnOrder::Sorted, .. }) => format!("order_rows + quant_{name}"),
        Some(_) => format!("quant_{name}"),
    }
}

/// Whether the streaming kernels may multiply these weights without unpacking, by digits of rows of x. Digits need the
/// most room (`has_digits` in quant/row_steps.cuh; groups of 32 and Q4_K are not multiplied by digits).
pub(super) fn takes_digits(scheme: QuantScheme) -> bool {
    scheme.is_int() && !scheme.has_minima()
}

/// Bytes from one row of x with `columns` columns to the next in the streaming kernels (`row_pitch` in
/// quant/row_steps.cuh).
pub(super) fn row_pitch(columns: usize, digits: bool) -> usize {
    const PAD: usize = 16;
    PAD + if digits { columns.div_ceil(128) * (256 + 32) } else { 2 * columns }
}
