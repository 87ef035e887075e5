//! What an engine may use.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use model_runtime::{Exec, LayerStates, ModelInfo};
use moe_layer::MAX_STEP_TOKENS;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::memory;
use crate::eplb::EplbConfig;

/// Settings of an engine. Names are vLLM's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The most sequences that run at once.
    pub max_num_seqs: usize,
    /// The most rows of a step: longer prompts are computed in chunks, beside what is decoding.
    pub max_num_batched_tokens: usize,
    /// Which waiting sequence starts next.
    pub scheduling_policy: SchedulingPolicy,
    /// The longest sequence, prompt and output, which the KV cache must hold; `None`: the model's
    /// context, or as much of it as the KV cache holds.
    pub max_model_len: Option<usize>,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Bytes of the KV cache, which are taken when the engine is made; `None`: 4 GiB, but at most half
    /// of the memory that is free then; on a GPU nine tenths of what is free there, or less where the largest step needs more. Never more than all sequences need at full length.
    pub kv_cache_memory: Option<usize>,
    /// Bytes of the GPU that may be in use, as if it had no more: weights, KV cache, buffers, and what other programs take.
    pub gpu_memory: Option<u64>,
    /// Shares the KV blocks of common prefixes.
    pub enable_prefix_caching: bool,
    /// Schedules a step before the tokens of the one before are known.
    pub async_scheduling: bool,
    /// Launches decode steps on a CUDA device one by one, not as a captured graph.
    pub enforce_eager: bool,
    /// Whether to count how often each expert is chosen, in every step.
    pub count_experts: bool,
    /// Writes the expert counts to this file, as a heat trace.
    pub expert_heat: Option<PathBuf>,
    /// Replaces the routing by an even one, for profiling; the seed varies it.
    pub force_balance: Option<u64>,
    /// Moves experts between ranks as their loads change; `None`: never.
    pub eplb: Option<EplbConfig>,
    /// Ranks whose KV caches share this machine's memory.
    pub ranks: usize,
    /// Runs a step without rows where there is nothing to compute: other ranks' experts wait for it.
    pub lockstep: bool,
}

/// In which order waiting sequences start. On the CPU no token depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The shortest last: one and a half times as many as run at once are kept for the end. These start by the number
    /// of tokens that they may make, most first, as in list scheduling by longest processing time (Graham, 1969). At
    /// the end of a file of requests no long one is then left to run alone, and steps stay full. A short request may
    /// wait until all others run.
    LongestFirst,
}

impl EngineConfig {
    /// The largest [`max_num_seqs`](Self::max_num_seqs): launches that sample have a row of blocks for each sequence, of
    /// which a GPU takes so many.
    pub const MAX_NUM_SEQS: usize = 65_535;

    /// The largest [`max_num_batched_tokens`](Self::max_num_batched_tokens).
    pub const MAX_NUM_BATCHED_TOKENS: usize = MAX_STEP_TOKENS;

    /// Whether steps are counted: a trace of the counts asks for them, and so does balancing.
    pub fn counts(&self) -> bool {
        self.count_experts || self.expert_heat.is_some() || self.eplb.is_some()
    }

    /// The defaults for a device: a GPU computes more rows in a step before a step gets long, and more
    /// sequences before they wait for each other.
    pub fn for_device(ex: &Exec) -> Self {
        let default = Self::default();
        if ex.is_cuda() {
            Self { max_num_seqs: 256, max_num_batched_tokens: 8192, ..default }
        } else {
            default
        }
    }

    /// The defaults for a device and a model. Where keys and values of every head are made out of latent rows for each
    /// step, a chunk of a long prompt makes them again for all chunks before it, so that chunks are longer.
    pub fn for_model(ex: &Exec, info: &ModelInfo) -> Self {
        let default = Self::for_device(ex);
        match ex.is_cuda() && info.states.have_latent_rows() {
            true => Self { max_num_batched_tokens: 16384, ..default },
            false => default,
        }
    }

    /// Checks the settings against a model of this context; the longest sequence as far as the model is
    /// concerned.
    ///
    /// # Errors
    /// A setting that no model, or not this one, can have; its flag is named.
    pub fn check(&self, max_context_len: usize) -> Result<usize> {
        for (flag, value, most) in [
            ("--max-num-seqs", self.max_num_seqs, Self::MAX_NUM_SEQS),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, Self::MAX_NUM_BATCHED_TOKENS),
            ("--block-size", self.block_size, MAX_BLOCK_SIZE),
        ] {
            ensure!((1..=most).contains(&value), "{flag} must be from 1 to {most}, got {value}");
        }
        match self.max_model_len {
            Some(0) => bail!("--max-model-len 0: expected at least 1"),
            Some(len) if len > max_context_len => {
                bail!("--max-model-len {len}: expected 1 to {max_context_len}, the context of the model")
            }
            Some(len) => Ok(len),
            None => Ok(max_context_len),
        }
    }

    /// Sizes the KV cache of a model with this context where `free` bytes are left, if that is known: at most what all sequences
    /// can use at once. `budget` is what it may take without `kv_cache_memory`.
    pub(crate) fn capacity(
        &self,
        states: &LayerStates,
        max_context_len: usize,
        free: Option<u64>,
        budget: usize,
    ) -> Result<Capacity> {
        let context_len = self.check(max_context_len)?;
        let useful = context_len.div_ceil(self.block_size).saturating_mul(self.max_num_seqs);
        let budget = self.kv_cache_memory.unwrap_or(budget);
        // Slot numbers are 32 bits wide.
        let addressable = (u32::MAX as usize - 1) / self.block_size;
        let num_blocks = useful.min(states.blocks_in(budget, self.block_size)?).min(addressable);
        let block_bytes = states.bytes_per_token()? * self.block_size;
        ensure!(
            num_blocks > 0,
            "a KV cache of {budget} bytes holds no block: one of {} tokens needs {block_bytes} bytes; raise \
             --kv-cache-memory or lower --block-size",
            self.block_size,
        );
        let bytes = num_blocks.saturating_mul(block_bytes);
        ensure!(
            free.is_none_or(|free| bytes as u64 <= free),
            "the KV cache of --kv-cache-memory needs {bytes} bytes, but only {} bytes of memory are available; ask \
             for less",
            free.unwrap_or_default()
        );
        // The last token of a sequence is never written to the cache.
        let held = num_blocks * self.block_size + 1;
        if held < context_len {
            ensure!(self.max_model_len.is_none(), "{}", cut(bytes, held, context_len));
        }
        Ok(Capacity { num_blocks, bytes, context_len, max_model_len: context_len.min(held) })
    }

    /// Bytes that are free for a rank where `ex` runs, and what a KV cache takes of them by default.
    pub(super) fn free_and_budget(&self, ex: &Exec) -> Result<(Option<u64>, usize)> {
        let free = memory::available(ex, self.gpu_memory)?.map(|free| free / self.ranks.max(1) as u64);
        Ok((free, Self::budget(free, ex.is_cuda())))
    }

    /// What a KV cache takes by default of the bytes that are free for a rank.
    pub(crate) fn budget(free: Option<u64>, on_gpu: bool) -> usize {
        let share =
            |n: u64, d: u64| free.and_then(|free| usize::try_from(free / d * n).ok()).unwrap_or(usize::MAX);
        if on_gpu { share(9, 10) } else { DEFAULT_BUDGET.min(share(1, 2)) }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            scheduling_policy: SchedulingPolicy::Fcfs,
            max_model_len: None,
            block_size: 16,
            kv_cache_memory: None,
            gpu_memory: None,
            enable_prefix_caching: true,
            async_scheduling: false,
            enforce_eager: false,
            count_experts: false,
            expert_heat: None,
            force_balance: None,
            eplb: None,
            ranks: 1,
            lockstep: false,
        }
    }
}

/// What an engine has room for.
pub(crate) struct Capacity {
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Bytes of all of them.
    pub bytes: usize,
    /// The longest sequence that is asked for.
    pub context_len: usize,
    /// The longest sequence that also fits the KV cache.
    pub max_model_len: usize,
}

impl Capacity {
    /// Warns where the cache cannot hold a sequence of the whole context.
    pub fn warn_if_cut(&self) {
        let held = self.max_model_len;
        if held < self.context_len {
            let sizes = cut(self.bytes, held, self.context_len);
            warn!("{sizes}; until then no sequence gets longer than {held} tokens");
        }
    }
}

fn cut(bytes: usize, held: usize, context_len: usize) -> String {
    format!(
        "the KV cache of {bytes} bytes holds {held} tokens, and a sequence may have {context_len}: raise --kv-cache-memory, or \
         ask for shorter ones (--max-model-len, --max-new-tokens)"
    )
}

/// The largest KV block: a larger one only wastes memory.
const MAX_BLOCK_SIZE: usize = 1 << 16;

/// As vLLM has it on CPUs; taking more would make the start slow without being asked for.
const DEFAULT_BUDGET: usize = 4 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_limits() {
        type Set = fn(&mut EngineConfig, usize);
        let limits: [(&str, usize, Set); 3] = [
            ("--max-num-seqs", 65_535, |config, n| config.max_num_seqs = n),
            ("--max-num-batched-tokens", 1 << 24, |config, n| config.max_num_batched_tokens = n),
            ("--block-size", 1 << 16, |config, n| config.block_size = n),
        ];
        for (flag, most, set) in limits {
            let check = |n: usize| {
                let mut config = EngineConfig::default();
                set(&mut config, n);
                config.check(64).map_err(|e| e.to_string())
            };
            assert_eq!((check(1), check(most)), (Ok(64), Ok(64)));
            for wrong in [0, most + 1, usize::MAX] {
                assert_eq!(check(wrong), Err(format!("{flag} must be from 1 to {most}, got {wrong}")));
            }
        }
    }
}
