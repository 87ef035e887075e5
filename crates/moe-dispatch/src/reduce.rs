//! Weight and reduce: turns the experts' rows into token rows.
//!
//! The strategies are vLLM's (`topk_weight_and_reduce.py`), but all use one order of addition: slots in the order k =
//! 0..K-1 in f32, with one rounding at the end. So both formats give the same bits.

use candle_core::{DType, Result, bail};
use moe_kernels::arguments::{expect_dims, expect_dtype, expect_matrix, expect_rank3};
use moe_kernels::{
    ActivationFormat, Dispatched, Exec, Lent, RowBatches, View, ViewMut, WeightAndReduce,
    contiguous_local_ids_into, copy_rows_into, fill_into, group_slots_into, mask_nonlocal_into,
    unbatch_rows_into, weighted_sum_into,
};

use crate::rows::width;

const OP: &str = "weight_and_reduce";

/// The data of the tokens' owner that combine needs.
#[derive(Clone, Copy, Debug)]
pub struct CombineArgs<'a> {
    /// [T, K] u32 physical ids; slots of `u32::MAX` add nothing.
    pub topk_ids: View<'a>,
    /// [T, K] f32 router weights.
    pub topk_weights: View<'a>,
    /// \[P\] i32, local slot of each physical expert. Slots of experts on other ranks (-1) add nothing. `None`: every
    /// slot was computed.
    pub expert_map: Option<View<'a>>,
    /// Whether the experts' input rows were already multiplied by the weights (`apply_router_weight_on_input`). If so,
    /// rows are added with weight 1.
    pub weights_applied: bool,
}

/// Weights and adds the experts' rows of `dispatched` on the rank that computed them. `out` is [T', H]; `ids` and
/// `weights` of the slots are [T', K]. `Delegate` chooses the strategy that fits the format.
pub(crate) fn reduce_into(
    name: &str,
    expert_out: View,
    dispatched: &Dispatched,
    (ids, weights): (View, View),
    strategy: WeightAndReduce,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let format = dispatched.format;
    let batched = format == ActivationFormat::BatchedExperts;
    let strategy = match strategy {
        WeightAndReduce::Delegate if batched => WeightAndReduce::NaiveBatched { rank: 0 },
        WeightAndReduce::Delegate => WeightAndReduce::Contiguous,
        chosen => chosen,
    };
    if !reduces(strategy, format) {
        bail!("{name}: rows are in the {format:?} format, which {strategy:?} cannot reduce")
    }
    expect_dims(name, "out", &out, &[ids.rows(), width(dispatched.rows.view())])?;
    if batched && strategy != WeightAndReduce::NoOp {
        expect_dims(name, "expert_out", &expert_out, &dispatched.expert_out_dims()?)?;
    }
    let args = CombineArgs {
        topk_ids: ids,
        topk_weights: weights,
        expert_map: dispatched.expert_map,
        weights_applied: dispatched.weights_applied,
    };
    weight_and_reduce_into(strategy, expert_out, &args, out, ex)
}

/// Whether a strategy can reduce the experts' rows of a format.
pub(crate) fn reduces(strategy: WeightAndReduce, format: ActivationFormat) -> bool {
    let batched = format == ActivationFormat::BatchedExperts;
    match strategy {
        WeightAndReduce::Delegate | WeightAndReduce::NoOp => true,
        WeightAndReduce::Contiguous => !batched,
        WeightAndReduce::NaiveBatched { .. } => batched,
    }
}

/// Turns the experts' rows into token rows.
///
/// | strategy | `expert_out` | action |
/// |---|---|---|
/// | `Delegate` | any | an error: the caller must choose a strategy |
/// | `NoOp` | [T, H] f32 or the dtype of `out`, weighted and reduced | copied, f32 rounded once |
/// | `Contiguous` | [T, K, H] f32 (or [T*K, H]) | weighted, added over k |
/// | `NaiveBatched` | [E_local, max_tokens, H] f32, in slot order | sorted into slot order, then `Contiguous` |
///
/// `out` is [T, H] f32, bf16 or f16, and all of it is written. Rows of a slot without an expert on this rank are never
/// read. Without an `expert_map`, `NaiveBatched { rank }` assumes that the local experts are the physical experts `rank
/// * E_local ..`.
///
/// # Errors
/// `Delegate`; wrong dims or dtypes; an id outside of `expert_map`; with `NaiveBatched` an
/// expert with more than `max_tokens` rows.
pub fn weight_and_reduce_into(
    strategy: WeightAndReduce,
    expert_out: View,
    args: &CombineArgs,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let (rows, hidden) = expect_matrix(OP, "out", &out)?;
    if strategy == WeightAndReduce::NoOp {
        expect_dims(OP, "expert_out", &expert_out, &[rows, hidden])?;
        return copy_rows_into(expert_out, out, ex);
    }
    let (tokens, top_k) = expect_matrix(OP, "topk_ids", &args.topk_ids)?;
    expect_dims(OP, "out", &out, &[tokens, hidden])?;
    expect_dtype(OP, "expert_out", &expert_out, DType::F32)?;
    match strategy {
        WeightAndReduce::Delegate | WeightAndReduce::NoOp => bail!(
            "{OP}: Delegate leaves the choice to prepare/finalize; call it with NoOp, Contiguous or NaiveBatched"
        ),
        WeightAndReduce::Contiguous => {
            let slots = match (expert_out.dims(), tokens.checked_mul(top_k)) {
                (&[slots, h], Some(all)) if (slots, h) == (all, hidden) => {
                    expert_out.reshape(&[tokens, top_k, hidden])?
                }
                _ => expert_out,
            };
            expect_dims(OP, "expert_out", &slots, &[tokens, top_k, hidden])?;
            let ids = masked_ids(args, ex)?;
            sum_slots(slots, ids.view(), args, out, ex)
        }
        WeightAndReduce::NaiveBatched { rank } => {
            let (num_local, max_tokens, _) = expect_rank3(OP, "expert_out", &expert_out)?;
            expect_dims(OP, "expert_out", &expert_out, &[num_local, max_tokens, hidden])?;
            naive_batched(rank, expert_out, args, out, ex)
        }
    }
}

fn naive_batched(
    rank: usize,
    expert_out: View,
    args: &CombineArgs,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let (num_local, _, hidden) = expect_rank3(OP, "expert_out", &expert_out)?;
    let (tokens, top_k) = expect_matrix(OP, "topk_ids", &args.topk_ids)?;
    let ids = match args.expert_map {
        Some(_) => masked_ids(args, ex)?,
        None => {
            let mut local = ex.scratch(DType::U32, args.topk_ids.dims())?;
            contiguous_local_ids_into(args.topk_ids, rank, num_local, local.view_mut(), ex)?;
            local.into()
        }
    };
    let mut offsets = ex.scratch(DType::U32, &[num_local + 1])?;
    let mut grouped = ex.scratch(DType::U32, &[args.topk_ids.elem_count()])?;
    group_slots_into(ids.view(), args.expert_map, offsets.view_mut(), grouped.view_mut(), ex)?;
    let batches = RowBatches { offsets: offsets.view(), slots: grouped.view(), top_k };
    let mut slots = ex.scratch(DType::F32, &[tokens, top_k, hidden])?;
    unbatch_rows_into(expert_out, &batches, slots.view_mut(), ex)?;
    sum_slots(slots.view(), ids.view(), args, out, ex)
}

/// The ids, with [`NO_EXPERT`] in place of experts on other ranks.
fn masked_ids<'a>(args: &CombineArgs<'a>, ex: &mut Exec) -> Result<Lent<'a>> {
    let Some(expert_map) = args.expert_map else { return Ok(args.topk_ids.into()) };
    let mut ids = ex.scratch(DType::U32, args.topk_ids.dims())?;
    mask_nonlocal_into(args.topk_ids, expert_map, ids.view_mut(), ex)?;
    Ok(ids.into())
}

fn sum_slots(slots: View, ids: View, args: &CombineArgs, out: ViewMut, ex: &mut Exec) -> Result<()> {
    if !args.weights_applied {
        return weighted_sum_into(slots, ids, args.topk_weights, out, ex);
    }
    let mut ones = ex.scratch(DType::F32, ids.dims())?;
    fill_into(1., ones.view_mut(), ex)?;
    weighted_sum_into(slots, ids, ones.view(), out, ex)
}
