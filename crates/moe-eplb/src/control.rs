//! Collect, plan, transfer: the state machine that a server steps once per forward pass.
//!
//! The wait for a plan is bounded. At a fixed step after the collection all ranks agree on whether every rank has the
//! plan. If a rank does not have it, or its planner crashed, all ranks keep the old placement and collect again. So a
//! slow planner costs balance but never stalls a rank, and ranks never diverge.

use std::sync::mpsc::{Receiver, TryRecvError, channel};

use crate::error::{Error, Result};
use crate::loads::Loads;
use crate::placement::Placement;

/// What a planning round produced.
#[derive(Clone, Debug, PartialEq)]
pub struct Rebalance {
    /// The new placement.
    pub placement: Placement,
    /// The layers to move, in this order. Other layers stay unchanged.
    pub layers: Vec<usize>,
}

/// State of a planning round.
// This enum is exhaustive: a round of planning has these ends.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanStatus {
    /// The planner is still working.
    Pending,
    /// Done.
    Ready(Rebalance),
    /// The planner will not finish because of an error or a crash; this is the message.
    Failed(String),
}

/// Something that plans in the background.
pub trait Planner {
    /// Starts a round; an unfinished earlier one is abandoned.
    fn start(&mut self, heat: Loads, current: Placement);
    /// Returns the state of the round without waiting.
    fn poll(&mut self) -> PlanStatus;
}

impl<P: Planner + ?Sized> Planner for Box<P> {
    fn start(&mut self, heat: Loads, current: Placement) {
        (**self).start(heat, current);
    }

    fn poll(&mut self) -> PlanStatus {
        (**self).poll()
    }
}

/// Plans on a separate thread, one per round. A panic on it counts as a failed round.
pub struct ThreadPlanner<F> {
    plan: F,
    round: Option<Receiver<Result<Rebalance>>>,
}

impl<F> ThreadPlanner<F>
where
    F: Fn(Loads, Placement) -> Result<Rebalance> + Clone + Send + 'static,
{
    /// Plans with `plan`.
    pub fn new(plan: F) -> Self {
        Self { plan, round: None }
    }
}

impl<F> Planner for ThreadPlanner<F>
where
    F: Fn(Loads, Placement) -> Result<Rebalance> + Clone + Send + 'static,
{
    fn start(&mut self, heat: Loads, current: Placement) {
        let (send, receive) = channel();
        let plan = self.plan.clone();
        // A panic drops the sender, which poll sees; a late result finds no receiver.
        // Without a thread the sender is dropped, too.
        drop(std::thread::Builder::new().spawn(move || drop(send.send(plan(heat, current)))));
        self.round = Some(receive);
    }

    fn poll(&mut self) -> PlanStatus {
        let Some(round) = &self.round else { return PlanStatus::Failed("no round was started".into()) };
        match round.try_recv() {
            Ok(Ok(rebalance)) => PlanStatus::Ready(rebalance),
            Ok(Err(error)) => PlanStatus::Failed(error.to_string()),
            Err(TryRecvError::Empty) => PlanStatus::Pending,
            Err(TryRecvError::Disconnected) => PlanStatus::Failed("the planner crashed".into()),
        }
    }
}

/// Lengths of the phases, in steps. All ranks must use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// Collected steps before a round of planning.
    pub collect: u32,
    /// Steps that planning may take.
    pub plan: u32,
    /// Layers transferred per step.
    pub layers_per_step: usize,
}

impl Default for Intervals {
    fn default() -> Self {
        Self { collect: 600, plan: 50, layers_per_step: 1 }
    }
}

/// What the server has to do in this step.
// This enum is exhaustive: a server that leaves an action out would not move experts as the other ranks do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing special.
    None,
    /// Gather the heat of all ranks and call [`Controller::planned_with`].
    Gather,
    /// Find out whether `ready` holds on every rank and call [`Controller::agreed`].
    Agree {
        /// Whether this rank has the plan.
        ready: bool,
    },
    /// Move these layers to their rows of `placement` and call [`Controller::transferred`] for each.
    Transfer {
        /// Layers of this step, in order.
        layers: Vec<usize>,
    },
}

/// The current state.
#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Collecting { left: u32 },
    Gathering,
    Planning { left: u32 },
    Agreeing,
    Transferring { done: usize, running: usize },
}

/// Counters for logs and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Rounds whose plan was carried out.
    pub applied: u64,
    /// Rounds dropped because a plan was late, failed or not on every rank.
    pub dropped: u64,
    /// Layers moved.
    pub layers: u64,
}

/// The state machine of one rank.
pub struct Controller<P> {
    intervals: Intervals,
    planner: P,
    placement: Placement,
    phase: Phase,
    plan: Option<Rebalance>,
    counters: Counters,
    last_failure: Option<String>,
}

impl<P: Planner> Controller<P> {
    /// Starts collecting for `placement`.
    ///
    /// # Errors
    /// If an interval is zero.
    pub fn new(intervals: Intervals, planner: P, placement: Placement) -> Result<Self> {
        if intervals.collect == 0 || intervals.plan == 0 || intervals.layers_per_step == 0 {
            return Err(Error::Setting { what: "every interval", must: "at least 1" });
        }
        let phase = Phase::Collecting { left: intervals.collect };
        let counters = Counters::default();
        Ok(Self { intervals, planner, placement, phase, plan: None, counters, last_failure: None })
    }

    /// The placement in force.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The placement that the running transfer is to reach.
    pub fn target(&self) -> Option<&Placement> {
        self.plan.as_ref().map(|plan| &plan.placement)
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Why the last round was dropped.
    pub fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }

    /// Advances by one step. `recorded` says whether the step's heat was collected; steps that were
    /// not (dummy runs, the wrong stage) do not shorten the collection, but the other phases count
    /// every step, because all ranks must reach their end together.
    pub fn step(&mut self, recorded: bool) -> Action {
        match &mut self.phase {
            Phase::Collecting { left } => {
                *left -= u32::from(recorded);
                if *left > 0 {
                    return Action::None;
                }
                self.phase = Phase::Gathering;
                Action::Gather
            }
            Phase::Planning { left } => {
                *left -= 1;
                let due = *left == 0;
                self.look();
                if !due {
                    return Action::None;
                }
                self.phase = Phase::Agreeing;
                Action::Agree { ready: self.plan.is_some() }
            }
            Phase::Transferring { done, running: 0 } => {
                let done = *done;
                self.start_transfers(done)
            }
            // Waiting for the server's answer to the last action.
            Phase::Gathering | Phase::Agreeing | Phase::Transferring { .. } => Action::None,
        }
    }

    /// Answers [`Action::Gather`] with the heat of all ranks.
    ///
    /// # Errors
    /// If no gathering was asked for.
    pub fn planned_with(&mut self, heat: Loads) -> Result<()> {
        if self.phase != Phase::Gathering {
            return Err(Error::Setting { what: "planned_with", must: "called after Action::Gather" });
        }
        self.plan = None;
        self.last_failure = None;
        self.planner.start(heat, self.placement.clone());
        self.phase = Phase::Planning { left: self.intervals.plan };
        Ok(())
    }

    /// Answers [`Action::Agree`]: whether every rank has the plan.
    ///
    /// # Errors
    /// If no agreement was asked for, or the others agreed on a plan that this rank lacks.
    pub fn agreed(&mut self, all_ready: bool) -> Result<()> {
        if self.phase != Phase::Agreeing {
            return Err(Error::Setting { what: "agreed", must: "called after Action::Agree" });
        }
        if all_ready && self.plan.is_none() {
            return Err(Error::Setting { what: "all_ready", must: "false if this rank was not ready" });
        }
        if all_ready {
            self.phase = Phase::Transferring { done: 0, running: 0 };
        } else {
            self.drop_round("not every rank had a plan in time");
        }
        Ok(())
    }

    /// Reports that `layer` was moved (`ok`), or could not be: then it and all later layers keep
    /// their old placement.
    ///
    /// # Errors
    /// If that layer's transfer is not under way.
    pub fn transferred(&mut self, layer: usize, ok: bool) -> Result<()> {
        let wrong = Error::Setting { what: "transferred", must: "called for a layer under way, in order" };
        let (Phase::Transferring { done, running }, Some(plan)) = (&mut self.phase, &self.plan) else {
            return Err(wrong);
        };
        if *running == 0 || plan.layers.get(*done) != Some(&layer) {
            return Err(wrong);
        }
        if !ok {
            self.drop_round("a transfer failed");
            return Ok(());
        }
        self.placement.copy_layer(&plan.placement, layer);
        *done += 1;
        *running -= 1;
        self.counters.layers += 1;
        Ok(())
    }

    /// Takes the plan if it is ready.
    fn look(&mut self) {
        if self.plan.is_some() || self.last_failure.is_some() {
            return;
        }
        match self.planner.poll() {
            PlanStatus::Pending => {}
            PlanStatus::Ready(plan) => match self.placement.check_successor(&plan.placement, &plan.layers) {
                Ok(()) => self.plan = Some(plan),
                Err(error) => self.last_failure = Some(error.to_string()),
            },
            PlanStatus::Failed(reason) => self.last_failure = Some(reason),
        }
    }

    fn start_transfers(&mut self, done: usize) -> Action {
        let layers = self.plan.as_ref().map_or(&[][..], |plan| &plan.layers[done..]);
        let layers = layers[..layers.len().min(self.intervals.layers_per_step)].to_vec();
        if layers.is_empty() {
            self.counters.applied += 1;
            self.restart();
            return Action::None;
        }
        self.phase = Phase::Transferring { done, running: layers.len() };
        Action::Transfer { layers }
    }

    fn drop_round(&mut self, reason: &str) {
        self.counters.dropped += 1;
        self.last_failure.get_or_insert_with(|| reason.into());
        self.restart();
    }

    fn restart(&mut self) {
        self.plan = None;
        self.phase = Phase::Collecting { left: self.intervals.collect };
    }
}
