//! The number format of a matrix of weights as plain data: what its codes stand for, which of them share a scale, and
//! what is subtracted.
//!
//! This is the home of number formats: code elsewhere asks for the properties that it needs (bits, groups, zero
//! points), and a device has one codec for each kind of [`Codes`]. How a file packs codes and scales is its reader's
//! matter.

use std::fmt;

use candle_core::DType;
use serde::{Serialize, Serializer};

pub use crate::codes::Codes;

/// Quantisation of the weights of one matrix \[N, K\]; activations keep their dtype.
///
/// ```
/// use moe_kernels::{QuantGroup, QuantScheme};
/// let scheme = QuantScheme::int(4, QuantGroup::Size(128)).with_zero_points(true);
/// assert_eq!(scheme.to_string(), "int4 group 128 with zero points");
/// assert_eq!(scheme.groups(768), 6);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantScheme {
    /// What a stored code stands for.
    pub codes: Codes,
    /// Weights that share a scale.
    pub group: QuantGroup,
    /// What is subtracted in each group.
    pub offset: Offset,
    /// How many numbers make a scale, or a minimum.
    pub levels: Levels,
    /// Columns belong to groups in any order (GPTQ's `desc_act`, compressed-tensors' `actorder: group`).
    pub act_order: bool,
}

/// How many numbers make the scale of a group, and its minimum.
// This enum is exhaustive: every reader must say how it makes scales of more levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Levels {
    /// One float.
    One,
    /// Two, which are multiplied: an integer of 8 bits with a sign of its own, and an f16 that this number of
    /// consecutive groups of a row share (a power of two), as in the super-blocks of ggml's K types. Their product is
    /// exact in f32.
    Two(usize),
    /// Two, which are multiplied in f32: a float of 8 bits, E4M3, and an f32 that all groups of a row share, as in
    /// NVFP4.
    Fp8,
}

/// Weights that share a scale.
// This enum is exhaustive: formats and cuts over ranks must say what a new group means to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantGroup {
    /// So many consecutive columns of a row; the last group of a row may be shorter.
    Size(usize),
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

/// What is subtracted from the codes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Offset {
    /// Nothing: codes have a sign. w = scale * value(q).
    None,
    /// The middle of the unsigned integers, 2^(bits - 1). w = scale * (q - middle).
    Middle,
    /// A zero point, an integer of each group. w = scale * (q - zero).
    Zero,
    /// A minimum, a float of each group, with any sign. w = scale * q - minimum.
    Minimum,
}

impl QuantGroup {
    /// Columns of a row of `k` that share a scale.
    pub fn columns(self, k: usize) -> usize {
        match self {
            Self::Size(size) => size,
            Self::Block { k: block, .. } => block,
            Self::Channel | Self::Tensor => k,
        }
    }

    /// The row of scales that a row of the matrix has: rows of a block have the same.
    pub fn scale_row(self, row: usize) -> usize {
        match self {
            Self::Size(_) | Self::Channel => row,
            Self::Block { n, .. } => row / n.max(1),
            Self::Tensor => 0,
        }
    }
}

impl QuantScheme {
    /// Weights in the activation dtype.
    pub const NONE: Self = Self {
        codes: Codes::Floats,
        group: QuantGroup::Channel,
        offset: Offset::None,
        levels: Levels::One,
        act_order: false,
    };

    /// Integers of 4, 5, 6 or 8 bits around their middle.
    pub const fn int(bits: u8, group: QuantGroup) -> Self {
        Self { codes: Codes::Int(bits), group, offset: Offset::Middle, levels: Levels::One, act_order: false }
    }

    /// Floats of 8 bits, E4M3.
    pub const fn fp8(group: QuantGroup) -> Self {
        Self { codes: Codes::E4m3, group, offset: Offset::None, levels: Levels::One, act_order: false }
    }

    /// Floats of 4 bits, E2M1.
    pub const fn fp4(group: QuantGroup) -> Self {
        Self { codes: Codes::E2m1, group, offset: Offset::None, levels: Levels::One, act_order: false }
    }

    /// Codes of 4 bits that stand for the values of IQ4_NL.
    pub const fn iq4_nl(group: QuantGroup) -> Self {
        Self { codes: Codes::Iq4Nl, group, offset: Offset::None, levels: Levels::One, act_order: false }
    }

    /// The same format with a float minimum of each group.
    pub const fn with_minima(self) -> Self {
        Self { offset: Offset::Minimum, ..self }
    }

    /// The same format whose scales, and minima, are products of an integer and an f16 that `groups` groups share.
    pub const fn with_shared_scales(self, groups: usize) -> Self {
        Self { levels: Levels::Two(groups), ..self }
    }

    /// The same format whose scales are products of an E4M3 float and an f32 that a row shares.
    pub const fn with_fp8_scales(self) -> Self {
        Self { levels: Levels::Fp8, ..self }
    }

    /// Integers of which each group has a zero point of its own, or around their middle.
    pub const fn with_zero_points(self, own: bool) -> Self {
        Self { offset: if own { Offset::Zero } else { Offset::Middle }, ..self }
    }

    /// The same format with columns that belong to groups in any order, or in theirs.
    pub const fn with_act_order(self, act_order: bool) -> Self {
        Self { act_order, ..self }
    }

    /// Whether codes are unsigned integers.
    pub fn is_int(self) -> bool {
        matches!(self.codes, Codes::Int(_))
    }

    /// Bits of a code; 0 of floats, which have none.
    pub fn bits(self) -> usize {
        match self.codes {
            Codes::Floats => 0,
            Codes::Int(bits) => usize::from(bits),
            Codes::E4m3 => 8,
            Codes::E2m1 | Codes::Iq4Nl => 4,
        }
    }

    /// The largest code.
    pub fn largest_code(self) -> u8 {
        ((1u32 << self.bits().min(8)) - 1) as u8
    }

    /// Whether groups have zero points of their own.
    pub fn has_zero_points(self) -> bool {
        self.offset == Offset::Zero
    }

    /// Whether groups have float minima.
    pub fn has_minima(self) -> bool {
        self.offset == Offset::Minimum
    }

    /// Whether this is the form of ggml's Q4_K, the only one with minima that GPUs read: integers of 4 bits in groups of
    /// 32, with scales and minima in two levels, whose floats 128 columns or more share.
    pub(crate) fn is_q4k(self) -> bool {
        let shared = matches!(self.levels, Levels::Two(groups) if groups.is_multiple_of(4));
        let group = self.group == QuantGroup::Size(32);
        self.codes == Codes::Int(4) && group && self.has_minima() && shared && !self.act_order
    }

    /// The zero point of integers without zero points of their own; 0 of codes that have none.
    pub fn middle(self) -> u8 {
        match self.codes {
            _ if self.has_minima() => 0,
            Codes::Int(bits) => 1 << (bits.clamp(1, 8) - 1),
            _ => 0,
        }
    }

    /// What a code stands for, which is not NaN: w = scale * (value(q) - zero), or scale * value(q) - minimum.
    pub fn value(self, q: u8) -> f32 {
        self.codes.value(q)
    }

    /// Columns that share a scale in a row of `k` columns (at least 1).
    pub fn group_size(self, k: usize) -> usize {
        self.group.columns(k).max(1)
    }

    /// Scales of a row of `k` columns.
    pub fn groups(self, k: usize) -> usize {
        k.div_ceil(self.group_size(k))
    }

    /// Floats of a row of `k` columns that groups share; 0 where scales are one float.
    pub fn shared_scales(self, k: usize) -> usize {
        match self.levels {
            Levels::One => 0,
            Levels::Two(groups) => self.groups(k).div_ceil(groups.max(1)),
            Levels::Fp8 => self.groups(k).min(1),
        }
    }

    /// About as many bytes as a matrix [N, K] has on a device: codes with scales and minima in 16 bits or in their two
    /// levels, zero points of a byte, FP8 with a scale in f32 for each eight rows; floats of `dtype` without a scheme.
    pub fn matrix_bytes(self, (n, k): (usize, usize), dtype: DType) -> usize {
        let codes = (n * k * self.bits()).div_ceil(8);
        match self.codes {
            Codes::Floats => n * k * dtype.size_in_bytes(),
            Codes::E4m3 => codes + n.div_ceil(8) * self.groups(k) * 4,
            _ => {
                let zeros = if self.has_zero_points() { self.groups(k) } else { 0 };
                codes + n * (self.scale_bytes(k) + zeros)
            }
        }
    }

    /// Bytes of the scales and minima of a row.
    fn scale_bytes(self, k: usize) -> usize {
        let floats = size_of::<u16>();
        let scales = match self.levels {
            Levels::One => self.groups(k) * floats,
            Levels::Two(_) => self.groups(k) + self.shared_scales(k) * floats,
            Levels::Fp8 => self.groups(k) + self.shared_scales(k) * size_of::<f32>(),
        };
        if self.has_minima() { 2 * scales } else { scales }
    }

    /// Bytes that a weight takes in a row of `k`, with its share of scales and minima in 16 bits or in their two
    /// levels, and of zero points; `None` for floats.
    pub fn bytes_per_weight(self, k: usize) -> Option<f64> {
        let bits = self.bits() as f64;
        let zeros = if self.has_zero_points() { bits * self.groups(k) as f64 } else { 0.0 };
        match self.codes {
            Codes::Floats => None,
            Codes::E4m3 => Some(1.0),
            _ => Some((bits + (8.0 * self.scale_bytes(k) as f64 + zeros) / k.max(1) as f64) / 8.0),
        }
    }
}

/// As its text.
impl Serialize for QuantScheme {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl fmt::Display for QuantScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes {
            Codes::Floats => return f.write_str("none"),
            Codes::Int(bits) => write!(f, "int{bits}")?,
            Codes::E4m3 => f.write_str("fp8")?,
            Codes::E2m1 => f.write_str("fp4")?,
            Codes::Iq4Nl => f.write_str("iq4_nl")?,
        }
        match self.group {
            QuantGroup::Size(size) => match self.levels {
                Levels::One => write!(f, " group {size}")?,
                Levels::Two(groups) => write!(f, " group {size} of {}", size * groups)?,
                Levels::Fp8 => write!(f, " group {size} with fp8 scales")?,
            },
            QuantGroup::Block { n, k } => write!(f, " block {n}x{k}")?,
            QuantGroup::Channel => f.write_str(" per channel")?,
            QuantGroup::Tensor => f.write_str(" per tensor")?,
        }
        let offset = match self.offset {
            Offset::None | Offset::Middle => "",
            Offset::Zero => "zero points",
            Offset::Minimum => "minima",
        };
        match (offset, self.act_order) {
            ("", false) => Ok(()),
            ("", true) => f.write_str(" with act-order"),
            (offset, false) => write!(f, " with {offset}"),
            (offset, true) => write!(f, " with {offset} and act-order"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_of_two_levels_has_the_bytes_of_both() {
        let q4_k = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
        let q6_k = QuantScheme::int(6, QuantGroup::Size(16)).with_shared_scales(16);
        assert_eq!(q4_k.bytes_per_weight(512).map(|bytes| 8.0 * bytes), Some(4.625));
        assert_eq!(q6_k.bytes_per_weight(256).map(|bytes| 8.0 * bytes), Some(6.5625));
        assert_eq!((q4_k.shared_scales(512), q6_k.shared_scales(768)), (2, 3));
        assert_eq!(q4_k.to_string(), "int4 group 32 of 256 with minima");
        assert_eq!(q6_k.to_string(), "int6 group 16 of 256");
        let nvfp4 = QuantScheme::fp4(QuantGroup::Size(16)).with_fp8_scales();
        assert_eq!(nvfp4.bytes_per_weight(512).map(|bytes| 8.0 * bytes), Some(4.5625));
        assert_eq!((nvfp4.shared_scales(512), nvfp4.shared_scales(0)), (1, 0));
        assert_eq!(nvfp4.to_string(), "fp4 group 16 with fp8 scales");
    }

    #[test]
    fn groups_of_a_row() {
        let int = |group| QuantScheme::int(8, group).with_act_order(true);
        let block = QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 });
        assert_eq!(int(QuantGroup::Size(32)).groups(96), 3);
        assert_eq!(int(QuantGroup::Channel).groups(96), 1);
        assert_eq!(block.groups(200), 2);
        assert_eq!([0, 127, 128, 300].map(|row| block.group.scale_row(row)), [0, 0, 1, 2]);
        assert_eq!(QuantScheme::NONE.groups(0), 0);
        assert_eq!(int(QuantGroup::Size(32)).to_string(), "int8 group 32 with act-order");
        assert_eq!(block.to_string(), "fp8 block 128x128");
        assert_eq!(QuantScheme::fp4(QuantGroup::Size(32)).to_string(), "fp4 group 32");
    }

    #[test]
    fn any_bits_have_a_middle() {
        let middle = |bits| QuantScheme::int(bits, QuantGroup::Channel).middle();
        assert_eq!([0, 1, 4, 8, 9, u8::MAX].map(middle), [1, 1, 8, 128, 128, 128]);
    }

    #[test]
    fn a_matrix_has_the_bytes_of_its_values_scales_and_zero_points() {
        let int =
            |bits, zero_point| QuantScheme::int(bits, QuantGroup::Size(128)).with_zero_points(zero_point);
        let k = |bits, group| QuantScheme::int(bits, QuantGroup::Size(group));
        let cases = [
            (QuantScheme::NONE, 2 * 64 * 256),
            (int(4, false), 64 * 128 + 64 * 2 * 2),
            (int(8, true), 64 * 256 + 64 * 2 * 3),
            (int(4, false).with_minima(), 64 * 128 + 64 * 2 * 4),
            (k(4, 32).with_minima().with_shared_scales(8), 64 * 128 + 64 * 2 * (8 + 2)),
            (k(6, 16).with_shared_scales(16), 64 * 192 + 64 * (16 + 2)),
            (QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 }), 64 * 256 + 8 * 2 * 4),
            (QuantScheme::fp4(QuantGroup::Size(32)), 64 * 128 + 64 * 8 * 2),
        ];
        for (scheme, expected) in cases {
            assert_eq!(scheme.matrix_bytes((64, 256), DType::BF16), expected, "{scheme}");
        }
    }
}
