//! The default policy: copies and places are searched together.

use super::deepseek::{experts_of_nodes, place_layer};
use super::{Layout, Policy, Task};
use crate::certificate::BOUND_SLACK;
use crate::error::{Result, expect_share};
use crate::exact;
use crate::matching::keep_in_place;
use crate::placement::moved_in_layer;
use crate::score::{Objective, known_par};
use crate::search::{self, Request, rows};
use crate::topology::Topology;

/// Joint search over copy counts and places with local repair; see the README of this crate.
///
/// Greedy start, descent on a smoothed peak, kicks out of local optima, exact search of small
/// layers, optimal matching of rows to devices. The result depends on the input and these settings
/// alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Joint {
    /// What to minimise.
    pub objective: Objective,
    /// Search steps per physical slot of a layer. A step looks at one candidate move.
    pub effort: u32,
    /// The gain in PAR for which it would pay to transfer every slot. Zero plans from scratch. With a price, the search
    /// starts at the current placement and moves an expert only if that pays. Finite, at least 0.
    pub move_price: f64,
    /// Accept shapes in which a device must hold an expert twice.
    pub allow_duplicates: bool,
    /// Keep the experts of a group in one node, as group-limited routing likes it. This has no effect if there is one
    /// node, the groups do not divide over the nodes, or a node has fewer experts than a device has slots.
    pub hierarchical: bool,
}

impl Joint {
    /// Steps per slot that keep a 48-layer, 144-slot model below 10 ms on one core.
    pub const DEFAULT_EFFORT: u32 = 64;
}

impl Default for Joint {
    fn default() -> Self {
        Self {
            objective: Objective::default(),
            effort: Self::DEFAULT_EFFORT,
            move_price: 0.0,
            allow_duplicates: false,
            hierarchical: false,
        }
    }
}

/// Nodes that the exact search may visit for each step of effort; at the default effort it ends
/// within some ten milliseconds.
const EXACT_NODES_PER_EFFORT: u64 = 15_000;

/// The factor by which the search of a small layer is longer if a complete search takes too long.
const SMALL_LAYER_EFFORT: u32 = 32;

impl Policy for Joint {
    fn name(&self) -> &'static str {
        "joint"
    }

    fn objective(&self) -> Objective {
        self.objective
    }

    fn allows_duplicates(&self) -> bool {
        self.allow_duplicates
    }

    fn place(&self, task: &Task) -> Result<Layout> {
        task.check()?;
        expect_share("move_price", self.move_price)?;
        let topology = task.topology;
        let experts = topology.experts();
        let k = topology.slots_per_device();
        if k > experts {
            // This is only reached with `allow_duplicates`: some device must hold an expert twice.
            let slots = place_layer(&task.summed_f32(), topology).0;
            return Ok(Layout { slots, exhaustive: false, steps: topology.slots() as u64 });
        }
        let nodes = topology.nodes();
        if self.hierarchical && nodes > 1 && topology.groups().is_multiple_of(nodes) && k <= experts / nodes {
            return self.place_by_node(task);
        }
        Ok(self.place_flat(task))
    }
}

impl Joint {
    fn place_flat(&self, task: &Task) -> Layout {
        let experts = task.topology.experts();
        let current = task.valid_current();
        let loads = self.objective.episodes(task.loads, experts);
        let task = Task { loads: &loads, current, ..*task };
        let mut layout = match rows::lanes_for(loads.len() / experts) {
            1 => self.search::<1>(&task),
            2 => self.search::<2>(&task),
            4 => self.search::<4>(&task),
            8 => self.search::<8>(&task),
            _ => self.search::<16>(&task),
        };
        if loads.len() == experts && (current.is_none() || self.move_price == 0.0) {
            self.finish_small(&task, &mut layout);
        }
        self.settle(&task, layout)
    }

    fn search<const W: usize>(&self, task: &Task) -> Layout {
        let topology = task.topology;
        let row = rows::normalised::<W>(task.loads, topology.experts(), topology.devices());
        let request = Request {
            devices: topology.devices(),
            slots: topology.slots(),
            steps: u64::from(self.effort) * topology.slots() as u64,
            floor: task.lower_bound as f32,
            current: task.current,
            move_price: self.move_price as f32,
        };
        let (slots, steps) = search::solve(row, &request);
        Layout { slots: slots.into_iter().map(u32::from).collect(), exhaustive: false, steps }
    }

    /// Small single-episode layers: improve to the optimum and prove it. If that takes too long,
    /// a longer search is cheap at this size.
    fn finish_small(&self, task: &Task, layout: &mut Layout) {
        let topology = task.topology;
        let experts = topology.experts();
        let devices = topology.devices();
        if !exact::is_small(experts, topology.slots(), topology.slots_per_device()) {
            return;
        }
        let total: f64 = task.loads.iter().sum();
        let par = |slots: &[u32]| known_par(task.loads, slots, experts, devices, Objective::Episode);
        let reached = |slots: &[u32]| par(slots) <= task.lower_bound * (1.0 + BOUND_SLACK);
        if total == 0.0 || reached(&layout.slots) {
            return;
        }
        let peak = par(&layout.slots) * total / devices as f64;
        let nodes = u64::from(self.effort) * EXACT_NODES_PER_EFFORT;
        let (exhaustive, used) = exact::improve(task.loads, devices, &mut layout.slots, peak, nodes);
        layout.exhaustive = exhaustive;
        layout.steps += used;
        if !exhaustive && !reached(&layout.slots) {
            let effort = self.effort.saturating_mul(SMALL_LAYER_EFFORT);
            let longer = Self { effort, ..*self }.search::<1>(task);
            layout.steps += longer.steps;
            if par(&longer.slots) < par(&layout.slots) {
                layout.slots = longer.slots;
            }
        }
    }

    /// Fits the new layout to the devices with least movement, or keeps the current one if the new
    /// one is not worth its price.
    fn settle(&self, task: &Task, mut layout: Layout) -> Layout {
        let Some(current) = task.current else { return layout };
        let experts = task.topology.experts();
        let k = task.topology.slots_per_device();
        layout.slots = keep_in_place(current, &layout.slots, experts, k);
        let par = |slots| known_par(task.loads, slots, experts, task.topology.devices(), Objective::Episode);
        let moved = moved_in_layer(current, &layout.slots, experts, k) as f64 / current.len() as f64;
        if par(current) <= par(&layout.slots) + self.move_price * moved {
            layout.slots.copy_from_slice(current);
        }
        layout
    }

    /// Packs groups to nodes, then solves each node by itself.
    fn place_by_node(&self, task: &Task) -> Result<Layout> {
        let topology = task.topology;
        let experts = topology.experts();
        let nodes = topology.nodes();
        let node_topology =
            Topology::new(experts / nodes, topology.slots() / nodes, topology.devices() / nodes)?;
        let mut layout = Layout { slots: Vec::new(), exhaustive: false, steps: 0 };
        for members in experts_of_nodes(&task.summed_f32(), nodes, topology.groups()) {
            let pick = |step: &[f64]| members.iter().map(|&e| step[e]).collect::<Vec<_>>();
            let loads: Vec<f64> = task.loads.chunks_exact(experts).flat_map(pick).collect();
            let node = self.place_flat(&Task::new(&node_topology, &loads, None, self.objective));
            layout.slots.extend(node.slots.iter().map(|&e| members[e as usize] as u32));
            layout.steps += node.steps;
        }
        Ok(self.settle_in_nodes(task, layout))
    }

    /// The same as [`Joint::settle`], but rows stay inside their node: only slots are kept.
    fn settle_in_nodes(&self, task: &Task, mut layout: Layout) -> Layout {
        if let Some(current) = task.current {
            let width = task.topology.slots() / task.topology.nodes();
            let experts = task.topology.experts();
            let k = task.topology.slots_per_device();
            let rows = current.chunks_exact(width).zip(layout.slots.chunks_exact(width));
            layout.slots = rows.flat_map(|(old, new)| keep_in_place(old, new, experts, k)).collect();
        }
        layout
    }
}
