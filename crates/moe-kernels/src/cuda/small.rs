//! The sub-layers of a decode step of a few tokens, each with its norm before and the addition to the
//! residual stream after it in the same launch (docs/kernels.md).

use std::ffi::c_void;

use candle_core::{DType, Result, bail};

use super::args::{LayerStreamArgs, LinearStreamArgs, Output};
use super::router::check_gate;
use super::{Gate, ffi, small};
use crate::door::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Most tokens of such a step.
const MAX_TOKENS: usize = 4;
/// Width up to which the rows of a linear layer fit beside the weights' ring in shared memory.
const MAX_HIDDEN: usize = 4096;

/// RMS norm before a sub-layer.
#[derive(Clone, Copy, Debug)]
pub struct PreNorm<'a> {
    /// \[H\] bf16.
    pub weight: View<'a>,
    /// Epsilon.
    pub eps: f32,
}

impl PreNorm<'_> {
    pub(super) fn check(&self, op: &str, hidden: usize) -> Result<()> {
        expect_dims(op, "norm", &self.weight, &[hidden])?;
        expect_dtype(op, "norm", &self.weight, DType::BF16)
    }
}

/// Whether [`norm_linear_into`] and [`linear_add_into`] fit products of this depth.
pub fn small_linear_fits(tokens: usize, k: usize, dtype: DType, ex: &Exec) -> bool {
    let depth = k > 0 && k.is_multiple_of(64) && k <= 2 * MAX_HIDDEN;
    may_fuse(ex) && dtype == DType::BF16 && tokens <= MAX_TOKENS && depth
}

/// Whether [`norm_experts_add_into`] fits.
pub fn small_experts_fit(
    tokens: usize,
    (experts, top_k): (usize, usize),
    (hidden, inter): (usize, usize),
    ex: &Exec,
) -> bool {
    let sizes = [tokens, hidden, inter, experts, experts, top_k].map(i32::try_from);
    let [Ok(t), Ok(h), Ok(i), Ok(e), Ok(local), Ok(k)] = sizes else { return false };
    // SAFETY: a pure function of numbers and the device.
    may_fuse(ex) && unsafe { ffi::moe_layer_stream_fits(t, h, i, e, local, k) } == 1
}

/// Whether these launches may be used: on Hopper, unless a row's bits must not depend on the number of rows.
fn may_fuse(ex: &Exec) -> bool {
    !ex.batch_invariant() && ex.cuda("small").is_ok_and(|cuda| cuda.major >= 9)
}

/// out [T, N] f32 = norm(residual [T, H] f32) · wᵀ + bias, w [N, H] bf16.
///
/// # Errors
/// A CPU context; wrong dims or dtypes; sizes that [`small_linear_fits`] refuses.
pub fn norm_linear_into(
    residual: View,
    norm: &PreNorm,
    w: View,
    bias: Option<View>,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "norm_linear";
    let (t, h) = expect_matrix(op, "residual", &residual)?;
    expect_dtype(op, "residual", &residual, DType::F32)?;
    norm.check(op, h)?;
    let n = check_linear(op, w, bias, h)?;
    expect_dims(op, "out", &out, &[t, n])?;
    expect_dtype(op, "out", &out, DType::F32)?;
    let cuda = ex.cuda(op)?;
    // SAFETY: dims and dtypes are checked above; the launcher refuses sizes that do not fit it.
    let code = unsafe {
        ffi::moe_linear_stream(
            &LinearStreamArgs {
                x: cuda.read(op, "residual", residual)?,
                norm: cuda.read(op, "norm", norm.weight)?,
                eps: norm.eps,
                w: cuda.read(op, "w", w)?,
                bias: cuda.read_or_null(op, "bias", bias)?,
                out: cuda.write(op, "out", &mut out)?,
                output: Output::F32,
                m: small(op, t)?,
                n: small(op, n)?,
                k: small(op, h)?,
            },
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

/// residual [T, N] f32 += x [T, K] · wᵀ + bias, x and w [N, K] bf16.
///
/// # Errors
/// As [`norm_linear_into`].
pub fn linear_add_into(
    x: View,
    w: View,
    bias: Option<View>,
    mut residual: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "linear_add";
    let (t, k) = expect_matrix(op, "x", &x)?;
    expect_dtype(op, "x", &x, DType::BF16)?;
    let n = check_linear(op, w, bias, k)?;
    expect_dims(op, "residual", &residual, &[t, n])?;
    expect_dtype(op, "residual", &residual, DType::F32)?;
    let cuda = ex.cuda(op)?;
    // SAFETY: dims and dtypes are checked above; the launcher refuses sizes that do not fit it.
    let code = unsafe {
        ffi::moe_linear_stream(
            &LinearStreamArgs {
                x: cuda.read(op, "x", x)?,
                norm: std::ptr::null(),
                eps: 0.,
                w: cuda.read(op, "w", w)?,
                bias: cuda.read_or_null(op, "bias", bias)?,
                out: cuda.write(op, "residual", &mut residual)?,
                output: Output::AddF32,
                m: small(op, t)?,
                n: small(op, n)?,
                k: small(op, k)?,
            },
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

/// residual [T, H] f32 += Σ_k weight_k · w2\[e\] (silu(gate) · up) of its norm, with the experts that `gate`
/// chooses: norm, router, experts and combine in one launch. w13 [E, 2I, H], w2 [E, H, I] bf16.
///
/// # Errors
/// A CPU context; wrong dims or dtypes; sizes that [`small_experts_fit`] refuses.
pub fn norm_experts_add_into(
    norm: &PreNorm,
    gate: &Gate,
    top_k: usize,
    (w13, w2): (View, View),
    mut residual: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "norm_experts_add";
    let (_, h) = expect_matrix(op, "residual", &residual)?;
    expect_dtype(op, "residual", &residual, DType::F32)?;
    norm.check(op, h)?;
    let stream: *mut f32 = ex.cuda(op)?.write(op, "residual", &mut residual)?;
    let dims = residual.dims();
    let dims = [dims[0], dims[1]];
    // SAFETY: the kernel may read x where it adds; the view lives on until the launch.
    let x = Rows { at: stream.cast_const().cast(), norm: Some(norm), dims };
    layer_stream(op, x, (gate, top_k), (w13, w2), None, (stream.cast(), Output::AddF32), ex)
}

/// out [T, H] f32 = Σ_k weight_k · w2\[e\] (silu(gate) · up) of x [T, H] bf16, as [`norm_experts_add_into`] has it.
///
/// # Errors
/// As there.
pub(super) fn experts_into(
    x: View,
    gate: &Gate,
    top_k: usize,
    packs: (View, View),
    expert_map: Option<View>,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "experts";
    let (t, h) = expect_matrix(op, "x", &x)?;
    expect_dtype(op, "x", &x, DType::BF16)?;
    expect_dims(op, "out", &out, &[t, h])?;
    expect_dtype(op, "out", &out, DType::F32)?;
    let out = ex.cuda(op)?.write(op, "out", &mut out)?;
    let x = Rows { at: ex.cuda(op)?.read(op, "x", x)?, norm: None, dims: [t, h] };
    layer_stream(op, x, (gate, top_k), packs, expert_map, (out, Output::F32), ex)
}

/// What the one launch reads: bf16 rows, or with a norm f32 ones.
struct Rows<'a> {
    at: *const c_void,
    norm: Option<&'a PreNorm<'a>>,
    dims: [usize; 2],
}

/// The launch.
fn layer_stream(
    op: &str,
    x: Rows,
    (gate, top_k): (&Gate, usize),
    (w13, w2): (View, View),
    expert_map: Option<View>,
    (out, output): (*mut c_void, Output),
    ex: &mut Exec,
) -> Result<()> {
    let [t, h] = x.dims;
    let (e, _) = expect_matrix(op, "gate", &gate.weight)?;
    let (local, _, i) = expect_rank3(op, "w2", &w2)?;
    for (name, view, dims) in [("w13", w13, [local, 2 * i, h]), ("w2", w2, [local, h, i])] {
        expect_dims(op, name, &view, &dims)?;
        expect_dtype(op, name, &view, DType::BF16)?;
    }
    check_gate(op, gate, e, h)?;
    if !small_experts_fit(t, (e, top_k), (h, i), ex) {
        bail!("{op}: the kernel does not fit T = {t}, E = {e}, K = {top_k}, H = {h}, I = {i}")
    }
    let mut ids = ex.scratch(DType::U32, &[t, top_k])?;
    let mut weights = ex.scratch(DType::F32, &[t, top_k])?;
    let cuda = ex.cuda(op)?;
    // SAFETY: a pure function of two numbers.
    let bytes = unsafe { ffi::moe_layer_stream_state(small(op, e)?, small(op, i)?) };
    let state = cuda.counters("layer_stream", bytes.div_ceil(4))?;
    let valid = if gate.padded { cuda.valid_rows()?.cast_const() } else { std::ptr::null() };
    // SAFETY: dims, dtypes and the launcher's conditions are checked above and by the callers.
    let code = unsafe {
        ffi::moe_layer_stream(
            &LayerStreamArgs {
                x: x.at,
                norm: cuda.read_or_null(op, "norm", x.norm.map(|norm| norm.weight))?,
                eps: x.norm.map_or(0.0, |norm| norm.eps),
                gate: cuda.read(op, "gate", gate.weight)?,
                gate_bias: cuda.read_or_null(op, "gate_bias", gate.bias)?,
                correction_bias: cuda.read_or_null(op, "correction_bias", gate.correction_bias)?,
                valid: valid.cast(),
                topk_ids: cuda.write(op, "topk_ids", &mut ids.view_mut())?,
                topk_weights: cuda.write(op, "topk_weights", &mut weights.view_mut())?,
                w13: cuda.read(op, "w13", w13)?,
                w2: cuda.read(op, "w2", w2)?,
                expert_map: cuda.read_or_null(op, "expert_map", expert_map)?,
                out,
                output,
                state,
                tokens: small(op, t)?,
                hidden: small(op, h)?,
                inter: small(op, i)?,
                num_ids: small(op, e)?,
                num_local: small(op, local)?,
                top_k: small(op, top_k)?,
                scoring: gate.scoring,
                raw_logits: i32::from(gate.raw_logits),
                renormalize: i32::from(gate.renormalize),
                scale: gate.scale,
                softcap: gate.softcap.unwrap_or(0.),
            },
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

/// Checks a weight and its bias; the number of outputs.
fn check_linear(op: &str, w: View, bias: Option<View>, k: usize) -> Result<usize> {
    let (n, _) = expect_matrix(op, "w", &w)?;
    expect_dims(op, "w", &w, &[n, k])?;
    expect_dtype(op, "w", &w, DType::BF16)?;
    if let Some(bias) = &bias {
        expect_dims(op, "bias", bias, &[n])?;
        expect_dtype(op, "bias", bias, DType::BF16)?;
    }
    Ok(n)
}
