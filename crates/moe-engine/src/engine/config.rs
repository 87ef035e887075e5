//! What an engine may use.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use model_runtime::{Exec, KvCache, ModelInfo};

#[cfg(feature = "cuda")]
use super::device::DeviceRunner;

/// Settings of an engine. Names are vLLM's.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The most sequences that run at once.
    pub max_num_seqs: usize,
    /// The most rows of a step: longer prompts are computed in chunks, beside what is decoding.
    pub max_num_batched_tokens: usize,
    /// The longest sequence, prompt and output; `None`: the model's context.
    pub max_model_len: Option<usize>,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Bytes of the KV cache; `None`: enough for all sequences at full length, but at most half of
    /// the memory that is free now (of a GPU: nine tenths).
    pub kv_cache_memory: Option<usize>,
    /// Shares the KV blocks of common prefixes.
    pub enable_prefix_caching: bool,
    /// Schedules a step before the tokens of the one before are known.
    pub async_scheduling: bool,
    /// Launches decode steps on a CUDA device one by one, not as a captured graph.
    pub enforce_eager: bool,
    /// Counts how often each expert is chosen, by step.
    pub collect_heat: bool,
    /// Writes those counts to this file, as a heat trace.
    pub expert_heat: Option<PathBuf>,
    /// Replaces the routing by an even one, for profiling; the seed varies it.
    pub force_balance: Option<u64>,
    /// Ranks whose KV caches share this machine's memory.
    pub ranks: usize,
    /// Runs a step without rows where there is nothing to compute: other ranks' experts wait for it.
    pub lockstep: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: 512,
            max_model_len: None,
            block_size: 16,
            kv_cache_memory: None,
            enable_prefix_caching: true,
            async_scheduling: false,
            enforce_eager: false,
            collect_heat: false,
            expert_heat: None,
            force_balance: None,
            ranks: 1,
            lockstep: false,
        }
    }
}

/// The largest KV block: a larger one only wastes memory.
const MAX_BLOCK_SIZE: usize = 1 << 16;

impl EngineConfig {
    /// Checks the settings against a model; the longest sequence.
    pub(super) fn check(&self, info: &ModelInfo) -> Result<usize> {
        ensure!(self.max_num_seqs > 0, "--max-num-seqs must be at least 1, got 0");
        ensure!(self.max_num_batched_tokens > 0, "--max-num-batched-tokens must be at least 1, got 0");
        ensure!(
            (1..=MAX_BLOCK_SIZE).contains(&self.block_size),
            "--block-size must be from 1 to {MAX_BLOCK_SIZE}, got {}",
            self.block_size
        );
        match self.max_model_len {
            Some(len) if len == 0 || len > info.max_context_len => bail!(
                "--max-model-len {len}: expected 1 to {}, the context of the model",
                info.max_context_len
            ),
            Some(len) => Ok(len),
            None => Ok(info.max_context_len),
        }
    }

    /// The KV cache: at most what all sequences can use at once.
    pub(super) fn kv_cache(&self, info: &ModelInfo, max_model_len: usize, ex: &Exec) -> Result<KvCache> {
        let per_sequence = max_model_len.div_ceil(self.block_size);
        let useful = per_sequence.saturating_mul(self.max_num_seqs);
        let ranks = self.ranks.max(1) as u64;
        let (free, share) = available_memory(ex)?;
        let free = free.map(|free| free / ranks);
        let budget = match (self.kv_cache_memory, free) {
            (Some(bytes), Some(free)) if bytes as u64 > free => bail!(
                "--kv-cache-memory asks for {bytes} bytes, but only {free} bytes of memory are available for each of {ranks} ranks; ask for less"
            ),
            (Some(bytes), _) => bytes,
            (None, Some(free)) => usize::try_from((free as f64 * share) as u64).unwrap_or(usize::MAX),
            (None, None) => DEFAULT_BUDGET,
        };
        let fitting = info.kv.blocks_in(budget, self.block_size)?;
        // Slot numbers are 32 bits wide.
        let addressable = (u32::MAX as usize - 1) / self.block_size;
        let blocks = useful.min(fitting).min(addressable);
        ensure!(
            blocks > 0,
            "a KV cache of {budget} bytes holds no block: one of {} tokens needs {} bytes; raise --kv-cache-memory or \
             lower --block-size",
            self.block_size,
            info.kv.bytes_per_token()? * self.block_size
        );
        Ok(KvCache::new_on(ex.device(), info.kv, blocks, self.block_size)?)
    }

    /// What runs steps on a CUDA device; `None` on the CPU and on cards that cannot draw tokens.
    #[cfg(feature = "cuda")]
    pub(super) fn device_runner(
        &self,
        info: &ModelInfo,
        max_model_len: usize,
        ex: &Exec,
    ) -> Result<Option<DeviceRunner>> {
        if model_runtime::compute_capability(ex.device()).is_none_or(|capability| capability < (9, 0)) {
            return Ok(None);
        }
        let blocks = max_model_len.div_ceil(self.block_size);
        let (rows, seqs) = (self.max_num_batched_tokens, self.max_num_seqs);
        Ok(Some(DeviceRunner::new(info.vocab_size, rows, seqs, blocks, self.enforce_eager, ex)?))
    }
}

/// Where the free memory is not known.
const DEFAULT_BUDGET: usize = 4 << 30;

/// Bytes of memory that are free where the cache will be, and the share of them that it may take: the
/// whole machine is not ours, a GPU is, but for a step's activations.
fn available_memory(ex: &Exec) -> Result<(Option<u64>, f64)> {
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return Ok((Some(ex.device_memory()?.0 as u64), 0.9));
    }
    let _ = ex;
    Ok((host_memory(), 0.5))
}

/// Bytes of host memory that can be used without swapping, as Linux estimates them.
fn host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
