//! The whole expert layer on CUDA: from token rows and their top-k to the weighted sum.

mod launch;

use candle_core::{DType, Result, bail};

use super::args::Output;
use super::router::{self, Gate, gate_route, gate_route_fits};
use super::small::{experts_into, small_experts_fit};
use super::{PreNorm, aligned};
use crate::align::list_slots_into;
use crate::buffer::Scratch;
use crate::door::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use crate::exec::Exec;
use crate::view::{View, ViewMut};
use launch::{Buckets, Inputs, Lease, Rows, bucket_counts};

/// From this many tokens on Hopper's warpgroup products beat the streaming kernel (docs/kernels.md).
const TENSOR_TOKENS: usize = 8;
/// Most experts of those products, whose table lies in shared memory.
const TENSOR_EXPERTS: usize = 2048;
/// From this many tokens on the grouped kernels of other cards beat the streaming one.
const GROUPED_TOKENS: usize = 256;
/// Most slots of the streaming kernel.
const STREAM_SLOTS: usize = 2048;

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
    /// The slots of each local expert, where they are known: saves listing them.
    pub lists: Option<ExpertLists<'a>>,
}

/// The slots of each local expert, as [`list_slots_into`](crate::list_slots_into) lists those of the same ids and map.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLists<'a> {
    /// \[E_local\] u32.
    pub counts: View<'a>,
    /// [E_local, T*K] u32.
    pub slots: View<'a>,
}

/// out\[t\] = Σ_k topk_weights[t, k] · w2\[e\] (silu(gate) · up), gate and up from w13\[e\] x\[t\], e =
/// topk_ids[t, k]; k ascending in f32. `out` is [T, H] f32 or bf16.
///
/// # Errors
/// A CPU context; a wrong dtype or wrong dims; H or I that are no multiple of 64.
pub fn fused_experts_into(args: &FusedExperts, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "fused_experts";
    let sizes = Sizes::check(op, args)?;
    expect_dims(op, "out", &out, &[sizes.tokens, sizes.hidden])?;
    if !matches!(out.dtype(), DType::F32 | DType::BF16) {
        bail!("{op}: expected out of dtype f32 or bf16, got {}", out.dtype().as_str())
    }
    if sizes.tokens == 0 {
        return Ok(());
    }
    let output = Output::stored_as(out.dtype());
    let inputs = Inputs::of(op, args, ex)?;
    let scratch = inputs.scratch(&sizes, ex)?;
    let out = ex.cuda(op)?.write(op, "out", &mut out)?;
    match sizes.form(ex)? {
        Form::Stream => inputs.stream(&sizes, scratch, (out, output), ex),
        Form::Tensor => {
            let listed;
            let lists = match args.lists {
                Some(lists) => lists,
                None => {
                    listed = list(args, &sizes, ex)?;
                    ExpertLists { counts: listed[0].view(), slots: listed[1].view() }
                }
            };
            inputs.tensor(&sizes, Buckets::of(op, &lists, &sizes, ex)?, &scratch, ex)?;
            inputs.combine(&sizes, &scratch, (out, output), ex)
        }
        Form::Grouped => {
            inputs.grouped(&sizes, &scratch, ex)?;
            inputs.combine(&sizes, &scratch, (out, output), ex)
        }
    }
}

/// Lists the slots of each local expert, where the caller has not: how many, and which.
fn list(args: &FusedExperts, sizes: &Sizes, ex: &mut Exec) -> Result<[Scratch; 2]> {
    let mut counts = ex.scratch(DType::U32, &[sizes.num_local])?;
    let mut slots = ex.scratch(DType::U32, &[sizes.num_local, sizes.slots()])?;
    list_slots_into(args.topk_ids, args.expert_map, counts.view_mut(), slots.view_mut(), ex)?;
    Ok([counts, slots])
}

/// Whether [`route_experts_add_norm_into`] fits a step of so many tokens.
pub fn route_experts_add_norm_fits(
    tokens: usize,
    (experts, top_k): (usize, usize),
    (hidden, inter): (usize, usize),
    ex: &Exec,
) -> bool {
    let sizes = Sizes { tokens, top_k, num_ids: experts, num_local: experts, hidden, inter };
    Sizes::fit(hidden, inter)
        && gate_route_fits(hidden, experts, top_k, DType::BF16, ex)
        && matches!(sizes.form(ex), Ok(Form::Tensor))
}

/// The experts that `gate` chooses, with what follows them: residual += Σ_k weight_k · w2\[e\] (silu(gate) · up) of x,
/// then out = norm(residual), the norm of the next sub-layer. The same bits as [`gate_route_into`],
/// [`fused_experts_into`] and the norm one after the other, in three launches. x and out [T, H] bf16, `residual` [T, H]
/// f32, w13 [E, 2I, H], w2 [E, H, I] bf16.
///
/// # Errors
/// A CPU context; wrong dims or dtypes; sizes that [`route_experts_add_norm_fits`] refuses.
pub fn route_experts_add_norm_into(
    x: View,
    (gate, top_k): (&Gate, usize),
    (w13, w2): (View, View),
    norm: &PreNorm,
    mut residual: ViewMut,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let op = "route_experts_add_norm";
    let (tokens, hidden) = expect_matrix(op, "x", &x)?;
    let (experts, _, inter) = expect_rank3(op, "w2", &w2)?;
    norm.check(op, hidden)?;
    for (name, view, dtype) in [("residual", &residual, DType::F32), ("out", &out, DType::BF16)] {
        expect_dims(op, name, view, &[tokens, hidden])?;
        expect_dtype(op, name, view, dtype)?;
    }
    if !route_experts_add_norm_fits(tokens, (experts, top_k), (hidden, inter), ex)
        || !aligned(&[residual.as_view(), out.as_view(), norm.weight])
    {
        bail!(
            "{op}: the kernels do not fit T = {tokens}, E = {experts}, K = {top_k}, H = {hidden}, I = {inter}"
        )
    }
    let routed = Routed::new(op, x, (gate, top_k), (w13, w2), None, ex)?;
    routed.inputs.combine_add_norm(&routed.sizes, &routed.rows, norm, (&mut residual, &mut out), ex)
}

/// Whether [`route_experts_into`] fits a step of so many tokens.
pub fn route_experts_fit(tokens: usize, experts: (usize, usize), widths: (usize, usize), ex: &Exec) -> bool {
    small_experts_fit(tokens, experts, widths, ex) || route_experts_add_norm_fits(tokens, experts, widths, ex)
}

/// out [T, H] f32 = Σ_k weight_k · w2\[e\] (silu(gate) · up) of x [T, H] bf16, with those experts that `gate` chooses and that
/// live here: for a few tokens in one launch, else in three. w13 [E_local, 2I, H], w2 [E_local, H, I] bf16; `expert_map`
/// \[E\] i32 as in [`FusedExperts`].
///
/// # Errors
/// A CPU context; wrong dims or dtypes; sizes that [`route_experts_fit`] refuses.
pub fn route_experts_into(
    x: View,
    (gate, top_k): (&Gate, usize),
    (w13, w2): (View, View),
    expert_map: Option<View>,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "route_experts";
    let (tokens, hidden) = expect_matrix(op, "x", &x)?;
    let (experts, _) = expect_matrix(op, "gate", &gate.weight)?;
    let (num_local, _, inter) = expect_rank3(op, "w2", &w2)?;
    match &expert_map {
        Some(map) => {
            expect_dims(op, "expert_map", map, &[experts])?;
            expect_dtype(op, "expert_map", map, DType::I32)?;
        }
        None => expect_dims(op, "w2", &w2, &[experts, hidden, inter])?,
    }
    expect_dims(op, "out", &out, &[tokens, hidden])?;
    expect_dtype(op, "out", &out, DType::F32)?;
    if small_experts_fit(tokens, (experts, top_k), (hidden, inter), ex) {
        return experts_into(x, gate, top_k, (w13, w2), expert_map, out, ex);
    }
    if num_local > TENSOR_EXPERTS || !route_experts_fit(tokens, (experts, top_k), (hidden, inter), ex) {
        bail!(
            "{op}: the kernels do not fit T = {tokens}, E = {experts}, K = {top_k}, H = {hidden}, I = {inter}"
        )
    }
    let routed = Routed::new(op, x, (gate, top_k), (w13, w2), expert_map, ex)?;
    let out = ex.cuda(op)?.write(op, "out", &mut out)?;
    routed.inputs.combine(&routed.sizes, &routed.rows, (out, Output::F32), ex)
}

/// Tokens behind router and products, before their sum.
struct Routed {
    sizes: Sizes,
    inputs: Inputs,
    rows: Rows,
    // The launches to come read them.
    _ids: Scratch,
    _weights: Scratch,
}

impl Routed {
    fn new(
        op: &'static str,
        x: View,
        (gate, top_k): (&Gate, usize),
        (w13, w2): (View, View),
        expert_map: Option<View>,
        ex: &Exec,
    ) -> Result<Self> {
        let (tokens, experts, num_local) = (x.rows(), gate.weight.rows(), w2.dims()[0]);
        let mut logits = ex.scratch(DType::F32, &[tokens, experts])?;
        let mut ids = ex.scratch(DType::U32, &[tokens, top_k])?;
        let mut weights = ex.scratch(DType::F32, &[tokens, top_k])?;
        let slots = Lease::new(op, DType::U32, &[num_local, tokens], ex)?;
        let outputs = (logits.view_mut(), ids.view_mut(), weights.view_mut());
        let buckets = router::Buckets {
            counts: bucket_counts(num_local, ex)?,
            slots: slots.at,
            expert_map: ex.cuda(op)?.read_or_null(op, "expert_map", expert_map)?,
        };
        gate_route(x, gate, outputs, buckets, ex)?;
        let (topk_ids, topk_weights) = (ids.view(), weights.view());
        let args = FusedExperts { x, w13, w2, topk_ids, topk_weights, expert_map, lists: None };
        let sizes = Sizes::check(op, &args)?;
        let inputs = Inputs::of(op, &args, ex)?;
        let rows = inputs.scratch(&sizes, ex)?;
        let (at, counts) = (slots.at.cast_const(), bucket_counts(num_local, ex)?.cast_const());
        inputs.tensor(&sizes, Buckets { at, counts, places: tokens }, &rows, ex)?;
        Ok(Self { sizes, inputs, rows, _ids: ids, _weights: weights })
    }
}

/// Which kernels compute the products.
enum Form {
    Stream,
    Tensor,
    Grouped,
}

pub(super) struct Sizes {
    pub tokens: usize,
    pub top_k: usize,
    pub num_ids: usize,
    pub num_local: usize,
    pub hidden: usize,
    pub inter: usize,
}

impl Sizes {
    fn check(op: &str, args: &FusedExperts) -> Result<Self> {
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
        if let Some(lists) = &args.lists {
            expect_dims(op, "lists.counts", &lists.counts, &[num_local])?;
            expect_dtype(op, "lists.counts", &lists.counts, DType::U32)?;
            expect_dims(op, "lists.slots", &lists.slots, &[num_local, tokens * top_k])?;
            expect_dtype(op, "lists.slots", &lists.slots, DType::U32)?;
        }
        if !Self::fit(hidden, inter) {
            bail!("{op}: expected H and I to be multiples of 64, got {hidden} and {inter}")
        }
        let num_ids = args.expert_map.map_or(num_local, |map| map.elem_count());
        Ok(Self { tokens, top_k, num_ids, num_local, hidden, inter })
    }

    pub(super) fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// By sizes and card alone. Where a row's bits must not depend on the number of rows, the form for many serves any.
    fn form(&self, ex: &Exec) -> Result<Form> {
        let (hopper, invariant) = (ex.cuda("fused_experts")?.major >= 9, ex.batch_invariant());
        let many = |from: usize| invariant || self.tokens >= from;
        Ok(if hopper && many(TENSOR_TOKENS) && self.num_local <= TENSOR_EXPERTS {
            Form::Tensor
        } else if !many(GROUPED_TOKENS) && self.slots() <= STREAM_SLOTS {
            Form::Stream
        } else {
            Form::Grouped
        })
    }

    fn fit(hidden: usize, inter: usize) -> bool {
        [hidden, inter].iter().all(|n| *n > 0 && n.is_multiple_of(64))
    }
}
