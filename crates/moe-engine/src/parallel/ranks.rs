//! The ranks of one tensor-parallel group, used as one model.
//!
//! A step runs on all ranks at once. The first rank runs on the caller's thread with the caller's KV cache. It sends
//! the step to the other ranks, which have caches of their own. If a rank fails or panics, the whole world fails, so
//! that no rank waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Error, Result, bail};
use model_runtime::{
    CausalLm, DeviceSampling, Exec, KvCache, LayerPlan, LogitsOut, ModelInfo, Observer, ParallelGroups,
    Router, RunnerSizes, Step, StepContext, StepRanks, StepViews, View, ViewMut,
};
use moe_comm::{Collectives, Communicator, Geometry, ReduceOp, Window};
use moe_layer::{ExpertTraffic, Machine, MoveRound, MoveStatus, PlacedExperts, PlanStep};

use tracing::trace_span;

use super::agree::{Proposal, common_bucket};
use super::followers::Followers;
use super::step_message::{GroupMessage, StepMessage};

/// The time in which the reason of a failure should arrive.
const REASON: Duration = Duration::from_secs(2);

/// One rank: its part of the model, and its place in the world.
pub struct Rank {
    /// The rank's part of the model.
    pub model: Box<dyn CausalLm>,
    /// The place of the rank.
    pub geometry: Geometry,
    /// The communicators of its groups over the hosts.
    pub groups: ParallelGroups,
    /// The communicator of all ranks' GPUs, if the model runs on GPUs. The layers have communicators of their groups of
    /// GPUs.
    pub device: Option<Arc<dyn Communicator>>,
    /// The window in which experts from other ranks' GPUs arrive.
    pub window: Option<Arc<dyn Window>>,
}

/// The ranks that see the same tokens, used as one model. Its KV layout is the layout of one rank.
pub struct LocalRanks {
    first: Rank,
    followers: Followers,
}

impl LocalRanks {
    pub(crate) fn with_followers(first: Rank, followers: Followers) -> Self {
        Self { first, followers }
    }

    /// The first rank's communicator of the whole world. A failure that is reported there reaches every rank.
    pub fn world(&self) -> Arc<dyn Communicator> {
        self.first.groups.world.clone()
    }

    /// Does the part of this process's first rank in a round of moving experts.
    pub(super) fn take_part(&self, round: &MoveRound) -> Result<MoveStatus> {
        self.first.move_experts(round)
    }

    /// The number of the group's first rank in the world.
    pub(super) fn leader(&self) -> usize {
        self.first.geometry.rank - self.first.geometry.tp_rank
    }
}

impl CausalLm for LocalRanks {
    fn info(&self) -> &ModelInfo {
        self.first.model.info()
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        self.first.model.router(moe_layer)
    }

    fn placed_experts(&self, moe_layer: usize) -> Option<&PlacedExperts> {
        self.first.model.placed_experts(moe_layer)
    }

    fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        self.first.model.expert_traffic()
    }

    fn plan(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        self.first.model.plan(step, machine)
    }

    fn ranks(&self) -> Option<&dyn StepRanks> {
        Some(self)
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        // The loop of a follower catches its own panics and reports them.
        let _guard = self.followers.is_somebody().then(|| AbortOnPanic(self.first.groups.world.as_ref()));
        let ran = self.first.model.forward(step, kv, logits, observer, context, ex);
        ran.map_err(|e| self.first.failed(e))
    }
}

impl StepRanks for LocalRanks {
    fn begin(
        &self,
        step: &Step,
        sampling: Option<(&DeviceSampling, RunnerSizes)>,
        kv: &KvCache,
        bucket: Option<usize>,
        context: &mut StepContext,
    ) -> Result<Option<usize>> {
        let begun = self.check().and_then(|()| {
            let message = StepMessage::new(step, sampling, kv, context);
            self.followers.tell(GroupMessage::Step(Box::new(message)))?;
            self.first.agree(step, bucket, context)
        });
        begun.map_err(|e| self.first.failed(e))
    }

    fn shares_steps(&self) -> bool {
        let geometry = &self.first.geometry;
        geometry.tp_size > 1 || geometry.ep_size > 1
    }

    fn takes_masks(&self) -> bool {
        // Groups that do not share their experts record their graphs alone.
        self.first.geometry.dp_size == 1 || self.first.geometry.ep_size == 1
    }

    fn tell_masks(&self, masks: &[u32]) -> Result<()> {
        let message = || GroupMessage::Masks(bytemuck::cast_slice(masks).to_vec());
        let told = self.check().and_then(|()| self.followers.tell(message()));
        told.map_err(|e| self.first.failed(e))
    }

    fn move_experts(&self, round: &MoveRound) -> Result<MoveStatus> {
        let _guard = AbortOnPanic(self.first.groups.world.as_ref());
        let moved = self.check().and_then(|()| {
            self.followers.tell(GroupMessage::Move(round.clone()))?;
            self.first.move_experts(round)
        });
        moved.map_err(|e| self.first.failed(e))
    }

    fn cuts_vocabulary(&self) -> bool {
        self.first.geometry.tp_size > 1
    }

    fn all(&self, yes: bool) -> Result<bool> {
        let Rank { geometry, groups, .. } = &self.first;
        let ranks = if geometry.ep_size > 1 { &groups.world } else { &groups.tp };
        let mut all = [u32::from(yes)];
        ranks.all_reduce(ViewMut::new(&mut all, &[1])?, ReduceOp::Min, &mut Exec::cpu())?;
        Ok(all == [1])
    }

    fn watch(&self, ex: &mut Exec) -> Result<()> {
        match &self.first.device {
            Some(device) => device.watch(ex).map_err(|e| self.first.failed(e)),
            None => Ok(()),
        }
    }

    fn check(&self) -> Result<()> {
        self.first.groups.world.check()?;
        match &self.first.device {
            Some(device) => device.check().map_err(|e| self.first.failed(e)),
            None => Ok(()),
        }
    }
}

impl Rank {
    /// Exchanges facts about this step over the hosts, once per step: how many rows each data-parallel rank has,
    /// whether all ranks only decode, and whether all can pad their rows to one number. The ranks of a tensor-parallel
    /// group have the same values, so an exchange in the data-parallel groups is enough.
    fn agree(&self, step: &Step, bucket: Option<usize>, context: &mut StepContext) -> Result<Option<usize>> {
        if self.geometry.ep_size == 1 {
            return Ok(bucket);
        }
        let own = Proposal {
            rows: step.num_tokens(),
            only_decode: step.one_row_each(),
            bucket,
            replays: context.replay.is_some(),
        };
        let own = own.words();
        let mut all = vec![0u32; 4 * self.geometry.dp_size];
        let dims = [self.geometry.dp_size, 4];
        let own = View::new(&own, &[1, 4])?;
        let out = ViewMut::new(&mut all, &dims)?;
        self.groups.dp.all_gather(own, out, &mut Exec::cpu())?;
        let proposed = |(dp_rank, words): (usize, &[u32; 4])| {
            let rank = dp_rank * self.geometry.tp_size + self.geometry.tp_rank;
            Proposal::from_words(words).map_err(|e| e.context(format!("rank {rank} proposes what cannot be")))
        };
        let proposals =
            all.as_chunks::<4>().0.iter().enumerate().map(proposed).collect::<Result<Vec<_>>>()?;
        let bucket = common_bucket(&proposals);
        let rows = proposals.iter().map(|proposal| bucket.unwrap_or(proposal.rows));
        let tokens = rows.flat_map(|rows| std::iter::repeat_n(rows, self.geometry.tp_size));
        context.rank_tokens = Some(tokens.collect());
        context.some_replay = proposals.iter().any(|proposal| proposal.replays);
        context.only_decode = proposals.iter().all(|proposal| proposal.only_decode);
        Ok(bucket)
    }

    /// Exchanges weights with the other ranks that share the experts, either over the hosts or from GPU to GPU.
    fn move_experts(&self, round: &MoveRound) -> Result<MoveStatus> {
        let _span = trace_span!("move_experts", layer = round.layer, bytes = round.bytes).entered();
        match self.model.placed_experts(round.layer) {
            Some(placed) => {
                placed.move_round(round, self.groups.ep.as_ref(), self.window.as_ref(), &mut Exec::cpu())
            }
            None => bail!("layer {}: no map places its experts, so they cannot move", round.layer),
        }
    }

    /// Makes the world fail with an error of this rank, and returns the error. If the GPUs' communicator has failed, it
    /// returns the failure of the world instead. NCCL's errors have no reasons, but the errors of the sockets name the
    /// rank.
    fn failed(&self, e: Error) -> Error {
        let world = &self.groups.world;
        if self.device.as_ref().is_none_or(|device| device.check().is_ok()) {
            world.abort(&e.to_string());
            return e;
        }
        let start = Instant::now();
        while start.elapsed() < REASON {
            if let Err(reason) = world.check() {
                return reason;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        world.abort(&e.to_string());
        e
    }
}

/// Makes the world fail while a panic unwinds.
pub(crate) struct AbortOnPanic<'a>(pub &'a dyn Communicator);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("it panicked");
        }
    }
}
