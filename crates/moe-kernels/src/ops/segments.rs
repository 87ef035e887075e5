//! One segment of a row-parallel product: the part that a tensor-parallel rank computes.
//!
//! A row-parallel product adds the sums of S segments of K ([`row_parallel_segments`](crate::row_parallel_segments)) in
//! ascending order. A rank that holds some of the segments computes the sum of each with these ops, with exactly the
//! bits that it has within the whole product. The caller gathers all S sums and adds them.

use candle_core::{DType, Result, bail};

use super::experts::Checked;
use super::linear::{Rows, expect_segments, expect_u32, expect_weight, run};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::exec::Exec;
use crate::operands::ExpertGroups;
use crate::view::{View, ViewMut};
use crate::weight::WeightView;
use crate::with_float;

/// Which part of a rank's K a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The index of the segment, from 0.
    pub index: usize,
    /// The number of equal segments in this rank's K.
    pub of: usize,
}

impl Segment {
    /// Fails unless K has this segment, and a quantised weight is packed in such segments.
    fn expect_of(self, op: &str, w: &WeightView, k: usize) -> Result<()> {
        if self.of == 0 || self.index >= self.of || !k.is_multiple_of(self.of) {
            bail!("{op}: {self:?} is no segment of K = {k}")
        }
        expect_segments(op, w, self.of)
    }

    /// The product of this segment alone.
    fn rows<'a>(self, offsets: &'a [u32], out_rows: Option<&'a [u32]>) -> Rows<'a> {
        Rows { of: self.of, segments: self.index..self.index + 1, offsets, out_rows }
    }
}

/// out = x\[:, segment\] · w\[:, segment\]ᵀ in f32.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16); K is this rank's part |
/// | `w` | [N, K] same dtype; or quantised, packed in as many segments as `segment` says |
/// | `out` | [T, N] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; a segment that K does not have.
pub fn linear_segment_into<'w>(
    x: View,
    w: impl Into<WeightView<'w>>,
    segment: Segment,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    segment_product(x, w.into(), segment, out, ex)
}

fn segment_product(x: View, w: WeightView, segment: Segment, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "linear_segment";
    let (t, k) = expect_matrix(op, "x", &x)?;
    expect_dtype(op, "w", &w, x.dtype())?;
    let n = expect_weight(op, &w, None, k)?;
    expect(op, "out", &out, DType::F32, &[t, n])?;
    segment.expect_of(op, &w, k)?;
    let offsets = [0, expect_u32(op, t)?];
    with_float!(x.dtype(), op, T => run::<T, f32>(x, w, None, segment.rows(&offsets, None), out, ex))
}

/// out[out_rows\[i\]] = x\[i, segment\] · w2\[e\]\[:, segment\]ᵀ for every grouped slot i of expert e, in
/// f32. Rows of `out` that no slot names are not written.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [P, I] model dtype (f32, bf16, f16); I is this rank's part |
/// | `groups` | see [`ExpertGroups`]; `in_rows` is not used |
/// | `w2` | [E_local, H, I] same dtype; or quantised, packed in as many segments as `segment` says |
/// | `out` | [S, H] f32 |
///
/// # Errors
/// The errors of [`grouped_down_into`](crate::grouped_down_into); a segment that I does not have.
pub fn grouped_down_segment_into<'w>(
    x: View,
    groups: &ExpertGroups,
    w2: impl Into<WeightView<'w>>,
    segment: Segment,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    down_segment(x, groups, w2.into(), segment, out, ex)
}

fn down_segment(
    x: View,
    groups: &ExpertGroups,
    w2: WeightView,
    segment: Segment,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_down_segment";
    groups.check_down(op, &x, &w2, &out)?;
    segment.expect_of(op, &w2, x.dims()[1])?;
    let Checked { offsets, out_rows, .. } = groups.check_out(op, out.rows())?;
    let rows = segment.rows(offsets, Some(out_rows));
    with_float!(x.dtype(), op, T => run::<T, f32>(x, w2, None, rows, out, ex))
}
