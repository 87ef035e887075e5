//! Moves experts between the ranks of an engine: as its balancer decides, or to a placement from the caller.

use std::time::Instant;

use moe_layer::{ExpertMap, MoveRound, MoveStatus};

use super::StepLoad;
use super::dp::DpEngine;
use super::serve::{Question, Reply};
use crate::eplb::{Balancer, EplbStats};
use crate::error::{Context, Result, ensure};

impl DpEngine<'_> {
    /// The counters of load balancing; `None` without load balancing.
    pub fn eplb_stats(&self) -> Option<EplbStats> {
        self.balancer.as_ref().map(Balancer::stats)
    }

    /// Which expert is in which slot of MoE layer `layer`; `None` if no map places its experts.
    pub fn expert_map(&self, layer: usize) -> Option<ExpertMap> {
        self.engine.runner.model.placed_experts(layer).map(|placed| placed.map())
    }

    /// Moves the experts of a layer now, between two steps. It repeats rounds like `round` until the move has ended.
    /// Tokens do not depend on the placement.
    ///
    /// # Errors
    /// A placement that the slots cannot have, in which case nothing changes; experts that were not loaded to be moved;
    /// a rank that died.
    pub fn move_experts(&mut self, round: &MoveRound) -> Result<MoveStatus> {
        let MoveRound { layer, phy2log, .. } = round;
        let map =
            self.expert_map(*layer).with_context(|| format!("layer {layer}: no map places its experts"))?;
        map.with_phy2log(phy2log.clone()).with_context(|| format!("layer {layer}"))?;
        loop {
            let status = self.move_round(round)?;
            if status != MoveStatus::Underway {
                return Ok(status);
            }
        }
    }

    /// Informs the balancer about a step, and runs the round that it asks for.
    pub(super) fn balance(&mut self, loads: &[StepLoad]) -> Result<()> {
        let Some(mut balancer) = self.balancer.take() else { return Ok(()) };
        let balanced = self.balance_by(&mut balancer, loads);
        // The balancer is put back even after an error, because the report of a failed run also shows the counters of
        // balancing.
        self.balancer = Some(balancer);
        balanced
    }

    fn balance_by(&mut self, balancer: &mut Balancer, loads: &[StepLoad]) -> Result<()> {
        let Some(round) = balancer.step(loads)? else { return Ok(()) };
        let start = Instant::now();
        let status = self.move_round(&round).context("moving experts")?;
        balancer.moved(&status, start.elapsed())
    }

    /// Runs one round on all ranks.
    fn move_round(&mut self, round: &MoveRound) -> Result<MoveStatus> {
        self.or_fail(|ranks| ranks.round_of_all(round))
    }

    fn round_of_all(&mut self, round: &MoveRound) -> Result<MoveStatus> {
        let mut asked = self.peers.live();
        asked.iter().try_for_each(|&peer| self.peers.tell(peer, Question::Move(round.clone())))?;
        let here = self.run_here(|engine| engine.move_experts(round))?;
        for (peer, answer) in self.answers(&mut asked)? {
            let Reply::Moved(there) = answer else { return Err(self.peers.unasked(peer)) };
            ensure!(there == here, "ranks disagree about a move of experts");
        }
        Ok(here)
    }
}
