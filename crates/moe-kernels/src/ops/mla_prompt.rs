//! Attention of prompts over latent rows, with queries that are not in latent space.

use candle_core::{Result, bail};

use super::attention::check_meta;
use super::{mla_value_into, paged_attention_into};
use crate::arguments::{expect, expect_cache, expect_dtype, expect_rank3};
use crate::cpu::mla::{PerHead, round_row};
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::operands::MlaPrompt;
use crate::view::ViewMut;
use crate::with_float;

/// out = W_UV softmax(scale · q · k) c of every head, causal, where a key is [W_UK c | rotated part] and c is the
/// latent of a position. It is computed in latent space, like [`mla_query_into`](crate::mla_query_into),
/// [`paged_attention_into`] and [`mla_value_into`], or with keys and values of every head
/// ([`PromptForm`](crate::plan::PromptForm)).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`MlaPrompt`] |
/// | `out` | [T, Hq · V] model dtype |
///
/// # Errors
/// Wrong dtypes or dims; sinks; the errors of [`paged_attention_into`].
pub fn mla_prompt_into(args: &MlaPrompt, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "mla_prompt";
    let dtype = args.q.dtype();
    let (t, heads, width) = expect_rank3(op, "q", &args.q)?;
    let (_, l, n) = expect_rank3(op, "w_uk", &args.w_uk)?;
    let (_, v, _) = expect_rank3(op, "w_uv", &args.w_uv)?;
    let Some(r) = width.checked_sub(n) else {
        bail!("{op}: q has {width} values per head, fewer than the {n} that w_uk multiplies")
    };
    if n == 0 || r == 0 {
        bail!("{op}: expected keys with a plain and a rotated part, got {n} and {r} values")
    }
    expect(op, "w_uk", &args.w_uk, dtype, &[heads, l, n])?;
    expect(op, "w_uv", &args.w_uv, dtype, &[heads, v, l])?;
    expect(op, "out", &out, dtype, &[t, heads * v])?;
    expect_cache(op, "cache", &args.cache, 1, l + r)?;
    expect_dtype(op, "cache", &args.cache, dtype)?;
    check_meta(op, &args.meta, t)?;
    if args.meta.gates.is_some() {
        bail!("{op}: latent rows have no gates, got meta.gates")
    }
    if args.meta.sinks.is_some() {
        bail!("{op}: expected heads without sinks, which prompts of latent attention do not have")
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() && crate::cuda::any::expands(args, &out, ex) {
        return crate::cuda::any::mla_expanded(op, args, out, ex);
    }
    let mut latent_q = ex.scratch(dtype, &[t, heads, l + r])?;
    to_latent(op, args, latent_q.view_mut(), ex)?;
    let mut latents = ex.scratch(dtype, &[t, heads * l])?;
    paged_attention_into(latent_q.view(), args.cache, args.cache, &args.meta, latents.view_mut(), ex)?;
    mla_value_into(latents.view(), args.w_uv, out, ex)
}

/// [W_UKᵀ q | rotated part] of every head, [T, Hq, L + R].
fn to_latent(op: &str, args: &MlaPrompt, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::latent_query(ex, op, args, out);
    }
    let l = args.w_uk.dims()[1];
    let n = args.w_uk.dims()[2];
    with_float!(args.q.dtype(), op, T => to_latent_rows::<T>(args, (l, n), &mut out, ex))
}

fn to_latent_rows<T: Lanes>(
    args: &MlaPrompt,
    (l, n): (usize, usize),
    out: &mut ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let heads = args.q.dims()[1];
    let width = args.q.dims()[2];
    let r = args.q.dims()[2] - n;
    let mut plain = ex.scratch(args.q.dtype(), &[args.q.rows(), heads, n])?;
    let rows = args.q.cpu::<T>()?.chunks_exact(width);
    let mut to = plain.view_mut();
    let parts = to.cpu_mut::<T>()?.chunks_exact_mut(n).zip(out.cpu_mut::<T>()?.chunks_exact_mut(l + r));
    for (row, (plain, out)) in rows.zip(parts) {
        plain.copy_from_slice(&row[..n]);
        round_row(&row[n..], &mut out[l..]);
    }
    let x = plain.view().cpu::<T>()?;
    let w = args.w_uk.cpu::<T>()?;
    PerHead { x, w, heads, n: l, k: n, out: out.cpu_mut::<T>()?, stride: l + r }.run(ex)
}
