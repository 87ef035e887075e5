//! Latent attention around its products and softmax; the products with a matrix per head by cuBLAS where that is
//! faster.

use candle_core::{DType, Result};

use super::{Dtype, count, ffi, int};
use crate::cuda::aligned;
use crate::cuda::args::{In, MlaCacheArgs, MlaLatentArgs, MlaQueryArgs, MlaRowsArgs, PerHeadArgs};
use crate::cuda::blas::{self, PerHead};
use crate::exec::Exec;
use crate::operands::{MlaLatent, MlaQuery, MlaRows};
use crate::plan::{Form, PerHeadCall, PerHeadForm, QUERY_WITH_PRODUCT};
use crate::view::{View, ViewMut};

// SAFETY of every call below: as in `rows`.

pub(crate) fn mla_latent(
    ex: &Exec,
    op: &str,
    args: &MlaLatent,
    mut latent: ViewMut,
    mut rotated: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let raw = MlaLatentArgs {
        compressed: cuda.read(op, "compressed", args.compressed)?,
        norm: cuda.read(op, "norm", args.norm)?,
        eps: args.eps,
        cos: cuda.read(op, "cos", args.cos)?,
        sin: cuda.read(op, "sin", args.sin)?,
        dtype: Dtype::of(op, latent.dtype())?,
        rows: int(op, latent.rows())?,
        latent: int(op, latent.dims()[1])?,
        rope: int(op, rotated.dims()[1])?,
        latent_out: cuda.write(op, "latent", &mut latent)?,
        rotated_out: cuda.write(op, "rotated", &mut rotated)?,
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_mla_latent(&raw, cuda.raw()?) })
}

pub(crate) fn mla_cache(
    ex: &Exec,
    op: &str,
    (kv, rotated): (View, View),
    slot_mapping: View,
    mut k_cache: ViewMut,
    mut v_cache: Option<ViewMut>,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let cache = [k_cache.dims()[0], k_cache.dims()[2], k_cache.dims()[3]];
    let raw = MlaCacheArgs {
        kv: cuda.read(op, "kv", kv)?,
        rotated: cuda.read(op, "rotated", rotated)?,
        slots: cuda.read(op, "slot_mapping", slot_mapping)?,
        dtype: Dtype::of(op, k_cache.dtype())?,
        kv_dtype: Dtype::of(op, kv.dtype())?,
        rows: int(op, kv.rows())?,
        heads: int(op, kv.dims()[1])?,
        key: int(op, cache[2])?,
        rope: int(op, rotated.dims()[1])?,
        value: int(op, v_cache.as_ref().map_or(0, |cache| cache.dims()[3]))?,
        block_size: int(op, cache[1])?,
        num_slots: count(op, cache[0] * cache[1])?,
        k_cache: cuda.write(op, "k_cache", &mut k_cache)?,
        v_cache: cuda.write_or_null(op, "v_cache", v_cache.as_mut())?,
    };
    // SAFETY: see above; a slot beyond the cache is not written.
    cuda.check(op, unsafe { ffi::moe_any_mla_cache(&raw, cuda.raw()?) })
}

pub(crate) fn mla_query(ex: &Exec, op: &str, args: &MlaQuery, mut out: ViewMut) -> Result<()> {
    let t = args.q.dims()[0];
    let heads = args.q.dims()[1];
    let width = args.q.dims()[2];
    let rope = 2 * args.cos.dims()[1];
    let mut plain = match args.w_uk {
        Some(w) => Some(ex.scratch(w.dtype(), &[t, heads, width - rope])?),
        None => None,
    };
    split_query(ex, op, args, plain.as_mut().map(|plain| plain.view_mut()), out.reborrow())?;
    match (args.w_uk, &plain) {
        (Some(w), Some(plain)) => per_head(ex, op, plain.view(), w, out),
        _ => Ok(()),
    }
}

pub(crate) fn mla_rows(
    ex: &Exec,
    op: &str,
    args: &MlaRows,
    mut out: ViewMut,
    mut k_cache: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let t = args.products.rows();
    let heads = out.dims()[1];
    let key = k_cache.dims()[3];
    let rope = 2 * args.cos.dims()[1];
    let latent = args.norm.elem_count();
    let query_row = args.products.dims()[1];
    let latent_columns = if args.latents.is_some() { 0 } else { key };
    let queries = query_row - latent_columns;
    let plain_dim = queries / heads - rope;
    let products: In = cuda.read(op, "products", args.products)?;
    let (latents, latent_row) = match args.latents {
        Some(latents) => (cuda.read(op, "latents", latents)?, key),
        // The latents of a row follow its queries in the same array.
        None => (products.wrapping_byte_add(size_of::<f32>() * queries), query_row),
    };
    let overlapped = args.w_uk.filter(|w| {
        let call = PerHeadCall {
            rows: t,
            head_dim: plain_dim,
            latent,
            neighbour: Some(QUERY_WITH_PRODUCT),
            dtype: if out.dtype() == k_cache.dtype() { out.dtype() } else { DType::F32 },
        };
        aligned(&[args.products, *w])
            && PerHeadForm::choose(&call, &ex.machine()) == Some(PerHeadForm::Overlapped)
    });
    let mut plain = match args.w_uk {
        Some(w) if overlapped.is_none() => Some(ex.scratch(w.dtype(), &[t, heads, plain_dim])?),
        _ => None,
    };
    let mut to = plain.as_mut().map(|plain| plain.view_mut());
    let raw = MlaRowsArgs {
        queries: products,
        latents,
        norm: cuda.read(op, "norm", args.norm)?,
        eps: args.eps,
        cos: cuda.read(op, "cos", args.cos)?,
        sin: cuda.read(op, "sin", args.sin)?,
        slots: cuda.read(op, "slot_mapping", args.slot_mapping)?,
        plain: cuda.write_or_null(op, "plain", to.as_mut())?,
        out: cuda.write(op, "out", &mut out)?,
        dtype: Dtype::of(op, k_cache.dtype())?,
        out_dtype: Dtype::of(op, out.dtype())?,
        rows: int(op, t)?,
        heads: int(op, heads)?,
        plain_dim: int(op, plain_dim)?,
        rope: int(op, rope)?,
        width: int(op, out.dims()[2])?,
        latent: int(op, latent)?,
        query_row: int(op, query_row)?,
        latent_row: int(op, latent_row)?,
        num_slots: count(op, k_cache.dims()[0] * k_cache.dims()[2])?,
        k_cache: cuda.write(op, "k_cache", &mut k_cache)?,
    };
    if let Some(w) = overlapped {
        let w = cuda.read(op, "w_uk", w)?;
        ex.launched(|| QUERY_WITH_PRODUCT);
        // SAFETY: see above; the form has checked the sizes, a slot beyond the cache is not written.
        return cuda.check(op, unsafe { ffi::moe_attention_latent_query(&raw, w, cuda.raw()?) });
    }
    ex.launched(|| op);
    // SAFETY: see above; a slot beyond the cache is not written.
    cuda.check(op, unsafe { ffi::moe_any_mla_rows(&raw, cuda.raw()?) })?;
    match (args.w_uk, &plain) {
        (Some(w), Some(plain)) => per_head(ex, op, plain.view(), w, out),
        _ => Ok(()),
    }
}

/// Writes the rotated tails of the queries to `out`, and the other values to `plain` or, without it, to `out`.
fn split_query(
    ex: &Exec,
    op: &str,
    args: &MlaQuery,
    mut plain: Option<ViewMut>,
    mut out: ViewMut,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let rope = 2 * args.cos.dims()[1];
    let raw = MlaQueryArgs {
        q: cuda.read(op, "q", args.q)?,
        cos: cuda.read(op, "cos", args.cos)?,
        sin: cuda.read(op, "sin", args.sin)?,
        dtype: Dtype::of(op, args.w_uk.map_or(out.dtype(), |w| w.dtype()))?,
        out_dtype: Dtype::of(op, out.dtype())?,
        rows: int(op, args.q.rows())?,
        heads: int(op, args.q.dims()[1])?,
        plain_dim: int(op, args.q.dims()[2] - rope)?,
        rope: int(op, rope)?,
        width: int(op, out.dims()[2])?,
        plain: cuda.write_or_null(op, "nope", plain.as_mut())?,
        out: cuda.write(op, "out", &mut out)?,
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_mla_query(&raw, cuda.raw()?) })
}

/// Writes the first N values of each head's row of `out` [T, Hq, S]: `w` \[h\] [N, K] times `x` [T, Hq, K].
pub(crate) fn per_head(ex: &Exec, op: &str, x: View, w: View, mut out: ViewMut) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let rows = x.rows();
    let stride = out.dims()[2];
    let heads = w.dims()[0];
    let n = w.dims()[1];
    let k = w.dims()[2];
    let call = PerHeadCall { rows, head_dim: n.min(k), latent: n.max(k), neighbour: None, dtype: x.dtype() };
    let form = PerHeadForm::choose(&call, &ex.machine()).unwrap_or(PerHeadForm::Any);
    ex.launched(|| form.kernel(&call));
    if form == PerHeadForm::Blas {
        let x = (x, [heads * k, k]);
        let out_strides = [heads * stride, stride];
        let p = PerHead { x, w, by_columns: false, rows, heads, n, k, out: out_strides };
        return blas::per_head(cuda, op, &p, out);
    }
    let raw = PerHeadArgs {
        x: cuda.read(op, "x", x)?,
        w: cuda.read(op, "w", w)?,
        dtype: Dtype::of(op, x.dtype())?,
        out_dtype: Dtype::of(op, out.dtype())?,
        out: cuda.write(op, "out", &mut out)?,
        rows: int(op, rows)?,
        heads: int(op, heads)?,
        n: int(op, n)?,
        k: int(op, k)?,
        stride: int(op, stride)?,
        invariant: i32::from(ex.batch_invariant()),
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_per_head(&raw, cuda.raw()?) })
}
