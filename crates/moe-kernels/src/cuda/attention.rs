//! Attention over the paged KV cache on CUDA, from the rows of q, k and v: what goes into the cache, decoding rows, and
//! steps of decoding rows and prompts.

mod gates;
mod paged;

use std::ptr::null;

use candle_core::{DType, Result};

use self::gates::{gate_row, scale_by_gates};
use self::paged::{Inputs, PagedLaunch, attend};
pub(crate) use self::paged::{latent_values, paged_attention};
use super::args::{AttentionDecodeArgs, Dtype, QkNormRopeArgs};
use super::fp8::Fp8Place;
use super::{aligned, any, ffi, small};
use crate::exec::Exec;
use crate::fp8::FP8_GROUP;
use crate::operands::{AttentionMeta, QkNormRope, StepRows};
use crate::plan::{AttentionCall, AttentionForm, Feature, Form, MAX_ROWS, MixedCall, MixedForm};
use crate::rows_view::RowsViewMut;
use crate::view::{View, ViewMut};

/// See [`crate::qk_norm_rope_cache_into`].
pub(crate) fn qk_norm_rope_cache(
    args: &QkNormRope,
    mut q_out: ViewMut,
    mut k_cache: ViewMut,
    mut v_cache: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let op = "qk_norm_rope_cache";
    let cuda = ex.cuda("qk_norm_rope_cache")?;
    let views = [k_cache.as_view(), v_cache.as_view(), q_out.as_view()];
    let call = call(args, false, k_cache.as_view(), aligned(&views) && rows_are_aligned(args));
    let dtypes = args.qkv.dtype() == DType::F32 && q_out.dtype() == DType::BF16;
    let fast =
        dtypes && args.qkv.rows() <= MAX_ROWS && AttentionForm::Prefill.fits(&call, &ex.machine()).is_ok();
    let block_size = k_cache.dims()[2];
    let blocks = k_cache.rows();
    let raw = QkNormRopeArgs {
        qkv: cuda.read(op, "qkv", args.qkv)?,
        q_norm: cuda.read_or_null(op, "q_norm", args.q_norm)?,
        k_norm: cuda.read_or_null(op, "k_norm", args.k_norm)?,
        eps: args.eps,
        cos: cuda.read(op, "cos", args.cos)?,
        sin: cuda.read(op, "sin", args.sin)?,
        angle_index: null(),
        slots: cuda.read(op, "slot_mapping", args.slot_mapping)?,
        dtype: Dtype::of(op, k_cache.dtype())?,
        stream_dtype: Dtype::of(op, args.qkv.dtype())?,
        q_dtype: Dtype::of(op, q_out.dtype())?,
        norm_dtype: Dtype::of(op, norm_dtype(args, k_cache.dtype()))?,
        q_out: cuda.write(op, "q_out", &mut q_out)?,
        k_cache: cuda.write(op, "k_cache", &mut k_cache)?,
        v_cache: cuda.write(op, "v_cache", &mut v_cache)?,
        tokens: small(op, args.qkv.rows())?,
        heads: small(op, args.num_heads)?,
        kv_heads: small(op, args.num_kv_heads)?,
        head_dim: small(op, args.head_dim)?,
        block_size: small(op, block_size)?,
        qkv_row: small(op, args.qkv.dims()[1])?,
        num_slots: any::count(op, blocks * block_size)?,
    };
    let launch = if fast { ffi::moe_qk_norm_rope_cache } else { ffi::moe_any_qk_norm_rope_cache };
    // SAFETY: the op has checked dims and dtypes, `fast` the conditions of the fast launcher; neither writes to slots
    // beyond the cache.
    cuda.check(op, unsafe { launch(&raw, cuda.raw()?) })
}

/// The dtype of the norms of q and k: the model's, or f32.
fn norm_dtype(args: &QkNormRope, model: DType) -> DType {
    args.q_norm.or(args.k_norm).map_or(model, |norm| norm.dtype())
}

/// Whether everything that is read before the cache is written begins at multiples of 16 bytes.
fn rows_are_aligned(args: &QkNormRope) -> bool {
    let mut norms = [args.q_norm, args.k_norm].into_iter().flatten();
    aligned(&[args.qkv, args.cos, args.sin]) && norms.all(|norm| aligned(&[norm]))
}

fn call(args: &QkNormRope, one_row_each: bool, k_cache: View, aligned: bool) -> AttentionCall {
    let QkNormRope { num_heads, head_dim, .. } = *args;
    let dtype = k_cache.dtype();
    let block_size = Some(k_cache.dims()[2]);
    AttentionCall {
        rows: args.qkv.rows(),
        one_row_each,
        num_heads,
        head_dim,
        value_dim: head_dim,
        latent: false,
        sinks: false,
        gates: false,
        dtype,
        block_size,
        aligned,
    }
}

/// Whether one launch does everything for the first rows of a step ([`decode_attention`]).
pub(crate) fn is_one_launch(args: &QkNormRope, decode_rows: usize, k_cache: View, ex: &Exec) -> bool {
    ex.is_cuda()
        && args.qkv.dtype() == DType::F32
        && AttentionForm::choose(&decode_call(args, decode_rows, k_cache), &ex.machine())
            == Some(AttentionForm::Decode)
}

/// The call of `rows` decoding rows.
fn decode_call(args: &QkNormRope, rows: usize, k_cache: View) -> AttentionCall {
    AttentionCall { rows, ..call(args, true, k_cache, aligned(&[k_cache]) && rows_are_aligned(args)) }
}

/// Attention of a step whose first rows decode, one row per sequence. One launch computes these rows, and other
/// launches the rows of prompts after them.
pub(crate) fn decode_then_prompts(
    args: &QkNormRope,
    meta: &AttentionMeta,
    step: StepRows,
    mut k_cache: ViewMut,
    mut v_cache: ViewMut,
    mut out: RowsViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let decode_rows = step.decode;
    let rows = args.qkv.rows();
    let sequences = meta.block_tables.rows();
    let decode_args = args.narrow(0, decode_rows)?;
    let decode = AttentionMeta {
        positions: meta.positions.narrow(0, decode_rows)?,
        block_tables: meta.block_tables.narrow(0, decode_rows)?,
        gates: meta.gates.map(|gates| gates.narrow(0, decode_rows)).transpose()?,
        ..*meta
    };
    let prompt_rows = rows - decode_rows;
    let prompts = sequences - decode_rows;
    let mixed = MixedCall {
        decode: AttentionCall {
            gates: meta.gates.is_some(),
            ..decode_call(args, decode_rows, k_cache.as_view())
        },
        num_kv_heads: args.num_kv_heads,
        prompts: AttentionCall {
            rows: prompt_rows,
            gates: meta.gates.is_some(),
            aligned: aligned(&[k_cache.as_view(), v_cache.as_view()]) && out.is_aligned(),
            ..call(args, false, k_cache.as_view(), true)
        },
        decode_scores: step.decode_scores,
        prompt_scores: step.prompt_scores,
    };
    let form = match prompt_rows {
        0 => MixedForm::Apart,
        _ => MixedForm::choose(&mixed, &ex.machine()).unwrap_or(MixedForm::Apart),
    };
    if form == MixedForm::Apart && decode_rows > 0 {
        let caches = [k_cache.reborrow(), v_cache.reborrow()];
        decode_attention(&decode_args, &decode, caches, out.first(decode_rows)?, &mixed, form, ex)?;
    }
    if prompt_rows == 0 {
        return Ok(());
    }
    // Row numbers in query_start_loc count from the step's first row, so q, positions and out stay whole.
    let prompt = AttentionMeta {
        query_start_loc: meta.query_start_loc.narrow(decode_rows, prompts + 1)?,
        block_tables: meta.block_tables.narrow(decode_rows, prompts)?,
        ..*meta
    };
    let mut q = ex.scratch(k_cache.dtype(), &[rows, args.num_heads, args.head_dim])?;
    let q_out = q.view_mut().narrow(decode_rows, prompt_rows)?;
    let k = k_cache.reborrow();
    let v = v_cache.reborrow();
    qk_norm_rope_cache(&args.narrow(decode_rows, prompt_rows)?, q_out, k, v, ex)?;
    let blocks = match form {
        MixedForm::Overlapped => {
            small("rope_attention", MixedCall::prompt_sms(ex.cuda("rope_attention")?.gpu.sms))?
        }
        MixedForm::Apart => 0,
    };
    let k = k_cache.as_view();
    let v = v_cache.as_view();
    let inputs = Inputs { q: q.view(), k_cache: k, v_cache: v, meta: &prompt, first: decode_rows };
    attend(inputs, out.first(rows)?, PagedLaunch::Attention { blocks }, ex)?;
    if form == MixedForm::Overlapped {
        let out = out.first(decode_rows)?;
        decode_attention(&decode_args, &decode, [k_cache, v_cache], out, &mixed, form, ex)?;
    }
    Ok(())
}

/// Head norm, rotation, cache write and attention of one new token per sequence, in one launch. With
/// [`MixedForm::Overlapped`] it runs at the same time as the launch before it, which computes the prompts of `mixed`.
fn decode_attention(
    args: &QkNormRope,
    meta: &AttentionMeta,
    [mut k_cache, mut v_cache]: [ViewMut; 2],
    mut out: RowsViewMut,
    mixed: &MixedCall,
    form: MixedForm,
    ex: &Exec,
) -> Result<()> {
    let op = "decode_attention";
    let cuda = ex.cuda("decode_attention")?;
    ex.launched(|| AttentionForm::Decode.name());
    let rows = small(op, args.qkv.rows())?;
    let heads = small(op, args.num_heads)?;
    let kv_heads = small(op, args.num_kv_heads)?;
    let head_dim = small(op, args.head_dim)?;
    let sms = small(op, cuda.gpu.sms)?;
    // The blocks of a cluster merge splits, so only cards with clusters can have several.
    let splits = match cuda.gpu.has(Feature::Clusters) {
        true => {
            // SAFETY: a pure function of numbers.
            let splits = unsafe { ffi::moe_attention_decode_splits(rows, heads, kv_heads, sms) };
            small(op, mixed.decode_splits(form, splits as usize))?
        }
        false => 1,
    };
    // SAFETY: a pure function of numbers.
    let bytes = unsafe { ffi::moe_attention_decode_workspace(rows, heads, kv_heads, head_dim, splits) };
    let workspace = cuda.counters("decode_attention", bytes.div_ceil(4))?;
    let blocks = k_cache.rows();
    let block_size = k_cache.dims()[2];
    let norms = norm_dtype(args, k_cache.dtype());
    let qkv_row = args.qkv.dims()[1];
    let holds_gates = AttentionForm::Decode.holds_gates(&mixed.decode);
    let held = meta.gates.filter(|_| holds_gates);
    let (place, fp8) = out.place(op, cuda)?;
    let args = AttentionDecodeArgs {
        qkv: cuda.read(op, "qkv", args.qkv)?,
        q_norm: cuda.read_or_null(op, "q_norm", args.q_norm)?,
        k_norm: cuda.read_or_null(op, "k_norm", args.k_norm)?,
        eps: args.eps,
        cos: cuda.read(op, "cos", args.cos)?,
        sin: cuda.read(op, "sin", args.sin)?,
        angle_index: null(),
        slots: cuda.read(op, "slot_mapping", args.slot_mapping)?,
        positions: cuda.read(op, "positions", meta.positions)?,
        block_tables: cuda.read(op, "block_tables", meta.block_tables)?,
        max_blocks: small(op, meta.block_tables.dims()[1])?,
        k_cache: cuda.write(op, "k_cache", &mut k_cache)?,
        v_cache: cuda.write(op, "v_cache", &mut v_cache)?,
        out: place,
        workspace,
        rows,
        heads,
        kv_heads,
        head_dim,
        block_size: small(op, block_size)?,
        scale: meta.scale,
        window: meta.window_i32(),
        splits,
        num_slots: any::count(op, blocks * block_size)?,
        norm_dtype: Dtype::of(op, norms)?,
        qkv_row: small(op, qkv_row)?,
        sinks: cuda.read_or_null(op, "sinks", meta.sinks)?,
        gates: cuda.read_or_null(op, "gates", held)?,
        gate_row: gate_row(op, held)?,
    };
    let overlapped = i32::from(form == MixedForm::Overlapped);
    // SAFETY: the op has checked dims and dtypes; `is_one_launch` and, for FP8, `leaves_fp8` are the launchers'
    // conditions. Slots beyond the cache are not written; what is read is the contract of `AttentionMeta`. The launch
    // that may run at the same time writes only rows of prompts.
    cuda.check(op, unsafe {
        match fp8 {
            None => ffi::moe_attention_decode_overlapped(&args, overlapped, cuda.raw()?),
            Some(Fp8Place { scales, lines, quads, .. }) => {
                ffi::moe_attention_decode_fp8(&args, overlapped, scales, lines, quads, cuda.raw()?)
            }
        }
    })?;
    match meta.gates {
        Some(gates) if !holds_gates => scale_by_gates(op, gates, out, 0, ex),
        _ => Ok(()),
    }
}

/// Whether the launches of a step with `decode_rows` decoding rows leave their rows in FP8: with heads whose columns
/// share a scale.
pub(crate) fn leaves_fp8(args: &QkNormRope, decode_rows: usize, k_cache: View, ex: &Exec) -> bool {
    let prompts = AttentionCall {
        rows: args.qkv.rows() - decode_rows.min(args.qkv.rows()),
        ..call(args, false, k_cache, aligned(&[k_cache]) && rows_are_aligned(args))
    };
    args.head_dim == FP8_GROUP
        && (decode_rows == 0 || is_one_launch(args, decode_rows, k_cache, ex))
        && (prompts.rows == 0 || AttentionForm::choose(&prompts, &ex.machine()) == Some(AttentionForm::Wgmma))
}
