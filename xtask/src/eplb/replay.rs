//! `xtask eplb replay`: simulates a policy with these intervals on a trace.
//!
//! The steps run through the state machine that a server uses, with a planner that answers at once. The balance of
//! every step is computed with the placement at that step and with the first placement, which never changes. Moves are
//! counted from the migration plans.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use moe_eplb::control::{Action, Controller, Intervals, PlanStatus, Planner, Rebalance};
use moe_eplb::migrate::Contents;
use moe_eplb::policy::Policy;
use moe_eplb::select::{Proposal, Selector, Thresholds};
use moe_eplb::{Loads, Objective, Placement, Topology, check_migration, layer_par, plan_migration};
use serde_json::{Value, json};

use super::input::{InputOptions, window};
use super::policy::PolicyOptions;
use super::table::mean;

/// What to replay.
#[derive(Args, Clone, Debug)]
pub struct ReplayOptions {
    #[command(flatten)]
    pub input: InputOptions,
    #[command(flatten)]
    pub policy: PolicyOptions,
    /// Steps collected before each round of planning.
    #[arg(long, default_value_t = 8)]
    interval: u32,
    /// Steps that planning takes.
    #[arg(long, default_value_t = 1)]
    plan_steps: u32,
    /// Layers moved per step.
    #[arg(long, default_value_t = 64)]
    layers_per_step: usize,
    /// Least gain in PAR for moving a layer.
    #[arg(long, default_value_t = 0.02)]
    min_gain: f64,
    /// Most layers per round.
    #[arg(long, default_value_t = usize::MAX)]
    max_layers: usize,
    /// Bytes of one expert's weights.
    #[arg(long, default_value_t = 18_874_368)]
    expert_bytes: u64,
    /// Bytes per second that a device can receive.
    #[arg(long, default_value_t = 2.5e10)]
    link: f64,
}

/// Options of the sub-command.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    replay: ReplayOptions,
    /// Write the outcome here as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Replays and reports.
pub fn run(options: &Options) -> Result<()> {
    replay(&options.replay)?.report(options.json.as_deref())
}

/// What happened, step by step.
pub struct Outcome {
    /// Mean PAR over layers: with the changing placement, and with the first placement.
    pub par: Vec<f64>,
    pub par_static: Vec<f64>,
    /// Steps at which layers were moved, with layers, transfers and the stall in milliseconds.
    pub events: Vec<(usize, usize, usize, f64)>,
    pub expert_bytes: u64,
    pub dropped: u64,
    pub topology: Topology,
    pub loads: Loads,
    pub first: Placement,
    pub last: Placement,
}

impl Outcome {
    /// Prints a summary, and writes the whole outcome to a file if `json` is given.
    pub fn report(&self, json: Option<&Path>) -> Result<()> {
        let outcome = self.to_json();
        println!("{}", serde_json::to_string_pretty(&outcome["summary"])?);
        if let Some(path) = json {
            std::fs::write(path, serde_json::to_string_pretty(&outcome)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    fn to_json(&self) -> Value {
        let transfers: usize = self.events.iter().map(|e| e.2).sum();
        let events: Vec<Value> = self
            .events
            .iter()
            .map(|&(step, layers, transfers, stall_ms)| {
                json!({"step": step, "layers": layers, "transfers": transfers, "stall_ms": stall_ms})
            })
            .collect();
        json!({
            "summary": {
                "steps": self.par.len(),
                "par_mean": mean(&self.par),
                "par_static_mean": mean(&self.par_static),
                "rounds_dropped": self.dropped,
                "layers_moved": self.events.iter().map(|e| e.1).sum::<usize>(),
                "transfers": transfers,
                "bytes_moved": transfers as u64 * self.expert_bytes,
                "stall_ms": self.events.iter().map(|e| e.3).sum::<f64>(),
                "longest_stall_ms": self.events.iter().map(|e| e.3).fold(0.0, f64::max),
            },
            "par": self.par,
            "par_static": self.par_static,
            "events": events,
        })
    }
}

/// Makes its plan at once when it is asked.
struct Inline<'a> {
    policy: &'a dyn Policy,
    topology: Topology,
    selector: Selector,
    expert_bytes: u64,
    answer: PlanStatus,
}

impl Inline<'_> {
    fn plan(&mut self, heat: &Loads, current: &Placement) -> moe_eplb::Result<Rebalance> {
        let plan = self.policy.plan(&self.topology, heat, Some(current))?;
        let row =
            |p: &Placement, layer: usize| Placement::from_phy2log(&self.topology, 1, p.layer(layer).to_vec());
        let mut proposals = Vec::new();
        for layer in 0..heat.layers() {
            let slots = |p: &Placement| judge(heat.layer(layer), p.layer(layer), &self.topology);
            let moved = row(&plan.placement, layer)?.moved_from(&row(current, layer)?)?;
            proposals.push(Proposal {
                current_par: slots(current)?,
                new_par: slots(&plan.placement)?,
                bytes: moved as u64 * self.expert_bytes,
            });
        }
        let layers = self.selector.select(&proposals)?;
        // The planner answers at once and its transfers do not fail, so the moves are certain.
        layers.iter().try_for_each(|&layer| self.selector.moved(layer, proposals[layer].new_par))?;
        Ok(Rebalance { placement: plan.placement, layers })
    }
}

impl Planner for Inline<'_> {
    fn start(&mut self, heat: Loads, current: Placement) {
        self.answer = match self.plan(&heat, &current) {
            Ok(rebalance) => PlanStatus::Ready(rebalance),
            Err(error) => PlanStatus::Failed(error.to_string()),
        };
    }

    fn poll(&mut self) -> PlanStatus {
        self.answer.clone()
    }
}

fn judge(loads: &[f64], slots: &[u32], topology: &Topology) -> moe_eplb::Result<f64> {
    layer_par(loads, slots, topology.experts(), topology.devices(), Objective::Episode)
}

/// Runs the trace through the state machine.
pub fn replay(options: &ReplayOptions) -> Result<Outcome> {
    let (topology, loads) = options.input.read()?;
    let policy = options.policy.build()?;
    let first = Placement::initial(&topology, loads.layers())?;
    let limits =
        Thresholds { min_gain: options.min_gain, max_layers: options.max_layers, ..Thresholds::default() };
    let planner = Inline {
        policy: policy.as_ref(),
        topology,
        selector: Selector::new(loads.layers(), limits)?,
        expert_bytes: options.expert_bytes,
        answer: PlanStatus::Pending,
    };
    let intervals = Intervals {
        collect: options.interval,
        plan: options.plan_steps,
        layers_per_step: options.layers_per_step,
    };
    let mut controller = Controller::new(intervals, planner, first.clone())?;
    let mut par = Vec::new();
    let mut par_static = Vec::new();
    let mut events = Vec::new();
    for step in 0..loads.steps() {
        let now = window(&loads, step..step + 1, 1)?;
        par.push(mean(&moe_eplb::par(&now, controller.placement(), Objective::Episode)?));
        par_static.push(mean(&moe_eplb::par(&now, &first, Objective::Episode)?));
        match controller.step(true) {
            Action::None => {}
            Action::Gather => {
                let begin = (step + 1).saturating_sub(options.interval as usize);
                controller.planned_with(window(&loads, begin..step + 1, 16)?)?;
            }
            Action::Agree { ready } => controller.agreed(ready)?,
            Action::Transfer { layers } => {
                events.push(transfer(&mut controller, &layers, step, &topology, options)?);
            }
        }
    }
    let dropped = controller.counters().dropped;
    let last = controller.placement().clone();
    Ok(Outcome {
        par,
        par_static,
        events,
        expert_bytes: options.expert_bytes,
        dropped,
        topology,
        loads,
        first,
        last,
    })
}

/// Migrates `layers` as a server would: planned, validated, counted.
fn transfer<P: Planner>(
    controller: &mut Controller<P>,
    layers: &[usize],
    step: usize,
    topology: &Topology,
    options: &ReplayOptions,
) -> Result<(usize, usize, usize, f64)> {
    let mut received = vec![0u64; topology.devices()];
    let mut transfers = 0;
    for &layer in layers {
        if let Some(target) = controller.target().cloned() {
            let start = Contents::of(controller.placement(), layer, 1)?;
            let migration = plan_migration(topology, layer, &start, target.layer(layer))?;
            check_migration(&start, target.layer(layer), &migration, topology.experts(), 1)?;
            for t in migration.transfers.iter().filter(|t| !t.is_local()) {
                received[t.to.device as usize] += options.expert_bytes;
                transfers += 1;
            }
        }
        controller.transferred(layer, true)?;
    }
    // Devices receive at the same time, so the slowest decides.
    let slowest = received.into_iter().max().unwrap_or(0);
    Ok((step, layers.len(), transfers, slowest as f64 / options.link * 1e3))
}
