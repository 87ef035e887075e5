//! Quantised matrices in the order of the CPU kernels.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, bail};

use super::packed::{Packed, ScaleCounts, Scales, ScalesView};
use super::places::{get_step, step_bytes};
use super::{Columns, QuantRows, STEP};
use crate::cpu::simd::LANES;
use crate::plan::{ColumnOrder, expect_codec};
use crate::scheme::{Levels, QuantScheme};

/// What a matrix is multiplied for, which decides how it is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantUse {
    /// A dense product.
    Linear,
    /// A product whose K is cut into equal segments. Each segment is summed by itself, so that ranks may share it:
    /// [`row_parallel_segments`](crate::row_parallel_segments) of the whole K; of a rank's part, its share of them.
    RowParallel {
        /// Segments of this matrix' K.
        segments: usize,
    },
    /// Gate rows, then as many up rows, for [`grouped_gate_up_into`](crate::grouped_gate_up_into).
    GateUp,
}

/// Matrices [E, N, K] of one scheme, packed for the CPU kernels: integers or FP8 with their scales, about as many
/// bytes as in the checkpoint.
///
/// Sixteen rows form a panel. A panel holds steps of 8 columns, and a step one 32-bit word (int4) or two (8 bits) of
/// each row: a lane of a vector is a row. Of 5 and 6 bits the lower four are such a word, and the others follow the
/// words of the step. Scales and minima are kept in the levels of the scheme; as one float they are f16 where that is
/// exact for all of them, else f32.
#[derive(Clone, Debug)]
pub struct QuantMatrix {
    pub(crate) dims: [usize; 3],
    /// Columns of a logical row: K, and more where this is a rank's part whose groups are spread over all of them.
    pub(super) width: usize,
    pub(crate) scheme: QuantScheme,
    pub(crate) usage: QuantUse,
    pub(crate) parts: Vec<Part>,
    /// How many scales a panel has, which units ask for more often than they should divide.
    pub(super) scale_counts: ScaleCounts,
    pub(crate) packed: Packed,
}

/// One of the matrices.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Without act-order one for all matrices, so that it stays in cache while experts change.
    pub columns: Arc<Columns>,
    /// First byte of the part in `q`.
    pub first: usize,
}

impl QuantMatrix {
    /// E, N and K.
    pub fn dims(&self) -> [usize; 3] {
        self.dims
    }

    /// How the matrices are quantised.
    pub fn scheme(&self) -> QuantScheme {
        self.scheme
    }

    /// What they are packed for.
    pub fn usage(&self) -> QuantUse {
        self.usage
    }

    /// The order of the columns.
    pub(crate) fn order(&self) -> ColumnOrder {
        let sorted = |part: &Part| part.columns.x.is_some();
        match self.parts.iter().any(sorted) {
            false => ColumnOrder::Input,
            true if self.dims[2] == self.width => ColumnOrder::Sorted,
            true => ColumnOrder::Filled,
        }
    }

    /// Dtype of the scales, or of those that groups share.
    pub(crate) fn scale_dtype(&self) -> DType {
        match self.packed.scales {
            Scales::F16(_) | Scales::Levels(_) => DType::F16,
            Scales::F32(_) | Scales::Fp8(_) => DType::F32,
        }
    }

    /// Bytes of codes, scales, zero points and minima.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    /// Rows of matrix `e` as f32, [rows, K] with columns in the order of x: scale * (value(q) - zero) - minimum.
    ///
    /// # Errors
    /// A matrix or rows that there are not; another length of `out`.
    pub fn dequantise_into(&self, e: usize, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let [experts, n, k] = self.dims;
        if e >= experts || rows.end > n || rows.start > rows.end || out.len() != rows.len() * k {
            bail!(
                "expected rows of [{experts}, {n}, {k}] and as many values, got {rows:?} of {e} and {}",
                out.len()
            )
        }
        if k == 0 {
            return Ok(());
        }
        for (row, out) in rows.zip(out.chunks_mut(k)) {
            self.dequantise_row(e, row, out);
        }
        Ok(())
    }

    fn dequantise_row(&self, e: usize, row: usize, out: &mut [f32]) {
        let (panel, lane) = self.place(row);
        let q = self.quants(e, panel);
        let columns = &self.parts[e].columns;
        for block in &columns.blocks {
            let scale = self.panel_scales(e, panel).one(block.group, lane);
            let zero = f32::from(self.zero(e, panel, block.group, lane));
            let minimum = self.panel_minima(e, panel).map_or(0.0, |minima| minima.one(block.group, lane));
            for (step, first) in (0..block.len).step_by(STEP).enumerate() {
                let codes = get_step(self.scheme, q, block.step + step, lane);
                for (at, code) in (block.start + first..block.start + block.len).zip(codes) {
                    let column = columns.x.as_ref().map_or(at, |x| x[at] as usize);
                    out[column] = scale * (self.scheme.value(code) - zero) - minimum;
                }
            }
        }
    }

    /// Panels of a matrix.
    pub(crate) fn panels(&self) -> usize {
        panels(self.dims[1], self.usage)
    }

    /// First row and number of rows of a panel.
    pub(crate) fn rows(&self, panel: usize) -> Range<usize> {
        let n = self.dims[1];
        let (half, panel) = match self.usage {
            QuantUse::GateUp => (panel / (self.panels() / 2) * (n / 2), panel % (self.panels() / 2)),
            _ => (0, panel),
        };
        let end = if self.usage == QuantUse::GateUp { half + n / 2 } else { n };
        let first = half + panel * LANES;
        first..end.min(first + LANES)
    }

    /// Panel and lane of a row.
    fn place(&self, row: usize) -> (usize, usize) {
        let half = self.dims[1] / 2;
        match self.usage {
            QuantUse::GateUp if row >= half => {
                (self.panels() / 2 + (row - half) / LANES, (row - half) % LANES)
            }
            _ => (row / LANES, row % LANES),
        }
    }

    /// Groups of a row.
    pub(crate) fn groups(&self) -> usize {
        self.scheme.groups(self.width)
    }

    /// Bytes of a step of a panel.
    pub(crate) fn step_bytes(&self) -> usize {
        step_bytes(self.scheme)
    }

    /// The integers of a panel.
    pub(crate) fn quants(&self, e: usize, panel: usize) -> &[u8] {
        let len = self.parts[e].columns.steps() * self.step_bytes();
        &self.packed.q[self.parts[e].first + panel * len..][..len]
    }

    /// The scales of a panel.
    pub(crate) fn panel_scales(&self, e: usize, panel: usize) -> ScalesView<'_> {
        self.packed.scales.panel(e * self.panels() + panel, self.scale_counts)
    }

    /// The minima of a panel, of schemes that have them.
    pub(crate) fn panel_minima(&self, e: usize, panel: usize) -> Option<ScalesView<'_>> {
        let minima = &self.packed.minima;
        (!minima.is_empty()).then(|| minima.panel(e * self.panels() + panel, self.scale_counts))
    }

    /// The zero points of a panel, [groups, 16]; none where all are the middle.
    pub(crate) fn panel_zeros(&self, e: usize, panel: usize) -> &[u8] {
        let len = self.scale_counts.groups;
        let first = (e * self.panels() + panel) * len;
        self.packed.zeros.get(first..first + len).unwrap_or_default()
    }

    fn zero(&self, e: usize, panel: usize, group: usize, lane: usize) -> u8 {
        let zeros = self.panel_zeros(e, panel);
        zeros.get(group * LANES + lane).copied().unwrap_or(self.scheme.middle())
    }
}

/// The one shape and scheme of matrices that are packed together; fails where they differ or do not go together.
pub(crate) fn check_matrices(
    matrices: &[&dyn QuantRows],
    usage: QuantUse,
) -> Result<((usize, usize), QuantScheme)> {
    let Some(first) = matrices.first() else { bail!("expected at least one quantised matrix to pack") };
    let (n, width) = first.shape();
    let scheme = first.scheme();
    for (e, m) in matrices.iter().enumerate() {
        if m.shape() != (n, width) || m.scheme() != scheme {
            let (rows, columns) = m.shape();
            let other = m.scheme();
            bail!(
                "matrix {e} is [{rows}, {columns}] {other}; expected [{n}, {width}] {scheme} like the first"
            )
        }
    }
    check(n, scheme, usage)?;
    Ok(((n, width), scheme))
}

/// Refuses shapes and schemes that do not go together.
fn check(n: usize, scheme: QuantScheme, usage: QuantUse) -> Result<()> {
    if expect_codec(scheme, false).is_err() {
        bail!("expected integers of 4, 5, 6 or 8 bits, fp8, fp4 or iq4_nl to pack, got {scheme}")
    }
    if let Levels::Two(groups) = scheme.levels
        && !groups.is_power_of_two()
    {
        bail!("expected scales that a power of two of groups share, got {groups} groups in {scheme}")
    }
    if usage == QuantUse::GateUp && !n.is_multiple_of(2) {
        bail!("expected an even number of rows (gate, then up), got {n}")
    }
    Ok(())
}

pub(super) fn panels(n: usize, usage: QuantUse) -> usize {
    match usage {
        QuantUse::GateUp => 2 * (n / 2).div_ceil(LANES),
        _ => n.div_ceil(LANES),
    }
}
