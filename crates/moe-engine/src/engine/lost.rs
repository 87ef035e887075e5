//! Going on without a rank that was lost.
//!
//! Replicas without expert parallelism share nothing, so the ranks that are left can compute what a lost one has not
//! finished. A choice of a request that had not ended begins again from its prompt: what it generated may depend on the
//! bits of that rank's GPU, and an answer must not be made of two. On the CPU the answer is the same.
//!
//! Replicas that share experts all stop. The ranks that are left load the model again ([`Session::go_on`]), and a new
//! engine takes over what the old one has left [`Unfinished`].
//!
//! [`Session::go_on`]: crate::Session::go_on

use std::sync::Arc;

use tracing::warn;

use super::dispatch::{Dispatcher, Left};
use super::dp::DpEngine;
use super::{EngineConfig, Output, RequestId};
use crate::error::Result;
use crate::heat::HeatWriter;
use crate::loss::Loss;
use crate::structured::Grammars;

/// The requests of an engine whose ranks have lost one.
pub struct Unfinished {
    dispatcher: Dispatcher,
    /// What the caller has not seen yet.
    outputs: Vec<Output>,
    restarted: Vec<(RequestId, usize)>,
    grammars: Option<Arc<Grammars>>,
    trace: Option<HeatWriter>,
    steps: u64,
}

impl Unfinished {
    /// The settings of an engine that can take these requests over. The old engine had `config`.
    pub fn config(&self, config: &EngineConfig) -> EngineConfig {
        EngineConfig {
            // The requests were accepted for sequences of this length.
            max_model_len: Some(self.dispatcher.max_model_len()),
            count_experts: config.counts(),
            // The trace goes on.
            expert_heat: None,
            ..config.clone()
        }
    }
}

impl DpEngine<'_> {
    /// Prepares for the loss of ranks, in a world that survives it. If replicas share experts, all of them begin again.
    pub(crate) fn survive(&mut self) {
        self.dispatcher.keep_requests(usize::from(!self.lockstep));
    }

    /// The choices that began again because their rank was lost, since this was last called: index c of request r as
    /// (r, c). The outputs that came before are void. Call it after each step, before the step's outputs are used.
    pub fn take_restarted(&mut self) -> Vec<(RequestId, usize)> {
        std::mem::take(&mut self.restarted)
    }

    /// Ends the engine, and keeps what it has not finished for [another one](Self::take_over).
    pub fn leave(self) -> Unfinished {
        let Self { engine, dispatcher, arrived, restarted, trace, steps, .. } = self;
        let outputs = arrived.into_iter().flat_map(|rank| rank.outputs).collect();
        Unfinished { dispatcher, outputs, restarted, grammars: engine.grammars, trace, steps }
    }

    /// Takes over the requests of an engine that had more ranks. Choices that had not ended begin again.
    pub fn take_over(&mut self, unfinished: Unfinished, loss: &Loss) {
        let Unfinished { dispatcher, mut outputs, mut restarted, grammars, trace, steps } = unfinished;
        let ranks = std::mem::replace(&mut self.dispatcher, dispatcher);
        let left = self.dispatcher.move_to(ranks);
        outputs.retain(|output| !left.restarted.contains(&(output.request, output.choice)));
        let begin_again = match left.restarted.len() {
            0 => "No sequence was running".to_string(),
            1 => "The only sequence begins again".to_string(),
            several => format!("All {several} sequences begin again"),
        };
        warn!("{loss}. {begin_again}");
        restarted.extend(left.restarted);
        (self.restarted, self.arrived[0].outputs) = (restarted, outputs);
        (self.engine.grammars, self.trace, self.steps) = (grammars, trace, steps);
        for request in left.cancelled {
            // If this fails, the next step does, too.
            let _ = self.cancel(request);
        }
    }

    /// Gives the requests of a peer that was lost to other ranks.
    pub(super) fn lose(&mut self, peer: usize, why: &str) -> Result<()> {
        self.peers.forget(peer);
        let rank = 1 + peer;
        let Left { restarted, cancelled } = self.dispatcher.lose(rank);
        let arrived = &mut self.arrived[rank];
        arrived.last = true;
        // Outputs that the caller has not seen yet are dropped here, and the caller drops the others.
        arrived.outputs.retain(|output| !restarted.contains(&(output.request, output.choice)));
        let left = 1 + self.peers.live().len();
        let begin_again = match restarted.len() {
            0 => "It had no sequence left".to_string(),
            1 => "Its only sequence begins again there".to_string(),
            several => format!("Its {several} sequences begin again there"),
        };
        warn!("{why}. The run goes on with {left} of {} replicas. {begin_again}", self.arrived.len());
        self.restarted.extend(restarted);
        cancelled.into_iter().try_for_each(|request| self.cancel_now(request))
    }
}
