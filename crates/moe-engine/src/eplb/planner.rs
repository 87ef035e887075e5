//! One plan: the placement of a policy, and the layers whose moves are worth their cost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moe_eplb::control::Rebalance;
use moe_eplb::policy::Policy;
use moe_eplb::select::{Proposal, Selector, Thresholds};
use moe_eplb::{Loads, Objective, Placement, Result, Topology, layer_par};

use super::config::EplbConfig;

/// The costs of moves and steps, as measured in the run so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Costs {
    /// Seconds of a step. Experts take a part of it or all of it.
    pub seconds_per_step: f64,
    /// Seconds per moved byte.
    pub seconds_per_byte: f64,
}

/// Whether a layer's move saves more than it costs. The next `steps` steps get shorter as the peak falls, and each of
/// `layers` layers has an equal part of a step's time. This is an upper bound of the gain, because it assumes that
/// steps consist only of experts.
pub(super) fn pays(proposal: &Proposal, layers: usize, steps: usize, costs: &Costs) -> bool {
    let part = costs.seconds_per_step / layers.max(1) as f64;
    let saved = part * (1.0 - proposal.new_par / proposal.current_par) * steps as f64;
    saved > proposal.bytes as f64 * costs.seconds_per_byte
}

/// Makes plans, on any thread that calls it. Clones share the state.
#[derive(Clone)]
pub(super) struct RoundPlanner(Arc<Mutex<State>>);

struct State {
    policy: Box<dyn Policy + Send>,
    topology: Topology,
    selector: Selector,
    slot_len: u64,
    interval: usize,
    max_moves: usize,
    must_pay: bool,
    costs: Costs,
    /// Proposals of the last plan, by layer.
    proposals: Vec<Proposal>,
}

impl RoundPlanner {
    pub fn new(config: &EplbConfig, topology: Topology, layers: usize, slot_len: usize) -> Result<Self> {
        Self::with_policy(config.policy.build(), config, topology, layers, slot_len)
    }

    fn with_policy(
        policy: Box<dyn Policy + Send>,
        config: &EplbConfig,
        topology: Topology,
        layers: usize,
        slot_len: usize,
    ) -> Result<Self> {
        let thresholds = Thresholds { min_gain: config.min_gain, ..Thresholds::default() };
        Ok(Self(Arc::new(Mutex::new(State {
            policy,
            topology,
            selector: Selector::new(layers, thresholds)?,
            slot_len: slot_len as u64,
            interval: config.interval,
            max_moves: config.max_moves.unwrap_or(usize::MAX),
            must_pay: config.must_pay,
            costs: Costs::default(),
            proposals: Vec::new(),
        }))))
    }

    /// Changes the costs for the next plan.
    pub fn set_costs(&self, change: impl FnOnce(&mut Costs)) {
        change(&mut self.lock().costs);
    }

    /// The expectation of the last plan for a layer.
    pub fn proposal(&self, layer: usize) -> Option<Proposal> {
        self.lock().proposals.get(layer).copied()
    }

    /// Notes that the layer has its new placement.
    pub fn moved(&self, layer: usize) -> Result<()> {
        let mut state = self.lock();
        match state.proposals.get(layer).copied() {
            Some(proposal) => state.selector.moved(layer, proposal.new_par),
            None => Ok(()),
        }
    }

    /// A plan for these loads.
    pub fn plan(&self, loads: &Loads, current: &Placement) -> Result<Rebalance> {
        self.lock().plan(loads, current)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn plan(&mut self, loads: &Loads, current: &Placement) -> Result<Rebalance> {
        let placement = self.policy.plan(&self.topology, loads, Some(current))?.placement;
        // No rank could use an invalid placement. The error is logged.
        placement.check()?;
        let proposals = (0..loads.layers()).map(|layer| self.propose(layer, loads, current, &placement));
        self.proposals = proposals.collect::<Result<_>>()?;
        let mut layers = self.selector.select(&self.proposals)?;
        let mut left = self.max_moves as u64;
        layers.retain(|&layer| {
            let proposal = &self.proposals[layer];
            let pays = !self.must_pay || pays(proposal, loads.layers(), self.interval, &self.costs);
            let moves = proposal.bytes / self.slot_len.max(1);
            let taken = pays && moves <= left;
            left -= if taken { moves } else { 0 };
            taken
        });
        Ok(Rebalance { placement, layers })
    }

    fn propose(&self, layer: usize, loads: &Loads, now: &Placement, next: &Placement) -> Result<Proposal> {
        let row = |p: &Placement| Placement::from_phy2log(&self.topology, 1, p.layer(layer).to_vec());
        let before = row(now)?;
        let after = row(next)?;
        let experts = self.topology.experts();
        let devices = self.topology.devices();
        let par = |row: &Placement| {
            layer_par(loads.layer(layer), row.layer(0), experts, devices, Objective::Episode)
        };
        let bytes = after.moved_from(&before)? as u64 * self.slot_len;
        Ok(Proposal { current_par: par(&before)?, new_par: par(&after)?, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_pays_if_it_saves_more_than_its_bytes_cost() {
        let proposal = Proposal { current_par: 2.0, new_par: 1.0, bytes: 1000 };
        // Half of a layer's part of the steps: 10 of 20 ms, ten times.
        let costs = |seconds_per_byte| Costs { seconds_per_step: 0.08, seconds_per_byte };
        assert!(pays(&proposal, 4, 10, &costs(0.99e-4)));
        assert!(!pays(&proposal, 4, 10, &costs(1.01e-4)));
        assert!(!pays(&Proposal { new_par: 2.0, ..proposal }, 4, 10, &costs(1e-9)));
        assert!(!pays(&Proposal { new_par: f64::INFINITY, ..proposal }, 4, 10, &costs(0.0)));
    }

    /// Two layers of four experts on two ranks: the first is uneven, the second even.
    #[test]
    fn only_layers_that_gain_are_planned_and_no_more_than_may_move() {
        let topology = Topology::new(4, 4, 2).unwrap();
        let current = Placement::initial(&topology, 2).unwrap();
        let loads = Loads::episodes(1, 2, 4, &[90., 90., 10., 10., 50., 50., 50., 50.]).unwrap();
        for policy in super::super::EplbPolicy::ALL {
            let config = EplbConfig { policy, must_pay: false, ..EplbConfig::default() };
            let plan = |config: &EplbConfig| {
                let planner = RoundPlanner::new(config, topology, 2, 100).unwrap();
                (planner.plan(&loads, &current).unwrap(), planner)
            };
            let (rebalance, planner) = plan(&config);
            assert_eq!(rebalance.layers, [0], "{}", policy.name());
            let proposal = planner.proposal(0).unwrap();
            assert_eq!((proposal.current_par, proposal.new_par, proposal.bytes), (1.8, 1.0, 200));
            assert!(plan(&EplbConfig { max_moves: Some(1), ..config.clone() }).0.layers.is_empty());
            assert_eq!(plan(&EplbConfig { max_moves: Some(2), ..config.clone() }).0.layers, [0]);
            // In the first case moves cost nothing but steps take no time, so nothing is gained. With steps of one
            // second each, the gain is worth two hundred bytes.
            assert!(plan(&EplbConfig { must_pay: true, ..config.clone() }).0.layers.is_empty());
            planner.set_costs(|costs| costs.seconds_per_step = 1.0);
            assert_eq!(planner.plan(&loads, &current).unwrap().layers, [0]);
            planner.moved(0).unwrap();
            assert!(planner.plan(&loads, &rebalance.placement).unwrap().layers.is_empty());
        }
    }
    /// Eight experts in twelve slots: the published algorithm puts two copies of the expert with the highest load on
    /// one rank.
    #[test]
    fn a_policy_plans_what_ranks_can_take_or_says_why_not() {
        use moe_eplb::policy::Deepseek;

        let topology = Topology::new(8, 12, 4).unwrap();
        let current = Placement::initial(&topology, 1).unwrap();
        let loads = Loads::episodes(1, 1, 8, &[900., 1., 1., 1., 1., 1., 1., 1.]).unwrap();
        let config = EplbConfig { must_pay: false, ..EplbConfig::default() };
        let planner = |policy| RoundPlanner::with_policy(policy, &config, topology, 1, 100).unwrap();
        let published = planner(Box::new(Deepseek { allow_duplicates: true, ..Deepseek::default() }));
        let error = published.plan(&loads, &current).unwrap_err().to_string();
        assert!(error.contains("holds expert 0 twice"), "{error}");
        for policy in super::super::EplbPolicy::ALL {
            let plan = planner(policy.build()).plan(&loads, &current).unwrap();
            plan.placement.check().unwrap();
            assert_eq!(plan.layers, [0], "{}", policy.name());
        }
    }
}
