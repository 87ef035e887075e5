//! Linear attention by the gated delta rule on CUDA (`cuda/delta/*.cu`): f32, any sizes, element-aligned views. Prompts
//! of models in bf16 have a form of their own.

use candle_core::{DType, Result};

use super::args::{CausalConvArgs, Dtype, GatedDeltaArgs, GatedNormArgs};
use super::{aligned, ffi, small};
use crate::exec::Exec;
use crate::operands::{CausalConv, GatedDelta, GatedRmsNorm};
use crate::plan::{DeltaCall, DeltaForm, Form};
use crate::view::ViewMut;

// SAFETY of every call below: the op has checked dims and dtypes, so each pointer covers as many elements as the
// launcher states. Row ranges and numbers of states are device data. The kernels clamp the former to the rows of the
// step and touch no state beyond `states`; that no two sequences have the same state is the caller's promise.

/// See [`crate::causal_conv_into`].
pub(crate) fn causal_conv(args: &CausalConv, mut states: ViewMut, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "causal_conv";
    let cuda = ex.cuda("causal_conv")?;
    let raw = CausalConvArgs {
        projected: cuda.read(op, "projected", args.projected)?,
        weight: cuda.read(op, "weight", args.weight)?,
        query_start_loc: cuda.read(op, "query_start_loc", args.rows.query_start_loc)?,
        positions: cuda.read(op, "positions", args.rows.positions)?,
        numbers: cuda.read(op, "numbers of states", args.rows.states)?,
        tokens: small(op, args.projected.rows())?,
        sequences: small(op, args.rows.states.elem_count())?,
        num_states: small(op, states.dims()[0])?,
        stride: small(op, args.projected.dims()[1])?,
        channels: small(op, args.weight.dims()[1])?,
        width: small(op, args.weight.dims()[0])?,
        states: cuda.write(op, "states", &mut states)?,
        out: cuda.write(op, "out", &mut out)?,
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_causal_conv(&raw, cuda.raw()?) })
}

/// See [`crate::gated_delta_into`].
pub(crate) fn gated_delta(args: &GatedDelta, mut states: ViewMut, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "gated_delta";
    let cuda = ex.cuda("gated_delta")?;
    let call = DeltaCall {
        prompt_rows: args.prompt_rows,
        heads: args.heads,
        dtype: args.dtype,
        aligned: aligned(&[args.mixed, states.as_view(), out.as_view()]),
    };
    let form = DeltaForm::choose(&call, &ex.machine()).unwrap_or(DeltaForm::Rows);
    let chunks = call.chunks(args.mixed.rows());
    let mut workspace = match form {
        DeltaForm::Chunks => Some(ex.scratch(DType::U8, &[chunks, call.chunk_bytes()])?),
        DeltaForm::Rows => None,
    };
    let mut workspace = workspace.as_mut().map(|scratch| scratch.view_mut());
    ex.launched(|| form.name());
    let raw = GatedDeltaArgs {
        mixed: cuda.read(op, "mixed", args.mixed)?,
        projected: cuda.read(op, "projected", args.projected)?,
        a_log: cuda.read(op, "a_log", args.a_log)?,
        dt_bias: cuda.read(op, "dt_bias", args.dt_bias)?,
        query_start_loc: cuda.read(op, "query_start_loc", args.rows.query_start_loc)?,
        positions: cuda.read(op, "positions", args.rows.positions)?,
        numbers: cuda.read(op, "numbers of states", args.rows.states)?,
        tokens: small(op, args.mixed.rows())?,
        sequences: small(op, args.rows.states.elem_count())?,
        num_states: small(op, states.dims()[0])?,
        key_heads: small(op, args.heads.key_heads)?,
        value_heads: small(op, args.heads.value_heads)?,
        key_dim: small(op, args.heads.key_dim)?,
        value_dim: small(op, args.heads.value_dim)?,
        states: cuda.write(op, "states", &mut states)?,
        out: cuda.write(op, "out", &mut out)?,
        workspace: cuda.write_or_null(op, "workspace", workspace.as_mut())?,
        chunks: small(op, chunks)?,
    };
    // SAFETY: see above; the workspace has room for the operands of as many chunks.
    cuda.check(op, unsafe {
        match form {
            DeltaForm::Chunks => ffi::moe_gated_delta_chunks(&raw, cuda.raw()?),
            DeltaForm::Rows => ffi::moe_gated_delta(&raw, cuda.raw()?),
        }
    })
}

/// See [`crate::gated_rms_norm_into`].
pub(crate) fn gated_rms_norm(args: &GatedRmsNorm, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "gated_rms_norm";
    let cuda = ex.cuda("gated_rms_norm")?;
    let heads = args.heads;
    let projected: *const f32 = cuda.read(op, "projected", args.projected)?;
    let raw = GatedNormArgs {
        x: cuda.read(op, "x", args.x)?,
        // z follows the channels of the convolution in a row.
        z: projected.wrapping_add(heads.channels()).cast(),
        weight: cuda.read(op, "weight", args.weight)?,
        dtype: Dtype::of(op, out.dtype())?,
        rows: small(op, args.x.rows())?,
        heads: small(op, heads.value_heads)?,
        dim: small(op, heads.value_dim)?,
        stride: small(op, heads.projected())?,
        eps: args.eps,
        out: cuda.write(op, "out", &mut out)?,
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_gated_rms_norm(&raw, cuda.raw()?) })
}
