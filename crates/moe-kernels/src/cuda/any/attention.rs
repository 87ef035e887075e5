//! Head norm, rotary embedding and cache write; paged attention.

use candle_core::Result;

use super::{CudaExec, code, count, ffi, int};
use crate::exec::Exec;
use crate::ops::{AttentionMeta, QkNormRope};
use crate::view::{View, ViewMut};

// SAFETY of every call below: as in `rows`.

pub(crate) fn qk_norm_rope_cache(
    cuda: &CudaExec,
    op: &str,
    args: &QkNormRope,
    mut q_out: ViewMut,
    mut k_cache: ViewMut,
    mut v_cache: ViewMut,
) -> Result<()> {
    let (dtype, stream_dtype) = (code(op, k_cache.dtype())?, code(op, args.qkv.dtype())?);
    let q_dtype = code(op, q_out.dtype())?;
    let (block_size, tokens) = (k_cache.dims()[2], int(op, args.qkv.rows())?);
    let num_slots = count(op, k_cache.rows() * block_size)?;
    let (heads, kv_heads, head_dim) =
        (int(op, args.num_heads)?, int(op, args.num_kv_heads)?, int(op, args.head_dim)?);
    let (block_size, qkv) = (int(op, block_size)?, cuda.read(op, "qkv", args.qkv)?);
    let q_norm = cuda.read_or_null(op, "q_norm", args.q_norm)?;
    let k_norm = cuda.read_or_null(op, "k_norm", args.k_norm)?;
    let (cos, sin) = (cuda.read(op, "cos", args.cos)?, cuda.read(op, "sin", args.sin)?);
    let slots = cuda.read(op, "slot_mapping", args.slot_mapping)?;
    let q_out = cuda.write(op, "q_out", &mut q_out)?;
    let (k, v) = (cuda.write(op, "k_cache", &mut k_cache)?, cuda.write(op, "v_cache", &mut v_cache)?);
    let (index, stream) = (std::ptr::null(), cuda.raw()?);
    // SAFETY: see above; slots beyond the cache are not written.
    cuda.check(op, unsafe {
        ffi::moe_any_qk_norm_rope_cache(
            qkv,
            q_norm,
            k_norm,
            args.eps,
            cos,
            sin,
            index,
            slots,
            q_out,
            k,
            v,
            dtype,
            stream_dtype,
            q_dtype,
            tokens,
            heads,
            kv_heads,
            head_dim,
            block_size,
            num_slots,
            stream,
        )
    })
}

pub(crate) fn paged_attention(
    ex: &Exec,
    op: &str,
    q: View,
    k_cache: View,
    v_cache: View,
    meta: &AttentionMeta,
    mut out: ViewMut,
) -> Result<()> {
    let (cuda, invariant) = (ex.cuda(op)?, i32::from(ex.batch_invariant()));
    let (dtype, q_dtype) = (code(op, k_cache.dtype())?, code(op, q.dtype())?);
    let sizes = |view: &View, i: usize| int(op, view.dims()[i]);
    let (rows, heads, head_dim) = (sizes(&q, 0)?, sizes(&q, 1)?, sizes(&q, 2)?);
    let (num_blocks, kv_heads, block_size) = (sizes(&k_cache, 0)?, sizes(&k_cache, 1)?, sizes(&k_cache, 2)?);
    let (sequences, max_blocks) = (sizes(&meta.block_tables, 0)?, sizes(&meta.block_tables, 1)?);
    // A window beyond what fits sees everything.
    let window = meta.sliding_window.and_then(|n| i32::try_from(n).ok()).unwrap_or(0);
    let (q, out) = (cuda.read(op, "q", q)?, cuda.write(op, "out", &mut out)?);
    let (k, v) = (cuda.read(op, "k_cache", k_cache)?, cuda.read(op, "v_cache", v_cache)?);
    let starts = cuda.read(op, "query_start_loc", meta.query_start_loc)?;
    let positions = cuda.read(op, "positions", meta.positions)?;
    let tables = cuda.read(op, "block_tables", meta.block_tables)?;
    let stream = cuda.raw()?;
    // SAFETY: see above; positions beyond a table and blocks beyond the cache are not read.
    cuda.check(op, unsafe {
        ffi::moe_any_attention(
            q, k, v, starts, positions, tables, out, dtype, q_dtype, rows, sequences, max_blocks, heads,
            kv_heads, head_dim, num_blocks, block_size, meta.scale, window, invariant, stream,
        )
    })
}
