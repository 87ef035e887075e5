//! The number format of a matrix of weights as plain data: what its codes stand for, which of them share a scale, and what is
//! subtracted.
//!
//! This is the home of number formats: code elsewhere asks for the properties that it needs (bits, groups, zero points), and a
//! device has one codec for each kind of [`Codes`]. How a file packs codes and scales is its reader's matter.

use std::fmt;

use candle_core::DType;
use serde::{Serialize, Serializer};

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
    /// Columns belong to groups in any order (GPTQ's `desc_act`, compressed-tensors' `actorder: group`).
    pub act_order: bool,
}

/// What a stored code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// No codes: weights in the activation dtype.
    Floats,
    /// Unsigned integers of this number of bits, 4 or 8.
    Int(u8),
    /// Floats of 8 bits, E4M3 without infinities.
    E4m3,
    /// Floats of 4 bits, E2M1: a sign, 2 bits of exponent (bias 1), 1 of mantissa.
    E2m1,
}

/// The values of E2M1 codes.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

impl Codes {
    /// The values of codes of 4 bits that a codec looks up.
    pub(crate) fn book(self) -> Option<&'static [f32; 16]> {
        match self {
            Self::E2m1 => Some(&E2M1),
            Self::Floats | Self::Int(_) | Self::E4m3 => None,
        }
    }
}

/// Weights that share a scale.
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
    pub const NONE: Self =
        Self { codes: Codes::Floats, group: QuantGroup::Channel, offset: Offset::None, act_order: false };

    /// Integers of 4 or 8 bits around their middle.
    pub const fn int(bits: u8, group: QuantGroup) -> Self {
        Self { codes: Codes::Int(bits), group, offset: Offset::Middle, act_order: false }
    }

    /// Floats of 8 bits, E4M3.
    pub const fn fp8(group: QuantGroup) -> Self {
        Self { codes: Codes::E4m3, group, offset: Offset::None, act_order: false }
    }

    /// Floats of 4 bits, E2M1.
    pub const fn fp4(group: QuantGroup) -> Self {
        Self { codes: Codes::E2m1, group, offset: Offset::None, act_order: false }
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
            Codes::E2m1 => 4,
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
        match self.codes {
            Codes::Floats | Codes::Int(_) => f32::from(q),
            Codes::E4m3 => e4m3(q),
            Codes::E2m1 => E2M1[usize::from(q & 0xf)],
        }
    }

    /// Columns that share a scale in a row of `k` columns (at least 1).
    pub fn group_size(self, k: usize) -> usize {
        self.group.columns(k).max(1)
    }

    /// Scales of a row of `k` columns.
    pub fn groups(self, k: usize) -> usize {
        k.div_ceil(self.group_size(k))
    }

    /// About as many bytes as a matrix [N, K] has on a device: codes with scales in 16 bits, zero points of a byte and minima in f32, FP8
    /// with a scale in f32 for each eight rows; floats of `dtype` without a scheme.
    pub fn matrix_bytes(self, (n, k): (usize, usize), dtype: DType) -> usize {
        let codes = n * k * self.bits() / 8;
        match self.codes {
            Codes::Floats => n * k * dtype.size_in_bytes(),
            Codes::E4m3 => codes + n.div_ceil(8) * self.groups(k) * 4,
            _ => {
                codes + n * self.groups(k) * (2 + usize::from(self.has_zero_points()) + self.minimum_bytes())
            }
        }
    }

    /// Bytes of the minimum of a group.
    fn minimum_bytes(self) -> usize {
        if self.has_minima() { size_of::<f32>() } else { 0 }
    }

    /// Bytes that a weight takes in a row of `k`, with its share of scales in 16 bits, of zero points and of minima; `None` for
    /// floats.
    pub fn bytes_per_weight(self, k: usize) -> Option<f64> {
        let bits = self.bits() as f64;
        let zero = if self.has_zero_points() { bits } else { 8.0 * self.minimum_bytes() as f64 };
        match self.codes {
            Codes::Floats => None,
            Codes::E4m3 => Some(1.0),
            _ => Some((bits + (16.0 + zero) / self.group_size(k) as f64) / 8.0),
        }
    }
}

/// The value of an E4M3 byte that is not NaN: a sign, 4 bits of exponent (bias 7), 3 of mantissa.
pub(crate) fn e4m3(q: u8) -> f32 {
    // As bits of an f32, the exponent is 120 too small.
    const SCALE: f32 = (1u128 << 120) as f32;
    f32::from_bits(u32::from(q & 0x80) << 24 | u32::from(q & 0x7f) << 20) * SCALE
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
        }
        match self.group {
            QuantGroup::Size(size) => write!(f, " group {size}")?,
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
    fn e4m3_is_its_definition() {
        for q in 0..=255u8 {
            let exponent = i32::from(q >> 3 & 0xf);
            let mantissa = f64::from(q & 7);
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let want = if q & 0x80 == 0 { magnitude } else { -magnitude };
            assert_eq!(f64::from(e4m3(q)), want, "{q:#x}");
        }
    }

    #[test]
    fn e2m1_is_its_definition() {
        let scheme = QuantScheme::fp4(QuantGroup::Size(32));
        for q in 0..16u8 {
            let mantissa = f32::from(q & 1) / 2.0;
            let magnitude = match q >> 1 & 3 {
                0 => mantissa,
                exponent => (1.0 + mantissa) * f32::from(1u8 << (exponent - 1)),
            };
            let want = if q & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(scheme.value(q).to_bits(), want.to_bits(), "{q:#x}");
        }
        assert_eq!(scheme.to_string(), "fp4 group 32");
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
        let cases = [
            (QuantScheme::NONE, 2 * 64 * 256),
            (int(4, false), 64 * 128 + 64 * 2 * 2),
            (int(8, true), 64 * 256 + 64 * 2 * 3),
            (QuantScheme { offset: Offset::Minimum, ..int(4, false) }, 64 * 128 + 64 * 2 * 6),
            (QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 }), 64 * 256 + 8 * 2 * 4),
            (QuantScheme::fp4(QuantGroup::Size(32)), 64 * 128 + 64 * 8 * 2),
        ];
        for (scheme, expected) in cases {
            assert_eq!(scheme.matrix_bytes((64, 256), DType::BF16), expected, "{scheme}");
        }
    }
}
