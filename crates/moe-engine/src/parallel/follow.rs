//! The ranks of a tensor-parallel group that run what its first one does: threads beside it, or processes, on the
//! CPU or on GPUs. All wait for the same messages and run them in the same loop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use anyhow::Context;
use candle_core::{Result, bail};
use model_runtime::LayerStates;
use model_runtime::{CausalLm, Exec, KvCache, ModelInfo, run_step};
use moe_comm::Messages;

use super::followers::{FollowerThread, Followers};
use super::ranks::{LocalRanks, Rank};
use super::step_message::{CacheSizes, GroupMessage, StepMessage};
use super::wire::decode;
#[cfg(feature = "cuda")]
use crate::engine::DeviceRunner;
use crate::engine::host_memory;
use crate::panic_text;

impl LocalRanks {
    /// `first`, and the other ranks of its tensor-parallel group with their contexts, each on a thread of its own.
    pub fn new(first: Rank, followers: Vec<(Rank, Exec)>) -> Result<Self> {
        let threads = followers.into_iter().map(|(rank, ex)| {
            let number = rank.geometry.rank;
            let mut follower = Follower::new(rank, ex);
            // What fails it has failed the world, which tells the others.
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
    /// What runs steps whose tokens are sampled on the device. Its graphs know the cache, so they go first.
    #[cfg(feature = "cuda")]
    runner: Option<DeviceRunner>,
    /// The KV cache, with the id of the first rank's.
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
    pub fn serve(&mut self, messages: &Messages) -> anyhow::Result<()> {
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
        mut next: impl FnMut() -> anyhow::Result<Option<Arc<GroupMessage<'static>>>>,
    ) -> anyhow::Result<()> {
        let world = self.model.world();
        let mut run = || -> anyhow::Result<()> {
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
        let ran = ran.unwrap_or_else(|panic| Err(anyhow::anyhow!("it panicked: {}", panic_text(&*panic))));
        ran.inspect_err(|e| world.abort(&format!("{e:#}")))
    }

    fn run(&mut self, message: &StepMessage) -> Result<()> {
        let mut context = message.context();
        let sizes = message.cache;
        if self.cache.as_ref().is_none_or(|(id, _)| *id != sizes.id) {
            // The old cache goes before the new one is allocated.
            #[cfg(feature = "cuda")]
            {
                self.runner = None;
            }
            self.cache = None;
            // A cache of one block is of a step that only measures; what such a step reads does not matter.
            if sizes.num_blocks > 1 && !message.step.begins_all() {
                bail!("a step goes on with sequences of which the new KV cache {} has nothing", sizes.id)
            }
            let states = &self.model.info().states;
            check_memory(states, sizes, &self.ex)?;
            let kv = KvCache::new_on(self.ex.device(), states, sizes.num_blocks, sizes.block_size)?;
            self.cache = Some((sizes.id, kv));
        }
        let Some((_, kv)) = &mut self.cache else { bail!("a rank lost its KV cache") };
        if (kv.num_blocks(), kv.block_size()) != (sizes.num_blocks, sizes.block_size) {
            bail!(
                "the KV cache {} had {} blocks of {}, and now {sizes:?}",
                sizes.id,
                kv.num_blocks(),
                kv.block_size()
            )
        }
        let Some((sampling, sizes)) = &message.sampling else {
            return run_step(&self.model, &message.step, kv, None, &mut context, &mut self.ex).map(drop);
        };
        #[cfg(feature = "cuda")]
        {
            let runner = match &mut self.runner {
                Some(runner) => runner,
                none => {
                    // The first rank counts and records for all of them.
                    let nothing = (false, false);
                    none.insert(DeviceRunner::new(&self.model, *sizes, nothing, &self.ex)?)
                }
            };
            runner.run(&self.model, kv, &message.step, sampling, &mut context, &mut self.ex).map(drop)
        }
        #[cfg(not(feature = "cuda"))]
        bail!("{sampling:?} of {sizes:?}: the first rank samples on a GPU, but this program has no CUDA")
    }

    /// Samples the step before with these masks, words as bytes.
    fn sample(&mut self, masks: &[u8]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(runner) = &mut self.runner {
            let words = masks.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
            return runner.sample_with(&words.collect::<Vec<_>>(), &self.ex).map(drop);
        }
        bail!("{} bytes of masks for a step that was not launched", masks.len())
    }
}

/// The message of the first rank of the group, which a rank of this model can do as it says.
///
/// # Errors
/// Any other bytes, and what the message says that cannot be.
pub(super) fn read_message(message: &[u8], info: &ModelInfo) -> anyhow::Result<GroupMessage<'static>> {
    let message: GroupMessage = decode(message)?;
    message.check(info).context("it asks for what cannot be done")?;
    Ok(message)
}

/// Fails where the host has no room for a KV cache of these sizes: memory that the system refuses ends the process.
fn check_memory(states: &LayerStates, sizes: CacheSizes, ex: &Exec) -> Result<()> {
    let CacheSizes { num_blocks, block_size, .. } = sizes;
    let slots = num_blocks.checked_mul(block_size);
    let bytes = slots.and_then(|slots| states.bytes_per_token().ok()?.checked_mul(slots));
    match (bytes, host_memory()) {
        (Some(bytes), Some(free)) if ex.is_cuda() || bytes as u64 <= free => Ok(()),
        (Some(_), None) => Ok(()),
        (bytes, free) => bail!(
            "a KV cache of {num_blocks} blocks of {block_size}: {bytes:?} bytes where {free:?} are free"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use model_runtime::{
        LogitsOut, LogitsRows, Observer, ParallelGroups, SequenceStep, Step, StepContext, StepViews,
    };
    use moe_comm::{Collectives, Communicator, ParallelConfig, ReduceOp, ThreadComm};
    use moe_layer::ExpertTraffic;

    use super::*;
    use crate::testing::small_model;

    /// What a rank does in a step: adds up the ranks' tokens and numbers of the step, or fails.
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

    /// A group of two ranks; the second, on a thread of its own, may fail.
    fn group(fails: Option<fn() -> Result<()>>) -> LocalRanks {
        let parallel = ParallelConfig { tp: 2, ..ParallelConfig::default() };
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
        let [first, second] = <[Rank; 2]>::try_from(ranks).map_err(|_| "two ranks").unwrap();
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
            // It stays failed.
            assert!(run(&ranks, &[1], 4, &mut kv).is_err());
            drop(ranks);
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        }
    }
}
