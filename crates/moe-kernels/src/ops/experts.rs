//! Grouped expert products: gate and up with the activation, and down.

use candle_core::{DType, Result, bail};

use super::linear::{Rows, row_parallel_segments, run};
use crate::arguments::{expect, expect_dims, expect_dtype, expect_matrix, expect_optional, expect_rank3};
use crate::cpu::epilogue::GateUp;
use crate::cpu::gemm::{Products, products};
use crate::cpu::quant::{self, QuantProducts};
use crate::cpu::shared::Shared;
use crate::cpu::simd::{LANES, Lanes};
use crate::cpu::units::Units;
use crate::exec::Exec;
use crate::operands::ExpertGroups;
use crate::tags::Activation;
use crate::view::{View, ViewMut};
use crate::weight::{WeightOrder, WeightView};
use crate::with_float;

/// [`ExpertGroups`] after its checks: every index is in range.
pub(super) struct Checked<'a> {
    pub offsets: &'a [u32],
    pub in_rows: &'a [u32],
    pub out_rows: &'a [u32],
}

impl<'a> ExpertGroups<'a> {
    /// Number of grouped slots P.
    pub(super) fn len(&self) -> usize {
        self.in_rows.elem_count()
    }

    /// Checks dims and dtypes.
    pub(super) fn check_views(&self, op: &str, experts: usize) -> Result<()> {
        let p = self.len();
        for (name, view, len) in [
            ("offsets", &self.offsets, experts + 1),
            ("in_rows", &self.in_rows, p),
            ("out_rows", &self.out_rows, p),
        ] {
            expect(op, name, view, DType::U32, &[len])?;
        }
        Ok(())
    }

    /// Checks dims and dtypes of a down product: `x` [P, I], `w2` [E_local, H, I] and `out` [S, H] f32.
    pub(super) fn check_down(&self, op: &str, x: &View, w2: &WeightView, out: &ViewMut) -> Result<()> {
        let (e, h, i) = expect_rank3(op, "w2", w2)?;
        expect_dims(op, "x", x, &[self.len(), i])?;
        expect_dtype(op, "w2", w2, x.dtype())?;
        let (s, _) = expect_matrix(op, "out", out)?;
        expect(op, "out", out, DType::F32, &[s, h])?;
        self.check_views(op, e)
    }

    /// Returns the indices. The caller has called [`check_views`](Self::check_views) before. Fails unless offsets
    /// ascend.
    pub(super) fn check(&self, op: &str) -> Result<Checked<'a>> {
        let p = self.len();
        let offsets = self.offsets.cpu::<u32>()?;
        let ascending = offsets.first() == Some(&0) && offsets.is_sorted();
        if !ascending || offsets.last().is_none_or(|&last| last as usize > p) {
            bail!("{op}: expected offsets that ascend from 0 to at most {p}, got {offsets:?}")
        }
        Ok(Checked { offsets, in_rows: self.in_rows.cpu()?, out_rows: self.out_rows.cpu()? })
    }

    /// Like [`check`](Self::check), for groups that write to `rows` rows, each at most once.
    pub(super) fn check_out(&self, op: &str, rows: usize) -> Result<Checked<'a>> {
        let groups = self.check(op)?;
        groups.expect_below(op, "out_rows", groups.out_rows, rows)?;
        groups.expect_distinct(op, "out_rows", groups.out_rows, rows)?;
        Ok(groups)
    }
}

impl Checked<'_> {
    fn used(&self) -> usize {
        self.offsets.last().map_or(0, |&n| n as usize)
    }

    pub(super) fn expect_below(&self, op: &str, name: &str, rows: &[u32], bound: usize) -> Result<()> {
        let used = rows.iter().take(self.used());
        match used.enumerate().find(|(_, row)| **row as usize >= bound) {
            Some((i, row)) => bail!("{op}: {name}[{i}] is {row}; expected a row below {bound}"),
            None => Ok(()),
        }
    }

    fn expect_distinct(&self, op: &str, name: &str, rows: &[u32], bound: usize) -> Result<()> {
        let mut seen = vec![false; bound];
        for (i, &row) in rows.iter().take(self.used()).enumerate() {
            if std::mem::replace(&mut seen[row as usize], true) {
                bail!("{op}: {name}[{i}] names row {row} a second time; each row may be written once")
            }
        }
        Ok(())
    }
}

/// out\[i\] = act(x[in_rows\[i\]] · w13\[e\]ᵀ + w13_bias\[e\]) for every grouped slot i of expert e. The gate and up
/// products and the gated activation are one pass. Sums and activation are in f32, with one rounding. Rows of `out`
/// after `offsets[E_local]` are not written.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [R, H] model dtype (f32, bf16, f16) |
/// | `groups` | see [`ExpertGroups`]; `out_rows` is not used |
/// | `w13` | [E_local, 2I, H] same dtype: I gate rows, then I up rows; or quantised, packed for gate and up |
/// | `w13_bias` | [E_local, 2I] same dtype |
/// | `out` | [P, I] same dtype |
///
/// # Errors
/// A wrong dtype or wrong dims; an odd number of w13 rows; offsets that do not ascend; an
/// `in_rows` entry in use that is not below R.
pub fn grouped_gate_up_into<'w>(
    x: View,
    groups: &ExpertGroups,
    w13: impl Into<WeightView<'w>>,
    w13_bias: Option<View>,
    activation: Activation,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    gate_up_into(x, groups, w13.into(), w13_bias, activation, out, ex)
}

// The public ops are generic only to accept any view of a weight. Their code is in this function, so that it is
// compiled here and not again in each crate that calls them.
fn gate_up_into(
    x: View,
    groups: &ExpertGroups,
    w13: WeightView,
    w13_bias: Option<View>,
    activation: Activation,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_gate_up";
    let (r, h) = expect_matrix(op, "x", &x)?;
    let (e, two_i, _) = expect_rank3(op, "w13", &w13)?;
    expect(op, "w13", &w13, x.dtype(), &[e, two_i, h])?;
    if !two_i.is_multiple_of(2) {
        bail!("{op}: expected w13 with an even number of rows (gate, then up), got {two_i}")
    }
    expect_optional(op, "w13_bias", w13_bias.as_ref(), x.dtype(), &[e, two_i])?;
    expect(op, "out", &out, x.dtype(), &[groups.len(), two_i / 2])?;
    groups.check_views(op, e)?;
    if let WeightView::Quantised(w13) = w13 {
        w13.expect_gate_up(op)?;
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        if let WeightView::Quantised(w13) = w13 {
            let w13 = w13.device_pack(op)?;
            return crate::cuda::quant::gate_up(op, x, groups, (w13, w13_bias), activation, out, ex);
        }
        return crate::cuda::any::gate_up(ex, op, x, groups, (w13.rows(op)?, w13_bias), activation, out);
    }
    let groups = groups.check(op)?;
    groups.expect_below(op, "in_rows", groups.in_rows, r)?;
    with_float!(x.dtype(), op, T => gate_up::<T>(x, &groups, w13, w13_bias, activation, out, ex))
}

fn gate_up<T: Lanes>(
    x: View,
    groups: &Checked,
    w13: WeightView,
    bias: Option<View>,
    activation: Activation,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_gate_up";
    let k = w13.dims()[2];
    let width = w13.dims()[1] / 2;
    let x = x.cpu::<T>()?;
    let bias = bias.map(|b| b.cpu::<T>()).transpose()?;
    let out = Shared::new(out.cpu_mut::<T>()?);
    let epilogue = GateUp { isa: ex.isa(), width, bias, activation, out };
    let index = Some(groups.in_rows);
    let offsets = groups.offsets;
    let units = Units::GateUp(width);
    if let WeightView::Quantised(w) = w13 {
        let p = QuantProducts { x, index, w: w.matrix(op)?, segments: 0..1, offsets, units };
        return quant::products(&p, ex, &epilogue);
    }
    let (w13, order) = w13.values(op)?;
    if order == WeightOrder::Panels && !width.is_multiple_of(LANES) {
        bail!("{op}: a panel of w13 holds both gate and up rows: pack it with runs of {width} rows")
    }
    let p = Products {
        x,
        index,
        w: w13.cpu()?,
        order,
        matrix_rows: 2 * width,
        k,
        stride: k,
        start: 0,
        segments: 1,
        offsets,
        units,
    };
    products(&p, ex, &epilogue)
}

/// out[out_rows\[i\]] = x\[i\] · w2\[e\]ᵀ + w2_bias\[e\] for every grouped slot i of expert e, in f32.
/// K is cut into segments as in [`linear_row_parallel_into`](crate::linear_row_parallel_into).
/// Rows of `out` that no slot names are not written.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [P, I] model dtype (f32, bf16, f16) |
/// | `groups` | see [`ExpertGroups`]; `in_rows` is not used |
/// | `w2` | [E_local, H, I] same dtype; or quantised, packed for a dense product |
/// | `w2_bias` | [E_local, H] same dtype |
/// | `out` | [S, H] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; offsets that do not ascend; an `out_rows` entry in use that is
/// not below S or occurs twice.
pub fn grouped_down_into<'w>(
    x: View,
    groups: &ExpertGroups,
    w2: impl Into<WeightView<'w>>,
    w2_bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    down_into(x, groups, w2.into(), w2_bias, out, ex)
}

fn down_into(
    x: View,
    groups: &ExpertGroups,
    w2: WeightView,
    w2_bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_down";
    groups.check_down(op, &x, &w2, &out)?;
    expect_optional(op, "w2_bias", w2_bias.as_ref(), x.dtype(), &w2.dims()[..2])?;
    let k = x.dims()[1];
    // A rank's part of a quantised weight is packed in the segments of the whole K that the rank holds.
    let of = match w2 {
        WeightView::Quantised(w2) => w2.segments(op)?,
        _ => row_parallel_segments(k),
    };
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        if let WeightView::Quantised(w2) = w2 {
            return crate::cuda::quant::down(op, x, groups, (w2.device_pack(op)?, w2_bias), out, ex);
        }
        return crate::cuda::any::down(ex, op, x, groups, (w2.rows(op)?, w2_bias), out);
    }
    let Checked { offsets, out_rows, .. } = groups.check_out(op, out.rows())?;
    let rows = Rows { of, segments: 0..of, offsets, out_rows: Some(out_rows) };
    with_float!(x.dtype(), op, T => run::<T, f32>(x, w2, w2_bias, rows, out, ex))
}
