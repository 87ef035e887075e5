//! Matrices whose rows follow each other, each in its own number format: for example q, k and v, one of which has more
//! bits.

use std::ops::Range;

use candle_core::{DType, Result, bail};

use super::{QuantMatrix, QuantUse};
use crate::cpu::simd::LANES;
use crate::plan::ColumnOrder;
use crate::scheme::QuantScheme;

/// Matrices [E, N, K] made of one [`QuantMatrix`], or of several, each of which has some of the rows of all E matrices.
#[derive(Clone, Debug)]
pub struct QuantStack {
    dims: [usize; 3],
    usage: QuantUse,
    matrices: Vec<QuantMatrix>,
}

impl From<QuantMatrix> for QuantStack {
    fn from(matrix: QuantMatrix) -> Self {
        Self { dims: matrix.dims(), usage: matrix.usage(), matrices: vec![matrix] }
    }
}

impl QuantStack {
    /// Stacks several matrices, each packed for a dense product. The stack is for dense products too, or the two
    /// matrices are the gate and the up rows of [`QuantUse::GateUp`].
    ///
    /// # Errors
    /// No matrix; matrices of different E or K, or packed for another use; for gate and up, anything but two matrices
    /// of equal size; for a dense product, a matrix other than the last whose rows are not a multiple of 16.
    pub fn new(matrices: Vec<QuantMatrix>, usage: QuantUse) -> Result<Self> {
        let Some([experts, _, k]) = matrices.first().map(QuantMatrix::dims) else {
            bail!("expected at least one quantised matrix to stack")
        };
        for matrix in &matrices {
            let [e, n, columns] = matrix.dims();
            if (e, columns) != (experts, k) || matrix.usage() != QuantUse::Linear {
                bail!(
                    "expected matrices [{experts}, N, {k}] packed for a dense product to stack, got [{e}, {n}, {columns}] for {:?}",
                    matrix.usage()
                )
            }
        }
        let rows: Vec<_> = matrices.iter().map(|matrix| matrix.dims()[1]).collect();
        if !Self::fits(&rows, usage) {
            bail!("matrices of {rows:?} rows do not stack for {usage:?}")
        }
        Ok(Self { dims: [experts, rows.iter().sum(), k], usage, matrices })
    }

    /// Whether matrices with these numbers of rows fill whole panels, so that they can be stacked.
    pub(super) fn fits(rows: &[usize], usage: QuantUse) -> bool {
        match (usage, rows) {
            (_, [_]) => true,
            (QuantUse::GateUp, &[gate, up]) => gate == up,
            (QuantUse::Linear, [above @ .., _]) => above.iter().all(|rows| rows.is_multiple_of(LANES)),
            _ => false,
        }
    }

    /// E, N and K.
    pub fn dims(&self) -> [usize; 3] {
        self.dims
    }

    /// The use for which they are packed.
    pub fn usage(&self) -> QuantUse {
        self.usage
    }

    /// The matrices in the order of their rows.
    pub(crate) fn matrices(&self) -> &[QuantMatrix] {
        &self.matrices
    }

    /// How the first matrix is quantised.
    pub fn scheme(&self) -> QuantScheme {
        self.matrices[0].scheme()
    }

    /// Dtype of the scales of the first matrix.
    pub(crate) fn scale_dtype(&self) -> DType {
        self.matrices[0].scale_dtype()
    }

    /// The order of the columns. If the matrices differ, it is the order of one whose columns are not in the order of
    /// x.
    pub(crate) fn order(&self) -> ColumnOrder {
        let mut orders = self.matrices.iter().map(QuantMatrix::order);
        orders.find(|order| *order != ColumnOrder::Input).unwrap_or(ColumnOrder::Input)
    }

    /// Bytes of codes, scales, zero points and minima.
    pub fn bytes(&self) -> usize {
        self.matrices.iter().map(QuantMatrix::bytes).sum()
    }

    /// Writes row `row` of matrix `e` as f32, like [`QuantMatrix::dequantise_into`].
    ///
    /// # Errors
    /// A matrix or a row that does not exist; another length of `out`.
    pub(crate) fn dequantise_into(&self, e: usize, row: usize, out: &mut [f32]) -> Result<()> {
        let mut place = row;
        for matrix in &self.matrices {
            let [_, rows, _] = matrix.dims();
            if place < rows {
                return matrix.dequantise_into(e, place..place + 1, out);
            }
            place -= rows;
        }
        bail!("expected a row of {:?}, got row {row}", self.dims)
    }

    /// Panels of all matrices together.
    pub(crate) fn panels(&self) -> usize {
        self.matrices.iter().map(QuantMatrix::panels).sum()
    }

    /// Bytes of one expert.
    ///
    /// # Errors
    /// Experts with act-order, each of which has its own order of columns.
    pub(crate) fn expert_len(&self) -> Result<usize> {
        self.matrices.iter().map(QuantMatrix::expert_len).sum()
    }

    /// The bytes of `expert`, of all matrices.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len).
    pub(crate) fn expert_bytes(&self, expert: usize) -> Result<Vec<u8>> {
        let bytes = self.matrices.iter().map(|matrix| matrix.expert_bytes(expert));
        Ok(bytes.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Overwrites `expert`.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len); another number of bytes. Then nothing has changed.
    pub(crate) fn write_expert(&mut self, expert: usize, bytes: &[u8]) -> Result<()> {
        let len = self.expert_len()?;
        if bytes.len() != len {
            bail!("an expert's weights: expected {len} bytes, got {}", bytes.len())
        }
        let mut at = 0;
        for matrix in &mut self.matrices {
            let range: Range<usize> = at..at + matrix.expert_len()?;
            at = range.end;
            matrix.write_expert(expert, &bytes[range])?;
        }
        Ok(())
    }
}
