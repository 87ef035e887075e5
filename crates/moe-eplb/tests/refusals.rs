//! Wrong inputs of every kind: each call returns an error that names the argument, and none panics or runs for long.

use moe_eplb::dropin::{rebalance_experts, vllm_rebalance_experts};
use moe_eplb::heat::{CountKind, Heat, Stage, StageFilter};
use moe_eplb::migrate::{Contents, Migration, Place, Transfer};
use moe_eplb::policy::{Deepseek, FlashLb, Joint, Policy, Swift, Task};
use moe_eplb::select::{Proposal, Selector, Thresholds};
use moe_eplb::{Error, Loads, Objective, Placement, Topology, check_migration, par, plan_migration};

fn said<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

fn topology() -> Topology {
    Topology::new(4, 6, 2).unwrap()
}

fn loads() -> Loads {
    Loads::aggregate(1, 4, &[9., 1., 4., 2.]).unwrap()
}

#[test]
fn sizes_of_the_machine() {
    for (experts, slots, devices, expected) in [
        (0, 6, 2, "experts must be at least 1"),
        (4, 0, 2, "slots must be at least 1"),
        (4, 6, 0, "devices must be at least 1"),
        (4, 6, 4, "6 slots cannot be divided evenly over 4 devices"),
        (7, 6, 2, "6 physical slots cannot hold 7 logical experts"),
        (usize::MAX, usize::MAX, 1, "expert count 18446744073709551615 is out of range"),
        (4, usize::MAX, 1, "slot count 18446744073709551615 is out of range"),
        (4, 6, usize::MAX, "6 slots cannot be divided evenly over 18446744073709551615 devices"),
    ] {
        let text = said(Topology::new(experts, slots, devices));
        assert!(text.contains(expected), "{text}");
    }
    for (nodes, groups) in [(0, 1), (1, 0), (3, 1), (1, 3), (usize::MAX, 1), (1, usize::MAX)] {
        said(topology().with_nodes(nodes, groups));
    }
}

#[test]
fn tables_that_no_memory_holds() {
    assert!(said(Placement::initial(&topology(), usize::MAX)).contains("do not fit into memory"));
    assert!(said(Placement::initial(&topology(), 1 << 60)).contains("do not fit into memory"));
    assert_eq!(Placement::initial(&topology(), 0).unwrap().phy2log(), [0u32; 0]);
    let now = Placement::initial(&topology(), 1).unwrap();
    assert!(said(Contents::of(&now, 0, usize::MAX)).contains("do not fit into memory"));
    assert_eq!(said(Contents::of(&now, 1, 1)), "layer 1 is out of range 0..1");
    assert!(said(Heat::new(usize::MAX, 2, 2, StageFilter::All)).contains("do not fit into memory"));
    assert_eq!(said(Heat::new(1, 2, 0, StageFilter::All)), "steps must be at least 1");
}

/// Sums of these loads are infinite in f64, or in the f32 of some policies.
#[test]
fn loads_whose_sum_is_infinite() {
    for value in [f64::MAX, 3e38, f64::from(f32::MAX)] {
        let text = said(Loads::aggregate(1, 4, &[value; 4]));
        assert!(text.contains("layer 0 sum to") && text.contains("scale them down"), "{text}");
    }
    assert!(said(Loads::episodes(2, 1, 1, &[2e38; 2])).contains("layer 0 sum to"));
    let weight = [vec![f32::MAX; 4]];
    assert!(said(rebalance_experts(&weight, 6, 1, 1, 2)).contains("layer 0 sum to"));
}

fn policies() -> Vec<Box<dyn Policy>> {
    vec![
        Box::new(Joint::default()),
        Box::new(Joint { objective: Objective::Aggregate, ..Joint::default() }),
        Box::new(FlashLb::default()),
        Box::new(Deepseek::default()),
        Box::new(Swift::default()),
    ]
}

/// The reciprocals of subnormal sums are infinite.
#[test]
fn the_smallest_and_the_largest_loads_are_planned() {
    for values in [[5e-324, 0., 5e-324, 5e-324], [1e-310; 4], [8e37; 4], [3e38, 0., 0., 1e-300]] {
        let loads = Loads::aggregate(1, 4, &values).unwrap();
        for policy in policies() {
            let plan = policy.plan(&topology(), &loads, None).unwrap();
            plan.placement.check().unwrap();
            let certificate = plan.certificates[0];
            let is_sound = certificate.par.is_finite() && certificate.lower_bound <= certificate.par;
            assert!(is_sound, "{} {values:?}: {certificate:?}", policy.name());
        }
    }
}

#[test]
fn settings_of_policies() {
    let joint = |move_price| Joint { move_price, ..Joint::default() }.plan(&topology(), &loads(), None);
    for price in [f64::NAN, f64::INFINITY, -0.1] {
        assert_eq!(said(joint(price)), "move_price must be a finite number of at least 0");
    }
    let swift = |min_gain| Swift { min_gain, ..Swift::default() }.plan(&topology(), &loads(), None);
    for gain in [f64::NAN, -0.01, 1.0, f64::INFINITY] {
        assert_eq!(said(swift(gain)), "min_gain must be at least 0 and below 1");
    }
    let flash = |policy: FlashLb| policy.plan(&topology(), &loads(), None);
    for z_score in [f64::NAN, f64::INFINITY, -1.0] {
        let text = said(flash(FlashLb { z_score, ..FlashLb::default() }));
        assert_eq!(text, "z_score must be a finite number of at least 0");
    }
    assert_eq!(said(flash(FlashLb { depth: 0, ..FlashLb::default() })), "depth must be at least 1");
    // Searches that are wider or deeper than there is something to search end like others.
    let widest = FlashLb { width: usize::MAX, depth: usize::MAX, ..FlashLb::default() };
    let most = FlashLb { width: 64, depth: 4, ..FlashLb::default() };
    assert_eq!(flash(widest).unwrap().placement, flash(most).unwrap().placement);
    let swaps = Swift { max_swaps: usize::MAX, ..Swift::default() };
    swaps.plan(&topology(), &loads(), None).unwrap().placement.check().unwrap();
    let lazy = Joint { effort: 0, ..Joint::default() };
    lazy.plan(&topology(), &loads(), None).unwrap().placement.check().unwrap();
}

#[test]
fn any_number_of_threads_gives_the_same_plan() {
    let loads = Loads::aggregate(3, 4, &[9., 1., 4., 2., 1., 1., 1., 1., 0., 0., 0., 7.]).unwrap();
    let one = Joint::default().plan(&topology(), &loads, None).unwrap();
    for threads in [0, 2, usize::MAX] {
        assert_eq!(Joint::default().plan_on(&topology(), &loads, None, threads).unwrap(), one);
    }
}

/// The fields of a task are public.
#[test]
fn tasks_that_do_not_fit_their_topology() {
    let topology = topology();
    let sound = [9., 1., 4., 2.];
    let of = |loads: &[f64], current: Option<&[u32]>, policy: &dyn Policy| {
        said(policy.place(&Task { topology: &topology, loads, current, lower_bound: 1.0 }))
    };
    for policy in policies() {
        let policy = policy.as_ref();
        assert_eq!(of(&[], None, policy), "loads must be at least 1");
        assert_eq!(of(&sound[..3], None, policy), "3 loads cannot be divided evenly over 4 experts");
        assert!(of(&[1., 1., f64::NAN, 1.], None, policy).contains("expert 2 is NaN"));
        assert!(of(&[1., 1., 1., -1.], None, policy).contains("expert 3 is -1"));
        assert!(of(&[f64::MAX, f64::MAX, 1., 1.], None, policy).contains("layer 0 sum to"));
        let short = of(&sound, Some(&[0, 1, 2]), policy);
        assert_eq!(short, "slots of the current placement: expected 6 entries, got 3");
        assert_eq!(of(&sound, Some(&[0, 1, 2, 3, 4, 0]), policy), "expert 4 is out of range 0..4");
        let made = Task::new(&topology, &[], None, Objective::Episode);
        said(policy.place(&made));
    }
}

/// A placement of more experts than the other one has indexed tables of the smaller one.
#[test]
fn placements_of_different_models() {
    let small = Placement::initial(&topology(), 1).unwrap();
    let other = Placement::initial(&Topology::new(6, 6, 2).unwrap(), 1).unwrap();
    let text = said(small.moved_from(&other));
    assert_eq!(text, "experts of the old placement: expected 4 entries, got 6");
    let wide = Placement::initial(&Topology::new(4, 6, 3).unwrap(), 1).unwrap();
    assert_eq!(said(small.moved_from(&wide)), "slots of its devices: expected 3 entries, got 2");
    let tall = Placement::initial(&topology(), 2).unwrap();
    assert_eq!(said(small.moved_from(&tall)), "layers of the old placement: expected 1 entries, got 2");
    let halves = Placement::from_phy2log(&topology(), 1, vec![0, 1, 2, 0, 1, 2]).unwrap();
    assert_eq!(said(par(&loads(), &halves, Objective::Episode)), "layer 0: expert 3 has no copy");
}

#[test]
fn counts_that_overflow_are_not_recorded() {
    let mut heat = Heat::new(2, 2, 3, StageFilter::All).unwrap();
    heat.begin_step(Stage::Decode);
    heat.record(1, &[5, 6], CountKind::Counts).unwrap();
    let before = heat.clone();
    let too_many = "the token counts of a window must be below 2^64 together";
    assert_eq!(said(heat.record(1, &[u64::MAX, 0], CountKind::Counts)), too_many);
    assert_eq!(said(heat.record(1, &[u64::MAX, u64::MAX], CountKind::Counts)), too_many);
    assert_eq!(said(heat.record(1, &[0, u64::MAX], CountKind::Cumulative)), too_many);
    let fold = heat.record_physical(1, &[u64::MAX / 2 + 1, u64::MAX / 2 + 1], CountKind::Counts, &[0, 0]);
    assert_eq!(said(fold), too_many);
    assert_eq!(said(heat.record(2, &[1, 1], CountKind::Counts)), "layer 2 is out of range 0..2");
    assert_eq!(said(heat.record(0, &[1], CountKind::Counts)), "counts: expected 2 entries, got 1");
    let fall = heat.record(0, &[2, 1], CountKind::Cumulative);
    assert_eq!(said(fall), "cumulative counts must be non-decreasing");
    assert_eq!(heat, before);
    heat.record(0, &[u64::MAX, 0], CountKind::Counts).unwrap();
    heat.end_step();
    let mut other = heat.clone();
    assert_eq!(said(other.merge(&heat)), too_many);
    assert_eq!(other, heat);
    assert_eq!(said(heat.episodes(0)), "episodes must be at least 1");
    assert_eq!(heat.episodes(usize::MAX).unwrap().steps(), 1);
    heat.clear();
    assert_eq!(said(heat.episodes(1)), "collected steps must be at least 1");
}

#[test]
fn proposals_that_are_no_numbers() {
    let mut selector = Selector::new(1, Thresholds::default()).unwrap();
    for par in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
        let sound = Proposal { current_par: 1.5, new_par: 1.1, bytes: 1 };
        for wrong in [Proposal { current_par: par, ..sound }, Proposal { new_par: par, ..sound }] {
            assert_eq!(said(selector.select(&[wrong])), "a PAR must be a finite number above 0");
        }
        assert_eq!(said(selector.moved(0, par)), "a PAR must be a finite number above 0");
    }
    assert_eq!(said(selector.moved(1, 1.0)), "layer 1 is out of range 0..1");
    assert_eq!(said(selector.select(&[])), "proposals: expected 1 entries, got 0");
}

#[test]
fn migrations_of_other_machines() {
    let topology = topology();
    let now = Placement::initial(&topology, 1).unwrap();
    let start = Contents::of(&now, 0, 1).unwrap();
    let target = [0, 1, 2, 3, 0, 1];
    plan_migration(&topology, 0, &start, &target).unwrap();
    let three = Topology::new(4, 6, 3).unwrap();
    assert!(said(plan_migration(&three, 0, &start, &target)).contains("devices of the start"));
    // Two devices with two slots each against two devices with three.
    let narrow = Topology::new(4, 4, 2).unwrap();
    let text = said(plan_migration(&narrow, 0, &start, &target[..4]));
    assert_eq!(text, "slots of its devices: expected 2 entries, got 3");
    assert!(said(plan_migration(&topology, usize::MAX, &start, &target)).contains("layer"));
    assert!(said(plan_migration(&topology, 0, &start, &target[..5])).contains("target: expected 6"));
    let unknown = said(plan_migration(&topology, 0, &start, &[0, 1, 2, 3, 4, 0]));
    assert_eq!(unknown, "expert 4 is out of range 0..4");
    assert!(said(plan_migration(&topology, 0, &start, &[0, 1, 2, 0, 1, 2])).contains("expert 3 has no copy"));

    let none = Migration::default();
    let check = |experts| said(check_migration(&start, &target, &none, experts, 1));
    assert!(check(usize::MAX).contains("an expert is missing from the start"));
    assert_eq!(check(3), "expert 3 is out of range 0..3");
    let nowhere = Place { device: 9, slot: 0 };
    let transfer = Transfer { layer: 0, expert: 0, from: nowhere, to: Place { device: 0, slot: 3 } };
    let wild = Migration { transfers: vec![transfer] };
    assert_eq!(said(check_migration(&start, &target, &wild, 4, 1)), "device 9 is out of range 0..2");
}

/// Rows of another length whose sum is right were taken for the whole table.
#[test]
fn old_tables_of_another_shape() {
    let weight = [vec![1.0; 4], vec![2.0; 4]];
    let call = |old: &[Vec<u32>]| said(vllm_rebalance_experts(&weight, 6, 1, 1, 2, Some(old)));
    let ragged = [vec![0, 1, 2, 3, 0], vec![0, 1, 2, 3, 0, 1, 2]];
    assert_eq!(call(&ragged), "slots of a layer of the old table: expected 6 entries, got 5");
    assert_eq!(call(&[vec![0; 12]]), "layers of the old table: expected 2 entries, got 1");
    assert_eq!(call(&[]), "layers of the old table: expected 2 entries, got 0");
}
