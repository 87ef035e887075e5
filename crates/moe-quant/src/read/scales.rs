//! Scales of a matrix, in any of their layouts and dtypes.

use half::{bf16, f16};
use moe_kernels::QuantGroup;
use moe_kernels::quant::StoredGrid;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::dequantise::e4m3;
use super::e8m0::e8m0;
use crate::error::QuantError;
use crate::format::{Format, Fp4Tensors};

/// A tensor of scales and how a row and a group index it: scale(n, g) = data\[n / rows * row + g * group\].
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
    rows: usize,
    row: usize,
    group: usize,
    /// With which every scale is multiplied.
    factor: f32,
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
        Self { bytes: tensor.data(), dtype: tensor.dtype(), rows, row, group, factor: 1.0 }
    }

    /// Scales in two levels: multiplied with this factor of the matrix.
    pub fn times(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    fn index(&self, n: usize, group: usize) -> usize {
        n / self.rows * self.row + group * self.group
    }

    /// The byte of a scale, of scales of 8 bits.
    pub fn byte(&self, n: usize, group: usize) -> u8 {
        self.bytes[self.index(n, group)]
    }

    /// The factor of the matrix.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    pub fn get(&self, n: usize, group: usize) -> f32 {
        let index = self.index(n, group);
        match self.dtype {
            Dtype::F32 => f32::from_le_bytes(self.bytes.as_chunks().0[index]),
            Dtype::U8 => e8m0(self.bytes[index]),
            Dtype::F8_E4M3 => e4m3(self.bytes[index]) * self.factor,
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

/// The factor of a matrix in NVFP4, from its tensor \[1\], which has been checked against the layout.
///
/// # Errors
/// What is not a finite number above 0, or has no finite reciprocal where the tensor holds a divisor.
pub(super) fn matrix_factor(
    module: &str,
    tensors: Fp4Tensors,
    tensor: &TensorView<'_>,
) -> Result<f32, QuantError> {
    let stored = tensor.data().first_chunk().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes));
    let factor = match tensors {
        Fp4Tensors::Packed => 1.0 / stored,
        Fp4Tensors::Plain => stored,
    };
    if stored > 0.0 && factor > 0.0 && factor.is_finite() {
        return Ok(factor);
    }
    let name = format!("{module}.{}", tensors.matrix_scale());
    let problem = format!(
        "expected a finite number above 0, got {stored}; the file is damaged: download or quantise it again"
    );
    Err(QuantError::matrix(&name, problem))
}
