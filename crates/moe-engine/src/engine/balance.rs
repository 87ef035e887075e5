//! Moving experts between the ranks of an engine: by its balancer, or to a placement that a caller gives.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use model_runtime::CausalLm;
use moe_layer::{ExpertMap, MoveRound, MoveStatus};

use super::StepLoad;
use super::dp::{DpEngine, Member, Rank, side_by_side};
use super::remote::{Question, Reply};
use crate::eplb::{Balancer, EplbConfig, EplbStats};
use crate::parallel::AbortOnPanic;

impl<'m> DpEngine<'m> {
    /// What load balancing has done; `None` without it.
    pub fn eplb_stats(&self) -> Option<EplbStats> {
        self.balancer.as_ref().map(Balancer::stats)
    }

    /// Which expert is in which slot of MoE layer `layer`; `None` where no map places its experts.
    pub fn expert_map(&self, layer: usize) -> Option<ExpertMap> {
        model(&self.ranks)?.placed_experts(layer).map(|placed| placed.map())
    }

    /// Moves the experts of MoE layer `layer` to `phy2log` \[P\] now, between two steps, in rounds of `bytes_per_round` bytes.
    /// Tokens do not depend on it.
    ///
    /// # Errors
    /// A placement that the slots cannot have, with nothing changed; experts that were not loaded to be moved; a rank that died.
    pub fn move_experts(
        &mut self,
        layer: usize,
        phy2log: &[u32],
        bytes_per_round: usize,
    ) -> Result<MoveStatus> {
        let map =
            self.expert_map(layer).with_context(|| format!("layer {layer}: no map places its experts"))?;
        map.with_phy2log(phy2log.to_vec()).with_context(|| format!("layer {layer}"))?;
        let round = MoveRound { layer, phy2log: phy2log.to_vec(), bytes: bytes_per_round };
        loop {
            let status = self.move_round(&round)?;
            if status != MoveStatus::Underway {
                return Ok(status);
            }
        }
    }

    pub(super) fn balancer(ranks: &[Rank<'m>], config: &EplbConfig) -> Result<Balancer> {
        let model = model(ranks).context("load balancing: the first rank is in another process")?;
        Balancer::new(model, config)
    }

    /// Tells the balancer of a step, and runs the round that it asks for.
    pub(super) fn balance(&mut self, loads: &[StepLoad]) -> Result<()> {
        let Some(mut balancer) = self.balancer.take() else { return Ok(()) };
        if let Some(round) = balancer.step(loads)? {
            let start = Instant::now();
            let status = self.move_round(&round).context("moving experts")?;
            balancer.moved(&status, start.elapsed())?;
        }
        self.balancer = Some(balancer);
        Ok(())
    }

    /// One round on all ranks.
    fn move_round(&mut self, round: &MoveRound) -> Result<MoveStatus> {
        let mut ranks: Vec<&mut Rank> = self.ranks.iter_mut().collect();
        let statuses = side_by_side(&mut ranks, |rank| {
            let world = rank.world.clone();
            let _guard = AbortOnPanic(world.as_ref());
            match rank.ask(Question::Move(round.clone())).inspect_err(|e| world.abort(&format!("{e:#}")))? {
                Reply::Moved(status) => Ok(status),
                _ => bail!("a rank answers another question"),
            }
        })?;
        let mut statuses = statuses.into_iter();
        let first = statuses.next().context("there is no rank")?;
        ensure!(statuses.all(|status| status == first), "ranks disagree about a move of experts");
        Ok(first)
    }
}

/// The model as the first rank has it: it runs in this process.
fn model<'m>(ranks: &[Rank<'m>]) -> Option<&'m dyn CausalLm> {
    match &ranks.first()?.engine {
        Member::Here(engine) => Some(engine.runner.model),
        Member::There(_) => None,
    }
}
