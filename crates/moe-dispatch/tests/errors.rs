//! What is refused, and that the message says what was expected and what was given.

use moe_dispatch::candle::Result;
use moe_dispatch::{
    ActivationFormat, Combine, CombineArgs, Dispatched, Exec, ExpertsSide, LocalExperts, NoEp,
    PrepareFinalize, Tokens, View, ViewMut, WeightAndReduce, check_composition, weight_and_reduce_into,
};

const ROWS: [f32; 6] = [1.; 6];
const WEIGHTS: [f32; 6] = [0.5; 6];

fn message(r: Result<impl Sized>) -> String {
    r.err().map_or_else(|| "no error".to_string(), |e| e.to_string())
}

#[test]
fn prepare_checks_its_arguments() -> Result<()> {
    let hidden = View::new(&ROWS, &[3, 2])?;
    let ids_data = [0u32; 6];
    let ids = View::new(&ids_data, &[3, 2])?;
    let weights = View::new(&WEIGHTS, &[3, 2])?;
    let backends: [&dyn PrepareFinalize; 2] = [&NoEp::new(), &NoEp::batched(LocalExperts::all(1), 6)];
    for backend in backends {
        let prepare = |h, i, w| message(backend.prepare(Tokens::new(h, i, w), None, &mut Exec::cpu()));
        let flat = View::new(&ROWS, &[6])?;
        for (got, want) in [
            (prepare(flat, ids, weights), "expected hidden with 2 dimensions, got [6]"),
            (prepare(ids, ids, weights), "expected hidden of dtype f32, bf16 or f16, got u32"),
            (prepare(hidden, weights, weights), "expected topk_ids of dtype u32, got f32"),
            (prepare(hidden, ids.narrow(0, 2)?, weights), "expected topk_ids with dims [3, 2], got [2, 2]"),
            (prepare(hidden, ids, ids), "expected topk_weights of dtype f32, got u32"),
            (
                prepare(hidden, ids, weights.reshape(&[2, 3])?),
                "expected topk_weights with dims [3, 2], got [2, 3]",
            ),
        ] {
            assert!(got.contains(want) && got.contains(backend.name()), "{got}");
        }
    }
    let backends: [&dyn PrepareFinalize; 2] = [
        &NoEp::new().with_router_weight_on_input(true),
        &NoEp::batched(LocalExperts::all(1), 6).with_router_weight_on_input(true),
    ];
    for backend in backends {
        let e = message(backend.prepare(Tokens::new(hidden, ids, weights), None, &mut Exec::cpu()));
        assert!(e.contains("apply_router_weight_on_input needs top_k = 1, got 2"), "{e}");
    }
    Ok(())
}

#[test]
fn batched_prepare_names_the_overloaded_expert_and_unknown_ids() -> Result<()> {
    let hidden = View::new(&ROWS, &[6, 1])?;
    let weights = View::new(&WEIGHTS, &[6, 1])?;
    let prepare = |ids: [u32; 6], max| -> Result<String> {
        let backend = NoEp::batched(LocalExperts::all(2), max);
        Ok(message(backend.prepare(
            Tokens::new(hidden, View::new(&ids, &[6, 1])?, weights),
            None,
            &mut Exec::cpu(),
        )))
    };
    let e = prepare([1, 1, 0, 1, 1, 1], 4)?;
    assert!(e.contains("local expert 1 got 5 rows, expected at most max_num_tokens = 4"), "{e}");
    let e = prepare([0, 1, 0, 2, 0, 0], 6)?;
    assert!(e.contains("expert id 2 is out of range; expected 0..2"), "{e}");
    Ok(())
}

#[test]
fn finalize_refuses_other_formats_and_strategies() -> Result<()> {
    let ids_data = [0u32; 3];
    let hidden = View::new(&ROWS, &[3, 2])?;
    let ids = View::new(&ids_data, &[3, 1])?;
    let weights = View::new(&WEIGHTS[..3], &[3, 1])?;
    let standard = NoEp::new();
    let batched = NoEp::batched(LocalExperts::all(1), 3);
    let from_standard = standard.prepare(Tokens::new(hidden, ids, weights), None, &mut Exec::cpu())?;
    let from_batched = batched.prepare(Tokens::new(hidden, ids, weights), None, &mut Exec::cpu())?;
    let finalize =
        |backend: &dyn PrepareFinalize, y: View, d: &Dispatched, strategy, out_dims: [usize; 2]| {
            let mut out = vec![0f32; out_dims.iter().product()];
            let out = ViewMut::new(&mut out, &out_dims)?;
            backend.finalize(y, d, strategy, out, &mut Exec::cpu())
        };
    let slots = View::new(&ROWS, &[3, 1, 2])?;
    let rows = View::new(&ROWS, &[1, 3, 2])?;
    use WeightAndReduce::*;
    for (got, want) in [
        (
            finalize(&standard, slots, &from_batched, Delegate, [3, 2]),
            "NoEp: expected rows dispatched in the Standard format, got BatchedExperts",
        ),
        (
            finalize(&batched, rows, &from_standard, Delegate, [3, 2]),
            "NoEp batched: expected rows dispatched in the BatchedExperts format, got Standard",
        ),
        (
            finalize(&standard, slots, &from_standard, NaiveBatched { rank: 0 }, [3, 2]),
            "Standard format, which NaiveBatched { rank: 0 } cannot reduce",
        ),
        (
            finalize(&batched, rows, &from_batched, Contiguous, [3, 2]),
            "BatchedExperts format, which Contiguous cannot reduce",
        ),
        (
            finalize(&standard, rows, &from_standard, Delegate, [3, 2]),
            "expected expert_out with dims [3, 1, 2], got [1, 3, 2]",
        ),
        (
            finalize(&standard, slots, &from_standard, Delegate, [2, 3]),
            "expected out with dims [3, 2], got [2, 3]",
        ),
        (
            finalize(&batched, slots, &from_batched, Delegate, [3, 2]),
            "expected expert_out with dims [1, 3, 2], got [3, 1, 2]",
        ),
        (
            finalize(&batched, rows, &from_batched, Delegate, [2, 3]),
            "expected out with dims [3, 2], got [2, 3]",
        ),
        (
            finalize(&standard, slots, &from_standard, NoOp, [3, 2]),
            "expected expert_out with dims [3, 2], got [3, 1, 2]",
        ),
    ] {
        let got = message(got);
        assert!(got.contains(want), "expected {want:?} in {got:?}");
    }
    Ok(())
}

#[test]
fn delegate_cannot_be_called() -> Result<()> {
    let ids = [0u32];
    let args = CombineArgs {
        topk_ids: View::new(&ids, &[1, 1])?,
        topk_weights: View::new(&WEIGHTS[..1], &[1, 1])?,
        expert_map: None,
        weights_applied: false,
    };
    let mut out = [0f32; 2];
    let out = ViewMut::new(&mut out, &[1, 2])?;
    let y = View::new(&ROWS[..2], &[1, 1, 2])?;
    let e = message(weight_and_reduce_into(WeightAndReduce::Delegate, y, &args, out, &mut Exec::cpu()));
    assert!(e.contains("Delegate leaves the choice to prepare/finalize"), "{e}");
    Ok(())
}

/// A backend of which only the declarations are used.
struct Declares {
    format: ActivationFormat,
    combine: Combine,
    max_num_tokens: Option<usize>,
    num_dispatchers: usize,
}

impl PrepareFinalize for Declares {
    fn name(&self) -> &'static str {
        "Declares"
    }
    fn activation_format(&self) -> ActivationFormat {
        self.format
    }
    fn combine(&self) -> Combine {
        self.combine
    }
    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        self.max_num_tokens
    }
    fn num_dispatchers(&self) -> usize {
        self.num_dispatchers
    }
    fn prepare<'a>(
        &'a self,
        tokens: Tokens<'a>,
        _: Option<&[usize]>,
        _: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        Ok(Dispatched::standard(tokens.hidden, tokens.topk_ids, tokens.topk_weights))
    }
    fn finalize(&self, _: View, _: &Dispatched, _: WeightAndReduce, _: ViewMut, _: &mut Exec) -> Result<()> {
        Ok(())
    }
}

#[test]
fn ill_fitting_pairs_are_refused_when_composed() {
    use ActivationFormat::{BatchedExperts, Listed, Standard};
    use WeightAndReduce::{Contiguous, Delegate, NaiveBatched, NoOp};
    let prepare = |format, max_num_tokens, num_dispatchers| {
        let combine = if num_dispatchers == 1 { Combine::Here } else { Combine::BySlot };
        Declares { format, combine, max_num_tokens, num_dispatchers }
    };
    let by_rank = |format, combine| Declares { format, combine, max_num_tokens: Some(8), num_dispatchers: 2 };
    let experts = |activation_format, weight_and_reduce, max_rows| ExpertsSide {
        name: "Experts",
        activation_format,
        weight_and_reduce,
        max_rows,
    };
    let naive = NaiveBatched { rank: 0 };
    for (p, e, want) in [
        (prepare(Standard, None, 1), experts(Standard, Delegate, None), None),
        (prepare(Standard, None, 1), experts(Standard, NoOp, None), None),
        (prepare(Standard, None, 4), experts(Standard, Contiguous, None), None),
        (prepare(BatchedExperts, Some(8), 4), experts(BatchedExperts, naive, Some(32)), None),
        (prepare(BatchedExperts, Some(8), 4), experts(BatchedExperts, Delegate, Some(64)), None),
        (
            prepare(Standard, None, 1),
            experts(BatchedExperts, Delegate, Some(8)),
            Some("Declares hands over the Standard format, but Experts takes BatchedExperts"),
        ),
        // Listed rows are in neither of the other formats.
        (by_rank(Listed, Combine::ByRank), experts(Listed, NoOp, None), None),
        (by_rank(Listed, Combine::ByRank), experts(Listed, Delegate, None), None),
        (by_rank(Standard, Combine::AllReduce), experts(Standard, NoOp, None), None),
        (by_rank(Standard, Combine::DeferredToCaller), experts(Standard, NoOp, None), None),
        (
            by_rank(Listed, Combine::ByRank),
            experts(BatchedExperts, Delegate, Some(16)),
            Some("Declares hands over the Listed format, but Experts takes BatchedExperts; choose a pair"),
        ),
        (
            by_rank(Listed, Combine::ByRank),
            experts(Standard, NoOp, None),
            Some("Declares hands over the Listed format, but Experts takes Standard"),
        ),
        (
            prepare(BatchedExperts, Some(8), 2),
            experts(Listed, NoOp, None),
            Some("Declares hands over the BatchedExperts format, but Experts takes Listed"),
        ),
        (
            by_rank(Listed, Combine::ByRank),
            experts(Listed, Delegate, Some(16)),
            Some("Experts takes the Listed format, whose rows have no limit, but was given one of 16"),
        ),
        (
            by_rank(Listed, Combine::ByRank),
            experts(Listed, naive, None),
            Some("Experts takes the Listed format, whose rows NaiveBatched { rank: 0 } cannot reduce"),
        ),
        (
            prepare(Standard, None, 1),
            experts(Standard, Delegate, Some(8)),
            Some("Experts takes the Standard format, whose rows have no limit, but was given one of 8"),
        ),
        (
            prepare(BatchedExperts, Some(8), 4),
            experts(BatchedExperts, Delegate, None),
            Some("Experts takes the BatchedExperts format and must be told the most rows of an expert"),
        ),
        (
            prepare(BatchedExperts, None, 4),
            experts(BatchedExperts, Delegate, Some(32)),
            Some("Declares hands over the BatchedExperts format and must be told the most tokens"),
        ),
        (
            prepare(BatchedExperts, Some(9), 4),
            experts(BatchedExperts, Delegate, Some(32)),
            Some(
                "fills up to 36 rows per expert (max_num_tokens * num_dispatchers), but Experts was built for 32",
            ),
        ),
        (
            prepare(Standard, None, 1),
            experts(Standard, naive, None),
            Some("whose rows NaiveBatched { rank: 0 } cannot reduce"),
        ),
        (
            prepare(BatchedExperts, Some(8), 1),
            experts(BatchedExperts, Contiguous, Some(8)),
            Some("whose rows Contiguous cannot reduce"),
        ),
        (
            prepare(Standard, None, 2),
            experts(Standard, NoOp, None),
            Some(
                "Experts weights and reduces by itself (NoOp), but Declares adds by slot: the owners of the rows of 2 ranks",
            ),
        ),
        (
            prepare(BatchedExperts, Some(8), 1),
            experts(BatchedExperts, NoOp, Some(8)),
            Some("(NoOp), but Declares hands over blocks of rows without their weights"),
        ),
    ] {
        let got = check_composition(&p, &e).map_err(|e| e.to_string());
        match want {
            None => assert_eq!(got, Ok(())),
            Some(want) => assert!(got.clone().unwrap_err().contains(want), "expected {want:?} in {got:?}"),
        }
    }
}
