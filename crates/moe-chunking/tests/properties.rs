//! Checks the promises of the README for any numbers.

use std::num::NonZeroUsize;

use moe_chunking::{
    BudgetError, ChunkPlan, ChunkedMoe, PlanError, num_chunks, ridge_tokens, size_for_budget,
};
use proptest::prelude::*;

fn size(n: usize) -> NonZeroUsize {
    NonZeroUsize::MIN.saturating_add(n - 1)
}

proptest! {
    #[test]
    fn chunks_cover_the_tokens_once_and_evenly(tokens in 0usize..5000, n in 1usize..600) {
        let plan = ChunkPlan::new(tokens, size(n));
        let ranges: Vec<_> = plan.ranges().collect();
        prop_assert_eq!(ranges.iter().cloned().flatten().collect::<Vec<_>>(), (0..tokens).collect::<Vec<_>>());
        let lengths: Vec<usize> = ranges.iter().map(|r| r.len()).collect();
        prop_assert!(lengths.iter().all(|&len| 1 <= len && len <= n));
        prop_assert!(lengths.is_sorted_by(|a, b| a >= b));
        prop_assert!(lengths.first().unwrap_or(&0) - lengths.last().unwrap_or(&0) <= 1);
        // With one chunk fewer, a chunk would be too large.
        prop_assert!(tokens == 0 || (lengths.len() - 1) * n < tokens);
    }

    #[test]
    fn ranks_run_the_same_rounds(tokens in prop::collection::vec(0usize..300, 1..9), n in 1usize..70) {
        let plans: Vec<_> =
            (0..tokens.len()).map(|r| ChunkPlan::for_ranks(r, &tokens, size(n)).unwrap()).collect();
        let rounds = tokens.iter().map(|&t| num_chunks(t, size(n))).max().unwrap();
        for (rank, plan) in plans.iter().enumerate() {
            prop_assert_eq!(plan.rounds(), rounds);
            prop_assert_eq!(plan.ranges().map(|r| r.len()).sum::<usize>(), tokens[rank]);
            // Chunks with tokens come first.
            let empty = plan.ranges().position(|r| r.is_empty()).unwrap_or(rounds);
            prop_assert_eq!(empty, plan.chunks());
            prop_assert!(plan.ranges().skip(empty).all(|r| r == (tokens[rank]..tokens[rank])));
        }
        for round in 0..rounds + 2 {
            let counts: Vec<usize> = plans.iter().map(|p| p.range(round).len()).collect();
            prop_assert_eq!(ChunkPlan::rank_tokens(round, &tokens, size(n)), counts);
        }
    }

    #[test]
    fn the_budget_gives_the_largest_size_that_fits(
        max in 1usize..100_000, budget in 0usize..1_000_000, fixed in 0usize..1000, each in 0usize..5000,
    ) {
        let bytes = |tokens: usize| fixed + tokens * each;
        match size_for_budget(max, budget, bytes) {
            Err(e) => {
                prop_assert!(bytes(1) > budget);
                prop_assert_eq!(e, BudgetError { budget, needed: bytes(1) });
            }
            Ok(size) => {
                prop_assert!(size.get() <= max && bytes(size.get()) <= budget);
                prop_assert!(size.get() == max || bytes(size.get() + 1) > budget);
            }
        }
    }
}

#[test]
fn the_oracle_of_fastdeploy() {
    let tokens = [10, 1];
    assert_eq!(tokens.map(|t| num_chunks(t, size(2))), [5, 1]);
    for rank in 0..2 {
        assert_eq!(ChunkPlan::for_ranks(rank, &tokens, size(2)).unwrap().rounds(), 5);
    }
}

#[test]
fn a_fixed_number_of_rounds_is_kept_or_refused() {
    let plan = ChunkPlan::new(7, size(3));
    let fixed: Vec<_> = plan.with_rounds(5).unwrap().ranges().collect();
    assert_eq!(fixed, [0..3, 3..5, 5..7, 7..7, 7..7]);
    let e = plan.with_rounds(2).unwrap_err();
    assert_eq!(e, PlanError::TooFewRounds { tokens: 7, chunks: 3, rounds: 2 });
    assert!(e.to_string().contains("7 tokens need 3 chunks, but only 2 rounds"), "{e}");
    let e = ChunkPlan::for_ranks(2, &[1, 2], size(1)).unwrap_err();
    assert!(e.to_string().contains("rank 2 is outside of the token counts of 2 ranks"), "{e}");
}

#[test]
fn no_token_is_no_round_unless_the_whole_is_asked_for() {
    assert_eq!(ChunkPlan::new(0, size(4)).rounds(), 0);
    assert_eq!(ChunkPlan::for_ranks(0, &[0, 0], size(4)).unwrap().rounds(), 0);
    for tokens in [0, 9] {
        let whole = ChunkPlan::whole(tokens);
        assert_eq!((whole.rounds(), whole.range(0)), (1, 0..tokens));
    }
}

#[test]
fn settings_decide_in_order() {
    let bytes = |tokens: usize| tokens * 100;
    let sized = |settings: ChunkedMoe| settings.size(1000, bytes).map(|s| s.map(NonZeroUsize::get));
    assert_eq!(sized(ChunkedMoe::default()), Ok(None));
    assert_eq!(sized(ChunkedMoe { moe_memory_budget: Some(1), ..Default::default() }), Ok(None));
    assert_eq!(sized(ChunkedMoe { enable_chunked_moe: true, ..Default::default() }), Ok(Some(256)));
    assert_eq!(sized(ChunkedMoe::of_size(size(7))), Ok(Some(7)));
    assert_eq!(sized(ChunkedMoe::within(5050)), Ok(Some(50)));
    assert_eq!(sized(ChunkedMoe::within(1 << 30)), Ok(Some(1000)));
    let e = sized(ChunkedMoe::within(99)).unwrap_err();
    assert!(e.to_string().contains("99 bytes is too small: one token needs 100 bytes"), "{e}");
    // The largest possible numbers are allowed.
    assert_eq!(size_for_budget(usize::MAX, usize::MAX, |_| 0).unwrap().get(), usize::MAX - 1);
}

#[test]
fn the_ridge_counts_rows_of_one_expert() {
    assert_eq!(ridge_tokens(32, 128, 8), 512);
    assert_eq!(ridge_tokens(1, 5, 2), 3);
    assert_eq!(ridge_tokens(7, 4, 0), 28);
}

/// The largest numbers neither overflow nor take long, because rounds are computed and not listed.
#[test]
fn the_largest_numbers() {
    let most = usize::MAX;
    assert_eq!([num_chunks(most, size(1)), num_chunks(most, NonZeroUsize::MAX)], [most, 1]);
    for n in [size(1), size(2), size(3), NonZeroUsize::MAX] {
        let plan = ChunkPlan::new(most, n);
        let last = plan.rounds() - 1;
        assert_eq!([plan.range(0).start, plan.range(last).end], [0, most], "{n}");
        assert!(plan.range(last).len() <= n.get() && plan.range(last / 2).len() <= n.get(), "{n}");
        assert_eq!(plan.range(most), most..most);
        assert_eq!(plan.with_rounds(most).map(|plan| plan.rounds()), Ok(most));
    }
    assert_eq!(ChunkPlan::whole(most).range(0), 0..most);
    let plan = ChunkPlan::for_ranks(1, &[most, 0], size(1)).unwrap();
    assert_eq!([plan.rounds(), plan.chunks()], [most, 0]);
    assert_eq!(ChunkPlan::rank_tokens(most, &[most, 1], size(1)), [0, 0]);
    assert_eq!(size_for_budget(0, 0, |_| 0), Ok(size(1)));
    assert_eq!(size_for_budget(most, most, |tokens| tokens).map(|size| size.get() >= most - 1), Ok(true));
    assert_eq!(size_for_budget(8, 0, |_| 1), Err(BudgetError { budget: 0, needed: 1 }));
    assert_eq!(ridge_tokens(most, most, 0), most);
    // A workspace that falls: the size fits all the same.
    let falling = |tokens: usize| if tokens > 5 { 1 } else { tokens };
    let found = size_for_budget(64, 3, falling).unwrap().get();
    assert!(falling(found) <= 3, "{found}");
}

#[test]
fn wrong_ranks_and_rounds_are_named() {
    let said = |result: Result<ChunkPlan, PlanError>| result.unwrap_err().to_string();
    let unknown = said(ChunkPlan::for_ranks(usize::MAX, &[1, 2], size(4)));
    assert!(unknown.contains("is outside of the token counts of 2 ranks"), "{unknown}");
    assert!(said(ChunkPlan::for_ranks(0, &[], size(4))).contains("token counts of 0 ranks"));
    let few = said(ChunkPlan::new(9, size(4)).with_rounds(2));
    assert!(few.contains("9 tokens need 3 chunks, but only 2 rounds are run; raise"), "{few}");
    assert!(said(ChunkPlan::whole(0).with_rounds(0)).contains("0 tokens need 1 chunks"));
    let small = ChunkedMoe::within(10).size(8, |tokens| 11 * tokens).unwrap_err().to_string();
    assert!(
        small.contains("10 bytes is too small: one token needs 11") && small.contains("raise"),
        "{small}"
    );
    assert_eq!(ChunkedMoe { enable_chunked_moe: false, ..ChunkedMoe::within(0) }.size(8, |_| 1), Ok(None));
}
