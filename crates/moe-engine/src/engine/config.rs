//! The settings and limits of an engine.

use std::path::PathBuf;

use model_runtime::{Exec, ModelInfo};
use moe_layer::MAX_STEP_TOKENS;
use serde::{Deserialize, Serialize};

use super::memory;
use crate::eplb::EplbConfig;
use crate::error::{Result, bail, ensure};

/// Settings of an engine. Names are vLLM's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The largest number of sequences that run at the same time.
    pub max_num_seqs: usize,
    /// The largest number of rows in a step. Longer prompts are computed in chunks, together with the sequences that
    /// are decoding.
    pub max_num_batched_tokens: usize,
    /// Which waiting sequence starts next.
    pub scheduling_policy: SchedulingPolicy,
    /// The largest length of a sequence (prompt and output), which the KV cache must hold. With `None` it is the
    /// model's context, or as much of it as the KV cache holds.
    pub max_model_len: Option<usize>,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Bytes of the KV cache, which are allocated when the engine is made. With `None` it is 4 GiB, but at most half of
    /// the memory that is free then. On a GPU it is nine tenths of the free memory, or less if the largest step needs
    /// more. It is never more than all sequences need at full length.
    pub kv_cache_memory: Option<usize>,
    /// Limit of the memory in use on the GPU in bytes: weights, KV cache, buffers, and the memory of other programs.
    /// The engine behaves as if the GPU had only this much memory. It has no effect on the CPU.
    pub gpu_memory: Option<u64>,
    /// Shares the KV blocks of common prefixes.
    pub enable_prefix_caching: bool,
    /// Bytes of the KV cache in which the recurrent states at the ends of prefixes are saved, for models whose layers
    /// keep any. With `None` it is a quarter of the cache. With 0 no states are saved, and no prefixes are shared.
    pub prefix_state_memory: Option<usize>,
    /// Schedules a step before the tokens of the one before are known.
    pub async_scheduling: bool,
    /// Launches decode steps on a CUDA device one by one, not as a captured graph.
    pub enforce_eager: bool,
    /// Whether to count how often each expert is chosen, in every step.
    pub count_experts: bool,
    /// Writes the expert counts to this file, as a heat trace.
    pub expert_heat: Option<PathBuf>,
    /// Replaces routing by an even spread, for profiling; the seed varies it.
    pub force_balance: Option<u64>,
    /// Moves experts between ranks as their loads change; `None`: never.
    pub eplb: Option<EplbConfig>,
    /// Ranks whose KV caches share this machine's memory.
    pub ranks: usize,
    /// Runs a step without rows if there is nothing to compute, because the experts of other ranks wait for it.
    pub lockstep: bool,
}

/// The order in which waiting sequences start. On the CPU no token depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The shortest start last. One and a half times as many sequences as can run at the same time are kept for the
    /// end. These start in the order of the number of tokens that they may generate, largest first, as in list
    /// scheduling by longest processing time (Graham, 1969). So at the end of a file of requests no long request runs
    /// alone, and steps stay full. A short request may wait until all others run.
    LongestFirst,
}

impl EngineConfig {
    /// The largest [`max_num_seqs`](Self::max_num_seqs). Launches that sample have one grid row of blocks for each
    /// sequence, and this is the limit of a GPU.
    pub const MAX_NUM_SEQS: usize = 65_535;

    /// The largest [`max_num_batched_tokens`](Self::max_num_batched_tokens).
    pub const MAX_NUM_BATCHED_TOKENS: usize = MAX_STEP_TOKENS;

    /// Whether steps are counted. A trace of the counts needs that, and so does balancing.
    pub fn counts(&self) -> bool {
        self.count_experts || self.expert_heat.is_some() || self.eplb.is_some()
    }

    /// The defaults for a device. A GPU can compute more rows in a step, and run more sequences, before a step takes
    /// noticeably longer.
    pub fn for_device(ex: &Exec) -> Self {
        let default = Self::default();
        if ex.is_cuda() {
            Self { max_num_seqs: 256, max_num_batched_tokens: 8192, ..default }
        } else {
            default
        }
    }

    /// The defaults for a device and a model. If each step computes the keys and values of every head from latent rows,
    /// each chunk of a long prompt computes them again for all earlier chunks. So chunks are longer for such models.
    pub fn for_model(ex: &Exec, info: &ModelInfo) -> Self {
        let default = Self::for_device(ex);
        match ex.is_cuda() && info.states.have_latent_rows() {
            true => Self { max_num_batched_tokens: 16384, ..default },
            false => default,
        }
    }

    /// Checks the settings against a model with this context. Returns the length of the longest sequence that the model
    /// allows.
    ///
    /// # Errors
    /// A setting that no model, or not this model, supports; the error names its flag.
    pub fn check(&self, max_context_len: usize) -> Result<usize> {
        for (flag, value, most) in [
            ("`max_num_seqs`", self.max_num_seqs, Self::MAX_NUM_SEQS),
            ("`max_num_batched_tokens`", self.max_num_batched_tokens, Self::MAX_NUM_BATCHED_TOKENS),
            ("`block_size`", self.block_size, MAX_BLOCK_SIZE),
        ] {
            ensure!((1..=most).contains(&value), "{flag} must be from 1 to {most}, got {value}");
        }
        match self.max_model_len {
            Some(0) => bail!("`max_model_len` 0: expected at least 1"),
            Some(len) if len > max_context_len => {
                bail!("`max_model_len` {len}: expected 1 to {max_context_len}, the context of the model")
            }
            Some(len) => Ok(len),
            None => Ok(max_context_len),
        }
    }

    /// The bytes that are free for a rank on the device of `ex`, and the default size of a KV cache in them.
    pub(super) fn free_and_budget(&self, ex: &Exec) -> Result<(Option<u64>, usize)> {
        let free = memory::available(ex, self.gpu_memory)?.map(|free| free / self.ranks.max(1) as u64);
        Ok((free, Self::budget(free, ex.is_cuda())))
    }

    /// The default size of a KV cache, if `free` bytes are free for a rank.
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
            prefix_state_memory: None,
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

/// The largest KV block. A larger one would only waste memory.
const MAX_BLOCK_SIZE: usize = 1 << 16;

/// The default of vLLM on CPUs. A larger cache would make the start slow without a request for it.
const DEFAULT_BUDGET: usize = 4 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_limits() {
        type Set = fn(&mut EngineConfig, usize);
        let limits: [(&str, usize, Set); 3] = [
            ("`max_num_seqs`", 65_535, |config, n| config.max_num_seqs = n),
            ("`max_num_batched_tokens`", 1 << 24, |config, n| config.max_num_batched_tokens = n),
            ("`block_size`", 1 << 16, |config, n| config.block_size = n),
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
