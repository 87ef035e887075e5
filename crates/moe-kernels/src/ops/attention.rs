//! Causal attention over a paged KV cache, for any mix of prefill and decode rows.

use candle_core::{DType, Result, bail};

use super::activation::{expect_gates, sigmoid_gate_into};
use crate::arguments::{expect, expect_cache, expect_dtype, expect_matrix, expect_rank3, expect_stream};
use crate::cpu::attention::{Attention, Sequence, attend};
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::operands::AttentionMeta;
use crate::plan::{AttentionForm, Form};
use crate::view::{View, ViewMut};
use crate::with_float;

/// out = softmax(scale · q · kᵀ) · v, causal, in f32, rounded once; with sinks a head's softmax is also over its sink,
/// whose weight is dropped. With gates the rounded result is scaled by the sigmoids of its gates
/// ([`sigmoid_gate_into`]).
///
/// A row at position p attends to positions `max(0, p + 1 - window)..=p` of its sequence, whose keys and values must
/// already be in the cache. KV is processed in blocks of [`ATTENTION_BLOCK`](crate::ATTENTION_BLOCK) positions, aligned
/// at position 0. Each block's partial result uses its own maximum, and partial results are merged in ascending order
/// (the online softmax of Milakov and Gimelshein, 2018, as in FlashAttention). So a row's bits do not depend on the
/// cache's block size, on the other rows, or on how the prompt was chunked. Rows that belong to no sequence (padding)
/// are zeroed. The latent cache of MLA can serve as both caches.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `q` | [T, Hq, D] model dtype or f32 |
/// | `k_cache` | [num_blocks, Hkv, block_size, D] model dtype (f32, bf16, f16); Hkv divides Hq |
/// | `v_cache` | [num_blocks, Hkv, block_size, at least Dv] same dtype; a value is the first Dv elements of its row |
/// | `meta` | see [`AttentionMeta`] |
/// | `out` | [T, Hq · Dv] model dtype |
///
/// # Errors
/// A wrong dtype or wrong dims; heads that do not divide; row ranges that do not ascend; a position beyond its block
/// table; a block beyond the cache, anywhere between the first and the last position to which the rows of a sequence
/// attend; a window of 0.
pub fn paged_attention_into(
    q: View,
    k_cache: View,
    v_cache: View,
    meta: &AttentionMeta,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "paged_attention";
    let t = check_attention(op, &q, &k_cache, &v_cache, meta, &out)?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::attention::paged_attention(q, k_cache, v_cache, meta, out, ex);
    }
    ex.launched(|| AttentionForm::Cpu.name());
    let sequences = check_sequences(op, meta, t, k_cache.dims()[0], k_cache.dims()[2])?;
    with_float!(k_cache.dtype(), op, T => match q.dtype() {
        DType::F32 => run::<T, f32>(q, k_cache, v_cache, meta, &sequences, out.reborrow(), ex),
        _ => run::<T, T>(q, k_cache, v_cache, meta, &sequences, out.reborrow(), ex),
    })?;
    meta.gates.map_or(Ok(()), |gates| sigmoid_gate_into(gates, out, ex))
}

/// Checks dims and dtypes, and returns the number of rows.
pub(super) fn check_attention(
    op: &str,
    q: &View,
    k_cache: &View,
    v_cache: &View,
    meta: &AttentionMeta,
    out: &ViewMut,
) -> Result<usize> {
    let (t, hq, d) = expect_rank3(op, "q", q)?;
    let hkv = k_cache.dims().get(1).copied().unwrap_or(0);
    expect_cache(op, "k_cache", k_cache, hkv, d)?;
    if hkv == 0 || !hq.is_multiple_of(hkv) {
        bail!("{op}: {hkv} key heads do not divide {hq} query heads")
    }
    expect_stream(op, "q", q, k_cache.dtype())?;
    expect_dtype(op, "v_cache", v_cache, k_cache.dtype())?;
    let value_dim = expect_values(op, k_cache, v_cache, out, hq)?;
    expect(op, "out", out, k_cache.dtype(), &[t, hq * value_dim])?;
    check_meta(op, meta, t)?;
    check_heads(op, meta, [t, hq * value_dim], hq)?;
    Ok(t)
}

/// Returns the size of a value, which follows from `out`. A row of `v_cache` must have at least this size.
fn expect_values(op: &str, k_cache: &View, v_cache: &View, out: &ViewMut, hq: usize) -> Result<usize> {
    let value_dim = out.dims().last().map_or(0, |width| width / hq.max(1));
    match (k_cache.dims(), v_cache.dims()) {
        (&[blocks, hkv, size, _], &[b, h, s, row])
            if [b, h, s] == [blocks, hkv, size] && row >= value_dim =>
        {
            Ok(value_dim)
        }
        (k, v) => bail!(
            "{op}: expected v_cache with dims [{}, {}, {}, at least {value_dim}] for an out of {hq} heads of \
             {value_dim}, got {v:?}",
            k[0],
            k[1],
            k[2]
        ),
    }
}

/// Checks dims and dtypes.
pub(super) fn check_meta(op: &str, meta: &AttentionMeta, t: usize) -> Result<()> {
    let (s, _) = expect_matrix(op, "block_tables", &meta.block_tables)?;
    expect_dtype(op, "block_tables", &meta.block_tables, DType::U32)?;
    expect(op, "query_start_loc", &meta.query_start_loc, DType::U32, &[s + 1])?;
    expect(op, "positions", &meta.positions, DType::U32, &[t])?;
    if meta.sliding_window == Some(0) {
        bail!("{op}: expected a sliding_window of at least 1, got 0")
    }
    Ok(())
}

/// Checks dims and dtypes of the sinks and gates of `hq` heads whose results are `out` [T, width].
pub(super) fn check_heads(op: &str, meta: &AttentionMeta, out: [usize; 2], hq: usize) -> Result<()> {
    if let Some(sinks) = &meta.sinks {
        expect(op, "sinks", sinks, DType::F32, &[hq])?;
    }
    match &meta.gates {
        Some(gates) => expect_gates(op, gates, &out),
        None => Ok(()),
    }
}

/// Checks every index that the kernel will use. The caller has called [`check_meta`] before.
fn check_sequences<'a>(
    op: &str,
    meta: &AttentionMeta<'a>,
    t: usize,
    num_blocks: usize,
    block_size: usize,
) -> Result<Vec<Sequence<'a>>> {
    let s = meta.block_tables.dims()[0];
    let max_blocks = meta.block_tables.dims()[1];
    let starts = meta.query_start_loc.cpu::<u32>()?;
    let ascending = starts.first() == Some(&0) && starts.is_sorted();
    if !ascending || starts.last().is_none_or(|&last| last as usize > t) {
        bail!("{op}: expected query_start_loc that ascends from 0 to at most {t}, got {starts:?}")
    }
    let positions = meta.positions.cpu::<u32>()?;
    let tables = meta.block_tables.cpu::<u32>()?;
    let mut sequences = Vec::with_capacity(s);
    for (sequence, bounds) in starts.windows(2).enumerate() {
        let rows = bounds[0] as usize..bounds[1] as usize;
        let row_positions = &positions[rows.clone()];
        let (Some(&first), Some(&last)) = (row_positions.iter().min(), row_positions.iter().max()) else {
            continue;
        };
        let blocks = &tables[sequence * max_blocks..(sequence + 1) * max_blocks];
        let end = last as usize + 1;
        let start = meta.sliding_window.map_or(0, |window| (first as usize + 1).saturating_sub(window));
        let used = start / block_size..end.div_ceil(block_size);
        if used.end > max_blocks {
            bail!(
                "{op}: sequence {sequence} has a row at position {last}, beyond the {max_blocks} blocks of \
                 {block_size} in its block table"
            )
        }
        if let Some(i) = used.into_iter().find(|&i| blocks[i] as usize >= num_blocks) {
            bail!("{op}: block_tables[{sequence}][{i}] is {}; the cache holds {num_blocks} blocks", blocks[i])
        }
        sequences.push(Sequence { blocks, rows });
    }
    Ok(sequences)
}

fn run<T: Lanes, Q: Lanes>(
    q: View,
    k_cache: View,
    v_cache: View,
    meta: &AttentionMeta,
    sequences: &[Sequence],
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let num_heads = q.dims()[1];
    let head_dim = q.dims()[2];
    let value_dim = out.dims()[1] / num_heads.max(1);
    let out = out.cpu_mut::<T>()?;
    if out.is_empty() {
        return Ok(());
    }
    let used = sequences.last().map_or(0, |s| s.rows.end);
    let (out, padding) = out.split_at_mut(used * num_heads * value_dim);
    padding.fill(T::default());
    let attention = Attention {
        q: q.cpu::<Q>()?,
        k_cache: k_cache.cpu::<T>()?,
        v_cache: v_cache.cpu::<T>()?,
        block_size: k_cache.dims()[2],
        num_heads,
        num_kv_heads: k_cache.dims()[1],
        head_dim,
        value_row: v_cache.dims()[3],
        value_dim,
        sequences,
        positions: meta.positions.cpu()?,
        scale: meta.scale,
        window: meta.sliding_window,
        sinks: meta.sinks.map(|sinks| sinks.cpu()).transpose()?,
    };
    attend(&attention, out, ex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_more_positions_than_launchers_count_sees_everything() -> Result<()> {
        let window = |sliding_window| -> Result<i32> {
            let starts = View::new(&[0u32], &[1])?;
            let none = View::new::<u32>(&[], &[0])?;
            let block_tables = View::new::<u32>(&[], &[0, 1])?;
            let query_start_loc = starts;
            let positions = none;
            let meta = AttentionMeta {
                query_start_loc,
                positions,
                block_tables,
                scale: 1.,
                sliding_window,
                sinks: None,
                gates: None,
            };
            Ok(meta.window_i32())
        };
        let most = i32::MAX as usize;
        for (positions, seen) in
            [(None, 0), (Some(1), 1), (Some(most), i32::MAX), (Some(most + 1), 0), (Some(usize::MAX), 0)]
        {
            assert_eq!(window(positions)?, seen, "{positions:?}");
        }
        Ok(())
    }
}
