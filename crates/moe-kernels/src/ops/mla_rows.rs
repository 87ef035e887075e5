//! Queries and cache rows of latent attention, from one product that projects both or from two.

use candle_core::{DType, Result, bail};

use super::mla::{expect_angles, expect_rows, mla_cache_into, mla_latent_into, mla_query_into};
use crate::arguments::{
    expect, expect_cache, expect_dims, expect_matrix, expect_optional, expect_rank3, expect_stream,
};
use crate::exec::Exec;
use crate::operands::{MlaLatent, MlaQuery, MlaRows};
use crate::plan::{Form, PerHeadForm};
use crate::view::{View, ViewMut};

/// The latents go through [`mla_latent_into`] and [`mla_cache_into`], the queries of `products` through
/// [`mla_query_into`].
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`MlaRows`] |
/// | `out` | [T, Hq, N + R] or, with `w_uk`, [T, Hq, L + R], f32 or model dtype |
/// | `k_cache` | [num_blocks, 1, block_size, L + R] model dtype (f32, bf16, f16) |
///
/// # Errors
/// A wrong dtype or wrong dims; an odd R; a slot beyond the cache, which on CUDA is not written.
pub fn mla_rows_into(args: &MlaRows, out: ViewMut, k_cache: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "mla_rows";
    let dtype = k_cache.dtype();
    let (t, width) = expect_matrix(op, "products", &args.products)?;
    let (_, heads, out_width) = expect_rank3(op, "out", &out)?;
    let l = args.norm.elem_count();
    let r = 2 * args.cos.dims().last().copied().unwrap_or(0);
    expect(op, "products", &args.products, DType::F32, &[t, width])?;
    expect(op, "norm", &args.norm, dtype, &[l])?;
    expect_angles(op, &args.cos, &args.sin, t, r)?;
    expect_cache(op, "k_cache", &k_cache, 1, l + r)?;
    expect(op, "slot_mapping", &args.slot_mapping, DType::U32, &[t])?;
    expect_stream(op, "out", &out, dtype)?;
    expect_rows(op, t, heads)?;
    expect_optional(op, "latents", args.latents.as_ref(), DType::F32, &[t, l + r])?;
    let latent_columns = if args.latents.is_some() { 0 } else { l + r };
    let each = width
        .checked_sub(latent_columns)
        .filter(|all| all.is_multiple_of(heads.max(1)))
        .map(|all| all / heads.max(1));
    let Some(n) = each.and_then(|each| each.checked_sub(r)) else {
        bail!(
            "{op}: products of {width} columns are no queries of {heads} heads with {r} rotated values, and {latent_columns} more"
        )
    };
    if l == 0 || r == 0 {
        bail!("{op}: expected a latent and a rotated part, got {l} and {r} values")
    }
    match args.w_uk {
        Some(w) if n > 0 => {
            expect(op, "w_uk", &w, dtype, &[heads, l, n])?;
            expect_dims(op, "out", &out, &[t, heads, l + r])?;
        }
        Some(_) => bail!("{op}: expected queries with a part that is not rotated"),
        None if out_width == n + r => {}
        None => bail!("{op}: expected out [{t}, {heads}, {}], got {:?}", n + r, out.dims()),
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::mla_rows(ex, op, args, out, k_cache);
    }
    let rows = ex.launched_as_one(|| op);
    match args.latents {
        Some(latents) => {
            let q = args.products.reshape(&[t, heads, n + r])?;
            split_rows(args, q, latents, out, k_cache, ex)?;
        }
        None => {
            let mut q = ex.scratch(DType::F32, &[t, heads, n + r])?;
            let mut latents = ex.scratch(DType::F32, &[t, l + r])?;
            split_columns(args.products, q.view_mut(), latents.view_mut())?;
            split_rows(args, q.view(), latents.view(), out, k_cache, ex)?;
        }
    }
    drop(rows);
    if args.w_uk.is_some() {
        ex.launched(|| PerHeadForm::Cpu.name());
    }
    Ok(())
}

/// The first columns of each row of products to `queries`, the last ones to `latents`. On the CPU.
fn split_columns(products: View, mut queries: ViewMut, mut latents: ViewMut) -> Result<()> {
    let key = latents.dims()[1];
    let width = products.dims()[1];
    let rows = products.cpu::<f32>()?.chunks_exact(width);
    let queries = queries.cpu_mut::<f32>()?.chunks_exact_mut(width - key);
    let latents = latents.cpu_mut::<f32>()?.chunks_exact_mut(key);
    for (row, (query, latent)) in rows.zip(queries.zip(latents)) {
        let (first, last) = row.split_at(width - key);
        query.copy_from_slice(first);
        latent.copy_from_slice(last);
    }
    Ok(())
}

/// [`mla_rows_into`] on the CPU, of queries `q` [T, Hq, N + R] and `latents` [T, L + R], one part after the other.
fn split_rows(
    args: &MlaRows,
    q: View,
    latents: View,
    out: ViewMut,
    k_cache: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let MlaRows { norm, eps, cos, sin, .. } = *args;
    let dtype = k_cache.dtype();
    let t = latents.rows();
    let l = norm.elem_count();
    let mut latent = ex.scratch(dtype, &[t, l])?;
    let mut rotated = ex.scratch(dtype, &[t, latents.dims()[1] - l])?;
    let parts = MlaLatent { compressed: latents, norm, eps, cos, sin };
    mla_latent_into(&parts, latent.view_mut(), rotated.view_mut(), ex)?;
    let latent = latent.view().reshape(&[t, 1, l])?;
    mla_cache_into(latent, rotated.view(), args.slot_mapping, k_cache, None, ex)?;
    mla_query_into(&MlaQuery { q, w_uk: args.w_uk, cos, sin }, out, ex)
}
