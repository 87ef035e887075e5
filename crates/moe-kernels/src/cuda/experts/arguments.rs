//! What a step of an expert layer takes, and its checks.

use candle_core::{DType, Result, bail};

use super::epilogue::ExpertEpilogue;
use crate::arguments::{expect, expect_dtype, expect_matrix, expect_rank3};
use crate::cuda::expect_aligned;
use crate::plan::{ExpertsCall, QuantWeights};
use crate::view::View;
use crate::weight::WeightView;

/// Arguments of [`fused_experts_into`](super::fused_experts_into).
#[derive(Clone, Copy, Debug)]
pub struct FusedExperts<'a> {
    /// [T, H] bf16.
    pub x: View<'a>,
    /// [E_local, 2I, H] bf16, gate rows, then up rows; or quantised.
    pub w13: WeightView<'a>,
    /// [E_local, H, I] bf16, or quantised if w13 is.
    pub w2: WeightView<'a>,
    /// [T, K] u32 physical ids; `u32::MAX` and ids that live elsewhere add nothing.
    pub topk_ids: View<'a>,
    /// [T, K] f32.
    pub topk_weights: View<'a>,
    /// \[P\] i32, physical expert to local slot, -1 = elsewhere; `None` = identity.
    pub expert_map: Option<View<'a>>,
    /// The slots of each local expert, where they are known: saves listing them.
    pub lists: Option<ExpertLists<'a>>,
    /// Biases and activation.
    pub epilogue: ExpertEpilogue<'a>,
}

/// The slots of each local expert, as [`list_slots_into`](crate::list_slots_into) lists them for the same ids and map.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLists<'a> {
    /// \[E_local\] u32.
    pub counts: View<'a>,
    /// [E_local, T*K] u32.
    pub slots: View<'a>,
}

/// Checks dims and dtypes.
pub(super) fn check(op: &str, args: &FusedExperts) -> Result<ExpertsCall> {
    let (tokens, hidden) = expect_matrix(op, "x", &args.x)?;
    let (num_local, _, inter) = expect_rank3(op, "w2", &args.w2)?;
    let (_, top_k) = expect_matrix(op, "topk_ids", &args.topk_ids)?;
    expect_dtype(op, "x", &args.x, DType::BF16)?;
    expect(op, "w2", &args.w2, DType::BF16, &[num_local, hidden, inter])?;
    expect(op, "w13", &args.w13, DType::BF16, &[num_local, 2 * inter, hidden])?;
    expect(op, "topk_ids", &args.topk_ids, DType::U32, &[tokens, top_k])?;
    expect(op, "topk_weights", &args.topk_weights, DType::F32, &[tokens, top_k])?;
    if let Some(map) = &args.expert_map {
        expect_dtype(op, "expert_map", map, DType::I32)?;
    }
    if let Some(lists) = &args.lists {
        expect(op, "lists.counts", &lists.counts, DType::U32, &[num_local])?;
        expect(op, "lists.slots", &lists.slots, DType::U32, &[num_local, tokens * top_k])?;
    }
    expect_aligned(op, &[args.x])?;
    if [hidden, inter].iter().any(|n| *n == 0 || !n.is_multiple_of(64)) {
        bail!("{op}: expected H and I to be multiples of 64, got {hidden} and {inter}")
    }
    let num_ids = args.expert_map.map_or(num_local, |map| map.elem_count());
    let quant = quantisation(op, [args.w13, args.w2])?;
    let epilogue = args.epilogue.check(op, [num_local, hidden, inter])?;
    Ok(ExpertsCall { tokens, top_k, num_ids, num_local, hidden, inter, quant, passes: 1, epilogue })
}

/// How the packs of an expert layer are quantised; floats must begin at multiples of 16 bytes.
pub(super) fn quantisation(op: &str, packs: [WeightView; 2]) -> Result<Option<[QuantWeights; 2]>> {
    match packs {
        [WeightView::Quantised(w13), WeightView::Quantised(w2)] => {
            Ok(Some([w13.device_pack(op)?.weights(), w2.device_pack(op)?.weights()]))
        }
        [w13, w2] => {
            expect_aligned(op, &[w13.rows(op)?, w2.rows(op)?])?;
            Ok(None)
        }
    }
}
