//! Matrices of random bits as files hold them.

use candle_core::{DType, bail};
use half::f16;

use super::super::*;
use crate::quant::{LogicalRows, StoredBytes, StoredGrid};
use crate::scheme::{QuantGroup, QuantScheme};

/// How a file holds integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Words along K, transposed; zero points stored less one.
    Gptq,
    /// Words along N, in another order.
    Awq,
    /// Words along K.
    Rows,
}

/// Some rows and columns of a matrix of a file.
pub(super) struct Stored {
    bits: u8,
    scheme: QuantScheme,
    n: usize,
    pub(super) k: usize,
    matrix: StoredMatrix,
    tensors: [Vec<u8>; 3],
}

pub(super) fn hash(seed: u64, i: usize) -> u64 {
    let mut x = (seed ^ (i as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 24
}

impl Stored {
    /// Rows `rows` and columns `columns` of a matrix [n, k] of random bits.
    pub(super) fn new(
        kind: Kind,
        scheme: QuantScheme,
        (n, k): (usize, usize),
        rows: Range<usize>,
        columns: Range<usize>,
        seed: u64,
    ) -> Self {
        let bits = scheme.bits() as u8;
        let own = scheme.has_zero_points();
        let size = 32 / usize::from(bits);
        let groups = scheme.groups(k);
        let words = |rows, columns, row_stride, column_stride| StoredWords {
            grid: StoredGrid { bytes: 4, rows, columns, row_stride, column_stride },
            bits,
            place: if kind == Kind::Awq { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] },
            plus: if kind == Kind::Gptq { u32::MAX / ((1 << bits) - 1) } else { 0 },
        };
        let (mut codes, zeros) = match kind {
            Kind::Gptq => (words(1, size, 1, n), words(size, 1, 1, n / size)),
            Kind::Awq => (words(size, 1, 1, n / size), words(size, 1, 1, n / size)),
            Kind::Rows => (words(1, size, k.div_ceil(size), 1), words(size, 1, groups, 1)),
        };
        codes.plus = 0;
        let scale = |rows, row_stride, column_stride, bytes| StoredGrid {
            bytes,
            rows,
            columns: 1,
            row_stride,
            column_stride,
        };
        let (scales, scale_dtype) = match scheme.group {
            QuantGroup::Block { n, .. } => (scale(n, groups, 1, 4), DType::F32),
            QuantGroup::Tensor => (scale(1, 0, 0, 4), DType::F32),
            _ if !scheme.is_int() => (scale(1, groups, 1, 4), DType::F32),
            _ if kind == Kind::Rows => (scale(1, groups, 1, 2), DType::F16),
            _ => (scale(1, 1, n, 2), DType::F16),
        };
        // As FP8 none of the bytes is NaN.
        let random = |seed: u64, grid: StoredGrid, columns: usize| -> Vec<u8> {
            let len = (grid.element(n - 1, columns - 1) + 1) * grid.bytes;
            (0..len).map(|i| hash(seed, i) as u8 & 0xf7).collect()
        };
        let mut tensors = [
            random(seed, codes.grid, k),
            random(seed ^ 1, zeros.grid, groups),
            random(seed ^ 2, scales, groups),
        ];
        for scale in tensors[2].chunks_exact_mut(scales.bytes) {
            let value = f16::from_f32((scale[0] as f32 + 1.0) / 512.0);
            match scales.bytes {
                2 => scale.copy_from_slice(&value.to_le_bytes()),
                _ => scale.copy_from_slice(&value.to_f32().to_le_bytes()),
            }
        }
        let first_group = columns.start / scheme.group_size(k);
        let matrix = StoredMatrix {
            codes,
            zeros: own.then_some(zeros),
            scales,
            scale_dtype,
            first_row: rows.start,
            first_column: columns.start,
            first_group,
        };
        Self { bits, scheme, n: rows.len(), k: columns.len(), matrix, tensors }
    }

    fn integer(&self, tensor: usize, words: StoredWords, row: usize, column: usize) -> u8 {
        let word = self.tensors[tensor].as_chunks::<4>().0[words.grid.element(row, column)];
        words.integer(u32::from_le_bytes(word), row, column)
    }
}

impl StoredBytes for Stored {
    fn read_bytes(&self, tensor: StoredTensor, first: usize, out: &mut [u8]) -> Result<()> {
        let from = &self.tensors[[StoredTensor::Codes, StoredTensor::Zeros, StoredTensor::Scales]
            .iter()
            .position(|t| *t == tensor)
            .unwrap()];
        match from.get(first..first + out.len()) {
            Some(from) => out.copy_from_slice(from),
            None => bail!("{tensor:?} has {} bytes, {first} and {} were asked for", from.len(), out.len()),
        }
        Ok(())
    }
}

impl QuantRows for Stored {
    fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }
    fn scheme(&self) -> QuantScheme {
        self.scheme
    }
    fn perm(&self) -> Option<&[u32]> {
        None
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        *out = LogicalRows::default();
        let m = &self.matrix;
        let groups = self.scheme.groups(self.k);
        for row in rows.map(|row| m.first_row + row) {
            out.q.extend((0..self.k).map(|k| self.integer(0, m.codes, row, m.first_column + k)));
            for group in (0..groups).map(|group| m.first_group + group) {
                let bytes = &self.tensors[2][m.scales.element(row, group) * m.scales.bytes..];
                out.scale.push(scale_of(bytes, m.scales));
                if self.scheme.is_int() {
                    out.zero.push(
                        m.zeros.map_or(1 << (self.bits - 1), |zeros| self.integer(1, zeros, row, group)),
                    );
                }
            }
        }
        Ok(())
    }
    fn stored(&self) -> std::result::Result<Vec<StoredPart<'_>>, String> {
        Ok(vec![StoredPart { rows: self.n, matrix: self.matrix, bytes: self }])
    }
}

pub(super) fn scale_of(bytes: &[u8], grid: StoredGrid) -> f32 {
    match grid.bytes {
        2 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}
