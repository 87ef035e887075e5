//! Heat, the forecast and the choice of layers.

use moe_eplb::heat::{CountKind, Heat, Stage, StageFilter};
use moe_eplb::select::{Proposal, Selector, Thresholds};
use moe_eplb::stats::forecast;
use moe_eplb::{Error, Loads};
use proptest::prelude::*;

fn step(heat: &mut Heat, stage: Stage, counts: [u64; 2]) {
    heat.begin_step(stage);
    heat.record(0, &counts, CountKind::Counts).unwrap();
    heat.end_step();
}

#[test]
fn the_ring_forgets_and_the_window_follows() {
    let mut heat = Heat::new(1, 2, 3, StageFilter::All).unwrap();
    for i in 0..5 {
        step(&mut heat, Stage::Decode, [i, 10 * i]);
    }
    assert_eq!((heat.steps(), heat.held()), (5, 3));
    assert_eq!(heat.aggregate().unwrap().layer(0), [9.0, 90.0]);
    assert_eq!(heat.episodes(3).unwrap().layer(0), [2.0, 20.0, 3.0, 30.0, 4.0, 40.0]);
    assert_eq!(heat.episodes(2).unwrap().layer(0), [5.0, 50.0, 4.0, 40.0]);
    heat.clear();
    assert_eq!(heat.episodes(1), Err(Error::Empty("collected steps")));
}

#[test]
fn other_stages_neither_record_nor_advance() {
    let mut heat = Heat::new(1, 2, 4, StageFilter::Decode).unwrap();
    step(&mut heat, Stage::Prefill, [100, 100]);
    step(&mut heat, Stage::Decode, [1, 2]);
    step(&mut heat, Stage::Prefill, [100, 100]);
    assert_eq!(heat.steps(), 1);
    assert_eq!(heat.aggregate().unwrap().layer(0), [1.0, 2.0]);
}

#[test]
fn cumulative_and_physical_counts_fold_to_experts() {
    let mut heat = Heat::new(1, 2, 4, StageFilter::All).unwrap();
    heat.begin_step(Stage::Decode);
    heat.record(0, &[3, 10], CountKind::Cumulative).unwrap();
    heat.record_physical(0, &[5, 6, 10], CountKind::Cumulative, &[0, 1, 0]).unwrap();
    heat.end_step();
    assert_eq!(heat.aggregate().unwrap().layer(0), [12.0, 8.0]);
    assert!(heat.record(0, &[3, 2], CountKind::Cumulative).is_err());
    assert!(heat.record(1, &[3, 2], CountKind::Counts).is_err());
    assert!(heat.record(0, &[3], CountKind::Counts).is_err());
    assert!(heat.record_physical(0, &[1], CountKind::Counts, &[7]).is_err());
}

#[test]
fn ranks_merge_only_over_the_same_steps() {
    let mut a = Heat::new(1, 2, 4, StageFilter::All).unwrap();
    let mut b = a.clone();
    step(&mut a, Stage::Decode, [1, 2]);
    assert!(a.merge(&b).is_err());
    step(&mut b, Stage::Decode, [10, 20]);
    a.merge(&b).unwrap();
    assert_eq!(a.aggregate().unwrap().layer(0), [11.0, 22.0]);
    assert!(a.merge(&Heat::new(1, 3, 4, StageFilter::All).unwrap()).is_err());
}

#[test]
fn a_forecast_follows_a_trend_and_leaves_noise_alone() {
    let trend = Loads::episodes(4, 1, 2, &[1., 9., 2., 8., 4., 6., 5., 5.]).unwrap();
    let next = forecast(&trend).unwrap();
    let sum = |loads: &Loads, e: usize| loads.summed().layer(0)[e];
    assert!(sum(&next, 0) > sum(&trend, 0) && sum(&next, 1) < sum(&trend, 1));
    let noise = Loads::episodes(4, 1, 1, &[1., 3., 1., 3.]).unwrap();
    assert_eq!(forecast(&noise).unwrap(), noise);
}

fn proposal(current_par: f64, new_par: f64, bytes: u64) -> Proposal {
    Proposal { current_par, new_par, bytes }
}

#[test]
fn best_gain_per_byte_first_and_never_more_than_allowed() {
    let limits = Thresholds { max_layers: 2, ..Thresholds::default() };
    let mut selector = Selector::new(4, limits).unwrap();
    let proposals = [
        proposal(2.0, 1.5, 100), // 0.5 per 100
        proposal(2.0, 1.0, 100), // 1.0 per 100
        proposal(1.5, 1.0, 10),  // 0.5 per 10
        proposal(2.0, 1.99, 1),  // gains too little
    ];
    assert_eq!(selector.select(&proposals).unwrap(), [2, 1]);
    assert!(selector.select(&proposals[..2]).is_err());
}

#[test]
fn hysteresis_keeps_a_layer_until_it_is_good() {
    let mut selector = Selector::new(1, Thresholds::default()).unwrap();
    let at = |balancedness: f64| [proposal(1.0 / balancedness, 1.0, 1)];
    // The layer has never moved, so any balancedness below `leave` makes it a candidate.
    assert_eq!(selector.select(&at(0.90)).unwrap(), [0]);
    selector.moved(0, 1.0 / 0.93).unwrap();
    // The layer has moved. 0.90 is neither below `enter` nor below `decay` times 0.93.
    assert!(selector.select(&at(0.90)).unwrap().is_empty());
    assert_eq!(selector.select(&at(0.80)).unwrap(), [0]);
    // The layer is still a candidate at 0.90, because it was one before and has not reached `leave`.
    assert_eq!(selector.select(&at(0.90)).unwrap(), [0]);
    assert!(selector.select(&at(0.96)).unwrap().is_empty());
    assert!(selector.select(&at(0.90)).unwrap().is_empty());
    let wrong = Thresholds { leave: 0.5, ..Thresholds::default() };
    assert!(Selector::new(1, wrong).is_err());
    let nan = Thresholds { min_gain: f64::NAN, ..Thresholds::default() };
    assert!(Selector::new(1, nan).is_err());
}

proptest! {
    /// The running sums equal a fresh sum over what the ring holds.
    #[test]
    fn window_equals_its_steps(
        steps in prop::collection::vec(prop::collection::vec(0u64..1000, 6), 1..20),
        capacity in 1usize..6,
        episodes in 1usize..8,
    ) {
        let mut heat = Heat::new(2, 3, capacity, StageFilter::All).unwrap();
        for counts in &steps {
            heat.begin_step(Stage::Decode);
            heat.record(0, &counts[..3], CountKind::Counts).unwrap();
            heat.record(1, &counts[3..], CountKind::Counts).unwrap();
            heat.end_step();
        }
        let held = &steps[steps.len().saturating_sub(capacity)..];
        let sums: Vec<f64> = (0..6).map(|i| held.iter().map(|c| c[i] as f64).sum()).collect();
        let want = Loads::aggregate(2, 3, &sums).unwrap();
        prop_assert_eq!(heat.aggregate().unwrap(), want.clone());
        prop_assert_eq!(heat.episodes(episodes).unwrap().summed(), want);
    }
}
