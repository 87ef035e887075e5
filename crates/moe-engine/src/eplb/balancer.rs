//! The only place that decides about moves: it collects counts, starts plans, and chooses the next round of the next
//! move.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use model_runtime::CausalLm;
use moe_eplb::control::{Action, Controller, Intervals, Planner, ThreadPlanner};
use moe_eplb::heat::{CountKind, Heat, Stage, StageFilter};
use moe_eplb::{Objective, Placement, Topology, layer_par};
use moe_layer::{ExpertHeat, ExpertMap, MoveRound, MoveStatus};
use tracing::{info, warn};

use super::config::EplbConfig;
use super::planner::RoundPlanner;
use super::stats::{EplbStats, Waits};
use crate::engine::StepLoad;
use crate::error::{Context, Result, bail, usage};

/// The number of parts of the window whose peaks a plan considers separately (the lanes of the planner).
const EPISODES: usize = 16;

/// Assumed seconds per moved byte before any expert has moved. Sockets on one host reach more than 1 GB/s, GPUs of one
/// host more than 100 GB/s.
const ON_HOSTS: f64 = 1e-9;
const ON_GPUS: f64 = 1e-11;

/// The layer that is moving.
struct Moving {
    layer: usize,
    /// Number of its experts that move to another rank.
    experts: u64,
    /// See [`MoveRound::sole`].
    sole: Vec<u32>,
}

/// Balances the experts of a run.
pub(crate) struct Balancer {
    bytes_per_step: usize,
    move_timeout: Duration,
    topology: Topology,
    /// The slots of the ranks, with the experts of some layer in them.
    map: ExpertMap,
    slot_len: usize,
    heat: Heat,
    planner: RoundPlanner,
    controller: Controller<Box<dyn Planner + Send>>,
    /// The placement at the beginning of the run.
    first: Placement,
    /// The layers that the plan moves next.
    queue: VecDeque<usize>,
    moving: Option<Moving>,
    /// The time when the window was last evaluated, and the number of steps since.
    since: (Instant, u32),
    stats: EplbStats,
    waits: Waits,
}

impl Balancer {
    /// A balancer for a model whose experts were loaded to be moved.
    ///
    /// # Errors
    /// Invalid settings; experts that cannot move; ranks with different numbers of slots.
    pub fn new(model: &dyn CausalLm, config: &EplbConfig) -> Result<Self> {
        config.check()?;
        let maps = maps(model)?;
        let (Some(map), Some(slot_len)) = (maps.first(), model.placed_experts(0).and_then(|p| p.slot_len()))
        else {
            bail!("load balancing: the model's experts were not loaded to be moved; load it with `eplb`")
        };
        let topology = topology(map)?;
        if maps.iter().any(|other| !has_even_slots(other) || other.num_slots() != map.num_slots()) {
            return Err(usage("`eplb`: the expert map gives ranks or layers different numbers of slots"));
        }
        let phy2log = maps.iter().flat_map(|map| map.phy2log().iter().copied()).collect();
        let first = Placement::from_phy2log(&topology, maps.len(), phy2log)?;
        let planner = RoundPlanner::new(config, topology, maps.len(), slot_len)?;
        let on_gpus = model.placed_experts(0).is_some_and(|placed| !placed.device().is_cpu());
        planner.set_costs(|costs| costs.seconds_per_byte = if on_gpus { ON_GPUS } else { ON_HOSTS });
        let plan = planner.clone();
        let thread = ThreadPlanner::new(move |loads, current| plan.plan(&loads, &current));
        let intervals = Intervals {
            collect: config.interval as u32,
            plan: config.plan_steps as u32,
            // Layers move one after the other: `bytes_per_step` limits the bytes per step, of whatever layer.
            layers_per_step: usize::MAX,
        };
        Ok(Self {
            bytes_per_step: config.bytes_per_step,
            move_timeout: config.move_timeout,
            topology,
            map: map.clone(),
            slot_len,
            heat: Heat::new(maps.len(), topology.experts(), config.window, StageFilter::All)?,
            planner,
            controller: Controller::new(
                intervals,
                Box::new(thread) as Box<dyn Planner + Send>,
                first.clone(),
            )?,
            first,
            queue: VecDeque::new(),
            moving: None,
            since: (Instant::now(), 0),
            stats: EplbStats::default(),
            waits: Waits::default(),
        })
    }

    /// Counters so far.
    pub fn stats(&self) -> EplbStats {
        let counters = self.controller.counters();
        let [median_stall, p99_stall] = self.waits.quantiles([0.5, 0.99]);
        let plans = counters.applied;
        let dropped = counters.dropped;
        EplbStats { plans, dropped, median_stall, p99_stall, ..self.stats.clone() }
    }

    /// Advances by one step, whose counts are `loads`. Returns the round of a move that all ranks must run before the
    /// next step.
    ///
    /// # Errors
    /// Counts of another model.
    pub fn step(&mut self, loads: &[StepLoad]) -> Result<Option<MoveRound>> {
        for load in loads {
            self.observe(load).context("counting the experts of a step")?;
        }
        self.since.1 += 1;
        match self.controller.step(!loads.is_empty()) {
            Action::None => {}
            Action::Gather => {
                let (start, steps) = std::mem::replace(&mut self.since, (Instant::now(), 0));
                let seconds = start.elapsed().as_secs_f64() / f64::from(steps.max(1));
                self.planner.set_costs(|costs| costs.seconds_per_step = seconds);
                self.controller.planned_with(self.heat.episodes(EPISODES)?)?;
            }
            Action::Agree { ready } => {
                self.controller.agreed(ready)?;
                if !ready {
                    let why = self.controller.last_failure().unwrap_or("no plan");
                    warn!("load balancing: experts stay where they are: {why}");
                }
            }
            Action::Transfer { layers } => self.begin(layers),
        }
        if self.moving.is_none() {
            self.next_layer()?;
        }
        let Some((moving, target)) = self.moving.as_ref().zip(self.controller.target()) else {
            return Ok(None);
        };
        let &Moving { layer, ref sole, .. } = moving;
        Ok(Some(MoveRound {
            layer,
            phy2log: target.layer(layer).to_vec(),
            sole: sole.clone(),
            bytes: self.bytes_per_step,
            limit: self.move_timeout,
        }))
    }

    /// Notes that a round was run: the state of the move, and how long the ranks took.
    ///
    /// # Errors
    /// A round that was not asked for.
    pub fn moved(&mut self, status: &MoveStatus, took: Duration) -> Result<()> {
        let Some(&Moving { layer, experts, .. }) = self.moving.as_ref() else {
            bail!("load balancing: no expert was moving")
        };
        self.stats.waited(took);
        self.waits.add(took);
        match status {
            MoveStatus::Underway => return Ok(()),
            MoveStatus::Moved => {
                self.stats.layers += 1;
                self.stats.experts += experts;
                self.stats.bytes += experts * self.slot_len as u64;
                self.planner.moved(layer)?;
                if self.stats.bytes > 0 {
                    let seconds = self.stats.stall / self.stats.bytes as f64;
                    self.planner.set_costs(|costs| costs.seconds_per_byte = seconds);
                }
                if let Some(p) = self.planner.proposal(layer) {
                    self.stats.planned_par_sums[0] += p.current_par;
                    self.stats.planned_par_sums[1] += p.new_par;
                    info!(
                        layer,
                        experts,
                        bytes = p.bytes,
                        "experts moved: peak over mean load {:.3}, expected {:.3}",
                        p.current_par,
                        p.new_par
                    );
                }
            }
            MoveStatus::RolledBack(faults) => {
                self.stats.rolled_back += 1;
                self.queue.clear();
                for fault in faults {
                    warn!("experts of layer {layer} stay where they were: {fault}");
                }
            }
        }
        self.moving = None;
        self.controller.transferred(layer, *status == MoveStatus::Moved)?;
        Ok(())
    }

    fn begin(&mut self, layers: Vec<usize>) {
        info!(layers = layers.len(), "load balancing: a plan moves experts of these layers");
        self.queue = layers.into();
    }

    fn next_layer(&mut self) -> Result<()> {
        let Some((layer, target)) = self.queue.pop_front().zip(self.controller.target()) else {
            return Ok(());
        };
        let now = self.controller.placement().layer(layer);
        let next = target.layer(layer);
        let k = self.topology.slots_per_device();
        let comes = |(rank, &expert): (usize, &u32)| !now[rank * k..][..k].contains(&expert);
        let experts =
            next.iter().enumerate().map(|(slot, expert)| (slot / k, expert)).filter(|&e| comes(e)).count();
        let loads = self.heat.aggregate()?;
        let sole = self.map.with_phy2log(next.to_vec())?.sole_copies(loads.layer(layer))?;
        self.moving = Some(Moving { layer, experts: experts as u64, sole });
        Ok(())
    }

    fn observe(&mut self, load: &StepLoad) -> Result<()> {
        let stage = if load.prefill_rows > 0 { Stage::Prefill } else { Stage::Decode };
        self.heat.begin_step(stage);
        for layer in 0..load.counts.layers() {
            self.heat.record(layer, load.counts.layer(layer), CountKind::Counts)?;
        }
        self.heat.end_step();
        self.stats.steps += 1;
        self.stats.par_sum += self.par(&load.counts, self.controller.placement())?;
        self.stats.static_par_sum += self.par(&load.counts, &self.first)?;
        Ok(())
    }

    /// Peak over mean load of the ranks in a step, the mean of all layers.
    fn par(&self, counts: &ExpertHeat, placement: &Placement) -> Result<f64> {
        let experts = self.topology.experts();
        let ranks = self.topology.devices();
        let layers = counts.layers();
        let of = |layer: usize| {
            let loads: Vec<f64> = counts.layer(layer).iter().map(|&count| count as f64).collect();
            layer_par(&loads, placement.layer(layer), experts, ranks, Objective::Aggregate)
        };
        let sum = (0..layers).map(of).sum::<std::result::Result<f64, _>>()?;
        Ok(sum / layers.max(1) as f64)
    }
}

/// The maps of all MoE layers.
pub(crate) fn maps(model: &dyn CausalLm) -> Result<Vec<ExpertMap>> {
    let Some(moe) = &model.info().moe else { bail!("load balancing: the model has no routed experts") };
    let map = |layer| {
        let placed = model.placed_experts(layer).map(|placed| placed.map());
        placed.context("load balancing: the model's experts were not loaded to be moved; load it with `eplb`")
    };
    (0..moe.layers.len()).map(map).collect()
}

fn has_even_slots(map: &ExpertMap) -> bool {
    (0..map.num_ranks()).all(|rank| map.slots(rank).len() * map.num_ranks() == map.num_slots())
}

fn topology(map: &ExpertMap) -> Result<Topology> {
    let experts = map.num_experts();
    let slots = map.num_slots();
    let ranks = map.num_ranks();
    if !slots.is_multiple_of(ranks) {
        let fits = slots.next_multiple_of(ranks) - experts;
        return Err(usage(format!(
            "`eplb`: {experts} experts and {} redundant ones do not divide over {ranks} ranks; use \
             `num_redundant_experts` {fits}",
            slots - experts
        )));
    }
    Ok(Topology::new(experts, slots, ranks)?)
}
