//! Maps of experts to slots: what they contain, what they refuse, and how one is turned into another.

use moe_comm::{ExpertMap, ReplicaChoice, partition};
use proptest::prelude::*;

#[test]
fn tables_name_slots_ranks_and_copies() {
    let map = ExpertMap::new(4, &[vec![3, 0], vec![], vec![1, 2, 3]]).unwrap();
    assert_eq!((map.num_experts(), map.num_slots(), map.num_ranks(), map.max_copies()), (4, 5, 3, 2));
    assert_eq!([0, 1, 2, 3, 9].map(|rank| map.slots(rank)), [0..2, 2..2, 2..5, 5..5, 5..5]);
    assert_eq!([0, 1, 2, 4, 5].map(|slot| map.rank_of(slot)), [Some(0), Some(0), Some(2), Some(2), None]);
    assert_eq!(map.experts(2), [1, 2, 3]);
    assert_eq!(map.log2phy(None), [1, -1, 2, -1, 3, -1, 0, 4]);
    assert_eq!(map.log2phy(Some(2)), [1, -1, 2, -1, 3, -1, 4, -1]);
    let layout = map.layout(2).unwrap();
    assert_eq!((&layout.local_experts[..], &layout.owners[..]), (&[2, 3, 4][..], &[0, 0, 2, 2, 2][..]));
    assert_eq!(layout.expert_map, Some(vec![-1, -1, 0, 1, 2]));
    assert_eq!(map.layout(1).unwrap().num_local_experts(), 0);
    assert!(map.layout(3).unwrap_err().to_string().contains("rank 3"));
    let names: Vec<&str> = ReplicaChoice::ALL.iter().map(|choice| choice.name()).collect();
    assert_eq!(names, ["round_robin", "hash", "local_first"]);
}

#[test]
fn what_is_no_placement_is_refused_by_slot_rank_and_expert() {
    let refused = |experts, ranks: &[Vec<u32>]| ExpertMap::new(experts, ranks).unwrap_err().to_string();
    assert!(refused(2, &[vec![0], vec![2]]).contains("slot 1 of rank 1 holds expert 2; expected 0..2"));
    assert!(refused(2, &[vec![0, 1], vec![1, 1]]).contains("slot 3: rank 1 holds expert 1 twice"));
    assert!(refused(3, &[vec![0], vec![2]]).contains("none of the 2 slots holds expert 1"));
    assert!(refused(usize::MAX, &[vec![0], vec![1]]).contains("none of the 2 slots holds expert 2"));
    assert!(refused(0, &[vec![]]).contains("got 0 experts on 1 ranks"));
    assert!(refused(1, &[]).contains("on 0 ranks"));
    let e = ExpertMap::initial(4, 9, 3).unwrap_err().to_string();
    assert!(e.contains("at most 8 are redundant"), "{e}");
    let map = ExpertMap::initial(4, 0, 2).unwrap();
    assert!(map.with_phy2log(vec![0, 1, 2]).unwrap_err().to_string().contains("of 4 slots, got 3"));
    let other = ExpertMap::new(4, &[vec![0], vec![1, 2, 3]]).unwrap();
    assert!(map.transfers(&other).is_err());
}

#[test]
fn the_usual_start_has_copies_of_the_first_experts_at_the_end() {
    let map = ExpertMap::initial(5, 3, 3).unwrap();
    assert_eq!([0, 1, 2].map(|rank| map.experts(rank).to_vec()), [vec![0, 1, 2], vec![3, 4, 0], vec![1, 2]]);
    assert_eq!(ExpertMap::initial(2, 0, 4).unwrap().experts(3), [] as [u32; 0]);
    assert_eq!(ExpertMap::initial(4, 8, 3).unwrap().num_slots(), 12);
}

#[test]
fn a_slot_reads_from_its_own_rank_first_and_then_from_who_has_sent_least() {
    let map = ExpertMap::new(3, &[vec![0, 1], vec![2, 0], vec![1, 2]]).unwrap();
    let target = map.with_phy2log(vec![1, 0, 1, 2, 2, 0]).unwrap();
    let transfers = map.transfers(&target).unwrap();
    let list: Vec<_> = transfers.iter().map(|t| (t.expert, t.from, t.to)).collect();
    // Expert 1 comes from rank 0. So expert 0 comes from rank 1, although rank 0 is the first that holds it.
    assert_eq!(list, [(1, 1, 0), (0, 0, 1), (1, 1, 2), (2, 2, 3), (2, 5, 4), (0, 3, 5)]);
    assert!(map.transfers(&map).unwrap().is_empty());
}

/// A placement from numbers: every expert has a slot, and further copies go to ranks that do not hold the expert yet.
fn placed() -> impl Strategy<Value = (usize, usize, usize, Vec<usize>)> {
    (1usize..9, 1usize..5, 0usize..9, prop::collection::vec(0usize..1000, 40))
}

proptest! {
    #[test]
    fn transfers_lead_to_the_target((experts, ranks, redundant, numbers) in placed()) {
        let redundant = redundant.min(experts * (ranks - 1));
        let Ok(map) = ExpertMap::initial(experts, redundant, ranks) else { return Ok(()) };
        // Another placement of the same slots: experts and ranks are renumbered if the sizes allow it, otherwise only
        // experts.
        let shift = numbers[0] % experts;
        let renamed = map.phy2log().iter().map(|&e| ((e as usize + shift) % experts) as u32).collect();
        let target = map.with_phy2log(renamed).unwrap();
        let mut slots = map.phy2log().to_vec();
        for t in map.transfers(&target).unwrap() {
            prop_assert_eq!(map.phy2log()[t.from], t.expert);
            slots[t.to] = t.expert;
        }
        prop_assert_eq!(&slots[..], target.phy2log());
        // Each slot is in the row of its expert, once, and rows are ascending.
        let table = target.log2phy(None);
        let width = target.max_copies();
        let mut found: Vec<(usize, u32)> = Vec::new();
        for (expert, row) in table.chunks(width).enumerate() {
            let copies: Vec<i32> = row.iter().copied().take_while(|&slot| slot >= 0).collect();
            prop_assert!(!copies.is_empty() && copies.is_sorted() && row[copies.len()..].iter().all(|&slot| slot == -1));
            found.extend(copies.iter().map(|&slot| (slot as usize, expert as u32)));
        }
        found.sort_unstable();
        let want: Vec<_> = target.phy2log().iter().copied().enumerate().collect();
        prop_assert_eq!(found, want);
        let sizes: Vec<usize> = (0..ranks).map(|rank| partition(experts + redundant, ranks, rank).len()).collect();
        let got: Vec<usize> = (0..ranks).map(|rank| target.slots(rank).len()).collect();
        prop_assert_eq!(got, sizes);
    }
}

#[test]
fn one_copy_of_each_expert_is_chosen_evenly() {
    // The map has 8 experts, and copies of the first 4 on the second rank. With all copies in use each rank would read
    // 6 experts; with one copy of each expert it is 4.
    let map = ExpertMap::initial(8, 4, 2).unwrap();
    let count = |sole: &[u32]| {
        sole.iter().fold([0, 0], |mut count, &slot| {
            count[map.rank_of(slot as usize).unwrap()] += 1;
            count
        })
    };
    let sole = map.sole_copies(&[]).unwrap();
    assert_eq!(count(&sole), [4, 4]);
    assert!(sole.iter().enumerate().all(|(expert, &slot)| map.phy2log()[slot as usize] == expert as u32));
    // Experts 4 and 5 stay on rank 0, 6 and 7 on rank 1. The two experts with the highest loads go to different ranks,
    // and the others to the rank with less load.
    let sole = map.sole_copies(&[90.0, 80.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]).unwrap();
    assert_eq!(count(&sole), [4, 4]);
    assert_ne!(map.rank_of(sole[0] as usize), map.rank_of(sole[1] as usize));
    let sole = map.sole_copies(&[90.0, 80.0, 1.0, 1.0, 60.0, 60.0, 0.0, 0.0]).unwrap();
    assert_eq!((map.rank_of(sole[0] as usize), map.rank_of(sole[1] as usize)), (Some(1), Some(0)));
    let refused = |loads: &[f64]| map.sole_copies(loads).unwrap_err().to_string();
    assert!(refused(&[1.0]).contains("expected the loads of 8 experts, got 1"));
    assert!(refused(&[f64::NAN; 8]).contains("the load of expert 0 is NaN"));
    // Without copies there is nothing to choose.
    let sole = ExpertMap::initial(5, 0, 2).unwrap().sole_copies(&[0.0; 5]).unwrap();
    assert_eq!(sole, [0, 1, 2, 3, 4]);
}
