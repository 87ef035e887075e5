//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the ops around its products and softmax.
//!
//! The keys and values of all heads come from one latent row c of L values per token, and from one rotated key part of
//! R values that all heads share. There are two equivalent forms:
//!
//! - naive: k = [W_UK c | rotated part] and v = W_UV c of every head are expanded and cached;
//! - absorbed: the cache row is [c | rotated part]. W_UK is applied to the query
//!   (q · W_UK c = W_UKᵀ q · c) and W_UV after the weighted sum, so a token costs L + R values.
//!
//! The rotation uses the interleaved (GPT-J) layout.

use candle_core::{DType, Result, bail};

#[cfg(feature = "cuda")]
use super::attention::check_attention;
use super::attention::paged_attention_into;
use crate::arguments::{
    expect, expect_cache, expect_dims, expect_dtype, expect_matrix, expect_optional, expect_rank3,
    expect_stream,
};
use crate::cpu::dispatch;
use crate::cpu::mla::{PerHead, rotate_pairs, round_row};
use crate::cpu::norm::RmsNorm;
use crate::cpu::parallel::for_each_item;
use crate::cpu::rope::NO_SLOT;
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::operands::{AttentionMeta, MlaLatent, MlaQuery};
use crate::plan::{Form, PerHeadForm};
use crate::view::{View, ViewMut};
use crate::with_float;

/// Processes the down-projected rows: the latent is normalised, and the key part is rotated, both in f32 with one
/// rounding.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`MlaLatent`] |
/// | `latent` | [T, L] model dtype (f32, bf16, f16) |
/// | `rotated` | [T, R] same dtype |
///
/// # Errors
/// A wrong dtype or wrong dims; an odd R.
pub fn mla_latent_into(args: &MlaLatent, latent: ViewMut, rotated: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "mla_latent";
    let (t, l) = expect_matrix(op, "latent", &latent)?;
    let (_, r) = expect_matrix(op, "rotated", &rotated)?;
    expect(op, "rotated", &rotated, latent.dtype(), &[t, r])?;
    expect(op, "compressed", &args.compressed, DType::F32, &[t, l + r])?;
    expect(op, "norm", &args.norm, latent.dtype(), &[l])?;
    expect_angles(op, &args.cos, &args.sin, t, r)?;
    if l == 0 || r == 0 {
        bail!("{op}: expected a latent and a rotated part, got {l} and {r} values")
    }
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::mla_latent(ex, op, args, latent, rotated);
    }
    with_float!(latent.dtype(), op, T => split_latent::<T>(args, latent, rotated, ex))
}

fn split_latent<T: Lanes>(
    args: &MlaLatent,
    mut latent: ViewMut,
    mut rotated: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let l = latent.dims()[1];
    let r = rotated.dims()[1];
    let x = args.compressed.cpu::<f32>()?;
    let weight = args.norm.cpu::<T>()?;
    let angles = Angles::new(&args.cos, &args.sin, r)?;
    let latent = latent.cpu_mut::<T>()?;
    let rotated = rotated.cpu_mut::<T>()?;
    let rows = x.chunks_exact(l + r).zip(latent.chunks_exact_mut(l).zip(rotated.chunks_exact_mut(r)));
    for_each_item(ex, rows.enumerate().collect(), x.len(), |(t, (x, (out, rotated)))| {
        let (x, tail) = x.split_at(l);
        dispatch(ex.isa(), RmsNorm { x, weight, eps: args.eps, out });
        angles.rotate(t, tail, rotated);
    });
    Ok(())
}

/// Writes the keys of all heads, and values if they have their own cache, to the rows' slots. The key of a head is its
/// first N values in `kv`, followed by the rotated part; its value is the V values after those N. The latent row of the
/// absorbed form is a head with V = 0. If two rows name the same slot, the later row wins; on CUDA this is not allowed.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `kv` | [T, Hkv, N + V] model dtype or f32 |
/// | `rotated` | [T, R] model dtype |
/// | `slot_mapping` | \[T\] u32: slot (block · block_size + offset); `u32::MAX` writes nothing |
/// | `k_cache` | [num_blocks, Hkv, block_size, N + R] model dtype (f32, bf16, f16) |
/// | `v_cache` | [num_blocks, Hkv, block_size, V] same dtype; `None`: V = 0 |
///
/// # Errors
/// A wrong dtype or wrong dims; a slot beyond the cache, which on CUDA is not written.
pub fn mla_cache_into(
    kv: View,
    rotated: View,
    slot_mapping: View,
    k_cache: ViewMut,
    v_cache: Option<ViewMut>,
    ex: &mut Exec,
) -> Result<()> {
    let op = "mla_cache";
    let (t, heads, width) = expect_rank3(op, "kv", &kv)?;
    let (_, r) = expect_matrix(op, "rotated", &rotated)?;
    expect(op, "rotated", &rotated, k_cache.dtype(), &[t, r])?;
    expect_stream(op, "kv", &kv, k_cache.dtype())?;
    let v = v_cache.as_ref().map_or(0, |cache| cache.dims().last().copied().unwrap_or(0));
    let Some(n) = width.checked_sub(v) else {
        bail!("{op}: kv has {width} values per head, fewer than the {v} of a value")
    };
    let slots = expect_cache(op, "k_cache", &k_cache, heads, n + r)?;
    let dims = [&k_cache.dims()[..3], &[v]].concat();
    expect_optional(op, "v_cache", v_cache.as_ref(), k_cache.dtype(), &dims)?;
    expect(op, "slot_mapping", &slot_mapping, DType::U32, &[t])?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::mla_cache(ex, op, (kv, rotated), slot_mapping, k_cache, v_cache);
    }
    for (i, slot) in slot_mapping.cpu::<u32>()?.iter().enumerate() {
        if *slot != NO_SLOT && *slot as usize >= slots {
            bail!("{op}: slot_mapping[{i}] is {slot}; the cache holds {slots} slots")
        }
    }
    with_float!(k_cache.dtype(), op, T => match kv.dtype() {
        DType::F32 => write_cache::<T, f32>(kv, rotated, slot_mapping, k_cache, v_cache, ex),
        _ => write_cache::<T, T>(kv, rotated, slot_mapping, k_cache, v_cache, ex),
    })
}

fn write_cache<T: Lanes, X: Lanes>(
    kv: View,
    rotated: View,
    slot_mapping: View,
    mut k_cache: ViewMut,
    mut v_cache: Option<ViewMut>,
    _ex: &Exec,
) -> Result<()> {
    let heads = kv.dims()[1];
    let block_size = k_cache.dims()[2];
    let key = k_cache.dims()[3];
    let width = kv.dims()[2];
    let r = rotated.dims()[1];
    let kv = kv.cpu::<X>()?;
    let rotated = rotated.cpu::<T>()?;
    let keys = k_cache.cpu_mut::<T>()?;
    let mut values = v_cache.as_mut().map(|cache| cache.cpu_mut::<T>()).transpose()?;
    for (t, &slot) in slot_mapping.cpu::<u32>()?.iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT) {
        let block = slot as usize / block_size;
        let offset = slot as usize % block_size;
        for head in 0..heads {
            let row = (block * heads + head) * block_size + offset;
            let (k, v) = kv[(t * heads + head) * width..][..width].split_at(key - r);
            let out = &mut keys[row * key..][..key];
            round_row(k, &mut out[..key - r]);
            out[key - r..].copy_from_slice(&rotated[t * r..][..r]);
            if let Some(values) = &mut values {
                round_row(v, &mut values[row * v.len()..][..v.len()]);
            }
        }
    }
    Ok(())
}

/// The queries in the form that attention takes. The last R values of each head are rotated. The other values stay
/// unchanged (naive form), or are rounded to the model dtype and multiplied with W_UKᵀ (absorbed form).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`MlaQuery`] |
/// | `out` | [T, Hq, N + R] f32, bf16 or f16, or with `w_uk` [T, Hq, L + R] f32 or model dtype |
///
/// # Errors
/// A wrong dtype or wrong dims; an odd R.
pub fn mla_query_into(args: &MlaQuery, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "mla_query";
    let (t, heads, width) = expect_rank3(op, "q", &args.q)?;
    expect_dtype(op, "q", &args.q, DType::F32)?;
    let r = 2 * args.cos.dims().last().copied().unwrap_or(0);
    expect_angles(op, &args.cos, &args.sin, t, r)?;
    let Some(n) = width.checked_sub(r) else {
        bail!("{op}: q has {width} values per head, fewer than the {r} that are rotated")
    };
    expect_rows(op, t, heads)?;
    match args.w_uk {
        None => expect_dims(op, "out", &out, &[t, heads, n + r])?,
        Some(w) => {
            let (_, l, _) = expect_rank3(op, "w_uk", &w)?;
            expect_dims(op, "w_uk", &w, &[heads, l, n])?;
            expect_stream(op, "out", &out, w.dtype())?;
            expect_dims(op, "out", &out, &[t, heads, l + r])?;
            if n == 0 {
                bail!(
                    "{op}: expected queries with a part that is not rotated, got {width} values, all rotated"
                )
            }
        }
    }
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::mla_query(ex, op, args, out);
    }
    let Some(w) = args.w_uk else {
        return with_float!(out.dtype(), op, O => split_query::<O, O>(args, r, None, out, ex));
    };
    ex.launched(|| PerHeadForm::Cpu.name());
    with_float!(w.dtype(), op, T => match out.dtype() {
        DType::F32 => absorb_query::<T, f32>(args, w, r, out, ex),
        _ => absorb_query::<T, T>(args, w, r, out, ex),
    })
}

/// The queries in latent space.
fn absorb_query<T: Lanes, O: Lanes>(
    args: &MlaQuery,
    w: View,
    r: usize,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let t = args.q.rows();
    let heads = w.dims()[0];
    let l = w.dims()[1];
    let n = w.dims()[2];
    let mut nope = ex.scratch(w.dtype(), &[t, heads, n])?;
    split_query::<T, O>(args, r, Some(nope.view_mut()), out.reborrow(), ex)?;
    let x = nope.view().cpu::<T>()?;
    let w = w.cpu::<T>()?;
    PerHead { x, w, heads, n: l, k: n, out: out.cpu_mut::<O>()?, stride: l + r }.run(ex)
}

/// Rotates the last values of all heads into `out`. Their other values go to `nope`, rounded, or to `out`.
fn split_query<T: Lanes, O: Lanes>(
    args: &MlaQuery,
    r: usize,
    nope: Option<ViewMut>,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let heads = args.q.dims()[1];
    let width = args.q.dims()[2];
    let out_width = out.dims()[2];
    let q = args.q.cpu::<f32>()?;
    let angles = Angles::new(&args.cos, &args.sin, r)?;
    let n = width - r;
    let rows = q.chunks_exact(width.max(1)).zip(out.cpu_mut::<O>()?.chunks_exact_mut(out_width.max(1)));
    let Some(mut nope) = nope else {
        for_each_item(ex, rows.enumerate().collect(), q.len(), |(i, (q, out))| {
            round_row(&q[..n], &mut out[..n]);
            angles.rotate(i / heads, &q[n..], &mut out[n..]);
        });
        return Ok(());
    };
    let rows = rows.zip(nope.cpu_mut::<T>()?.chunks_exact_mut(n));
    for_each_item(ex, rows.enumerate().collect(), q.len(), |(i, ((q, out), nope))| {
        round_row(&q[..n], nope);
        angles.rotate(i / heads, &q[n..], &mut out[out_width - r..]);
    });
    Ok(())
}

/// out[t, h] = W_UV\[h\] · x[t, h]: transforms the result of attention from latent space to values.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, Hq · L] model dtype (f32, bf16, f16) |
/// | `w_uv` | [Hq, V, L] same dtype |
/// | `out` | [T, Hq · V] same dtype |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn mla_value_into(x: View, w_uv: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "mla_value";
    let (heads, v, l) = expect_rank3(op, "w_uv", &w_uv)?;
    let (t, _) = expect_matrix(op, "x", &x)?;
    expect_dims(op, "x", &x, &[t, heads * l])?;
    expect_dtype(op, "w_uv", &w_uv, x.dtype())?;
    expect(op, "out", &out, x.dtype(), &[t, heads * v])?;
    expect_rows(op, t, heads)?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let x = x.reshape(&[t, heads, l])?;
        let out = out.reshape(&[t, heads, v])?;
        return crate::cuda::any::per_head(ex, op, x, w_uv, out);
    }
    ex.launched(|| PerHeadForm::Cpu.name());
    with_float!(x.dtype(), op, T => {
        let x = x.cpu::<T>()?;
        let w = w_uv.cpu::<T>()?;
        let out = out.cpu_mut::<T>()?;
        PerHead { x, w, heads, n: v, k: l, out, stride: v }.run(ex)
    })
}

/// out\[t, h\] = W_UV\[h\] times the attention over latent rows: [`paged_attention_into`], then [`mla_value_into`].
///
/// | argument | shape, dtype |
/// |---|---|
/// | `q` | [T, Hq, L + R] f32 or model dtype, in latent space |
/// | `cache` | [num_blocks, 1, block_size, L + R] model dtype; the first L elements of a row are its value |
/// | `w_uv` | [Hq, V, L] model dtype |
/// | `out` | [T, Hq · V] model dtype |
///
/// # Errors
/// The errors of both ops.
pub fn mla_attention_into(
    q: View,
    cache: View,
    meta: &AttentionMeta,
    w_uv: View,
    #[cfg_attr(not(feature = "cuda"), expect(unused_mut))] mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "mla_attention";
    let (t, heads, _) = expect_rank3(op, "q", &q)?;
    let (_, v, l) = expect_rank3(op, "w_uv", &w_uv)?;
    expect(op, "w_uv", &w_uv, out.dtype(), &[heads, v, l])?;
    expect_dims(op, "out", &out, &[t, heads * v])?;
    let mut latents = ex.scratch(out.dtype(), &[t, heads * l])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        check_attention(op, &q, &cache, &cache, meta, &latents.view_mut())?;
        let mut to = latents.view_mut();
        let mut values = out.reborrow();
        if crate::cuda::attention::latent_values(
            q,
            cache,
            meta,
            to.reborrow(),
            (w_uv, values.reborrow()),
            ex,
        )? {
            return Ok(());
        }
    }
    paged_attention_into(q, cache, cache, meta, latents.view_mut(), ex)?;
    mla_value_into(latents.view(), w_uv, out, ex)
}

/// Cosines and sines by row.
struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
}

impl<'a> Angles<'a> {
    fn new(cos: &View<'a>, sin: &View<'a>, r: usize) -> Result<Self> {
        Ok(Self { cos: cos.cpu()?, sin: sin.cpu()?, half: r / 2 })
    }

    fn rotate<O: Lanes>(&self, row: usize, x: &[f32], out: &mut [O]) {
        let [cos, sin] = [self.cos, self.sin].map(|a| &a[row * self.half..][..self.half]);
        rotate_pairs(x, cos, sin, out);
    }
}

pub(super) fn expect_angles(op: &str, cos: &View, sin: &View, t: usize, r: usize) -> Result<()> {
    if !r.is_multiple_of(2) {
        bail!("{op}: expected an even number of rotated values, got {r}")
    }
    for (name, table) in [("cos", cos), ("sin", sin)] {
        expect(op, name, table, DType::F32, &[t, r / 2])?;
    }
    Ok(())
}

/// Fails if the number of heads of all rows does not fit in a u32.
pub(super) fn expect_rows(op: &str, t: usize, heads: usize) -> Result<()> {
    match t.checked_mul(heads).map(u32::try_from) {
        Some(Ok(_)) => Ok(()),
        _ => bail!("{op}: {t} rows of {heads} heads are more than a u32 counts; split them"),
    }
}
