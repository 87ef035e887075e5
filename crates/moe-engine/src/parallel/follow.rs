//! The ranks of a tensor-parallel group that repeat the steps of its first rank: threads in the same process, or
//! processes, on the CPU or on GPUs. All wait for the same messages and run them in the same loop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use candle_core::{Result, bail};
use model_runtime::{CacheSizes, CausalLm, Exec, KvCache, LayerStates, ModelInfo, run_step};
use moe_comm::Messages;

use super::followers::{FollowerThread, Followers};
use super::ranks::{LocalRanks, Rank};
use super::step_message::{GroupMessage, StepCache, StepMessage};
use super::wire::decode;
#[cfg(feature = "cuda")]
use crate::engine::DeviceRunner;
use crate::engine::host_memory;
use crate::error::Context;
use crate::panic_text;

impl LocalRanks {
    /// `first`, and the other ranks of its tensor-parallel group with their contexts, each on its own thread.
    pub fn new(first: Rank, followers: Vec<(Rank, Exec)>) -> Result<Self> {
        let threads = followers.into_iter().map(|(rank, ex)| {
            let number = rank.geometry.rank;
            let mut follower = Follower::new(rank, ex);
            // A failure has also failed the world, which informs the other ranks.
            FollowerThread::start(number, move |told| drop(follower.follow(|| Ok(told.recv().ok()))))
        });
        let followers = Followers::Threads(threads.collect::<Result<_>>()?);
        Ok(Self::with_followers(first, followers))
    }
}

/// A rank that runs the steps of its group's first rank, with a KV cache of the same size.
pub(crate) struct Follower {
    model: LocalRanks,
    ex: Exec,
    /// Runs steps whose tokens are sampled on the device. Its graphs use the cache, so it is dropped first.
    #[cfg(feature = "cuda")]
    runner: Option<DeviceRunner>,
    /// The KV cache, with the id of the first rank's cache.
    cache: Option<(u64, KvCache)>,
}

impl Follower {
    pub fn new(rank: Rank, ex: Exec) -> Self {
        Self {
            model: LocalRanks::with_followers(rank, Followers::nobody()),
            ex,
            #[cfg(feature = "cuda")]
            runner: None,
            cache: None,
        }
    }

    /// Runs the steps that the first rank of the group sends to this process, until the first rank leaves or says stop
    /// (an empty message).
    pub fn serve(&mut self, messages: &Messages) -> crate::error::Result<()> {
        let first = self.model.leader();
        let info = self.model.info().clone();
        self.follow(|| {
            let Some(message) = messages.recv(first)?.filter(|message| !message.is_empty()) else {
                return Ok(None);
            };
            let message = read_message(&message, &info).with_context(|| format!("rank {first}"))?;
            Ok(Some(Arc::new(message)))
        })
    }

    /// Runs steps until there are no more. An error or a panic fails the world.
    fn follow(
        &mut self,
        mut next: impl FnMut() -> crate::error::Result<Option<Arc<GroupMessage<'static>>>>,
    ) -> crate::error::Result<()> {
        let world = self.model.world();
        let mut run = || -> crate::error::Result<()> {
            while let Some(message) = next()? {
                match &*message {
                    GroupMessage::Step(step) => self.run(step)?,
                    GroupMessage::Masks(masks) => self.sample(masks)?,
                    GroupMessage::Move(round) => drop(self.model.take_part(round)?),
                }
            }
            Ok(())
        };
        let ran = catch_unwind(AssertUnwindSafe(&mut run));
        let ran =
            ran.unwrap_or_else(|panic| Err(crate::error::failed!("it panicked: {}", panic_text(&*panic))));
        ran.inspect_err(|e| world.abort(&format!("{e:#}")))
    }

    fn run(&mut self, message: &StepMessage) -> Result<()> {
        let mut context = message.context();
        let StepCache { id, sizes } = message.cache;
        if self.cache.as_ref().is_none_or(|(own, _)| *own != id) {
            // The old cache is freed before the new one is allocated.
            #[cfg(feature = "cuda")]
            {
                self.runner = None;
            }
            self.cache = None;
            // A cache of one block belongs to a step that only measures memory, and what such a step reads does not
            // matter.
            if sizes.num_blocks > 1 && !message.step.begins_all() {
                bail!("a step goes on with sequences of which the new KV cache {id} has nothing")
            }
            let states = &self.model.info().states;
            check_memory(states, sizes, &self.ex)?;
            self.cache = Some((id, KvCache::with_sizes(self.ex.device(), states, sizes)?));
        }
        let Some((_, kv)) = &mut self.cache else { bail!("a rank lost its KV cache") };
        if kv.sizes() != sizes {
            bail!("the KV cache {id} had {:?}, and now {sizes:?}", kv.sizes())
        }
        let Some((sampling, sizes)) = &message.sampling else {
            return run_step(&self.model, &message.step, kv, None, &mut context, &mut self.ex).map(drop);
        };
        #[cfg(feature = "cuda")]
        {
            let runner = match &mut self.runner {
                Some(runner) => runner,
                none => {
                    // The first rank counts and records for all ranks.
                    let nothing = (false, false);
                    none.insert(DeviceRunner::new(&self.model, *sizes, nothing, &self.ex)?)
                }
            };
            runner.run(&self.model, kv, &message.step, sampling, &mut context, &mut self.ex).map(drop)
        }
        #[cfg(not(feature = "cuda"))]
        bail!("{sampling:?} of {sizes:?}: the first rank samples on a GPU, but this program has no CUDA")
    }

    /// Samples the step before with these masks, which are words as bytes.
    fn sample(&mut self, masks: &[u8]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(runner) = &mut self.runner {
            let words = masks.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
            return runner.sample_with(&words.collect::<Vec<_>>(), &self.ex).map(drop);
        }
        bail!("{} bytes of masks for a step that was not launched", masks.len())
    }
}

/// The message of the first rank of the group, after checking that a rank of this model can carry it out.
///
/// # Errors
/// Bytes that are no message, and invalid messages.
pub(super) fn read_message(message: &[u8], info: &ModelInfo) -> crate::error::Result<GroupMessage<'static>> {
    let message: GroupMessage = decode(message)?;
    message.check(info).context("it asks for what cannot be done")?;
    Ok(message)
}

/// Fails if the host has no room for a KV cache of these sizes. If the system refused the memory later, the process
/// would end.
fn check_memory(states: &LayerStates, sizes: CacheSizes, ex: &Exec) -> Result<()> {
    let bytes = states.bytes(&sizes)?;
    match host_memory() {
        Some(free) if !ex.is_cuda() && bytes as u64 > free => {
            bail!("a KV cache of {sizes:?}: {bytes} bytes where {free} are free")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use model_runtime::{
        LogitsOut, LogitsRows, Observer, ParallelGroups, SequenceStep, Step, StepContext, StepRanks,
        StepViews,
    };
    use moe_comm::{Collectives, Communicator, ParallelConfig, ReduceOp, ThreadComm};
    use moe_layer::ExpertTraffic;

    use super::*;
    use crate::testing::small_model;

    /// The work of a rank in a step: it adds up the ranks' tokens and numbers of the step, or fails.
    struct Adding {
        info: ModelInfo,
        group: Arc<dyn Communicator>,
        fails: Option<fn() -> Result<()>>,
    }

    impl CausalLm for Adding {
        fn info(&self) -> &ModelInfo {
            &self.info
        }

        fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
            Ok(Some(ExpertTraffic { needed: self.group.rank() as u64 + 1, ..ExpertTraffic::default() }))
        }

        fn forward(
            &self,
            step: &StepViews,
            kv: &mut KvCache,
            logits: LogitsOut,
            _: Option<&mut dyn Observer>,
            context: &mut StepContext,
            ex: &mut Exec,
        ) -> Result<()> {
            if let Some(fails) = self.fails.filter(|_| context.step == 3) {
                fails()?;
            }
            let own = step.token_ids.cpu::<u32>()?.iter().sum::<u32>() as f32;
            let own = own + 100.0 * context.step as f32 + 10_000.0 * kv.num_blocks() as f32;
            let mut logits = logits.rows;
            logits.cpu_mut::<f32>()?.fill(own + 1e6 * context.force_balance.unwrap_or(0) as f32);
            self.group.all_reduce(logits, ReduceOp::Sum, ex)
        }
    }

    /// Two ranks, of which the second may fail.
    fn two_ranks(parallel: ParallelConfig, fails: Option<fn() -> Result<()>>) -> [Rank; 2] {
        let info = small_model(8);
        let ranks = std::thread::scope(|scope| {
            let threads = ThreadComm::world(2).into_iter().enumerate().map(|(rank, comm)| {
                let info = info.clone();
                scope.spawn(move || {
                    let geometry = parallel.geometry(rank).unwrap();
                    let groups = ParallelGroups::new(&geometry, Arc::new(comm), &mut Exec::cpu()).unwrap();
                    let fails = fails.filter(|_| rank == 1);
                    let model = Box::new(Adding { info, group: groups.tp.clone(), fails });
                    Rank { model, geometry, groups, device: None, window: None }
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        <[Rank; 2]>::try_from(ranks).map_err(|_| "two ranks").unwrap()
    }

    /// A group of two ranks; the second, on a thread of its own, may fail.
    fn group(fails: Option<fn() -> Result<()>>) -> LocalRanks {
        let [first, second] = two_ranks(ParallelConfig { tp: 2, ..ParallelConfig::default() }, fails);
        LocalRanks::new(first, vec![(second, Exec::cpu().with_threads(1).unwrap())]).unwrap()
    }

    /// The logits of a step of these tokens with a cache.
    fn run(ranks: &LocalRanks, tokens: &[u32], number: u64, kv: &mut KvCache) -> Result<f32> {
        let sequence = SequenceStep {
            token_ids: tokens,
            start: 0,
            prompt_len: tokens.len(),
            blocks: &[0, 1],
            logits: LogitsRows::Last,
            scored: &[],
        };
        let step = Step::new([sequence], 4)?;
        let mut context = StepContext { step: number, force_balance: Some(number), ..StepContext::default() };
        let logits = run_step(ranks, &step, kv, None, &mut context, &mut Exec::cpu())?;
        Ok(logits.view().cpu::<f32>()?[0])
    }

    #[test]
    fn a_thread_runs_the_same_steps_with_a_cache_of_the_same_size() {
        let ranks = group(None);
        let states = &ranks.info().states;
        let mut kv = KvCache::new(states, 2, 4).unwrap();
        assert_eq!(run(&ranks, &[1, 2], 1, &mut kv).unwrap(), 2.0 * (3.0 + 100.0 + 20_000.0 + 1e6));
        assert_eq!(run(&ranks, &[7], 2, &mut kv).unwrap(), 2.0 * (7.0 + 200.0 + 20_000.0 + 2e6));
        let mut kv = KvCache::new(states, 3, 4).unwrap();
        assert_eq!(run(&ranks, &[7], 2, &mut kv).unwrap(), 2.0 * (7.0 + 200.0 + 30_000.0 + 2e6));
    }

    #[test]
    fn replicas_that_share_no_experts_sample_alone() {
        let parallel = |tp, dp, enable_expert_parallel| ParallelConfig {
            tp,
            dp,
            enable_expert_parallel,
            ..ParallelConfig::default()
        };
        let asks = |parallel| {
            let [first, _] = two_ranks(parallel, None);
            let ranks = LocalRanks::with_followers(first, Followers::nobody());
            (ranks.shares_steps(), ranks.takes_masks())
        };
        assert_eq!(asks(parallel(1, 2, false)), (false, true));
        assert_eq!(asks(parallel(1, 2, true)), (true, false));
        assert_eq!(asks(parallel(2, 1, false)), (true, true));
        assert_eq!(asks(parallel(2, 1, true)), (true, true));
    }

    #[test]
    fn a_group_tells_what_its_first_rank_has_fetched() {
        assert_eq!(group(None).expert_traffic().unwrap().map(|traffic| traffic.needed), Some(1));
    }

    #[test]
    fn a_thread_that_fails_or_panics_fails_the_step_by_name() {
        let panics: fn() -> Result<()> = || panic!("the disk is on fire");
        for fails in [panics, || bail!("the disk is on fire")] {
            let ranks = group(Some(fails));
            let mut kv = KvCache::new(&ranks.info().states, 2, 4).unwrap();
            run(&ranks, &[1], 2, &mut kv).unwrap();
            let start = Instant::now();
            let error = run(&ranks, &[1], 3, &mut kv).unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains("the disk is on fire"), "{error}");
            // The group stays failed.
            assert!(run(&ranks, &[1], 4, &mut kv).is_err());
            drop(ranks);
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        }
    }
}
