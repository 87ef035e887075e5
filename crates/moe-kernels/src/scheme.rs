//! How a matrix of weights is quantised, as plain data: what a kernel must know, whatever file format it came from.

use std::fmt;

use candle_core::DType;
use serde::Serialize;

/// Quantisation of the weights of one matrix \[N, K\]; activations keep their dtype.
///
/// ```
/// use moe_kernels::{QuantGroup, QuantScheme};
/// let scheme = QuantScheme::Int { bits: 4, group: QuantGroup::Size(128), zero_point: true, act_order: false };
/// assert_eq!(scheme.to_string(), "int4 group 128 with zero points");
/// assert_eq!(scheme.groups(768), 6);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantScheme {
    /// Weights in the activation dtype.
    None,
    /// Integers: w = scale * (q - zero), one scale for each group of columns in each row.
    Int {
        /// Bits of an integer: 4 or 8.
        bits: u8,
        /// Columns that share a scale.
        group: QuantGroup,
        /// Each group has a zero point of its own; without, it is 2^(bits - 1) everywhere.
        zero_point: bool,
        /// Columns belong to groups in any order (GPTQ's `desc_act`, compressed-tensors' `actorder: group`).
        act_order: bool,
    },
    /// Floats of 8 bits, E4M3 without infinities: w = scale * q.
    Fp8 {
        /// Weights that share a scale.
        scales: Fp8Scales,
    },
}

/// Columns of a row that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantGroup {
    /// So many consecutive columns; it divides K.
    Size(usize),
    /// The whole row.
    Channel,
}

/// Weights of an FP8 matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fp8Scales {
    /// A block of rows and columns; the last of a row or column may be smaller.
    Block {
        /// Rows of a block.
        n: usize,
        /// Columns of a block.
        k: usize,
    },
    /// A row.
    Channel,
    /// The matrix.
    Tensor,
}

impl QuantScheme {
    /// Columns that share a scale in a row of `k` columns (at least 1).
    pub fn group_size(self, k: usize) -> usize {
        let size = match self {
            Self::Int { group: QuantGroup::Size(size), .. } => size,
            Self::Fp8 { scales: Fp8Scales::Block { k: block, .. } } => block,
            _ => k,
        };
        size.max(1)
    }

    /// Scales of a row of `k` columns.
    pub fn groups(self, k: usize) -> usize {
        k.div_ceil(self.group_size(k))
    }

    /// About as many bytes as a matrix [N, K] has on a device: integers with scales in f16 and zero points of a byte, FP8 with a scale in f32
    /// for each eight rows; floats of `dtype` without a scheme.
    pub fn matrix_bytes(self, (n, k): (usize, usize), dtype: DType) -> usize {
        match self {
            Self::None => n * k * dtype.size_in_bytes(),
            Self::Int { bits, zero_point, .. } => {
                n * k * usize::from(bits) / 8 + n * self.groups(k) * (2 + usize::from(zero_point))
            }
            Self::Fp8 { .. } => n * k + n.div_ceil(8) * self.groups(k) * 4,
        }
    }
}

impl fmt::Display for QuantScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::None => f.write_str("none"),
            Self::Int { bits, group, zero_point, act_order } => {
                match group {
                    QuantGroup::Size(size) => write!(f, "int{bits} group {size}")?,
                    QuantGroup::Channel => write!(f, "int{bits} per channel")?,
                }
                f.write_str(match (zero_point, act_order) {
                    (false, false) => "",
                    (true, false) => " with zero points",
                    (false, true) => " with act-order",
                    (true, true) => " with zero points and act-order",
                })
            }
            Self::Fp8 { scales } => match scales {
                Fp8Scales::Block { n, k } => write!(f, "fp8 block {n}x{k}"),
                Fp8Scales::Channel => f.write_str("fp8 per channel"),
                Fp8Scales::Tensor => f.write_str("fp8 per tensor"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_row() {
        let int = |group| QuantScheme::Int { bits: 8, group, zero_point: false, act_order: true };
        let block = QuantScheme::Fp8 { scales: Fp8Scales::Block { n: 128, k: 128 } };
        assert_eq!(int(QuantGroup::Size(32)).groups(96), 3);
        assert_eq!(int(QuantGroup::Channel).groups(96), 1);
        assert_eq!(block.groups(200), 2);
        assert_eq!(QuantScheme::None.groups(0), 0);
        assert_eq!(int(QuantGroup::Size(32)).to_string(), "int8 group 32 with act-order");
        assert_eq!(block.to_string(), "fp8 block 128x128");
    }

    #[test]
    fn a_matrix_has_the_bytes_of_its_values_scales_and_zero_points() {
        let int = |bits, zero_point| QuantScheme::Int {
            bits,
            group: QuantGroup::Size(128),
            zero_point,
            act_order: false,
        };
        let cases = [
            (QuantScheme::None, 2 * 64 * 256),
            (int(4, false), 64 * 128 + 64 * 2 * 2),
            (int(8, true), 64 * 256 + 64 * 2 * 3),
            (QuantScheme::Fp8 { scales: Fp8Scales::Block { n: 128, k: 128 } }, 64 * 256 + 8 * 2 * 4),
        ];
        for (scheme, expected) in cases {
            assert_eq!(scheme.matrix_bytes((64, 256), DType::BF16), expected, "{scheme}");
        }
    }
}
