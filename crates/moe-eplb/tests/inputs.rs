//! Empty, wrong and unusual input gives a clear error or a documented result.

use moe_eplb::dropin::{rebalance_experts, vllm_rebalance_experts, vllm_rebalance_experts_with};
use moe_eplb::heat::StageFilter;
use moe_eplb::policy::{Deepseek, FlashLb, Policy, Swift};
use moe_eplb::{Error, Heat, Joint, Loads, Objective, Placement, Topology, par};

#[test]
fn shapes_that_cannot_work_are_refused() {
    assert_eq!(Topology::new(8, 7, 1), Err(Error::TooFewSlots { slots: 7, experts: 8 }));
    assert!(matches!(Topology::new(8, 10, 4), Err(Error::NotDivisible { total: 10, parts: 4, .. })));
    assert_eq!(Topology::new(0, 8, 4), Err(Error::Empty("experts")));
    assert_eq!(Topology::new(8, 8, 0), Err(Error::Empty("devices")));
    let topology = Topology::new(8, 12, 4).unwrap();
    assert!(matches!(topology.with_nodes(3, 1), Err(Error::NotDivisible { .. })));
    assert!(matches!(topology.with_nodes(2, 3), Err(Error::NotDivisible { .. })));
    assert_eq!(topology.with_nodes(1, 0), Err(Error::Empty("groups")));
}

#[test]
fn loads_must_be_finite_and_not_negative() {
    for bad in [f64::NAN, f64::INFINITY, -1.0] {
        let error = Loads::episodes(2, 1, 2, &[1.0, 2.0, 3.0, bad]).unwrap_err();
        assert!(matches!(error, Error::BadLoad { step: 1, layer: 0, expert: 1, .. }), "{error}");
    }
    assert!(matches!(Loads::aggregate(2, 2, &[1.0; 3]), Err(Error::Shape { expected: 4, got: 3, .. })));
    assert_eq!(Loads::episodes(0, 1, 2, &[]), Err(Error::Empty("steps")));
}

/// The products of these sizes are 0 in 64 bits, so that an empty table would fit them.
#[test]
fn sizes_that_overflow_are_refused() {
    let big = 1 << 63;
    assert_eq!(Loads::aggregate(big, 2, &[]), Err(Error::TooLarge { what: "loads", sizes: vec![1, big, 2] }));
    let topology = Topology::new(4, 4, 4).unwrap();
    let placement = Placement::from_phy2log(&topology, 1 << 62, Vec::new());
    assert_eq!(placement, Err(Error::TooLarge { what: "phy2log", sizes: vec![1 << 62, 4] }));
    assert!(matches!(Heat::new(big, 2, 1, StageFilter::All), Err(Error::TooLarge { .. })));
}

#[test]
fn loads_of_another_model_have_no_par() {
    let topology = Topology::new(4, 4, 2).unwrap();
    let placement = Placement::initial(&topology, 2).unwrap();
    let said = |layers: usize, experts: usize| {
        let loads = Loads::aggregate(layers, experts, &vec![1.0; layers * experts]).unwrap();
        par(&loads, &placement, Objective::Episode).unwrap_err().to_string()
    };
    assert_eq!(said(3, 4), "layers of the placement: expected 3 entries, got 2");
    assert_eq!(said(2, 5), "experts of the placement: expected 5 entries, got 4");
}

fn policies() -> Vec<Box<dyn Policy>> {
    vec![
        Box::new(Joint::default()),
        Box::new(FlashLb::default()),
        Box::new(Deepseek::default()),
        Box::new(Swift::default()),
    ]
}

/// Loads that leave nothing to balance: none at all, a layer of zeros, no layer, one device.
#[test]
fn every_policy_takes_unusual_loads() {
    let other = [9., 1., 1., 1., 0., 0., 0., 0., 1., 1., 1., 9.];
    for ((experts, slots, devices), loads, balanced) in [
        ((4, 8, 4), Loads::episodes(3, 2, 4, &[0.; 24]), &[0, 1][..]),
        ((4, 6, 2), Loads::aggregate(3, 4, &other), &[1]),
        ((4, 6, 2), Loads::aggregate(0, 4, &[]), &[]),
        ((5, 5, 1), Loads::aggregate(1, 5, &[5., 4., 3., 2., 1.]), &[0]),
    ] {
        let topology = Topology::new(experts, slots, devices).unwrap();
        let loads = loads.unwrap();
        for policy in policies() {
            let plan = policy.plan(&topology, &loads, None).unwrap();
            plan.placement.check().unwrap();
            assert_eq!(plan.certificates.len(), loads.layers());
            for &layer in balanced {
                let certificate = plan.certificates[layer];
                assert!(certificate.par == 1.0 && certificate.is_optimal(), "{}", policy.name());
            }
        }
    }
}

#[test]
fn all_zero_loads_spread_the_copies_evenly() {
    let topology = Topology::new(4, 8, 4).unwrap();
    let loads = Loads::episodes(3, 2, 4, &[0.0; 24]).unwrap();
    let plan = Joint::default().plan(&topology, &loads, None).unwrap();
    assert_eq!(plan.placement.logcnt(), [2; 8]);
}

#[test]
fn more_slots_per_device_than_experts_needs_duplicates() {
    let topology = Topology::new(3, 8, 2).unwrap();
    let loads = Loads::aggregate(1, 3, &[5., 4., 3.]).unwrap();
    let refused = Error::DeviceTooWide { slots_per_device: 4, experts: 3 };
    assert_eq!(Joint::default().plan(&topology, &loads, None), Err(refused.clone()));
    assert_eq!(FlashLb::default().plan(&topology, &loads, None), Err(refused));
    let lenient = Joint { allow_duplicates: true, ..Joint::default() };
    let plan = lenient.plan(&topology, &loads, None).unwrap();
    assert!(plan.certificates[0].lower_bound <= plan.certificates[0].par);
    assert!(plan.placement.check().is_err(), "a duplicate is unavoidable");
}

#[test]
fn mismatched_arguments_are_refused() {
    let topology = Topology::new(4, 6, 2).unwrap();
    let loads = Loads::aggregate(1, 5, &[1.; 5]).unwrap();
    assert!(matches!(Joint::default().plan(&topology, &loads, None), Err(Error::Shape { .. })));
    let loads = Loads::aggregate(1, 4, &[1.; 4]).unwrap();
    let old = Placement::initial(&topology, 2).unwrap();
    assert!(matches!(Joint::default().plan(&topology, &loads, Some(&old)), Err(Error::Shape { .. })));
    let flash = FlashLb { depth: 0, ..FlashLb::default() };
    assert!(matches!(flash.plan(&topology, &loads, None), Err(Error::Setting { .. })));
}

/// An invalid current placement is no reason to fail: it is replaced.
#[test]
fn an_invalid_current_placement_is_replaced() {
    let topology = Topology::new(4, 6, 2).unwrap();
    let loads = Loads::aggregate(1, 4, &[4., 3., 2., 1.]).unwrap();
    let broken = Placement::from_phy2log(&topology, 1, vec![0; 6]).unwrap();
    for policy in [Joint::default(), Joint { move_price: 1.0, ..Joint::default() }] {
        policy.plan(&topology, &loads, Some(&broken)).unwrap().placement.check().unwrap();
    }
}

fn golden() -> Vec<Vec<f32>> {
    vec![
        vec![90., 132., 40., 61., 104., 165., 39., 4., 73., 56., 183., 86.],
        vec![20., 107., 104., 64., 19., 197., 187., 157., 172., 86., 16., 27.],
    ]
}

#[test]
fn drop_in_returns_consistent_maps() {
    let maps = rebalance_experts(&golden(), 16, 4, 2, 8).unwrap();
    assert_eq!(maps.phy2log[0], [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]);
    assert_eq!(maps.phy2log[1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]);
    for (layer, slots) in maps.phy2log.iter().enumerate() {
        for (e, copies) in maps.log2phy[layer].iter().enumerate() {
            let (used, padding) = copies.split_at(maps.logcnt[layer][e] as usize);
            assert!(used.iter().all(|&slot| slots[slot as usize] as usize == e));
            assert!(padding.iter().all(|&slot| slot == -1));
        }
    }
}

#[test]
fn drop_in_refuses_what_crashes_upstream() {
    assert_eq!(rebalance_experts(&[], 16, 1, 1, 8), Err(Error::Empty("layers")));
    assert_eq!(rebalance_experts(&golden(), 16, 0, 1, 8), Err(Error::Empty("groups")));
    assert!(matches!(rebalance_experts(&golden(), 16, 5, 1, 8), Err(Error::NotDivisible { .. })));
    assert!(matches!(rebalance_experts(&golden(), 15, 4, 2, 8), Err(Error::NotDivisible { .. })));
    let nan = vec![vec![1.0, f32::NAN]];
    assert!(matches!(rebalance_experts(&nan, 4, 1, 1, 2), Err(Error::BadLoad { .. })));
    let ragged = vec![vec![1.0; 4], vec![1.0; 3]];
    assert!(matches!(rebalance_experts(&ragged, 4, 1, 1, 2), Err(Error::Shape { .. })));
}

#[test]
fn vllm_form_keeps_slots_and_forgives_uneven_nodes() {
    let first = vllm_rebalance_experts(&golden(), 16, 4, 2, 8, None).unwrap();
    assert_eq!(first, rebalance_experts(&golden(), 16, 4, 2, 8).unwrap().phy2log);
    // Three nodes do not divide eight ranks: treated as one node.
    let flat = vllm_rebalance_experts(&golden(), 16, 4, 3, 8, None).unwrap();
    assert_eq!(flat, rebalance_experts(&golden(), 16, 4, 1, 8).unwrap().phy2log);
    let mut turned = golden();
    turned.iter_mut().for_each(|row| row.rotate_left(1));
    for policy in [&Deepseek::default() as &dyn Policy, &Joint::default()] {
        let next = vllm_rebalance_experts_with(policy, &turned, 16, 4, 2, 8, Some(&first)).unwrap();
        for (old, new) in first.concat().chunks(2).zip(next.concat().chunks(2)) {
            for (slot, e) in new.iter().enumerate() {
                let kept = old[slot] == *e || old[1 - slot] != *e || new[1 - slot] == *e;
                assert!(kept, "{old:?} -> {new:?}");
            }
        }
    }
}

/// Group-limited routing: each group's experts end up in one node.
#[test]
fn hierarchical_plans_keep_groups_in_nodes() {
    let topology = Topology::new(12, 16, 8).and_then(|t| t.with_nodes(2, 4)).unwrap();
    let flat: Vec<f64> = golden().concat().into_iter().map(f64::from).collect();
    let loads = Loads::aggregate(2, 12, &flat).unwrap();
    let policy = Joint { hierarchical: true, ..Joint::default() };
    let plan = policy.plan(&topology, &loads, None).unwrap();
    plan.placement.check().unwrap();
    for layer in 0..2 {
        let mut node_of_group = [None; 4];
        for (slot, &e) in plan.placement.layer(layer).iter().enumerate() {
            let node = topology.node_of(slot / 2);
            assert_eq!(*node_of_group[e as usize / 3].get_or_insert(node), node);
        }
    }
    let again = policy.plan(&topology, &loads, Some(&plan.placement)).unwrap();
    assert_eq!(again.placement, plan.placement);
    let greedy = Deepseek::default().plan(&topology, &loads, None).unwrap();
    assert!(plan.mean_par() <= greedy.mean_par());
}
