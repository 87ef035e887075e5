//! The launches that an expert layer is made of.

use candle_core::{DType, Result, bail};

use super::arguments::{ExpertLists, FusedExperts};
use super::packs::Packs;
use crate::buffer::Scratch;
use crate::cuda::args::{
    AlignTokensArgs, ExpertEpilogueArgs, ExpertsGroupedArgs, ExpertsStreamArgs, ExpertsTensorArgs, In,
    OrderRowsArgs, Out, Output, QuantExpertsStreamArgs, QuantExpertsTensorArgs, QuantPack,
};
use crate::cuda::{ffi, small};
use crate::exec::Exec;
use crate::plan::ExpertsCall;
use crate::view::{View, ViewMut};

/// Most slots of the streaming kernel, whose flags are sized for them.
const STREAM_SLOTS: usize = 2048;
/// Rows of a tile of the grouped kernels.
const GROUPED_ROWS: usize = 128;

/// Addresses of the arguments.
pub(super) struct Inputs {
    pub op: &'static str,
    pub x: In,
    pub packs: Packs,
    pub topk_ids: In,
    pub topk_weights: In,
    pub expert_map: In,
    pub epilogue: ExpertEpilogueArgs,
}

/// Scratch of the workspace with its address.
pub(super) struct ScratchArray {
    pub at: Out,
    scratch: Scratch,
}

/// The slots of each expert, [E, `places`] in any order, and how many there are \[E\].
#[derive(Clone, Copy)]
pub(super) struct Buckets {
    pub at: In,
    pub counts: In,
    pub places: usize,
}

impl Buckets {
    /// The buckets of `lists`, which `super::check` has checked.
    pub(super) fn of(op: &str, lists: &ExpertLists, s: &ExpertsCall, ex: &Exec) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        let at = cuda.read(op, "lists", lists.slots)?;
        let counts = cuda.read(op, "counts", lists.counts)?;
        Ok(Self { at, counts, places: s.slots() })
    }
}

/// The arrays that the products write and that the sum reads.
pub(super) struct Rows {
    /// [T K, I] bf16; none where activations are in FP8.
    pub act: Option<ScratchArray>,
    /// [T K, H] of `dtype`.
    pub slot_rows: ScratchArray,
    /// f32; bf16 where `moe_experts_wide` or products with FP8 activations compute them.
    pub dtype: DType,
}

impl Rows {
    fn act_at(&self, op: &str) -> Result<Out> {
        match &self.act {
            Some(act) => Ok(act.at),
            None => bail!("{op}: these products leave activations in bf16, for which there is no room"),
        }
    }
}

impl ScratchArray {
    pub(super) fn new(op: &str, dtype: DType, dims: &[usize], ex: &Exec) -> Result<Self> {
        let mut scratch = ex.scratch(dtype, dims)?;
        let at = ex.cuda(op)?.write(op, "scratch", &mut scratch.view_mut())?;
        Ok(Self { at, scratch })
    }

    pub(super) fn view(&self) -> View<'_> {
        self.scratch.view()
    }

    pub(super) fn into_scratch(self) -> Scratch {
        self.scratch
    }

    pub(super) fn view_mut(&mut self) -> ViewMut<'_> {
        self.scratch.view_mut()
    }
}

/// The counters of `moe_experts_tensor` and `moe_experts_wide`, which one launch leaves ready for the next.
fn counters(num_local: usize, ex: &Exec) -> Result<*mut u32> {
    let op = "experts_tensor";
    // SAFETY: a pure function of a number.
    let words = unsafe { ffi::moe_experts_tensor_counters(small(op, num_local)?) } as usize;
    Ok(ex.cuda(op)?.counters_of_size(op, words)?.cast())
}

/// The address of the counts of each expert's slots, which the router fills for these products.
pub(super) fn bucket_counts(num_local: usize, ex: &Exec) -> Result<Out> {
    // SAFETY: the place is a constant below the number of counters.
    Ok(unsafe { counters(num_local, ex)?.add(ffi::moe_experts_tensor_counts() as usize) }.cast())
}

/// Sets the counts to zero for the next layer, after products that do not do so themselves.
pub(super) fn clear_bucket_counts(num_local: usize, ex: &Exec) -> Result<()> {
    let op = "clear_bucket_counts";
    let cuda = ex.cuda("clear_bucket_counts")?;
    let counts = bucket_counts(num_local, ex)?;
    let words = i64::from(small(op, num_local)?);
    // SAFETY: there are as many counts as local experts; zero has the same bits in f32 and u32.
    cuda.check(op, unsafe { ffi::moe_any_fill(counts, 0.0, words, cuda.raw()?) })
}

impl Inputs {
    pub(super) fn of(op: &'static str, args: &FusedExperts, ex: &Exec) -> Result<Self> {
        let cuda = ex.cuda(op)?;
        Ok(Self {
            op,
            x: cuda.read(op, "x", args.x)?,
            packs: Packs::of(op, [args.w13, args.w2], ex)?,
            topk_ids: cuda.read(op, "topk_ids", args.topk_ids)?,
            topk_weights: cuda.read(op, "topk_weights", args.topk_weights)?,
            expert_map: cuda.read_or_null(op, "expert_map", args.expert_map)?,
            epilogue: args.epilogue.args(op, cuda)?,
        })
    }

    /// Slot rows are of `dtype`, activations in bf16.
    pub(super) fn scratch(&self, s: &ExpertsCall, dtype: DType, ex: &Exec) -> Result<Rows> {
        let act = ScratchArray::new(self.op, DType::BF16, &[s.slots(), s.inter], ex)?;
        self.rows(s, Some(act), dtype, ex)
    }

    /// What products with FP8 activations need, which have their own rows between them.
    pub(super) fn fp8_scratch(&self, s: &ExpertsCall, ex: &Exec) -> Result<Rows> {
        self.rows(s, None, DType::BF16, ex)
    }

    fn rows(&self, s: &ExpertsCall, act: Option<ScratchArray>, dtype: DType, ex: &Exec) -> Result<Rows> {
        let slot_rows = ScratchArray::new(self.op, dtype, &[s.tokens, s.top_k, s.hidden], ex)?;
        Ok(Rows { act, slot_rows, dtype })
    }

    /// Everything in one launch.
    pub(super) fn stream(
        &self,
        s: &ExpertsCall,
        rows: Rows,
        (out, output): (Out, Output),
        ex: &Exec,
    ) -> Result<()> {
        let op = self.op;
        let cuda = ex.cuda(self.op)?;
        let num_local = small(op, s.num_local)?;
        // SAFETY: a pure function of numbers.
        let words = unsafe { ffi::moe_experts_stream_flags(STREAM_SLOTS as i32, num_local) };
        // Two sets of flags take turns, and where the second begins depends on their number.
        let flags = cuda.counters_of_size("experts_stream", words as usize)?;
        let &Self { x, topk_ids, topk_weights, expert_map, epilogue, .. } = self;
        let act = rows.act_at(op)?;
        let slot_rows = rows.slot_rows.at;
        let tokens = small(op, s.tokens)?;
        let top_k = small(op, s.top_k)?;
        let num_ids = small(op, s.num_ids)?;
        // SAFETY: `super::check` has checked dims, dtypes and the launchers' conditions; the scratch has the sizes
        // that they ask for.
        unsafe {
            match self.packs {
                Packs::Floats { w13, w2 } => {
                    let args = ExpertsStreamArgs {
                        x,
                        w13,
                        w2,
                        topk_ids,
                        topk_weights,
                        expert_map,
                        act,
                        slot_rows,
                        out,
                        flags,
                        flag_words: words,
                        tokens,
                        top_k,
                        num_ids,
                        num_local,
                        hidden: small(op, s.hidden)?,
                        inter: small(op, s.inter)?,
                        output,
                        epilogue,
                    };
                    cuda.check(op, ffi::moe_experts_stream(&args, cuda.raw()?))
                }
                Packs::Quantised { w13, w2 } => {
                    let args = QuantExpertsStreamArgs {
                        x,
                        w13,
                        w2,
                        topk_ids,
                        topk_weights,
                        expert_map,
                        act,
                        slot_rows,
                        out,
                        flags,
                        flag_words: words,
                        tokens,
                        top_k,
                        num_ids,
                        output,
                        epilogue,
                    };
                    cuda.check(op, ffi::moe_quant_experts_stream(&args, cuda.raw()?))
                }
            }
        }
    }

    /// Both products on warpgroup products: the rows of all slots that have a local expert, by the kernel that writes
    /// rows of their dtype.
    pub(super) fn tensor(&self, s: &ExpertsCall, slots: Buckets, rows: &Rows, ex: &Exec) -> Result<()> {
        let op = self.op;
        let cuda = ex.cuda(self.op)?;
        let bucket = small(op, slots.places)?;
        let counts = slots.counts;
        let act = rows.act_at(op)?;
        let slot_rows = rows.slot_rows.at;
        let counters = counters(s.num_local, ex)?.cast();
        let ordered = self.ordered(s, &slots, ex)?;
        // The rows are in order of slots, which is the same as one token with one expert for each slot.
        let (x, tokens, top_k) = match &ordered {
            Some(ordered) => (ordered.at.cast_const(), s.slots(), 1),
            None => (self.x, s.tokens, s.top_k),
        };
        let tokens = small(op, tokens)?;
        let top_k = small(op, top_k)?;
        let num_ids = small(op, s.num_ids)?;
        let slots = slots.at;
        let wide = rows.dtype == DType::BF16;
        // SAFETY: `super::check` has checked dims, dtypes and the launchers' conditions; the scratch has the sizes that
        // they ask for, and routing has filled it.
        unsafe {
            match self.packs {
                Packs::Floats { w13, w2 } => {
                    let args = ExpertsTensorArgs {
                        x,
                        w13,
                        w2,
                        slots,
                        counts,
                        bucket,
                        act,
                        slot_rows,
                        counters,
                        tokens,
                        top_k,
                        num_ids,
                        num_local: small(op, s.num_local)?,
                        hidden: small(op, s.hidden)?,
                        inter: small(op, s.inter)?,
                        epilogue: self.epilogue,
                    };
                    match wide {
                        true => cuda.check("experts_wide", ffi::moe_experts_wide(&args, cuda.raw()?)),
                        false => cuda.check("experts_tensor", ffi::moe_experts_tensor(&args, cuda.raw()?)),
                    }
                }
                Packs::Quantised { w13, w2 } => {
                    let w13 = QuantPack { perm: std::ptr::null(), ..w13 };
                    let args = QuantExpertsTensorArgs {
                        x,
                        w13,
                        w2,
                        slots,
                        counts,
                        bucket,
                        act,
                        slot_rows,
                        counters,
                        tokens,
                        top_k,
                        num_ids,
                        invariant: i32::from(ex.batch_invariant()),
                        epilogue: self.epilogue,
                    };
                    let (name, code) = match wide {
                        true => ("quant_experts_wide", ffi::moe_quant_experts_wide(&args, cuda.raw()?)),
                        false => ("quant_experts_tensor", ffi::moe_quant_experts_tensor(&args, cuda.raw()?)),
                    };
                    cuda.check(name, code)
                }
            }
        }
    }

    /// A row for each slot in the order of its expert's columns, where experts have orders of their own; rows of slots
    /// without a local expert are unspecified.
    fn ordered(&self, s: &ExpertsCall, slots: &Buckets, ex: &Exec) -> Result<Option<ScratchArray>> {
        let perm = match self.packs {
            Packs::Quantised { w13, .. } if !w13.perm.is_null() => w13.perm,
            _ => return Ok(None),
        };
        let op = self.op;
        let cuda = ex.cuda(self.op)?;
        let rows = ScratchArray::new(op, DType::BF16, &[s.slots(), s.hidden], ex)?;
        let args = OrderRowsArgs {
            x: self.x,
            perm,
            slots: slots.at,
            counts: slots.counts,
            bucket: small(op, slots.places)?,
            out: rows.at,
            tokens: small(op, s.tokens)?,
            top_k: small(op, s.top_k)?,
            columns: small(op, s.hidden)?,
            experts: small(op, s.num_local)?,
        };
        // SAFETY: `super::check` has checked dims and dtypes, an order names a column of x for each column of the pack,
        // and routing has listed the slots, each of which has a row.
        cuda.check("order_rows", unsafe { ffi::moe_order_rows(&args, cuda.raw()?) })?;
        Ok(Some(rows))
    }

    /// Alignment and both products, a launch each: the rows of all slots that have a local expert.
    pub(super) fn grouped(&self, s: &ExpertsCall, rows: &Rows, ex: &Exec) -> Result<()> {
        let op = self.op;
        let cuda = ex.cuda(self.op)?;
        let slots = small(op, s.slots())?;
        let num_local = small(op, s.num_local)?;
        let num_ids = small(op, s.num_ids)?;
        let tile_rows = small(op, GROUPED_ROWS)?;
        // SAFETY: a pure function of numbers.
        let max_tiles = unsafe { ffi::moe_max_tiles(slots, num_local, tile_rows) } as usize;
        let words = |n: usize| ScratchArray::new(op, DType::U32, &[n], ex);
        // Slots in order of their experts, and tiles of at most `GROUPED_ROWS` of them.
        let offsets = words(s.num_local + 1)?;
        let sorted = words(s.slots())?;
        let tiles = words(2 * max_tiles)?;
        let num_tiles = words(1)?;
        let align = AlignTokensArgs {
            topk_ids: self.topk_ids,
            expert_map: self.expert_map,
            slots,
            num_ids,
            num_local,
            tile_rows,
            offsets: offsets.at,
            sorted: sorted.at,
            tiles: tiles.at,
            num_tiles: num_tiles.at,
        };
        let (w13, w2) = self.packs.floats(op)?;
        let args = ExpertsGroupedArgs {
            x: self.x,
            w13,
            w2,
            offsets: offsets.at,
            sorted: sorted.at,
            tiles: tiles.at,
            num_tiles: num_tiles.at,
            act: rows.act_at(op)?,
            slot_rows: rows.slot_rows.at,
            slots,
            top_k: small(op, s.top_k)?,
            num_local,
            hidden: small(op, s.hidden)?,
            inter: small(op, s.inter)?,
        };
        // SAFETY: `super::check` has checked dims, dtypes and the launchers' conditions; the scratch has the sizes that
        // they ask for, and what each reads the one before has written.
        unsafe {
            cuda.check("align_tokens", ffi::moe_align_tokens(&align, cuda.raw()?))?;
            cuda.check("experts_grouped_gate_up", ffi::moe_experts_grouped_gate_up(&args, cuda.raw()?))?;
            cuda.check("experts_grouped_down", ffi::moe_experts_grouped_down(&args, cuda.raw()?))
        }
    }
}
