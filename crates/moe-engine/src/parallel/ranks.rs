//! The ranks of one tensor-parallel group, as one model.
//!
//! A step runs on all of them at once: the first on the caller's thread and with its KV cache, the
//! others on threads and with caches of their own. A rank that fails or panics fails the whole
//! world, so that nobody waits for it.

use std::any::Any;
use std::sync::Arc;

use candle_core::{DType, Error, Result};
use model_runtime::{
    CausalLm, Exec, KvCache, ModelInfo, Observer, ParallelGroups, Router, StepContext, StepViews, View,
    ViewMut,
};
use moe_comm::{Communicator, Geometry};

use super::follow::{Follower, RemoteFollowers};

/// One rank: its part of the model and its place in the world.
pub struct Rank {
    /// The part.
    pub model: Box<dyn CausalLm>,
    /// The place.
    pub geometry: Geometry,
    /// The groups, as the hosts talk to each other.
    pub groups: ParallelGroups,
    /// All ranks' GPUs, where the model runs on one: the layers have groups of them.
    pub device: Option<Arc<dyn Communicator>>,
}

/// The ranks that see the same tokens, as one model; its KV layout is that of one rank.
pub struct LocalRanks {
    pub(super) first: Rank,
    followers: Vec<Follower>,
    pub(super) remote: Option<RemoteFollowers>,
}

impl LocalRanks {
    /// `first`, and the other ranks of its tensor-parallel group with their contexts.
    pub fn new(first: Rank, followers: Vec<(Rank, Exec)>) -> Self {
        let followers = followers.into_iter().map(|(rank, ex)| Follower::new(rank, ex)).collect();
        Self { first, followers, remote: None }
    }

    /// `first`, whose followers are processes.
    pub(crate) fn with_remote(first: Rank, remote: RemoteFollowers) -> Self {
        Self { first, followers: Vec::new(), remote: Some(remote) }
    }

    /// The first rank's communicator of the whole world: what fails everybody.
    pub fn world(&self) -> Arc<dyn Communicator> {
        self.first.groups.world.clone()
    }
}

impl CausalLm for LocalRanks {
    fn info(&self) -> &ModelInfo {
        self.first.model.info()
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        self.first.model.router(moe_layer)
    }

    #[cfg(feature = "cuda")]
    fn ranks(&self) -> Option<&dyn model_runtime::StepRanks> {
        self.first.device.is_some().then_some(self)
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: ViewMut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if ex.is_cuda() {
            // The other ranks know of it: whoever runs a step there has begun it with them.
            let ran = self.first.model.forward(step, kv, logits, observer, context, ex);
            return ran.map_err(|e| self.first.failed(e));
        }
        // What a step counts is counted by the first rank alone.
        let told = context.for_followers();
        let blocks = (kv.num_blocks(), kv.block_size());
        if let Some(remote) = &self.remote {
            remote.send(step, blocks, &told)?;
        }
        std::thread::scope(|scope| {
            let follow = |follower| {
                let context = told.clone();
                std::thread::Builder::new()
                    .spawn_scoped(scope, move || Follower::run(follower, step, blocks, context))
            };
            let threads: Vec<_> = self.followers.iter().map(follow).collect();
            if let Some(Err(e)) = threads.iter().find(|thread| thread.is_err()) {
                self.first.groups.world.abort(&format!("cannot start a thread: {e}"));
            }
            let mut result = self.first.run(step, kv, logits, observer, context, ex);
            for (thread, follower) in threads.into_iter().zip(&self.followers) {
                let ended = match thread.map(|thread| thread.join()) {
                    Ok(Ok(ended)) => ended,
                    Ok(Err(panic)) => {
                        let rank = follower.rank();
                        Err(Error::msg(format!("rank {rank} panicked: {}", panic_text(panic.as_ref()))))
                    }
                    Err(e) => Err(e.into()),
                };
                result = result.and(ended);
            }
            result
        })
    }
}

impl Rank {
    /// Runs a step on this rank, after the ranks have agreed on it.
    pub(super) fn run(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: ViewMut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let world = self.groups.world.as_ref();
        let _guard = AbortOnPanic(world);
        let agreed = self.agree(step, context, ex);
        let result = agreed.and_then(|()| self.model.forward(step, kv, logits, observer, context, ex));
        result.inspect_err(|e| world.abort(&e.to_string()))
    }

    /// One exchange per step: how many tokens each rank brings, and whether all only decode. Ranks
    /// of a tensor-parallel group have the same, so the data-parallel groups suffice.
    fn agree(&self, step: &StepViews, context: &mut StepContext, ex: &mut Exec) -> Result<()> {
        if self.geometry.ep_size == 1 {
            return Ok(());
        }
        let (tokens, sequences) = (step.num_tokens(), step.query_start_loc.elem_count().saturating_sub(1));
        let own = [tokens as u32, u32::from(tokens == sequences)];
        let mut all = ex.scratch(DType::U32, &[self.geometry.dp_size, 2])?;
        self.groups.dp.all_gather(View::new(&own, &[1, 2])?, all.view_mut(), ex)?;
        let all = all.view();
        let groups = all.cpu::<u32>()?.as_chunks::<2>().0;
        let tokens = groups.iter().flat_map(|[n, _]| std::iter::repeat_n(*n as usize, self.geometry.tp_size));
        context.rank_tokens = Some(tokens.collect());
        context.only_decode = groups.iter().all(|[_, only_decode]| *only_decode == 1);
        Ok(())
    }
}

/// Fails the world while a panic unwinds.
pub(crate) struct AbortOnPanic<'a>(pub &'a dyn Communicator);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("it panicked");
        }
    }
}

/// The text of a panic, where it has one.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
