//! The gate product and the choice of experts in one launch.

use std::ffi::c_void;

use candle_core::{DType, Result, bail};

use super::args::{CopiesArgs, GateRouteArgs, StepRoutingArgs};
use super::{CudaExec, ffi, small};
use crate::align::{Log2Phy, Spread};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::exec::Exec;
use crate::monolithic::Gate;
use crate::plan::{Form, RouterCall, RouterForm};
use crate::view::{View, ViewMut};

/// logits [T, E] f32 = x [T, H] · gateᵀ, and the top K of their scores: topk_ids [T, K] u32 by descending score, ties
/// to the lower id, and topk_weights [T, K] f32. If every token gets shared experts, they are its last slots. With
/// `gate.log2phy` the ids name the experts' copies.
///
/// # Errors
/// A CPU context; a wrong dtype or wrong dims; sizes that [`RouterForm::OneLaunch`] refuses.
pub fn gate_route_into(
    x: View,
    gate: &Gate,
    logits: ViewMut,
    topk_ids: ViewMut,
    topk_weights: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let none =
        Buckets { counts: std::ptr::null_mut(), slots: std::ptr::null_mut(), expert_map: std::ptr::null() };
    gate_route(x, gate, (logits, topk_ids, topk_weights), none, ex)
}

/// Where the router also lists the slots of each expert; null for nowhere.
pub(super) struct Buckets {
    /// [local experts] u32, zero before.
    pub counts: *mut c_void,
    /// [local experts, T] u32.
    pub slots: *mut c_void,
    /// i32, indexed by the ids that the launch writes, or null.
    pub expert_map: *const c_void,
}

impl CopiesArgs {
    /// The arguments for a table that has been checked.
    pub(super) fn of(op: &str, log2phy: Option<&Log2Phy<'_>>, cuda: &CudaExec) -> Result<Self> {
        let Some(&Log2Phy { ids, spread, first_row }) = log2phy else {
            return Ok(Self { log2phy: std::ptr::null(), width: 0, hashed: 0, first_row: 0 });
        };
        Ok(Self {
            log2phy: cuda.read(op, "log2phy", ids)?,
            width: small(op, ids.dims()[1])?,
            hashed: i32::from(spread == Spread::Hashed),
            // The CPU's row numbers have 32 bits, too.
            first_row: first_row as u32,
        })
    }
}

/// [`gate_route_into`] with buckets.
pub(super) fn gate_route(
    x: View,
    gate: &Gate,
    outputs: (ViewMut, ViewMut, ViewMut),
    buckets: Buckets,
    ex: &Exec,
) -> Result<()> {
    let op = "gate_route";
    let args = checked(op, x, gate, outputs, buckets, ex)?;
    let cuda = ex.cuda(op)?;
    // SAFETY: `checked` has checked dims, dtypes and the launcher's conditions.
    cuda.check(op, unsafe { ffi::moe_gate_route(&args, cuda.raw()?) })
}

/// The launcher's arguments, with dims, dtypes and its conditions checked.
fn checked(
    op: &str,
    x: View,
    gate: &Gate,
    (mut logits, mut topk_ids, mut topk_weights): (ViewMut, ViewMut, ViewMut),
    buckets: Buckets,
    ex: &Exec,
) -> Result<GateRouteArgs> {
    let (t, h) = expect_matrix(op, "x", &x)?;
    let (e, _) = expect_matrix(op, "gate", &gate.weight)?;
    let (_, k) = expect_matrix(op, "topk_ids", &topk_ids)?;
    gate.check(op, e, h, DType::BF16)?;
    expect_dtype(op, "x", &x, DType::BF16)?;
    expect(op, "logits", &logits, DType::F32, &[t, e])?;
    expect(op, "topk_ids", &topk_ids, DType::U32, &[t, k])?;
    expect(op, "topk_weights", &topk_weights, DType::F32, &[t, k])?;
    if k != gate.slots() {
        bail!("{op}: expected topk_ids with {} slots of a token, got {k}", gate.slots())
    }
    super::expect_aligned(op, &[x, gate.weight])?;
    let cuda = ex.cuda(op)?;
    let call = RouterCall {
        hidden: h,
        experts: e + gate.shared,
        top_k: k,
        dtype: x.dtype(),
        gate: gate.weight.dtype(),
    };
    if let Err(reason) = RouterForm::OneLaunch.fits(&call, &ex.machine()) {
        bail!("{op}: {} {reason}", RouterForm::OneLaunch.name())
    }
    let none = std::ptr::null();
    let valid = if gate.padded { cuda.valid_rows()?.cast_const().cast() } else { none };
    Ok(GateRouteArgs {
        x: cuda.read(op, "x", x)?,
        gate: cuda.read(op, "gate", gate.weight)?,
        gate_bias: cuda.read_or_null(op, "gate_bias", gate.bias)?,
        correction_bias: cuda.read_or_null(op, "correction_bias", gate.correction_bias)?,
        valid,
        logits: cuda.write(op, "logits", &mut logits)?,
        topk_ids: cuda.write(op, "topk_ids", &mut topk_ids)?,
        topk_weights: cuda.write(op, "topk_weights", &mut topk_weights)?,
        tokens: small(op, t)?,
        hidden: small(op, h)?,
        experts: small(op, e)?,
        top_k: small(op, gate.top_k)?,
        shared: small(op, gate.shared)?,
        scoring: gate.scoring,
        raw_logits: i32::from(gate.raw_logits),
        renormalize: i32::from(gate.renormalize),
        scale: gate.scale,
        softcap: gate.softcap.unwrap_or(0.),
        shared_weight: gate.shared_weight,
        groups: small(op, gate.groups.map_or(0, |groups| groups.count))?,
        kept_groups: small(op, gate.groups.map_or(0, |groups| groups.kept))?,
        counts: buckets.counts,
        buckets: buckets.slots,
        expert_map: buckets.expert_map,
        invariant: i32::from(ex.batch_invariant()),
        routing: StepRoutingArgs::of(op, &gate.routing, (t, e, gate.top_k), cuda)?,
        copies: CopiesArgs::of(op, gate.log2phy.as_ref(), cuda)?,
    })
}
