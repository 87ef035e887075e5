//! One segment of a row-parallel product: what a tensor-parallel rank computes of it.
//!
//! A row-parallel product adds the sums of S segments of K
//! ([`row_parallel_segments`](crate::row_parallel_segments)) in ascending order. A rank that holds
//! some of the segments computes the sum of each here, with the very bits that it has inside the
//! whole product; whoever gathers all S of them adds them up.

use candle_core::{DType, Result, bail};

use crate::cpu::epilogue::Store;
use crate::cpu::gemm::{Products, Units, products};
use crate::cpu::shared::Shared;
use crate::cpu::simd::Lanes;
use crate::door::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use crate::exec::Exec;
use crate::ops::experts::{Checked, ExpertGroups};
use crate::view::{View, ViewMut};
use crate::with_float;

/// Which part of a rank's K a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its place, from 0.
    pub index: usize,
    /// Segments of equal length that this rank's K has.
    pub of: usize,
}

impl Segment {
    /// First k and length.
    fn columns(self, op: &str, k: usize) -> Result<(usize, usize)> {
        if self.of == 0 || self.index >= self.of || !k.is_multiple_of(self.of) {
            bail!("{op}: {self:?} is no segment of K = {k}")
        }
        let len = k / self.of;
        Ok((self.index * len, len))
    }
}

/// out = x\[:, segment\] · w\[:, segment\]ᵀ in f32.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16); K is this rank's part |
/// | `w` | [N, K] same dtype |
/// | `out` | [T, N] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; a segment that K does not have.
pub fn linear_segment_into(x: View, w: View, segment: Segment, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "linear_segment";
    let (t, k) = expect_matrix(op, "x", &x)?;
    let (n, _) = expect_matrix(op, "w", &w)?;
    expect_dims(op, "w", &w, &[n, k])?;
    expect_dtype(op, "w", &w, x.dtype())?;
    expect_dims(op, "out", &out, &[t, n])?;
    expect_dtype(op, "out", &out, DType::F32)?;
    let columns = segment.columns(op, k)?;
    let Ok(rows) = u32::try_from(t) else { bail!("{op}: {t} rows are more than a u32 counts; split them") };
    with_float!(x.dtype(), op, T => run::<T>((x, w), (n, k), columns, &[0, rows], None, out, ex))
}

/// out[out_rows\[i\]] = x\[i, segment\] · w2\[e\]\[:, segment\]ᵀ for every grouped slot i of expert e, in
/// f32. Rows of out that no slot names are left untouched.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [P, I] model dtype (f32, bf16, f16); I is this rank's part |
/// | `groups` | see [`ExpertGroups`]; `in_rows` is not used |
/// | `w2` | [E_local, H, I] same dtype |
/// | `out` | [S, H] f32 |
///
/// # Errors
/// As [`grouped_down_into`](crate::grouped_down_into); a segment that I does not have.
pub fn grouped_down_segment_into(
    x: View,
    groups: &ExpertGroups,
    w2: View,
    segment: Segment,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_down_segment";
    let (e, h, i) = expect_rank3(op, "w2", &w2)?;
    expect_dims(op, "x", &x, &[groups.len(), i])?;
    expect_dtype(op, "w2", &w2, x.dtype())?;
    let (s, _) = expect_matrix(op, "out", &out)?;
    expect_dims(op, "out", &out, &[s, h])?;
    expect_dtype(op, "out", &out, DType::F32)?;
    let columns = segment.columns(op, i)?;
    groups.check_views(op, e)?;
    let Checked { offsets, out_rows, .. } = groups.check_out(op, s)?;
    with_float!(x.dtype(), op, T => run::<T>((x, w2), (h, i), columns, offsets, Some(out_rows), out, ex))
}

/// Columns `start..start + len` of x times those of each group's matrix [n, stride].
fn run<T: Lanes>(
    (x, w): (View, View),
    (n, stride): (usize, usize),
    (start, len): (usize, usize),
    offsets: &[u32],
    rows: Option<&[u32]>,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let p = Products {
        x: x.cpu::<T>()?,
        index: None,
        w: w.cpu()?,
        matrix_rows: n,
        k: len,
        stride,
        start,
        segments: 1,
        offsets,
        units: Units::Rows(n),
    };
    let out = Shared::new(out.cpu_mut::<f32>()?);
    products(&p, ex, &Store::<T, f32> { isa: ex.isa(), n, bias: None, rows, out })
}
