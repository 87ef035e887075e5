//! Grouping of slots, ids as a rank sees them, and the batched layout. These are integers and copies, so the bits must
//! be equal.

use candle_core::DType;
use moe_kernels::{
    Buffer, Log2Phy, NO_EXPERT, RowBatches, Spread, batch_rows_into, contiguous_local_ids_into,
    group_slots_into, list_slots_into, mask_nonlocal_into, number_rows_into, physical_ids_into,
    unbatch_rows_into,
};

use crate::common::*;

/// The sizes include more experts than shared memory can count, one expert with all slots, and lists that several
/// blocks write.
const CASES: [(usize, usize, usize); 8] = [
    (0, 1, 3),
    (1, 1, 1),
    (40, 4, 6),
    (1100, 8, 128),
    (64, 2, 3000),
    (500, 1, 1),
    (5000, 8, 16),
    (32_801, 8, 5),
];

fn routed(rng: &mut Rng, tokens: usize, top_k: usize, experts: usize) -> (Buffer, Buffer) {
    let id = |rng: &mut Rng| if rng.below(6) == 0 { NO_EXPERT } else { rng.below(experts) as u32 };
    let ids = (0..tokens * top_k).map(|_| id(rng)).collect();
    let slots = rng.permutation(experts).into_iter().map(|s| if s % 4 == 3 { -1 } else { s as i32 });
    let map = Buffer::from_vec(slots.collect::<Vec<i32>>(), &[experts]).unwrap();
    (words(ids, &[tokens, top_k]), map)
}

#[test]
fn groups_and_local_ids_are_the_same() {
    let mut rng = Rng::new();
    for (tokens, top_k, experts) in small(CASES, 64, |case| case.0) {
        for mapped in [false, true] {
            let (ids, map) = routed(&mut rng, tokens, top_k, experts);
            let op = |p: &mut Place| {
                let ids = p.put(&ids);
                let map = p.put(&map);
                let local_map = mapped.then(|| map.view());
                let dims = [tokens, top_k];
                let mut offsets = p.out(DType::U32, &[experts + 1]);
                let mut slots = p.out(DType::U32, &[tokens * top_k]);
                group_slots_into(ids.view(), local_map, offsets.view_mut(), slots.view_mut(), &mut p.ex)?;
                let mut masked = p.out(DType::U32, &dims);
                let mut local = p.out(DType::U32, &dims);
                mask_nonlocal_into(ids.view(), map.view(), masked.view_mut(), &mut p.ex)?;
                let share = experts.div_ceil(3);
                contiguous_local_ids_into(ids.view(), 1, share, local.view_mut(), &mut p.ex)?;
                let mut counts = p.out(DType::U32, &[experts]);
                let mut lists = p.out(DType::U32, &[experts, tokens * top_k]);
                let to = (counts.view_mut(), lists.view_mut());
                list_slots_into(ids.view(), local_map, to.0, to.1, &mut p.ex)?;
                Ok(vec![offsets, slots, masked, local, counts, lists])
            };
            on_both(op, |c, g| {
                let names = ["offsets", "slots", "masked", "local", "counts", "lists"];
                for (what, (c, g)) in names.iter().zip(c.iter().zip(g)) {
                    assert_same(what, c, g);
                }
            });
        }
    }
}

/// Logical ids become physical ids of copies in the same way as on the CPU, for any number of copies, even for one, and
/// for rows that come in several calls.
#[test]
fn copies_are_chosen_alike() {
    let mut rng = Rng::new();
    for (tokens, top_k, experts) in small(CASES, 64, |case| case.0) {
        for width in [1, 2, 9] {
            let (ids, _) = routed(&mut rng, tokens, top_k, experts);
            let mut table = vec![-1; experts * width];
            for (expert, row) in table.chunks_mut(width).enumerate() {
                let copies = 1 + rng.below(width);
                row[..copies].iter_mut().enumerate().for_each(|(i, id)| *id = (expert * width + i) as i32);
            }
            let table = Buffer::from_vec(table, &[experts, width]).unwrap();
            let op = |p: &mut Place| {
                let ids = p.put(&ids);
                let table = p.put(&table);
                let mut all = Vec::new();
                for (spread, first) in [(Spread::InTurns, 0), (Spread::Hashed, 0), (Spread::Hashed, 12_345)] {
                    let mut out = p.out(DType::U32, &[tokens, top_k]);
                    let log2phy = Log2Phy { ids: table.view(), spread, first_row: first };
                    physical_ids_into(ids.view(), &log2phy, out.view_mut(), &mut p.ex)?;
                    all.push(out);
                }
                Ok(all)
            };
            on_both(op, |c, g| {
                for (what, (c, g)) in ["in turns", "hashed", "from row 12345"].iter().zip(c.iter().zip(g)) {
                    assert_same(what, c, g);
                }
            });
        }
    }
}

/// On the device an id that does not exist means no expert. Rows are counted as on the CPU, even beyond 32 bits.
#[test]
fn ids_that_there_are_not_have_no_copy() {
    let mut rng = Rng::new();
    let tokens = 300;
    let top_k = 7;
    let experts = 40;
    let width = 3;
    let table =
        Buffer::from_vec((0..experts * width).map(|id| id as i32).collect(), &[experts, width]).unwrap();
    let beyond = [NO_EXPERT, experts as u32, u32::MAX - 1];
    let known: Vec<u32> = (0..tokens * top_k).map(|_| rng.below(experts) as u32).collect();
    let with = |of: &dyn Fn(usize) -> u32| {
        let ids = known.iter().enumerate().map(|(i, id)| if i % 7 == 3 { of(i) } else { *id });
        words(ids.collect(), &[tokens, top_k])
    };
    for (spread, first_row) in
        [(Spread::InTurns, 0), (Spread::Hashed, 12_345), (Spread::InTurns, u32::MAX as usize - 2)]
    {
        let run = |ids: &Buffer, mut p: Place| {
            let ids = p.put(ids);
            let table = p.put(&table);
            let mut out = p.out(DType::U32, &[tokens, top_k]);
            let log2phy = Log2Phy { ids: table.view(), spread, first_row };
            physical_ids_into(ids.view(), &log2phy, out.view_mut(), &mut p.ex).unwrap();
            out.host(&p)
        };
        let want = run(&with(&|_| NO_EXPERT), Place::new(moe_kernels::Exec::cpu()));
        let got = run(&with(&|i| beyond[i / 7 % 3]), Place::new(cuda()));
        assert_same(&format!("{spread:?} from row {first_row}"), &want, &got);
    }
}

#[test]
fn batched_rows_go_and_come_back() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        for (tokens, top_k, experts, width) in [(0, 1, 3, 4), (1, 1, 1, 1), (40, 3, 6, 33), (100, 2, 5, 300)]
        {
            let (ids, map) = routed(&mut rng, tokens, top_k, experts);
            let rows = rng.floats(dtype, &[tokens, width]);
            let max_tokens = (tokens * top_k).max(2);
            let op = |p: &mut Place| {
                let ids = p.put(&ids);
                let map = p.put(&map);
                let rows = p.put(&rows);
                let slots_n = tokens * top_k;
                let mut offsets = p.out(DType::U32, &[experts + 1]);
                let mut slots = p.out(DType::U32, &[slots_n]);
                let out = (offsets.view_mut(), slots.view_mut());
                group_slots_into(ids.view(), Some(map.view()), out.0, out.1, &mut p.ex)?;
                let batches = RowBatches { offsets: offsets.view(), slots: slots.view(), top_k };
                let mut batched = p.out(dtype, &[experts, max_tokens, width]);
                let mut counts = p.out(DType::U32, &[experts]);
                batch_rows_into(rows.view(), &batches, batched.view_mut(), counts.view_mut(), &mut p.ex)?;
                let mut back = p.out(dtype, &[tokens, top_k, width]);
                unbatch_rows_into(batched.view(), &batches, back.view_mut(), &mut p.ex)?;
                let mut numbers = p.out(DType::U32, &[experts * max_tokens]);
                let mut starts = p.out(DType::U32, &[experts + 1]);
                let out = (starts.view_mut(), numbers.view_mut());
                number_rows_into(counts.view(), max_tokens, out.0, out.1, &mut p.ex)?;
                Ok(vec![batched, counts, back, starts, numbers])
            };
            on_both(op, |c, g| {
                let names = ["batched", "counts", "back", "starts", "numbers"];
                for (what, (c, g)) in names.iter().zip(c.iter().zip(g)) {
                    assert_same(what, c, g);
                }
            });
        }
    }
}
