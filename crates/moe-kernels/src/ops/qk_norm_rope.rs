//! Head norm, rotary embedding and cache write of one attention layer, in one pass.

use candle_core::{DType, Result, bail};

use super::attention::paged_attention_into;
#[cfg(feature = "cuda")]
use super::attention::{check_heads, check_meta};
use crate::arguments::{expect, expect_cache, expect_dims, expect_dtype, expect_optional, expect_stream};
use crate::cpu::parallel::for_each;
use crate::cpu::rope::{NO_SLOT, RopeCache};
use crate::cpu::shared::Shared;
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::operands::{AttentionMeta, QkNormRope, StepRows};
#[cfg(feature = "cuda")]
use crate::rows_view::Fp8Rows;
use crate::rows_view::RowsViewMut;
use crate::view::{View, ViewMut};
use crate::with_float;

/// Normalises q and k by head (if weights are given), rotates them (rotate-half RoPE, Su et al.
/// 2021, in the GPT-NeoX layout), writes q to `q_out` and k, v to their cache slots. Arithmetic
/// is f32 with one rounding. If two rows name one slot, the later row wins.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`QkNormRope`] |
/// | `q_out` | [T, Hq, D] dtype of `qkv`; on CUDA also the model dtype |
/// | `k_cache`, `v_cache` | [num_blocks, Hkv, block_size, D] model dtype (f32, bf16, f16) |
///
/// # Errors
/// A wrong dtype or wrong dims; an odd head size; a slot beyond the cache, which on CUDA is not written.
pub fn qk_norm_rope_cache_into(
    args: &QkNormRope,
    q_out: ViewMut,
    k_cache: ViewMut,
    v_cache: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "qk_norm_rope_cache";
    let num_slots = check(op, args, &k_cache, &v_cache)?;
    expect_dims(op, "q_out", &q_out, &[args.qkv.rows(), args.num_heads, args.head_dim])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        expect_stream(op, "q_out", &q_out, k_cache.dtype())?;
        return crate::cuda::attention::qk_norm_rope_cache(args, q_out, k_cache, v_cache, ex);
    }
    expect_dtype(op, "q_out", &q_out, args.qkv.dtype())?;
    let slots = args.slot_mapping.cpu::<u32>()?;
    let bad = |slot: u32| slot != NO_SLOT && slot as usize >= num_slots;
    if let Some((i, slot)) = slots.iter().enumerate().find(|(_, slot)| bad(**slot)) {
        bail!("{op}: slot_mapping[{i}] is {slot}; the cache holds {num_slots} slots")
    }
    let norms = args.q_norm.or(args.k_norm).map_or(k_cache.dtype(), |norm| norm.dtype());
    with_float!(k_cache.dtype(), op, T => match (args.qkv.dtype(), norms) {
        (DType::F32, DType::F32) => run::<T, f32, f32>(args, slots, q_out, k_cache, v_cache, ex),
        (DType::F32, _) => run::<T, f32, T>(args, slots, q_out, k_cache, v_cache, ex),
        (_, DType::F32) => run::<T, T, f32>(args, slots, q_out, k_cache, v_cache, ex),
        _ => run::<T, T, T>(args, slots, q_out, k_cache, v_cache, ex),
    })
}

/// Checks dims and dtypes; returns the number of slots of the cache.
fn check(op: &str, args: &QkNormRope, k_cache: &ViewMut, v_cache: &ViewMut) -> Result<usize> {
    let hq = args.num_heads;
    let hkv = args.num_kv_heads;
    let d = args.head_dim;
    if d == 0 || !d.is_multiple_of(2) {
        bail!("{op}: expected an even head_dim above 0, got {d}")
    }
    let dtype = k_cache.dtype();
    expect_stream(op, "qkv", &args.qkv, dtype)?;
    let t = args.qkv.rows();
    let width = |heads: usize| {
        let all = hkv.checked_mul(2).and_then(|n| n.checked_add(heads));
        all.and_then(|n| n.checked_mul(d))
    };
    let Some(without) = width(hq) else { bail!("{op}: {hq} + 2 * {hkv} heads of size {d} overflow") };
    let with_gates = hq.checked_mul(2).and_then(width);
    let held = args.qkv.dims().get(1).copied().filter(|held| with_gates == Some(*held));
    expect_dims(op, "qkv", &args.qkv, &[t, held.unwrap_or(without)])?;
    let in_f32 = args.q_norm.is_some_and(|norm| norm.dtype() == DType::F32);
    let norms = if in_f32 { DType::F32 } else { dtype };
    for (name, weight) in [("q_norm", &args.q_norm), ("k_norm", &args.k_norm)] {
        expect_optional(op, name, weight.as_ref(), norms, &[d])?;
    }
    for (name, table) in [("cos", &args.cos), ("sin", &args.sin)] {
        expect(op, name, table, DType::F32, &[t, d / 2])?;
    }
    let num_slots = expect_cache(op, "k_cache", k_cache, hkv, d)?;
    expect(op, "v_cache", v_cache, dtype, k_cache.dims())?;
    expect(op, "slot_mapping", &args.slot_mapping, DType::U32, &[t])?;
    Ok(num_slots)
}

/// [`qk_norm_rope_cache_into`], then [`paged_attention_into`]: the attention of a layer between its two products. In
/// the first `rows` rows of the step each row may be the only new row of its sequence. On CUDA a separate launch does
/// everything for these rows, if there is one ([`AttentionForm::Decode`](crate::plan::AttentionForm::Decode)). Prompts
/// in the same step use the other launches, at the same time if that is faster ([`MixedForm`](crate::plan::MixedForm)).
///
/// `out` is [T, Hq · D] in the model dtype, or quantised for the product that follows. The same launches quantise it if
/// a head has 128 columns with one scale; otherwise a separate launch does. The other arguments are the arguments of
/// the two ops.
///
/// # Errors
/// The errors of the two ops.
pub fn rope_attention_into<'o>(
    args: &QkNormRope,
    meta: &AttentionMeta,
    rows: StepRows,
    k_cache: ViewMut,
    v_cache: ViewMut,
    out: impl Into<RowsViewMut<'o>>,
    ex: &mut Exec,
) -> Result<()> {
    match out.into() {
        RowsViewMut::Floats(out) => rope_attention(args, meta, rows, [k_cache, v_cache], out, ex),
        #[cfg(feature = "cuda")]
        RowsViewMut::Fp8(out) => rope_attention_fp8(args, meta, rows, [k_cache, v_cache], out, ex),
        #[cfg(not(feature = "cuda"))]
        out => out.floats("rope_attention").map(drop),
    }
}

/// [`rope_attention`] with an output in FP8.
#[cfg(feature = "cuda")]
fn rope_attention_fp8(
    args: &QkNormRope,
    meta: &AttentionMeta,
    rows: StepRows,
    caches: [ViewMut; 2],
    out: &mut Fp8Rows,
    ex: &mut Exec,
) -> Result<()> {
    let op = "rope_attention";
    let [k_cache, v_cache] = caches;
    let dims = [args.qkv.rows(), args.num_heads * args.head_dim];
    if out.dims() != dims {
        bail!("{op}: expected out {dims:?} in FP8, got {:?}", out.dims())
    }
    let gated = meta.gates.is_some(); // gates multiply floats
    if !gated && crate::cuda::attention::leaves_fp8(args, rows.decode, k_cache.as_view(), ex) {
        check(op, args, &k_cache, &v_cache)?;
        check_meta(op, meta, dims[0])?;
        check_heads(op, meta, dims, args.num_heads)?;
        return crate::cuda::attention::decode_then_prompts(
            args,
            meta,
            rows,
            k_cache,
            v_cache,
            RowsViewMut::Fp8(out),
            ex,
        );
    }
    let mut floats = ex.scratch(k_cache.dtype(), &dims)?;
    rope_attention(args, meta, rows, [k_cache, v_cache], floats.view_mut(), ex)?;
    crate::cuda::quantise_rows_into(floats.view(), out, ex)
}

fn rope_attention(
    args: &QkNormRope,
    meta: &AttentionMeta,
    rows: StepRows,
    [mut k_cache, mut v_cache]: [ViewMut; 2],
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let t = args.qkv.rows();
    let heads = args.num_heads;
    let d = args.head_dim;
    let model = k_cache.dtype();
    #[cfg(feature = "cuda")]
    if rows.decode > 0 && crate::cuda::attention::is_one_launch(args, rows.decode, k_cache.as_view(), ex) {
        let op = "rope_attention";
        let sequences = meta.block_tables.rows();
        check(op, args, &k_cache, &v_cache)?;
        check_meta(op, meta, t)?;
        check_heads(op, meta, [t, heads * d], heads)?;
        if rows.decode > t.min(sequences) {
            let got = rows.decode;
            bail!("{op}: expected at most {t} rows and {sequences} sequences to decode, got {got}")
        }
        expect(op, "out", &out, model, &[t, heads * d])?;
        return crate::cuda::attention::decode_then_prompts(
            args,
            meta,
            rows,
            k_cache,
            v_cache,
            out.into(),
            ex,
        );
    }
    let _ = rows;
    // The CPU never rounds q. CUDA rounds it when it becomes an operand of the tensor cores.
    let q_dtype = if ex.is_cuda() { model } else { args.qkv.dtype() };
    let mut q = ex.scratch(q_dtype, &[t, heads, d])?;
    qk_norm_rope_cache_into(args, q.view_mut(), k_cache.reborrow(), v_cache.reborrow(), ex)?;
    paged_attention_into(q.view(), k_cache.as_view(), v_cache.as_view(), meta, out, ex)
}

fn run<'a, T: Lanes, S: Lanes, W: Lanes>(
    args: &QkNormRope<'a>,
    slots: &[u32],
    mut q_out: ViewMut,
    mut k_cache: ViewMut,
    mut v_cache: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let weight = |view: Option<View<'a>>| view.map(|w| w.cpu::<W>()).transpose();
    let rope = RopeCache {
        isa: ex.isa(),
        heads: (args.num_heads, args.num_kv_heads, args.head_dim),
        block_size: k_cache.dims()[2],
        qkv: args.qkv.cpu::<S>()?,
        qkv_row: args.qkv.dims()[1],
        norms: (weight(args.q_norm)?, weight(args.k_norm)?),
        eps: args.eps,
        angles: (args.cos.cpu()?, args.sin.cpu()?),
        slots,
        q_out: Shared::new(q_out.cpu_mut::<S>()?),
        k_cache: Shared::new(k_cache.cpu_mut::<T>()?),
        v_cache: Shared::new(v_cache.cpu_mut::<T>()?),
    };
    let heads = args.num_heads + args.num_kv_heads;
    for_each(ex, heads, rope.qkv.len(), |head| rope.head(head));
    Ok(())
}
