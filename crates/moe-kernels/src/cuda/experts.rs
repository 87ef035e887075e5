//! The whole expert layer on CUDA: from token rows and their top-k to the weighted sum.

use candle_core::{DType, Result, bail};

use super::{CudaExec, ffi, small};
use crate::door::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// From this many tokens on the grouped kernels beat the streaming one (docs/kernels.md).
const GROUPED_TOKENS: usize = 256;
/// Most slots of the streaming kernel.
const STREAM_SLOTS: usize = 2048;
/// Rows of a tile of the grouped kernels.
const TILE_ROWS: i32 = 128;

/// Arguments of [`fused_experts_into`].
#[derive(Clone, Copy, Debug)]
pub struct FusedExperts<'a> {
    /// [T, H] bf16.
    pub x: View<'a>,
    /// [E_local, 2I, H] bf16: gate rows, then up rows.
    pub w13: View<'a>,
    /// [E_local, H, I] bf16.
    pub w2: View<'a>,
    /// [T, K] u32 physical ids; `u32::MAX` and ids that live elsewhere add nothing.
    pub topk_ids: View<'a>,
    /// [T, K] f32.
    pub topk_weights: View<'a>,
    /// \[P\] i32, physical expert to local slot, -1 = elsewhere; `None` = identity.
    pub expert_map: Option<View<'a>>,
}

/// out\[t\] = Σ_k topk_weights[t, k] · w2\[e\] (silu(gate) · up), gate and up from w13\[e\] x\[t\], e =
/// topk_ids[t, k]; k ascending in f32. `out` is [T, H] f32 or bf16.
///
/// # Errors
/// A CPU context; a wrong dtype or wrong dims; H or I that are no multiple of 64.
pub fn fused_experts_into(args: &FusedExperts, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "fused_experts";
    let sizes = Sizes::check(op, args, &out)?;
    if sizes.tokens == 0 {
        return Ok(());
    }
    let output = i32::from(out.dtype() == DType::F32);
    let mut act = ex.scratch(DType::BF16, &[sizes.tokens * sizes.top_k, sizes.inter])?;
    let mut slot_rows = ex.scratch(DType::F32, &[sizes.tokens * sizes.top_k, sizes.hidden])?;
    let mut addresses = |cuda: &CudaExec| -> Result<_> {
        Ok(Addresses {
            x: cuda.read(op, "x", args.x)?,
            w13: cuda.read(op, "w13", args.w13)?,
            w2: cuda.read(op, "w2", args.w2)?,
            topk_ids: cuda.read(op, "topk_ids", args.topk_ids)?,
            topk_weights: cuda.read(op, "topk_weights", args.topk_weights)?,
            expert_map: cuda.read_or_null(op, "expert_map", args.expert_map)?,
            act: cuda.write(op, "act", &mut act.view_mut())?,
            slot_rows: cuda.write(op, "slot_rows", &mut slot_rows.view_mut())?,
            out: cuda.write(op, "out", &mut out)?,
        })
    };
    let at = addresses(ex.cuda(op)?)?;
    if !ex.batch_invariant() && sizes.tokens < GROUPED_TOKENS && sizes.tokens * sizes.top_k <= STREAM_SLOTS {
        stream(op, &sizes, &at, output, ex)
    } else {
        grouped(op, &sizes, &at, output, ex)
    }
}

struct Sizes {
    tokens: usize,
    top_k: usize,
    num_ids: usize,
    num_local: usize,
    hidden: usize,
    inter: usize,
}

struct Addresses {
    x: *const std::ffi::c_void,
    w13: *const std::ffi::c_void,
    w2: *const std::ffi::c_void,
    topk_ids: *const std::ffi::c_void,
    topk_weights: *const std::ffi::c_void,
    expert_map: *const std::ffi::c_void,
    act: *mut std::ffi::c_void,
    slot_rows: *mut std::ffi::c_void,
    out: *mut std::ffi::c_void,
}

impl Sizes {
    fn check(op: &str, args: &FusedExperts, out: &ViewMut) -> Result<Self> {
        let (tokens, hidden) = expect_matrix(op, "x", &args.x)?;
        let (num_local, _, inter) = expect_rank3(op, "w2", &args.w2)?;
        let (_, top_k) = expect_matrix(op, "topk_ids", &args.topk_ids)?;
        expect_dims(op, "w2", &args.w2, &[num_local, hidden, inter])?;
        expect_dims(op, "w13", &args.w13, &[num_local, 2 * inter, hidden])?;
        for (name, view, dtype) in
            [("x", args.x, DType::BF16), ("w13", args.w13, DType::BF16), ("w2", args.w2, DType::BF16)]
        {
            expect_dtype(op, name, &view, dtype)?;
        }
        expect_dims(op, "topk_ids", &args.topk_ids, &[tokens, top_k])?;
        expect_dtype(op, "topk_ids", &args.topk_ids, DType::U32)?;
        expect_dims(op, "topk_weights", &args.topk_weights, &[tokens, top_k])?;
        expect_dtype(op, "topk_weights", &args.topk_weights, DType::F32)?;
        if let Some(map) = &args.expert_map {
            expect_dtype(op, "expert_map", map, DType::I32)?;
        }
        expect_dims(op, "out", out, &[tokens, hidden])?;
        if !matches!(out.dtype(), DType::F32 | DType::BF16) {
            bail!("{op}: expected out of dtype f32 or bf16, got {}", out.dtype().as_str())
        }
        if !Self::fit(hidden, inter) {
            bail!("{op}: expected H and I to be multiples of 64, got {hidden} and {inter}")
        }
        let num_ids = args.expert_map.map_or(num_local, |map| map.elem_count());
        Ok(Self { tokens, top_k, num_ids, num_local, hidden, inter })
    }

    fn fit(hidden: usize, inter: usize) -> bool {
        [hidden, inter].iter().all(|n| *n > 0 && n.is_multiple_of(64))
    }
}

fn stream(op: &str, s: &Sizes, at: &Addresses, output: i32, ex: &Exec) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let num_local = small(op, s.num_local)?;
    // SAFETY: a pure function of numbers.
    let words = unsafe { ffi::moe_experts_stream_flags(STREAM_SLOTS as i32, num_local) };
    let flags = cuda.counters("experts_stream", words as usize)?;
    // SAFETY: `Sizes::check` has checked dims, dtypes and the launcher's conditions.
    let code = unsafe {
        ffi::moe_experts_stream(
            at.x,
            at.w13,
            at.w2,
            at.topk_ids,
            at.topk_weights,
            at.expert_map,
            at.act,
            at.slot_rows,
            at.out,
            flags,
            words,
            small(op, s.tokens)?,
            small(op, s.top_k)?,
            small(op, s.num_ids)?,
            num_local,
            small(op, s.hidden)?,
            small(op, s.inter)?,
            output,
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

fn grouped(op: &str, s: &Sizes, at: &Addresses, output: i32, ex: &Exec) -> Result<()> {
    let slots = small(op, s.tokens * s.top_k)?;
    let (num_ids, num_local) = (small(op, s.num_ids)?, small(op, s.num_local)?);
    let (tokens, top_k) = (small(op, s.tokens)?, small(op, s.top_k)?);
    let (hidden, inter) = (small(op, s.hidden)?, small(op, s.inter)?);
    // SAFETY: a pure function of numbers.
    let max_tiles = unsafe { ffi::moe_max_tiles(slots, num_local, TILE_ROWS) } as usize;
    let words = |n: usize| ex.scratch(DType::U32, &[n]);
    let (mut offsets, mut sorted) = (words(s.num_local + 1)?, words(s.tokens * s.top_k)?);
    let (mut tiles, mut num_tiles) = (words(2 * max_tiles)?, words(1)?);
    let cuda = ex.cuda(op)?;
    let address = |s: &mut crate::Scratch| cuda.write(op, "scratch", &mut s.view_mut());
    let (offsets, sorted) = (address(&mut offsets)?, address(&mut sorted)?);
    let (tiles, num_tiles) = (address(&mut tiles)?, address(&mut num_tiles)?);
    let stream = cuda.raw()?;
    // SAFETY: `Sizes::check` has checked dims, dtypes and the launchers' conditions; the scratch has the sizes that
    // they ask for, and what each reads the one before has written.
    unsafe {
        let code = ffi::moe_align_tokens(
            at.topk_ids,
            at.expert_map,
            slots,
            num_ids,
            num_local,
            TILE_ROWS,
            offsets,
            sorted,
            tiles,
            num_tiles,
            stream,
        );
        cuda.check("align_tokens", code)?;
        let code = ffi::moe_experts_grouped_gate_up(
            at.x, at.w13, offsets, sorted, tiles, num_tiles, at.act, slots, top_k, num_local, hidden, inter,
            stream,
        );
        cuda.check("experts_grouped_gate_up", code)?;
        let code = ffi::moe_experts_grouped_down(
            at.act,
            at.w2,
            offsets,
            sorted,
            tiles,
            num_tiles,
            at.slot_rows,
            slots,
            num_local,
            hidden,
            inter,
            stream,
        );
        cuda.check("experts_grouped_down", code)?;
        let code = ffi::moe_combine(
            at.slot_rows,
            at.topk_ids,
            at.topk_weights,
            at.expert_map,
            at.out,
            tokens,
            top_k,
            num_ids,
            num_local,
            hidden,
            output,
            stream,
        );
        cuda.check("combine", code)
    }
}
