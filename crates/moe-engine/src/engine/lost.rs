//! Going on without a rank that was lost.
//!
//! Replicas without expert parallelism share nothing, so the ranks that are left can compute what a lost one has not
//! finished. A choice of a request that had not ended begins again from its prompt: what it generated may depend on the
//! bits of that rank's GPU, and an answer must not be made of two. On the CPU the answer is the same.

use tracing::warn;

use super::RequestId;
use super::dispatch::Left;
use super::dp::DpEngine;
use crate::error::Result;

impl DpEngine<'_> {
    /// Prepares for the loss of ranks, in a world that survives it.
    pub(crate) fn survive(&mut self) {
        self.dispatcher.keep_requests();
    }

    /// The choices that began again because their rank was lost, since this was last called: index c of request r as
    /// (r, c). The outputs that came before are void. Call it after each step, before the step's outputs are used.
    pub fn take_restarted(&mut self) -> Vec<(RequestId, usize)> {
        std::mem::take(&mut self.restarted)
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
