//! Policies: heat in, placement out.

mod deepseek;
mod flashlb;
mod joint;
mod part;
mod swift;

pub use deepseek::Deepseek;
pub(crate) use deepseek::place_layer;
pub use flashlb::FlashLb;
pub use joint::Joint;
pub use swift::Swift;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bound;
use crate::certificate::{BOUND_SLACK, Certificate, Proof};
use crate::error::{Result, expect_below, expect_len, expect_multiple, expect_some};
use crate::loads::{Loads, check_loads, sum_steps};
use crate::placement::{Placement, check_layer};
use crate::score::{Objective, known_par};
use crate::topology::Topology;

/// One layer to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// The machine.
    pub topology: &'a Topology,
    /// Loads `[steps, experts]`.
    pub loads: &'a [f64],
    /// The expert of every slot at the moment, if there is a placement.
    pub current: Option<&'a [u32]>,
    /// A lower bound: no placement without duplicates has a smaller PAR by the policy's objective.
    pub lower_bound: f64,
}

impl<'a> Task<'a> {
    /// A task with its bound. Loads or slots that do not fit the topology are an error of [`Policy::place`].
    pub fn new(
        topology: &'a Topology,
        loads: &'a [f64],
        current: Option<&'a [u32]>,
        objective: Objective,
    ) -> Self {
        let lower_bound = bound::layer_bound(loads, topology, objective, false);
        Self { topology, loads, current, lower_bound }
    }

    /// Fails unless loads and slots fit the topology, so that a policy can index by them.
    pub(crate) fn check(&self) -> Result<()> {
        let experts = self.topology.experts();
        expect_some(&[("loads", self.loads.len())])?;
        expect_multiple(("loads", self.loads.len()), ("experts", experts))?;
        check_loads(self.loads, experts)?;
        let Some(current) = self.current else { return Ok(()) };
        expect_len("slots of the current placement", self.topology.slots(), current.len())?;
        current.iter().try_for_each(|&e| expect_below("expert", e as usize, experts))
    }

    /// The current layout, if it is one that a policy may go on from: every expert there, none twice on a device.
    fn valid_current(&self) -> Option<&'a [u32]> {
        let experts = self.topology.experts();
        let k = self.topology.slots_per_device();
        self.current.filter(|slots| check_layer(0, slots, experts, k).is_ok())
    }

    /// The summed load of every expert, in the precision of the published algorithm.
    fn summed_f32(&self) -> Vec<f32> {
        sum_steps(self.loads, self.topology.experts()).into_iter().map(|load| load as f32).collect()
    }
}

/// A policy's answer for one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The expert of every slot.
    pub slots: Vec<u32>,
    /// Whether the policy excluded every better placement.
    pub exhaustive: bool,
    /// Steps it took.
    pub steps: u64,
}

/// A placement with one certificate per layer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// The expert of every slot of every layer.
    pub placement: Placement,
    /// What is known about each layer.
    pub certificates: Vec<Certificate>,
}

impl Plan {
    /// Mean PAR over layers (1 without layers).
    pub fn mean_par(&self) -> f64 {
        if self.certificates.is_empty() {
            return 1.0;
        }
        self.certificates.iter().map(|c| c.par).sum::<f64>() / self.certificates.len() as f64
    }
}

/// A way of turning loads into a placement. Implementations are pure: equal input gives equal
/// output, bit for bit, on every rank and machine.
///
/// ```
/// use moe_eplb::{Joint, Loads, Placement, Policy, Topology, check_migration, migrate, plan_migration};
///
/// let topology = Topology::new(4, 6, 2)?; // 4 experts in 6 slots on 2 devices
/// let loads = Loads::aggregate(1, 4, &[90., 10., 20., 40.])?; // tokens, [layers, experts]
/// let now = Placement::initial(&topology, 1)?;
/// let plan = Joint::default().plan(&topology, &loads, Some(&now))?;
/// plan.placement.check()?; // every expert has a slot, and none has two on a device
/// assert!(plan.certificates[0].par < 1.2); // busiest device over the mean
/// // How to get there, with one spare slot on each device, without ever losing an expert.
/// let start = migrate::Contents::of(&now, 0, 1)?;
/// let target = plan.placement.layer(0);
/// let migration = plan_migration(&topology, 0, &start, target)?;
/// check_migration(&start, target, &migration, 4, 1)?;
/// # Ok::<(), moe_eplb::Error>(())
/// ```
pub trait Policy: Sync {
    /// Short name, as the command line spells it.
    fn name(&self) -> &'static str;

    /// What the policy minimises, and what its certificates speak of.
    fn objective(&self) -> Objective;

    /// Whether shapes that force an expert twice onto a device are acceptable.
    fn allows_duplicates(&self) -> bool {
        false
    }

    /// Places one layer.
    ///
    /// # Errors
    /// If the loads or slots of the task do not fit its topology, the policy cannot serve the layer's shape, or a
    /// setting is out of its range.
    fn place(&self, task: &Task) -> Result<Layout>;

    /// Places all layers on the calling thread.
    ///
    /// # Errors
    /// If loads, topology and current placement do not fit together, or a layer cannot be served.
    fn plan(&self, topology: &Topology, loads: &Loads, current: Option<&Placement>) -> Result<Plan> {
        self.plan_on(topology, loads, current, 1)
    }

    /// Places all layers on `threads` threads. Layers are independent, so the result does not
    /// depend on the number of threads.
    ///
    /// # Errors
    /// The errors of [`Policy::plan`].
    fn plan_on(
        &self,
        topology: &Topology,
        loads: &Loads,
        current: Option<&Placement>,
        threads: usize,
    ) -> Result<Plan> {
        check_input(topology, loads, current)?;
        if !self.allows_duplicates() {
            topology.check_no_forced_duplicates()?;
        }
        let one = |layer: usize| {
            let current = current.map(|p| p.layer(layer));
            let task = Task::new(topology, loads.layer(layer), current, self.objective());
            let layout = self.place(&task)?;
            let certificate = certify(&task, &layout, self.objective());
            Ok((layout.slots, certificate))
        };
        let layers = for_each_layer(loads.layers(), threads, &one);
        let mut slots = Vec::with_capacity(loads.layers() * topology.slots());
        let mut certificates = Vec::with_capacity(loads.layers());
        for layer in layers {
            let (row, certificate) = layer?;
            slots.extend(row);
            certificates.push(certificate);
        }
        Ok(Plan { placement: Placement::from_phy2log(topology, loads.layers(), slots)?, certificates })
    }
}

fn check_input(topology: &Topology, loads: &Loads, current: Option<&Placement>) -> Result<()> {
    expect_len("experts of the loads", topology.experts(), loads.experts())?;
    if let Some(p) = current {
        expect_len("layers of the current placement", loads.layers(), p.layers())?;
        expect_len("slots of the current placement", topology.slots(), p.slots())?;
        expect_len("slots of its devices", topology.slots_per_device(), p.slots_per_device())?;
        p.check_ids(topology.experts())?;
    }
    Ok(())
}

/// Runs `one` for every layer. The threads take layers in turn; the results are in the order of the layers.
fn for_each_layer<T: Send>(
    layers: usize,
    threads: usize,
    one: &(impl Fn(usize) -> Result<T> + Sync),
) -> Vec<Result<T>> {
    if threads <= 1 || layers <= 1 {
        return (0..layers).map(one).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let layer = next.fetch_add(1, Ordering::Relaxed);
            if layer >= layers {
                return done;
            }
            done.push((layer, one(layer)));
        }
    };
    let mut results: Vec<(usize, Result<T>)> = std::thread::scope(|scope| {
        // Where the system has no more threads, fewer do the work. This thread is one of them.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, worker).ok();
        let handles: Vec<_> = (1..threads.min(layers)).map_while(spawn).collect();
        let join = |handle: std::thread::ScopedJoinHandle<'_, _>| match handle.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let mut results = worker();
        results.extend(handles.into_iter().flat_map(join));
        results
    });
    results.sort_by_key(|(layer, _)| *layer);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Scores a layout and bounds what any layout could reach.
fn certify(task: &Task, layout: &Layout, objective: Objective) -> Certificate {
    let topology = task.topology;
    let experts = topology.experts();
    let devices = topology.devices();
    let k = topology.slots_per_device();
    let par = known_par(task.loads, &layout.slots, experts, devices, objective);
    let bound = match check_layer(0, &layout.slots, experts, k) {
        Ok(()) => task.lower_bound,
        // With duplicates the bound must not assume one copy per device.
        Err(_) => bound::layer_bound(task.loads, topology, objective, true),
    };
    let lower_bound = bound.min(par);
    let proof = if par <= lower_bound * (1.0 + BOUND_SLACK) {
        Proof::Bound
    } else if layout.exhaustive {
        Proof::Exhaustive
    } else {
        Proof::None
    };
    let lower_bound = if proof == Proof::Exhaustive { par } else { lower_bound };
    Certificate { par, lower_bound, proof, steps: layout.steps }
}
