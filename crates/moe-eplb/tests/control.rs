//! The state machine: bounded waits, agreement, failures.

use moe_eplb::control::{Action, Controller, Intervals, PlanStatus, Planner, Rebalance, ThreadPlanner};
use moe_eplb::{Joint, Loads, Placement, Policy, Topology};

fn topology() -> Topology {
    Topology::new(4, 6, 3).unwrap()
}

fn heat() -> Loads {
    Loads::aggregate(2, 4, &[90., 10., 10., 10., 5., 60., 5., 60.]).unwrap()
}

fn valid(heat: &Loads, current: &Placement) -> Rebalance {
    let placement = Joint::default().plan(&topology(), heat, Some(current)).unwrap().placement;
    Rebalance { placement, layers: vec![1, 0] }
}

/// Answers with what it was given after a number of polls.
struct Scripted {
    polls: u32,
    answer: PlanStatus,
}

impl Planner for Scripted {
    fn start(&mut self, _: Loads, _: Placement) {}
    fn poll(&mut self) -> PlanStatus {
        self.polls = self.polls.saturating_sub(1);
        if self.polls == 0 { self.answer.clone() } else { PlanStatus::Pending }
    }
}

const INTERVALS: Intervals = Intervals { collect: 3, plan: 4, layers_per_step: 1 };

/// Steps until the ranks have to agree; returns whether this one is ready.
fn until_agreement<P: Planner>(controller: &mut Controller<P>) -> bool {
    for _ in 0..INTERVALS.collect - 1 {
        assert_eq!(controller.step(true), Action::None);
    }
    assert_eq!(controller.step(false), Action::None, "an unrecorded step does not count");
    assert_eq!(controller.step(true), Action::Gather);
    controller.planned_with(heat()).unwrap();
    for _ in 0..INTERVALS.plan - 1 {
        assert_eq!(controller.step(true), Action::None);
    }
    match controller.step(false) {
        Action::Agree { ready } => ready,
        other => panic!("{other:?}"),
    }
}

fn controller(polls: u32, answer: PlanStatus) -> Controller<Scripted> {
    let start = Placement::initial(&topology(), 2).unwrap();
    Controller::new(INTERVALS, Scripted { polls, answer }, start).unwrap()
}

#[test]
fn a_round_moves_the_listed_layers_in_order() {
    let start = Placement::initial(&topology(), 2).unwrap();
    let plan = valid(&heat(), &start);
    let mut controller = controller(2, PlanStatus::Ready(plan.clone()));
    assert!(until_agreement(&mut controller));
    controller.agreed(true).unwrap();
    for layer in [1, 0] {
        assert_eq!(controller.step(true), Action::Transfer { layers: vec![layer] });
        assert!(controller.transferred(1 - layer, true).is_err(), "not the layer under way");
        controller.transferred(layer, true).unwrap();
        assert_eq!(controller.placement().layer(layer), plan.placement.layer(layer));
    }
    assert_eq!(controller.step(true), Action::None);
    assert_eq!(controller.counters().applied, 1);
    assert_eq!(controller.placement(), &plan.placement);
    assert_eq!(controller.step(true), Action::None, "collecting again");
}

#[test]
fn late_failed_or_disputed_plans_leave_the_old_placement() {
    let start = Placement::initial(&topology(), 2).unwrap();
    let good = valid(&heat(), &start);
    let lost = Placement::from_phy2log(&topology(), 2, vec![0; 12]).unwrap();
    let broken = Rebalance { placement: lost, layers: vec![0] };
    let twice = Rebalance { layers: vec![0, 0], ..good.clone() };
    for (polls, answer, all_ready) in [
        (99, PlanStatus::Ready(good.clone()), false),
        (1, PlanStatus::Failed("out of memory".into()), false),
        (1, PlanStatus::Ready(broken), false),
        (1, PlanStatus::Ready(twice), false),
        (1, PlanStatus::Ready(good), false), // another rank is late
    ] {
        let mut controller = controller(polls, answer);
        let ready = until_agreement(&mut controller);
        assert!(controller.agreed(!ready).is_err() || !all_ready && ready);
        if !ready {
            controller.agreed(all_ready).unwrap();
        }
    }
}

#[test]
fn a_dropped_round_starts_over_and_says_why() {
    let start = Placement::initial(&topology(), 2).unwrap();
    let mut controller = controller(1, PlanStatus::Failed("out of memory".into()));
    for round in 1..=3 {
        assert!(!until_agreement(&mut controller));
        controller.agreed(false).unwrap();
        assert_eq!(controller.counters().dropped, round);
        assert_eq!(controller.last_failure(), Some("out of memory"));
        assert_eq!(controller.placement(), &start);
    }
}

#[test]
fn a_failed_transfer_keeps_that_layer_and_the_rest() {
    let start = Placement::initial(&topology(), 2).unwrap();
    let plan = valid(&heat(), &start);
    let mut controller = controller(1, PlanStatus::Ready(plan.clone()));
    assert!(until_agreement(&mut controller));
    controller.agreed(true).unwrap();
    controller.step(true);
    controller.transferred(1, true).unwrap();
    controller.step(true);
    controller.transferred(0, false).unwrap();
    assert_eq!(controller.placement().layer(1), plan.placement.layer(1));
    assert_eq!(controller.placement().layer(0), start.layer(0));
    assert_eq!(controller.counters().dropped, 1);
}

#[test]
fn answers_without_a_question_are_errors() {
    let mut controller = controller(1, PlanStatus::Pending);
    assert!(controller.planned_with(heat()).is_err());
    assert!(controller.agreed(true).is_err());
    assert!(controller.transferred(0, true).is_err());
    let start = Placement::initial(&topology(), 2).unwrap();
    let zero = Intervals { plan: 0, ..INTERVALS };
    assert!(Controller::new(zero, Scripted { polls: 1, answer: PlanStatus::Pending }, start).is_err());
}

/// Polls until the thread has answered.
fn wait<P: Planner>(planner: &mut P) -> PlanStatus {
    loop {
        match planner.poll() {
            PlanStatus::Pending => std::thread::yield_now(),
            answer => return answer,
        }
    }
}

#[test]
fn a_thread_plans_and_a_crash_is_a_failure() {
    let start = Placement::initial(&topology(), 2).unwrap();
    let mut planner = ThreadPlanner::new(|heat: Loads, current: Placement| Ok(valid(&heat, &current)));
    assert!(matches!(planner.poll(), PlanStatus::Failed(_)));
    planner.start(heat(), start.clone());
    assert_eq!(wait(&mut planner), PlanStatus::Ready(valid(&heat(), &start)));
    let mut crashing = ThreadPlanner::new(|_: Loads, _: Placement| panic!("planner bug"));
    crashing.start(heat(), start);
    assert_eq!(wait(&mut crashing), PlanStatus::Failed("the planner crashed".into()));
}
