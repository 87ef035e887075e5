//! Prompts over latent rows: queries into latent space, or keys and values of every head.

use std::ptr::{null, null_mut};

use candle_core::{DType, Result};

use super::{Dtype, ffi, int, per_head};
use crate::cuda::aligned;
use crate::cuda::args::{MlaExpandArgs, PagedAttentionArgs};
use crate::cuda::blas::{self, PerHead};
use crate::exec::Exec;
use crate::operands::MlaPrompt;
use crate::plan::{Form, PromptCall, PromptForm};
use crate::view::{View, ViewMut};

/// The sizes L, N, R and V.
fn sizes(args: &MlaPrompt) -> [usize; 4] {
    let l = args.w_uk.dims()[1];
    let n = args.w_uk.dims()[2];
    [l, n, args.q.dims()[2] - n, args.w_uv.dims()[1]]
}

/// Whether the prompts are computed with keys and values of every head.
pub(crate) fn expands(args: &MlaPrompt, out: &ViewMut, ex: &Exec) -> bool {
    let starts = args.meta.query_start_loc;
    let call = PromptCall {
        rows: args.q.rows(),
        positions: Some(args.positions),
        num_heads: args.q.dims()[1],
        dims: sizes(args),
        dtype: args.q.dtype(),
        aligned: aligned(&[args.q, args.w_uk, args.w_uv, args.cache, out.as_view()]),
    };
    starts.elem_count() > 1 && PromptForm::choose(&call, &ex.machine()) == Some(PromptForm::Expanded)
}

/// Attention over keys and values of every head; [`expands`] has said yes.
pub(crate) fn mla_expanded(op: &str, args: &MlaPrompt, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let cuda = ex.cuda(op)?;
    ex.launched(|| PromptForm::Expanded.name());
    let [l, n, r, v] = sizes(args);
    let heads = args.q.dims()[1];
    let all = args.positions;
    let dtype = args.q.dtype();
    let tables = args.meta.block_tables.dims();
    let mut bases = ex.scratch(DType::U32, &[tables[0]])?;
    let mut latents = ex.scratch(dtype, &[all, l])?;
    let mut keys = ex.scratch(dtype, &[heads, all, n + r])?;
    let mut values = ex.scratch(dtype, &[heads, all, v])?;
    let query_start_loc = args.meta.query_start_loc;
    let positions = args.meta.positions;
    let expand = MlaExpandArgs {
        cache: cuda.read(op, "cache", args.cache)?,
        query_start_loc: cuda.read(op, "query_start_loc", query_start_loc)?,
        positions: cuda.read(op, "positions", positions)?,
        block_tables: cuda.read(op, "block_tables", args.meta.block_tables)?,
        latents: cuda.write(op, "latents", &mut latents.view_mut())?,
        keys: cuda.write(op, "keys", &mut keys.view_mut())?,
        bases: cuda.write(op, "bases", &mut bases.view_mut())?,
        sequences: int(op, tables[0])?,
        max_blocks: int(op, tables[1])?,
        block_size: int(op, args.cache.dims()[2])?,
        heads: int(op, heads)?,
        all: int(op, all)?,
    };
    // SAFETY: the op has checked dims and dtypes, `expands` the sizes, and no row is written that the results do not
    // have; which positions and blocks are read is the contract of `AttentionMeta`.
    cuda.check(op, unsafe { ffi::moe_mla_expand(&expand, cuda.raw()?) })?;
    // Keys and values of a head are next to each other; all heads read the same latents.
    for (w, by_columns, n, width, to) in
        [(args.w_uk, true, n, n + r, keys.view_mut()), (args.w_uv, false, v, v, values.view_mut())]
    {
        let x = (latents.view(), [l, 0]);
        let out = [width, all * width];
        blas::per_head(cuda, op, &PerHead { x, w, by_columns, rows: all, heads, n, k: l, out }, to)?;
    }
    let attention = PagedAttentionArgs {
        q: cuda.read(op, "q", args.q)?,
        k_cache: cuda.read(op, "keys", keys.view())?,
        v_cache: cuda.read(op, "values", values.view())?,
        query_start_loc: expand.query_start_loc,
        positions: expand.positions,
        block_tables: null(),
        out: cuda.write(op, "out", &mut out)?,
        dtype: Dtype::Bf16,
        q_dtype: Dtype::Bf16,
        tokens: int(op, args.q.rows())?,
        sequences: expand.sequences,
        max_blocks: 0,
        heads: expand.heads,
        kv_heads: expand.heads,
        head_dim: int(op, n + r)?,
        value_dim: int(op, v)?,
        value_row: int(op, v)?,
        num_blocks: 0,
        block_size: 1,
        scale: args.meta.scale,
        window: args.meta.window_i32(),
        invariant: 0,
        counters: cuda.counters("attention_expanded", 2)?,
        partials: null_mut(),
        splits: 1,
        sinks: null(),
        gates: null(),
        gate_row: 0,
    };
    // SAFETY: keys and values of all positions have been made above, for the same sequences.
    cuda.check(op, unsafe {
        ffi::moe_attention_expanded(&attention, expand.bases.cast_const().cast(), expand.all, cuda.raw()?)
    })
}

/// Queries with their plain parts in latent space: [T, Hq, L + R] from [T, Hq, N + R].
pub(crate) fn latent_query(ex: &Exec, op: &str, args: &MlaPrompt, mut out: ViewMut) -> Result<()> {
    let [l, n, r, _] = sizes(args);
    let t = args.q.rows();
    let heads = args.q.dims()[1];
    let mut plain = ex.scratch(args.q.dtype(), &[t, heads, n])?;
    copy_columns(ex, op, (args.q, 0), (&mut plain.view_mut(), 0), n)?;
    copy_columns(ex, op, (args.q, n), (&mut out, l), r)?;
    per_head(ex, op, plain.view(), args.w_uk, out)
}

/// Copies `width` columns of all rows (the last dimension) from column `first` on to column `to_first` on; one dtype.
fn copy_columns(
    ex: &Exec,
    op: &str,
    (from, first): (View, usize),
    (to, to_first): (&mut ViewMut, usize),
    width: usize,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let bytes = from.dtype().size_in_bytes();
    let row = |dims: &[usize]| dims.last().copied().unwrap_or(0);
    let from_row = row(from.dims());
    let to_row = row(to.dims());
    let rows = from.elem_count().checked_div(from_row).unwrap_or(0);
    let at: *const u8 = cuda.read(op, "from", from)?;
    let out: *mut u8 = cuda.write(op, "to", to)?;
    let at = at.wrapping_add(first * bytes).cast();
    let out = out.wrapping_add(to_first * bytes).cast();
    let dtype = Dtype::of(op, from.dtype())?;
    let rows = int(op, rows)?;
    let width = int(op, width)?;
    let from_row = int(op, from_row)?;
    let to_row = int(op, to_row)?;
    // SAFETY: the columns are inside of both rows; the callers have made them so.
    cuda.check(op, unsafe {
        ffi::moe_any_copy_columns(at, out, dtype, rows, width, from_row, to_row, cuda.raw()?)
    })
}
