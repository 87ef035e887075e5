//! The launches that an expert layer is made of.

use std::ffi::c_void;

use candle_core::{DType, Result};

use super::{FusedExperts, STREAM_SLOTS, Sizes};
use crate::buffer::Scratch;
use crate::cuda::{PreNorm, ffi, small};
use crate::exec::Exec;
use crate::view::ViewMut;

/// Rows of a tile of the grouped kernels.
const GROUPED_ROWS: i32 = 128;

/// The kernels behind an alignment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Products {
    /// Both products in one launch, on warpgroup products.
    Tensor,
    /// A launch each, in tiles of [`GROUPED_ROWS`].
    Grouped,
}

/// Addresses of the arguments.
pub(super) struct Inputs {
    op: &'static str,
    x: *const c_void,
    w13: *const c_void,
    w2: *const c_void,
    topk_ids: *const c_void,
    topk_weights: *const c_void,
    expert_map: *const c_void,
}

/// Scratch of the workspace with its address.
struct Lease {
    at: *mut c_void,
    _scratch: Scratch,
}

/// What lies between the products and the sum.
pub(super) struct Rows {
    /// [T K, I] bf16.
    act: Lease,
    /// [T K, H] f32.
    slot_rows: Lease,
}

impl Lease {
    fn new(op: &str, dtype: DType, dims: &[usize], ex: &Exec) -> Result<Self> {
        let mut scratch = ex.scratch(dtype, dims)?;
        let at = ex.cuda(op)?.write(op, "scratch", &mut scratch.view_mut())?;
        Ok(Self { at, _scratch: scratch })
    }
}

impl Inputs {
    pub(super) fn of(op: &'static str, args: &FusedExperts, ex: &Exec) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        Ok(Self {
            op,
            x: cuda.read(op, "x", args.x)?,
            w13: cuda.read(op, "w13", args.w13)?,
            w2: cuda.read(op, "w2", args.w2)?,
            topk_ids: cuda.read(op, "topk_ids", args.topk_ids)?,
            topk_weights: cuda.read(op, "topk_weights", args.topk_weights)?,
            expert_map: cuda.read_or_null(op, "expert_map", args.expert_map)?,
        })
    }

    pub(super) fn scratch(&self, s: &Sizes, ex: &Exec) -> Result<Rows> {
        Ok(Rows {
            act: Lease::new(self.op, DType::BF16, &[s.slots(), s.inter], ex)?,
            slot_rows: Lease::new(self.op, DType::F32, &[s.slots(), s.hidden], ex)?,
        })
    }

    /// Everything in one launch; `out` with 0 for bf16, 1 for f32.
    pub(super) fn stream(
        &self,
        s: &Sizes,
        rows: Rows,
        (out, output): (*mut c_void, i32),
        ex: &Exec,
    ) -> Result<()> {
        let (op, cuda) = (self.op, ex.cuda(self.op)?);
        let num_local = small(op, s.num_local)?;
        // SAFETY: a pure function of numbers.
        let words = unsafe { ffi::moe_experts_stream_flags(STREAM_SLOTS as i32, num_local) };
        let flags = cuda.counters("experts_stream", words as usize)?;
        // SAFETY: `Sizes::check` has checked dims, dtypes and the launcher's conditions; the scratch has the sizes
        // that it asks for.
        let code = unsafe {
            ffi::moe_experts_stream(
                self.x,
                self.w13,
                self.w2,
                self.topk_ids,
                self.topk_weights,
                self.expert_map,
                rows.act.at,
                rows.slot_rows.at,
                out,
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

    /// Alignment and both products: the rows of all slots that have a local expert.
    pub(super) fn products(&self, s: &Sizes, products: Products, rows: &Rows, ex: &Exec) -> Result<()> {
        let op = self.op;
        let slots = small(op, s.slots())?;
        let (num_ids, num_local) = (small(op, s.num_ids)?, small(op, s.num_local)?);
        let (top_k, hidden, inter) = (small(op, s.top_k)?, small(op, s.hidden)?, small(op, s.inter)?);
        // One tile per touched expert, or tiles of so many rows.
        let tile_rows = if products == Products::Tensor { slots } else { GROUPED_ROWS };
        // SAFETY: a pure function of numbers.
        let max_tiles = unsafe { ffi::moe_max_tiles(slots, num_local, tile_rows) } as usize;
        let words = |n: usize| Lease::new(op, DType::U32, &[n], ex);
        let (offsets, sorted) = (words(s.num_local + 1)?, words(s.slots())?);
        let (tiles, num_tiles, progress) = (words(2 * max_tiles)?, words(1)?, words(s.num_local + 2)?);
        let (act, slot_rows) = (rows.act.at, rows.slot_rows.at);
        let cuda = ex.cuda(op)?;
        let stream = cuda.raw()?;
        // SAFETY: `Sizes::check` has checked dims, dtypes and the launchers' conditions; the scratch has the sizes that
        // they ask for, and what each reads the one before has written.
        unsafe {
            let code = ffi::moe_align_tokens(
                self.topk_ids,
                self.expert_map,
                slots,
                num_ids,
                num_local,
                tile_rows,
                offsets.at,
                sorted.at,
                tiles.at,
                num_tiles.at,
                progress.at,
                stream,
            );
            cuda.check("align_tokens", code)?;
            if products == Products::Tensor {
                let code = ffi::moe_experts_tensor(
                    self.x,
                    self.w13,
                    self.w2,
                    offsets.at,
                    sorted.at,
                    tiles.at,
                    num_tiles.at,
                    act,
                    slot_rows,
                    progress.at,
                    slots,
                    top_k,
                    num_local,
                    hidden,
                    inter,
                    stream,
                );
                return cuda.check("experts_tensor", code);
            }
            let code = ffi::moe_experts_grouped_gate_up(
                self.x,
                self.w13,
                offsets.at,
                sorted.at,
                tiles.at,
                num_tiles.at,
                act,
                slots,
                top_k,
                num_local,
                hidden,
                inter,
                stream,
            );
            cuda.check("experts_grouped_gate_up", code)?;
            let code = ffi::moe_experts_grouped_down(
                act,
                self.w2,
                offsets.at,
                sorted.at,
                tiles.at,
                num_tiles.at,
                slot_rows,
                slots,
                num_local,
                hidden,
                inter,
                stream,
            );
            cuda.check("experts_grouped_down", code)
        }
    }

    /// The weighted sum; `out` with 0 for bf16, 1 for f32.
    pub(super) fn combine(
        &self,
        s: &Sizes,
        rows: &Rows,
        (out, output): (*mut c_void, i32),
        ex: &Exec,
    ) -> Result<()> {
        let (op, cuda) = (self.op, ex.cuda(self.op)?);
        // SAFETY: as in `products`, whose rows this reads.
        let code = unsafe {
            ffi::moe_combine(
                rows.slot_rows.at,
                self.topk_ids,
                self.topk_weights,
                self.expert_map,
                out,
                small(op, s.tokens)?,
                small(op, s.top_k)?,
                small(op, s.num_ids)?,
                small(op, s.num_local)?,
                small(op, s.hidden)?,
                output,
                cuda.raw()?,
            )
        };
        cuda.check("combine", code)
    }

    /// The weighted sum, added to `residual` [T, H] f32, and the norm of that to `out` [T, H] bf16.
    pub(super) fn combine_add_norm(
        &self,
        s: &Sizes,
        rows: &Rows,
        norm: &PreNorm,
        (residual, out): (&mut ViewMut, &mut ViewMut),
        ex: &Exec,
    ) -> Result<()> {
        let (op, cuda) = (self.op, ex.cuda(self.op)?);
        // SAFETY: as in `products`, whose rows this reads; the caller has checked `residual`, `norm` and `out`.
        let code = unsafe {
            ffi::moe_combine_add_rms_norm(
                rows.slot_rows.at,
                self.topk_ids,
                self.topk_weights,
                self.expert_map,
                cuda.write(op, "residual", residual)?,
                cuda.read(op, "norm", norm.weight)?,
                norm.eps,
                cuda.write(op, "out", out)?,
                small(op, s.tokens)?,
                small(op, s.top_k)?,
                small(op, s.num_ids)?,
                small(op, s.num_local)?,
                small(op, s.hidden)?,
                cuda.raw()?,
            )
        };
        cuda.check("combine_add_rms_norm", code)
    }
}
