//! Steps of ranks on GPUs: what the first rank of a tensor-parallel group tells those that follow, and how
//! the groups agree on a step.

use std::time::{Duration, Instant};

use candle_core::{Error, Result, bail};
use model_runtime::cuda::{SAMPLE_WORDS, SampleParams};
use model_runtime::device_step::Extras;
use model_runtime::{
    Announced, CausalLm, DrawSizes, Exec, KvCache, RoutedExperts, Step, StepContext, StepRanks, View,
    ViewMut, run_step,
};
use moe_comm::{Messages, ReduceOp};
use moe_layer::ExpertHeat;
use serde::{Deserialize, Serialize};

use super::agree::{Proposal, common_bucket};
use super::follow::RemoteFollowers;
use super::ranks::{AbortOnPanic, LocalRanks, Rank};
use super::wire::{self, decode, encode};
use crate::engine::DeviceRunner;

/// How long the reason of a failure may take to arrive.
const REASON: Duration = Duration::from_secs(2);

impl StepRanks for LocalRanks {
    fn begin(
        &self,
        announced: &Announced<'_>,
        context: &mut StepContext,
        _: &mut Exec,
    ) -> Result<Option<usize>> {
        let begun = self.check().and_then(|()| {
            if let Some(remote) = &self.remote {
                remote.announce(announced, context)?;
            }
            self.first.agree_on_device(announced, context)
        });
        begun.map_err(|e| self.first.failed(e))
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
    /// One exchange per step over the hosts: how many rows each data-parallel rank brings, whether all only
    /// decode, and whether all can pad their rows to one number.
    fn agree_on_device(&self, announced: &Announced<'_>, context: &mut StepContext) -> Result<Option<usize>> {
        if self.geometry.ep_size == 1 {
            return Ok(announced.bucket);
        }
        let step = announced.step;
        let own =
            Proposal { rows: step.num_tokens(), only_decode: step.one_row_each(), bucket: announced.bucket };
        let mut all = vec![0u32; 3 * self.geometry.dp_size];
        let dims = [self.geometry.dp_size, 3];
        let words = own.words();
        self.groups.dp.all_gather(
            View::new(&words, &[1, 3])?,
            ViewMut::new(&mut all, &dims)?,
            &mut Exec::cpu(),
        )?;
        let (words, _) = all.as_chunks::<3>();
        let proposals: Vec<Proposal> = words.iter().map(Proposal::from_words).collect();
        let bucket = common_bucket(&proposals);
        let rows = proposals.iter().map(|proposal| bucket.unwrap_or(proposal.rows));
        let tokens = rows.flat_map(|rows| std::iter::repeat_n(rows, self.geometry.tp_size));
        context.rank_tokens = Some(tokens.collect());
        context.only_decode = proposals.iter().all(|proposal| proposal.only_decode);
        Ok(bucket)
    }

    /// The failure of the world behind an error: NCCL's errors carry no reasons, the sockets' name the rank.
    pub(super) fn failed(&self, e: Error) -> Error {
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

impl RemoteFollowers {
    /// Tells the followers of a step; the collectives within it tell whether they run it.
    fn announce(&self, announced: &Announced<'_>, context: &StepContext) -> Result<()> {
        if self.ranks.is_empty() {
            return Ok(());
        }
        let message = encode(&AnnouncedStep::new(announced, context)).map_err(Error::wrap)?;
        self.ranks.iter().try_for_each(|&rank| self.messages.send(rank, &message))
    }
}

/// An announced step as data. What a step records is recorded by the first rank alone, but a step
/// that records takes another way through the router, so all ranks do.
#[derive(Serialize, Deserialize)]
struct AnnouncedStep {
    step: Step,
    draw: Option<Draw>,
    cache: (u64, usize, usize),
    #[serde(with = "wire::routed")]
    replay: Option<std::sync::Arc<RoutedExperts>>,
    recorded: bool,
    force_balance: Option<u64>,
    number: u64,
}

/// How tokens are drawn: where each comes from, the parameters of each row, the sizes of the runner.
#[derive(Serialize, Deserialize)]
struct Draw {
    feed: Vec<u32>,
    sampling: Vec<[u32; SAMPLE_WORDS]>,
    sizes: DrawSizes,
}

impl Draw {
    fn new((extras, sizes): (&Extras, DrawSizes)) -> Self {
        Self {
            feed: extras.feed.clone(),
            sampling: extras.sampling.iter().map(SampleParams::words).collect(),
            sizes,
        }
    }

    fn parts(self) -> (Extras, DrawSizes) {
        let sampling = self.sampling.into_iter().map(SampleParams::from_words).collect();
        (Extras { feed: self.feed, sampling }, self.sizes)
    }
}

impl AnnouncedStep {
    fn new(announced: &Announced<'_>, context: &StepContext) -> Self {
        Self {
            step: announced.step.clone(),
            draw: announced.draw.map(Draw::new),
            cache: announced.cache,
            replay: context.replay.clone(),
            recorded: context.capture.is_some() || context.heat.is_some(),
            force_balance: context.force_balance,
            number: context.step,
        }
    }
}

/// A rank on a GPU that runs what the first one of its group does, from another process.
pub(crate) struct DeviceFollower {
    model: LocalRanks,
    ex: Exec,
    /// What runs on it now. The graphs of the runner know the cache, so they go first.
    runner: Option<DeviceRunner>,
    cache: Option<(u64, KvCache)>,
}

impl DeviceFollower {
    pub fn new(rank: Rank, messages: Messages, ex: Exec) -> Self {
        let nobody = RemoteFollowers { messages, ranks: Vec::new() };
        Self { model: LocalRanks::with_remote(rank, nobody), ex, runner: None, cache: None }
    }

    /// Runs the steps that the first rank of the group announces, until that leaves or says stop (an empty
    /// message).
    ///
    /// # Errors
    /// Whatever fails this rank or another one.
    pub fn serve(&mut self, messages: &Messages) -> anyhow::Result<()> {
        let geometry = &self.model.first.geometry;
        let first = geometry.rank - geometry.tp_rank;
        while let Some(message) = messages.recv(first)?.filter(|message| !message.is_empty()) {
            let world = self.model.world();
            let _guard = AbortOnPanic(world.as_ref());
            let ran = decode(&message).and_then(|step| Ok(self.run(step)?));
            ran.inspect_err(|e| world.abort(&format!("{e:#}")))?;
        }
        Ok(())
    }

    fn run(&mut self, announced: AnnouncedStep) -> Result<()> {
        let AnnouncedStep { step, draw, cache: (id, blocks, block_size), .. } = announced;
        let info = self.model.info().clone();
        if self.cache.as_ref().is_none_or(|(known, _)| *known != id) {
            (self.runner, self.cache) = (None, None);
            let kv = KvCache::new_on(self.ex.device(), info.kv, blocks, block_size)?;
            self.cache = Some((id, kv));
        }
        let Some((_, kv)) = &mut self.cache else { bail!("a rank lost its KV cache") };
        let heat = info.moe.as_ref().map(|moe| ExpertHeat::new(moe.layers.len(), moe.num_experts));
        let mut context = StepContext {
            replay: announced.replay,
            heat: heat.filter(|_| announced.recorded),
            force_balance: announced.force_balance,
            step: announced.number,
            ..StepContext::default()
        };
        let Some((extras, sizes)) = draw.map(Draw::parts) else {
            return run_step(&self.model, &step, kv, None, &mut context, &mut self.ex).map(drop);
        };
        let runner = match &mut self.runner {
            Some(runner) => runner,
            none => none.insert(DeviceRunner::new(info.vocab_size, sizes, &self.ex)?),
        };
        runner.draw(&self.model, kv, &step, &extras, &mut context, &mut self.ex).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_travel() {
        let params = SampleParams {
            temperature: 0.7,
            top_p: 0.9,
            min_p: 0.1,
            top_k: 40,
            seed: 1 << 40 | 3,
            penalties: [1.5, 0.5, 0.25],
            logprobs: Some(3),
            ..SampleParams::PADDING
        };
        let extras = Extras { feed: vec![u32::MAX, 0], sampling: vec![params] };
        let sizes = DrawSizes { rows: 8, sequences: 2, tokens: 40, blocks: 3, eager: true };
        let message = encode(&Draw::new((&extras, sizes))).unwrap();
        let (got, got_sizes) = decode::<Draw>(&message).unwrap().parts();
        assert_eq!((got.feed, got.sampling, got_sizes), (extras.feed, extras.sampling, sizes));
    }
}
