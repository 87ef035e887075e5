//! The ranks of a tensor-parallel group that run what its first one does: on threads beside it, or in
//! processes that it sends each step to.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result, bail};
use model_runtime::{Exec, KvCache, RoutedExperts, StepContext, StepViews, View};
use moe_comm::Messages;
use serde::{Deserialize, Serialize};

use super::ranks::{AbortOnPanic, Rank};
use super::wire::{self, decode, encode};

/// A rank that runs what the first one of its group does.
pub(crate) struct Follower {
    rank: Rank,
    state: Mutex<FollowerState>,
}

struct FollowerState {
    ex: Exec,
    /// Made when the first step tells its size.
    kv: Option<KvCache>,
}

impl Follower {
    pub fn new(rank: Rank, ex: Exec) -> Self {
        Self { rank, state: Mutex::new(FollowerState { ex, kv: None }) }
    }

    /// Its number in the world.
    pub fn rank(&self) -> usize {
        self.rank.geometry.rank
    }

    /// Runs a step as the first rank does, with a KV cache of the same size.
    pub fn run(
        &self,
        step: &StepViews,
        (num_blocks, block_size): (usize, usize),
        mut context: StepContext,
    ) -> Result<()> {
        let _guard = AbortOnPanic(self.rank.groups.world.as_ref());
        // A rank that panicked has failed the world; what it held is not used again.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let FollowerState { ex, kv } = &mut *state;
        let info = self.rank.model.info();
        let fits = |kv: &&mut KvCache| (kv.num_blocks(), kv.block_size()) == (num_blocks, block_size);
        let kv = match kv.as_mut().filter(fits) {
            Some(_) => kv,
            None => {
                // The old cache goes before the new one is allocated.
                *kv = None;
                *kv = Some(self.checked(KvCache::new(info.kv, num_blocks, block_size))?);
                kv
            }
        };
        let Some(kv) = kv.as_mut() else { bail!("a rank lost its KV cache") };
        let mut logits = self.checked(ex.scratch(DType::F32, &[step.num_logits(), info.vocab_size]))?;
        let pool = ex.clone();
        pool.install(|| self.rank.run(step, kv, logits.view_mut(), None, &mut context, ex))
    }

    /// Fails the world if this rank cannot even begin.
    fn checked<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|e| self.rank.groups.world.abort(&e.to_string()))
    }

    /// Runs the steps that the first rank of the group sends from another process, until that leaves
    /// or says stop (an empty message).
    pub fn serve(&self, messages: &Messages) -> anyhow::Result<()> {
        let first = self.rank.geometry.rank - self.rank.geometry.tp_rank;
        while let Some(message) = messages.recv(first)?.filter(|message| !message.is_empty()) {
            let step: RemoteStep = decode(&message)?;
            self.run(&step.views()?, step.blocks, step.context())?;
        }
        Ok(())
    }
}

/// Followers in other processes, as the first rank of their group sees them.
pub(crate) struct RemoteFollowers {
    pub messages: Messages,
    /// Their numbers in the world.
    pub ranks: Vec<usize>,
}

impl RemoteFollowers {
    /// Sends a step; the collectives within it tell whether they run it.
    pub fn send(&self, step: &StepViews, blocks: (usize, usize), context: &StepContext) -> Result<()> {
        if self.ranks.is_empty() {
            return Ok(());
        }
        let message = encode(&RemoteStep::new(step, blocks, context)?).map_err(candle_core::Error::wrap)?;
        self.ranks.iter().try_for_each(|&rank| self.messages.send(rank, &message))
    }
}

/// A step as data. What a step counts is counted by the first rank alone.
#[derive(Serialize, Deserialize)]
struct RemoteStep {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slot_mapping: Vec<u32>,
    rope_len: Vec<u32>,
    query_start_loc: Vec<u32>,
    block_tables: Vec<u32>,
    /// Dims of the block tables.
    tables: [usize; 2],
    logits_rows: Vec<u32>,
    one_row_each: bool,
    /// Blocks of the KV cache, and tokens per block.
    blocks: (usize, usize),
    #[serde(with = "wire::routed")]
    replay: Option<Arc<RoutedExperts>>,
    force_balance: Option<u64>,
    step: u64,
}

impl RemoteStep {
    fn new(step: &StepViews, blocks: (usize, usize), context: &StepContext) -> Result<Self> {
        let words = |view: &View| Ok::<_, candle_core::Error>(view.cpu::<u32>()?.to_vec());
        let &[sequences, columns] = step.block_tables.dims() else { bail!("block tables need two dims") };
        Ok(Self {
            token_ids: words(&step.token_ids)?,
            positions: words(&step.positions)?,
            slot_mapping: words(&step.slot_mapping)?,
            rope_len: words(&step.rope_len)?,
            query_start_loc: words(&step.query_start_loc)?,
            block_tables: words(&step.block_tables)?,
            tables: [sequences, columns],
            logits_rows: words(&step.logits_rows)?,
            one_row_each: step.one_row_each,
            blocks,
            replay: context.replay.clone(),
            force_balance: context.force_balance,
            step: context.step,
        })
    }

    fn views(&self) -> Result<StepViews<'_>> {
        Ok(StepViews {
            token_ids: vector(&self.token_ids)?,
            positions: vector(&self.positions)?,
            slot_mapping: vector(&self.slot_mapping)?,
            rope_len: vector(&self.rope_len)?,
            query_start_loc: vector(&self.query_start_loc)?,
            block_tables: View::new(&self.block_tables, &self.tables)?,
            logits_rows: vector(&self.logits_rows)?,
            one_row_each: self.one_row_each,
        })
    }

    fn context(&self) -> StepContext {
        StepContext {
            token_ids: Some(self.token_ids.as_slice().into()),
            replay: self.replay.clone(),
            force_balance: self.force_balance,
            step: self.step,
            ..StepContext::default()
        }
    }
}

fn vector(data: &[u32]) -> Result<View<'_>> {
    View::new(data, &[data.len()])
}
