//! Products with quantised weights on the CPU, dense and grouped by expert.
//!
//! Each is the product of the same name without `quant`, with a [`QuantMatrix`] in place of the weights. With f32
//! activations, and with FP8 weights, the bits are those of the dequantised f32 matrix, its columns in packed order. With
//! bf16 or f16 activations and integer weights, a row of x is summed as 16-bit fixed point in blocks of up to 128 columns:
//! an error of at most 2^-15 of the largest value of a block.

use std::ops::Range;

use candle_core::{DType, Result, bail};

use super::experts::{Checked, ExpertGroups};
use super::linear::expect_u32;
use super::segments::Segment;
use crate::cpu::epilogue::{GateUp, Store};
use crate::cpu::gemm::Units;
use crate::cpu::quant::{QuantProducts, products};
use crate::cpu::shared::Shared;
use crate::cpu::simd::Lanes;
use crate::door::{expect, expect_dims, expect_matrix, expect_optional};
use crate::exec::Exec;
use crate::quant::{QuantMatrix, QuantUse};
use crate::spec::Activation;
use crate::view::{View, ViewMut};
use crate::weight::QuantView;
use crate::with_float;

/// out = x · wᵀ + bias, summed in f32, rounded once. Segments of a row-parallel `w` are summed apart and added in
/// ascending order.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16) |
/// | `w` | [1, N, K], packed for a dense product |
/// | `bias` | \[N\] model dtype |
/// | `out` | [T, N] model dtype or f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; a matrix packed for gate and up; a device other than the CPU.
pub fn quant_linear_into(
    x: View,
    w: &QuantMatrix,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    linear("quant_linear", x, w, None, bias, out, ex)
}

/// out = x\[:, segment\] · w\[:, segment\]ᵀ in f32.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, K] model dtype (f32, bf16, f16) |
/// | `w` | [1, N, K], packed with as many segments as `segment` says |
/// | `out` | [T, N] f32 |
///
/// # Errors
/// As [`quant_linear_into`]; a segment that `w` does not have.
pub fn quant_linear_segment_into(
    x: View,
    w: &QuantMatrix,
    segment: Segment,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "quant_linear_segment";
    expect(op, "out", &out, DType::F32, &[x.rows(), w.dims()[1]])?;
    linear(op, x, w, Some(segment), None, out, ex)
}

/// A dense product with a matrix that was packed for it: in so many segments.
pub(super) fn product(
    op: &str,
    wanted: usize,
    x: View,
    w: &QuantMatrix,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let packed = segments(op, w, None, ex)?.len();
    if packed != wanted {
        bail!("{op}: expected a matrix packed in {wanted} segments, got one in {packed}")
    }
    linear(op, x, w, None, bias, out, ex)
}

fn linear(
    op: &str,
    x: View,
    w: &QuantMatrix,
    segment: Option<Segment>,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let [experts, n, k] = w.dims();
    if experts != 1 {
        bail!("{op}: expected one matrix, got {experts}")
    }
    let (t, _) = expect_matrix(op, "x", &x)?;
    expect_dims(op, "x", &x, &[t, k])?;
    expect_dims(op, "out", &out, &[t, n])?;
    expect_optional(op, "bias", bias.as_ref(), x.dtype(), &[n])?;
    if out.dtype() != x.dtype() && out.dtype() != DType::F32 {
        bail!("{op}: expected out of dtype {} or f32, got {}", x.dtype().as_str(), out.dtype().as_str())
    }
    let segments = segments(op, w, segment, ex)?;
    let rows = Rows { segments, offsets: &[0, expect_u32(op, t)?], out_rows: None };
    with_float!(x.dtype(), op, X => match out.dtype() {
        DType::F32 => run::<X, f32>(x, w, bias, rows, out, ex),
        _ => run::<X, X>(x, w, bias, rows, out, ex),
    })
}

/// The gate and up products of every grouped slot and the gated activation, as
/// [`grouped_gate_up_into`](crate::grouped_gate_up_into).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [R, H] model dtype (f32, bf16, f16) |
/// | `groups` | see [`ExpertGroups`]; `out_rows` is not used |
/// | `w13` | [E_local, 2I, H], packed for gate and up |
/// | `w13_bias` | [E_local, 2I] model dtype |
/// | `out` | [P, I] model dtype |
///
/// # Errors
/// As [`grouped_gate_up_into`](crate::grouped_gate_up_into); a matrix packed for another use; a device other than the CPU.
pub fn quant_gate_up_into(
    x: View,
    groups: &ExpertGroups,
    w13: &QuantMatrix,
    w13_bias: Option<View>,
    activation: Activation,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "quant_gate_up";
    let ([e, two_i, h], (r, _)) = (w13.dims(), expect_matrix(op, "x", &x)?);
    if w13.usage() != QuantUse::GateUp || ex.is_cuda() {
        bail!("{op}: expected a matrix packed for gate and up, on the CPU; got one for {:?}", w13.usage())
    }
    expect_dims(op, "x", &x, &[r, h])?;
    expect_optional(op, "w13_bias", w13_bias.as_ref(), x.dtype(), &[e, two_i])?;
    expect(op, "out", &out, x.dtype(), &[groups.len(), two_i / 2])?;
    groups.check_views(op, e)?;
    let groups = groups.check(op)?;
    groups.expect_below(op, "in_rows", groups.in_rows, r)?;
    with_float!(x.dtype(), op, T => gate_up::<T>(x, &groups, w13, w13_bias, activation, out, ex))
}

fn gate_up<T: Lanes>(
    x: View,
    groups: &Checked,
    w: &QuantMatrix,
    bias: Option<View>,
    activation: Activation,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let width = w.dims()[1] / 2;
    let p = QuantProducts {
        x: x.cpu::<T>()?,
        index: Some(groups.in_rows),
        w,
        segments: 0..1,
        offsets: groups.offsets,
        units: Units::GateUp(width),
    };
    let bias = bias.map(|b| b.cpu::<T>()).transpose()?;
    let out = Shared::new(out.cpu_mut::<T>()?);
    products(&p, ex, &GateUp { isa: ex.isa(), width, bias, activation, out })
}

/// out[out_rows\[i\]] = x\[i\] · w2\[e\]ᵀ + w2_bias\[e\] for every grouped slot i of expert e, in f32, as
/// [`grouped_down_into`](crate::grouped_down_into).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [P, I] model dtype (f32, bf16, f16) |
/// | `groups` | see [`ExpertGroups`]; `in_rows` is not used |
/// | `w2` | [E_local, H, I], packed for a dense product |
/// | `w2_bias` | [E_local, H] model dtype |
/// | `out` | [S, H] f32 |
///
/// # Errors
/// As [`grouped_down_into`](crate::grouped_down_into); a matrix packed for gate and up; a device other than the CPU.
pub fn quant_down_into(
    x: View,
    groups: &ExpertGroups,
    w2: &QuantMatrix,
    w2_bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    down("quant_down", x, groups, w2, None, w2_bias, out, ex)
}

/// [`quant_down_into`] of one segment of I, without bias, as
/// [`grouped_down_segment_into`](crate::grouped_down_segment_into).
///
/// # Errors
/// As [`quant_down_into`]; a segment that `w2` does not have.
pub fn quant_down_segment_into(
    x: View,
    groups: &ExpertGroups,
    w2: &QuantMatrix,
    segment: Segment,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    down("quant_down_segment", x, groups, w2, Some(segment), None, out, ex)
}

#[allow(clippy::too_many_arguments)] // The two ops above, which differ by one argument each.
fn down(
    op: &str,
    x: View,
    groups: &ExpertGroups,
    w2: &QuantMatrix,
    segment: Option<Segment>,
    bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let [e, h, i] = w2.dims();
    expect_dims(op, "x", &x, &[groups.len(), i])?;
    let (s, _) = expect_matrix(op, "out", &out)?;
    expect(op, "out", &out, DType::F32, &[s, h])?;
    expect_optional(op, "w2_bias", bias.as_ref(), x.dtype(), &[e, h])?;
    groups.check_views(op, e)?;
    let segments = segments(op, w2, segment, ex)?;
    let Checked { offsets, out_rows, .. } = groups.check_out(op, s)?;
    let rows = Rows { segments, offsets, out_rows: Some(out_rows) };
    with_float!(x.dtype(), op, T => run::<T, f32>(x, w2, bias, rows, out, ex))
}

/// [`quant_gate_up_into`] or its form on a device, where the door of
/// [`grouped_gate_up_into`](crate::grouped_gate_up_into) has checked all views.
pub(super) fn grouped_gate_up(
    x: View,
    groups: &ExpertGroups,
    w13: QuantView,
    w13_bias: Option<View>,
    activation: Activation,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_gate_up";
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let w13 = w13.device_pack(op)?;
        if w13.usage() != QuantUse::GateUp {
            bail!("{op}: expected a matrix packed for gate and up, got one for {:?}", w13.usage())
        }
        return crate::cuda::quant::gate_up(op, x, groups, (w13, w13_bias), activation, out, ex);
    }
    quant_gate_up_into(x, groups, w13.matrix(op)?, w13_bias, activation, out, ex)
}

/// [`quant_down_into`] or its form on a device, where the door of [`grouped_down_into`](crate::grouped_down_into) has
/// checked all views.
pub(super) fn grouped_down(
    x: View,
    groups: &ExpertGroups,
    w2: QuantView,
    w2_bias: Option<View>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "grouped_down";
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let w2 = w2.device_pack(op)?;
        if w2.usage() == QuantUse::GateUp {
            bail!("{op}: expected a matrix packed for a dense product, got one for gate and up")
        }
        return crate::cuda::quant::down(op, x, groups, (w2, w2_bias), out, ex);
    }
    quant_down_into(x, groups, w2.matrix(op)?, w2_bias, out, ex)
}

/// The segments that an op multiplies; fails for a matrix packed for another use or a segment that it does not have.
fn segments(op: &str, w: &QuantMatrix, segment: Option<Segment>, ex: &Exec) -> Result<Range<usize>> {
    let of = match w.usage() {
        QuantUse::Linear => 1,
        QuantUse::RowParallel { segments } => segments,
        QuantUse::GateUp => {
            bail!("{op}: expected a matrix packed for a dense product, got one for gate and up")
        }
    };
    if ex.is_cuda() {
        bail!("{op}: expected a context on the CPU, got {:?}", ex.device().location())
    }
    match segment {
        None => Ok(0..of),
        Some(segment) if segment.of == of && segment.index < of => Ok(segment.index..segment.index + 1),
        Some(segment) => bail!("{op}: the matrix is packed in {of} segments; got {segment:?}"),
    }
}

/// Which rows are multiplied with which matrices, and over which segments.
struct Rows<'a> {
    segments: Range<usize>,
    /// The rows of x of each matrix.
    offsets: &'a [u32],
    /// The row of out that row i of x writes; `None`: row i.
    out_rows: Option<&'a [u32]>,
}

fn run<X: Lanes, O: Lanes>(
    x: View,
    w: &QuantMatrix,
    bias: Option<View>,
    rows: Rows,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let n = w.dims()[1];
    let p = QuantProducts {
        x: x.cpu::<X>()?,
        index: None,
        w,
        segments: rows.segments,
        offsets: rows.offsets,
        units: Units::Rows(n),
    };
    let bias = bias.map(|b| b.cpu::<X>()).transpose()?;
    let out = Shared::new(out.cpu_mut::<O>()?);
    products(&p, ex, &Store { isa: ex.isa(), n, bias, rows: rows.out_rows, out })
}
