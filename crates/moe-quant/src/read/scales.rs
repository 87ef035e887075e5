//! Scales of a matrix, in any of their layouts and dtypes.

use half::{bf16, f16};
use moe_kernels::QuantGroup;
use moe_kernels::quant::StoredGrid;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::format::Format;

/// A tensor of scales and how a row and a group index it: scale(n, g) = data\[n / rows * row + g * group\].
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
    rows: usize,
    row: usize,
    group: usize,
}

impl<'a> Scales<'a> {
    /// The scales of a matrix [n, k]; the tensor has been checked against the format's layout.
    pub fn new(format: Format, n: usize, k: usize, tensor: &TensorView<'a>) -> Self {
        let groups = format.scheme().groups(k);
        let (rows, row, group) = match (format, format.scheme().group) {
            (Format::Gptq { .. } | Format::Awq { .. }, _) => (1, 1, n),
            (_, QuantGroup::Block { n: rows, .. }) => (rows.max(1), groups, 1),
            (_, QuantGroup::Tensor) => (1, 0, 0),
            _ => (1, groups, 1),
        };
        Self { bytes: tensor.data(), dtype: tensor.dtype(), rows, row, group }
    }

    pub fn get(&self, n: usize, group: usize) -> f32 {
        let index = n / self.rows * self.row + group * self.group;
        match self.dtype {
            Dtype::F32 => f32::from_le_bytes(self.bytes.as_chunks().0[index]),
            Dtype::U8 => e8m0(self.bytes[index]),
            Dtype::BF16 => bf16::from_le_bytes(self.bytes.as_chunks().0[index]).to_f32(),
            _ => f16::from_le_bytes(self.bytes.as_chunks().0[index]).to_f32(),
        }
    }

    /// The tensor's bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The scales' dtype.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The index as data.
    pub fn grid(&self) -> StoredGrid {
        StoredGrid {
            bytes: self.dtype.bitsize() / 8,
            rows: self.rows,
            columns: 1,
            row_stride: self.row,
            column_stride: self.group,
        }
    }
}

/// The value of an E8M0 byte: 2^(q - 127), NaN for 255.
fn e8m0(q: u8) -> f32 {
    match q {
        // A subnormal f32.
        0 => f32::from_bits(1 << 22),
        u8::MAX => f32::NAN,
        _ => f32::from_bits(u32::from(q) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8m0_is_its_definition() {
        for q in 0..u8::MAX {
            assert_eq!(f64::from(e8m0(q)), 2f64.powi(i32::from(q) - 127), "{q}");
        }
        assert!(e8m0(u8::MAX).is_nan());
    }
}
