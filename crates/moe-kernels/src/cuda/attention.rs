//! Attention over the paged KV cache on CUDA.

use candle_core::{DType, Result};

use super::{aligned, any, ffi, small};
use crate::exec::Exec;
use crate::ops::{AttentionMeta, QkNormRope};
use crate::view::{View, ViewMut};

/// Most rows of a grid.
const MAX_ROWS: usize = 65_535;

fn head_dim_fits(head_dim: usize) -> bool {
    matches!(head_dim, 64 | 128)
}

/// See [`crate::qk_norm_rope_cache_into`].
pub(crate) fn qk_norm_rope_cache(
    args: &QkNormRope,
    mut q_out: ViewMut,
    mut k_cache: ViewMut,
    mut v_cache: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("qk_norm_rope_cache", ex.cuda("qk_norm_rope_cache")?);
    let bf16 = k_cache.dtype() == DType::BF16 && args.qkv.dtype() == DType::F32;
    let fits = bf16 && q_out.dtype() == DType::BF16 && head_dim_fits(args.head_dim) && args.num_heads > 0;
    let caches = [k_cache.as_view(), v_cache.as_view(), q_out.as_view()];
    if !fits || args.qkv.rows() > MAX_ROWS || !aligned(&caches) || !aligned(&[args.qkv, args.cos, args.sin]) {
        return any::qk_norm_rope_cache(cuda, op, args, q_out, k_cache, v_cache);
    }
    let block_size = small(op, k_cache.dims()[2])?;
    // SAFETY: the door has checked dims and dtypes; the launcher's conditions are checked above.
    let code = unsafe {
        ffi::moe_qk_norm_rope_cache(
            cuda.read(op, "qkv", args.qkv)?,
            cuda.read_or_null(op, "q_norm", args.q_norm)?,
            cuda.read_or_null(op, "k_norm", args.k_norm)?,
            args.eps,
            cuda.read(op, "cos", args.cos)?,
            cuda.read(op, "sin", args.sin)?,
            std::ptr::null(),
            cuda.read(op, "slot_mapping", args.slot_mapping)?,
            cuda.write(op, "q_out", &mut q_out)?,
            cuda.write(op, "k_cache", &mut k_cache)?,
            cuda.write(op, "v_cache", &mut v_cache)?,
            small(op, args.qkv.rows())?,
            small(op, args.num_heads)?,
            small(op, args.num_kv_heads)?,
            small(op, args.head_dim)?,
            block_size,
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

/// See [`crate::paged_attention_into`].
pub(crate) fn paged_attention(
    q: View,
    k_cache: View,
    v_cache: View,
    meta: &AttentionMeta,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("paged_attention", ex.cuda("paged_attention")?);
    let (heads, head_dim) = (q.dims()[1], q.dims()[2]);
    let bf16 = k_cache.dtype() == DType::BF16 && q.dtype() == DType::BF16;
    if !bf16 || !head_dim_fits(head_dim) || !aligned(&[q, k_cache, v_cache, out.as_view()]) {
        return any::paged_attention(ex, op, q, k_cache, v_cache, meta, out);
    }
    let tables = meta.block_tables.dims();
    // SAFETY: the door has checked dims and dtypes; the launcher's conditions are checked above.
    let code = unsafe {
        ffi::moe_attention_prefill(
            cuda.read(op, "q", q)?,
            cuda.read(op, "k_cache", k_cache)?,
            cuda.read(op, "v_cache", v_cache)?,
            cuda.read(op, "query_start_loc", meta.query_start_loc)?,
            cuda.read(op, "positions", meta.positions)?,
            cuda.read(op, "block_tables", meta.block_tables)?,
            small(op, tables[1])?,
            cuda.write(op, "out", &mut out)?,
            small(op, q.rows())?,
            small(op, tables[0])?,
            small(op, heads)?,
            small(op, k_cache.dims()[1])?,
            small(op, head_dim)?,
            small(op, k_cache.dims()[2])?,
            meta.scale,
            small(op, meta.sliding_window.unwrap_or(0))?,
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

/// Whether [`decode_attention`] fits. Its bits are not those of the same rows in a prompt, and depend on how
/// many blocks share a sequence.
pub(crate) fn decode_fits(args: &QkNormRope, k_cache: View, ex: &Exec) -> bool {
    let bf16 = k_cache.dtype() == DType::BF16 && args.qkv.dtype() == DType::F32;
    let fits = bf16 && head_dim_fits(args.head_dim) && args.num_heads > 0 && args.qkv.rows() <= MAX_ROWS;
    ex.is_cuda() && !ex.batch_invariant() && fits && aligned(&[args.qkv, args.cos, args.sin, k_cache])
}

/// Head norm, rotation, cache write and attention of one new token per sequence, in one launch.
pub(crate) fn decode_attention(
    args: &QkNormRope,
    meta: &AttentionMeta,
    mut k_cache: ViewMut,
    mut v_cache: ViewMut,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("decode_attention", ex.cuda("decode_attention")?);
    let (rows, heads) = (small(op, args.qkv.rows())?, small(op, args.num_heads)?);
    let (kv_heads, head_dim) = (small(op, args.num_kv_heads)?, small(op, args.head_dim)?);
    let sms = small(op, cuda.sms)?;
    // SAFETY: pure functions of numbers.
    let (splits, bytes) = unsafe {
        let splits = match cuda.major {
            9.. => ffi::moe_attention_decode_splits(rows, heads, kv_heads, sms),
            _ => 1,
        };
        (splits, ffi::moe_attention_decode_workspace(rows, heads, kv_heads, head_dim, splits))
    };
    let workspace = cuda.counters("decode_attention", bytes.div_ceil(4))?;
    let block_size = small(op, k_cache.dims()[2])?;
    // SAFETY: the door has checked dims and dtypes; `decode_fits` is the launcher's condition.
    let code = unsafe {
        ffi::moe_attention_decode(
            cuda.read(op, "qkv", args.qkv)?,
            cuda.read_or_null(op, "q_norm", args.q_norm)?,
            cuda.read_or_null(op, "k_norm", args.k_norm)?,
            args.eps,
            cuda.read(op, "cos", args.cos)?,
            cuda.read(op, "sin", args.sin)?,
            std::ptr::null(),
            cuda.read(op, "slot_mapping", args.slot_mapping)?,
            cuda.read(op, "positions", meta.positions)?,
            cuda.read(op, "block_tables", meta.block_tables)?,
            small(op, meta.block_tables.dims()[1])?,
            cuda.write(op, "k_cache", &mut k_cache)?,
            cuda.write(op, "v_cache", &mut v_cache)?,
            cuda.write(op, "out", &mut out)?,
            workspace,
            rows,
            heads,
            kv_heads,
            head_dim,
            block_size,
            meta.scale,
            small(op, meta.sliding_window.unwrap_or(0))?,
            splits,
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}
