//! Moving experts between the ranks of an engine: by its balancer, or to a placement that a caller gives.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use moe_layer::{ExpertMap, MoveRound, MoveStatus};

use super::StepLoad;
use super::dp::DpEngine;
use super::serve::{Question, Reply};
use crate::eplb::{Balancer, EplbStats};

impl DpEngine<'_> {
    /// What load balancing has done; `None` without it.
    pub fn eplb_stats(&self) -> Option<EplbStats> {
        self.balancer.as_ref().map(Balancer::stats)
    }

    /// Which expert is in which slot of MoE layer `layer`; `None` where no map places its experts.
    pub fn expert_map(&self, layer: usize) -> Option<ExpertMap> {
        self.engine.runner.model.placed_experts(layer).map(|placed| placed.map())
    }

    /// Moves the experts of a layer now, between two steps, in as many rounds like this one as it takes. Tokens do not
    /// depend on it.
    ///
    /// # Errors
    /// A placement that the slots cannot have, with nothing changed; experts that were not loaded to be moved; a rank that died.
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

    /// Tells the balancer of a step, and runs the round that it asks for.
    pub(super) fn balance(&mut self, loads: &[StepLoad]) -> Result<()> {
        let Some(mut balancer) = self.balancer.take() else { return Ok(()) };
        let balanced = self.balance_by(&mut balancer, loads);
        // After an error, too: the report of a run that fails tells what balancing has done.
        self.balancer = Some(balancer);
        balanced
    }

    fn balance_by(&mut self, balancer: &mut Balancer, loads: &[StepLoad]) -> Result<()> {
        let Some(round) = balancer.step(loads)? else { return Ok(()) };
        let start = Instant::now();
        let status = self.move_round(&round).context("moving experts")?;
        balancer.moved(&status, start.elapsed())
    }

    /// One round on all ranks.
    fn move_round(&mut self, round: &MoveRound) -> Result<MoveStatus> {
        self.or_fail(|ranks| ranks.round_of_all(round))
    }

    fn round_of_all(&mut self, round: &MoveRound) -> Result<MoveStatus> {
        (0..self.peers.len()).try_for_each(|peer| self.peers.tell(peer, Question::Move(round.clone())))?;
        let here = self.run_here(|engine| engine.move_experts(round))?;
        for (peer, answer) in self.answers()? {
            let Reply::Moved(there) = answer else { return Err(self.peers.unasked(peer)) };
            ensure!(there == here, "ranks disagree about a move of experts");
        }
        Ok(here)
    }
}
