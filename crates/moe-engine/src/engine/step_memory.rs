//! The GPU memory that the largest step needs in addition to weights and KV cache. It is measured by running that step
//! before the cache is made, as in vLLM's profile run. The step's buffers stay in the workspace, so the cache may use
//! the memory that is free afterwards.

use model_runtime::{
    CacheSizes, CausalLm, Exec, KvCache, LogitsRows, SequenceStep, Step, StepContext, logits_rows, run_step,
};

use super::config::EngineConfig;
use crate::error::{Context, Result};

/// Memory that is kept free for later allocations: recorded graphs, tables of a step.
const RESERVE: u64 = 256 << 20;

/// The largest number of rows of logits in a step: one for each sequence, padded as for graphs.
pub(super) fn most_logits(max_num_seqs: usize) -> usize {
    max_num_seqs.next_multiple_of(8)
}

/// The size that a KV cache may have so that the largest step still fits, if a measurement is needed: the step runs if
/// the cache would take more than half of the free memory. The ranks of a group compute it together, so all groups in
/// lockstep must call this at the same time ([`DpEngine`](super::DpEngine)).
pub(super) fn budget(model: &dyn CausalLm, config: &EngineConfig, ex: &mut Exec) -> Result<Option<usize>> {
    match is_tight(model, config, ex)? {
        true => measure(model, config, ex).map(Some),
        false => Ok(None),
    }
}

/// Whether a cache on a GPU, with no size given by the user, would take more than half of the free memory.
pub(super) fn is_tight(model: &dyn CausalLm, config: &EngineConfig, ex: &Exec) -> Result<bool> {
    if !ex.is_cuda() || config.kv_cache_memory.is_some() {
        return Ok(false);
    }
    // Memory that an earlier engine has freed only counts once the stream has finished.
    ex.synchronize()?;
    let info = model.info();
    let (free, budget) = config.free_and_budget(ex)?;
    let capacity = config.capacity(&info.states, info.max_context_len, free, budget)?;
    Ok(free.is_some_and(|free| capacity.bytes as u64 > free / 2))
}

/// Runs the largest step and returns the number of bytes that the KV cache may then have. All positions share one
/// block, so the step needs no real cache.
pub(super) fn measure(model: &dyn CausalLm, config: &EngineConfig, ex: &mut Exec) -> Result<usize> {
    let info = model.info();
    ex.synchronize()?;
    let (free, most) = config.free_and_budget(ex)?;
    let capacity = config.capacity(&info.states, info.max_context_len, free, most)?;
    let longest = capacity.max_model_len;
    let mut rows = config.max_num_batched_tokens;
    if info.states.are_recurrent() {
        // A step has no more sequences than there are states.
        rows = rows.min(capacity.sizes.num_states.saturating_mul(longest));
    }
    let step = largest(rows, longest, info.vocab_size, info.states.have_latent_rows(), config)?;
    let num_states = if info.states.are_recurrent() { step.num_sequences() } else { 1 };
    let sizes = CacheSizes { num_blocks: 1, block_size: config.block_size, num_states, num_saved: 0 };
    let mut kv = KvCache::with_sizes(ex.device(), &info.states, sizes)?;
    kv.commit(ex)?;
    run(model, &step, &mut kv, ex).with_context(|| {
        format!(
            "the largest step, of {rows} rows, which says how much memory the KV cache may take, failed; if memory ran out, lower \
             `max_num_batched_tokens`"
        )
    })?;
    drop(kv);
    // The runner has separate memory for the logits from which the device samples.
    let sampled = most_logits(config.max_num_seqs);
    let rows = sampled + logits_rows(model, sampled).into_iter().sum::<usize>();
    let logits = rows.saturating_mul(info.vocab_size).saturating_mul(4);
    let (free, _) = config.free_and_budget(ex)?;
    let left = free.unwrap_or_default().saturating_sub(RESERVE).saturating_sub(logits as u64);
    Ok(usize::try_from(left)?.min(most))
}

/// Runs a step to its end, on all ranks.
fn run(model: &dyn CausalLm, step: &Step, kv: &mut KvCache, ex: &mut Exec) -> Result<()> {
    let logits = run_step(model, step, kv, None, &mut StepContext::default(), ex)?;
    ex.synchronize()?;
    // The stream of a failed world continues, so this check is the only sign of the failure.
    model.ranks().map_or(Ok(()), |ranks| ranks.check())?;
    drop(logits);
    Ok(())
}

/// A step of `rows` rows, as sequences of at most `longest` tokens, each with a recurrent state of its own. If a step
/// computes keys and values from the latent rows of all positions to which it attends (`latent`), its rows are the last
/// ones of their sequence.
fn largest(rows: usize, longest: usize, vocab: usize, latent: bool, config: &EngineConfig) -> Result<Step> {
    let token_ids: Vec<u32> = (0..rows).map(|i| (i % vocab) as u32).collect();
    let blocks = vec![0; longest.div_ceil(config.block_size)];
    let sequences = token_ids.chunks(longest.max(1)).map(|chunk| {
        let start = if latent { longest - chunk.len() } else { 0 };
        let end = start + chunk.len();
        let blocks = &blocks[..end.div_ceil(config.block_size)];
        SequenceStep {
            token_ids: chunk,
            start,
            prompt_len: end,
            blocks,
            logits: LogitsRows::Last,
            scored: &[],
        }
    });
    let step = Step::new(sequences, config.block_size)?;
    let states = (0..step.num_sequences() as u32).collect();
    Ok(step.with_states(states, Vec::new(), Vec::new())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_step_has_all_rows() {
        let config = EngineConfig::default();
        let step = largest(100, 40, 7, false, &config).unwrap();
        assert_eq!((step.num_tokens(), step.num_sequences(), step.num_logits()), (100, 3, 3));
        assert_eq!((step.positions()[0], step.positions()[40], step.positions()[99]), (0, 0, 19));
        assert_eq!(step.states(), [0, 1, 2]);
        let step = largest(30, 4000, 7, true, &config).unwrap();
        assert_eq!((step.num_tokens(), step.positions()[0], step.positions()[29]), (30, 3970, 3999));
    }
}
