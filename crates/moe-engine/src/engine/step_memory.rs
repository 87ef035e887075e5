//! What the largest step takes of a GPU beside weights and KV cache, found out by running it before the cache is made, as vLLM
//! profiles a run. Its buffers stay in the workspace, so the cache may have what is free afterwards.

use anyhow::{Context, Result};
use model_runtime::{
    CausalLm, Exec, KvCache, LogitsRows, SequenceStep, Step, StepContext, logits_rows, run_step,
};

use super::config::EngineConfig;

/// Left for what is made later: recorded graphs, tables of a step.
const RESERVE: u64 = 256 << 20;

/// Most rows of logits of a step: one of each sequence, padded as graphs pad them.
pub(super) fn most_logits(max_num_seqs: usize) -> usize {
    max_num_seqs.next_multiple_of(8)
}

/// What a KV cache may take beside the largest step, where the step must say so: it runs if the cache would take more than half
/// of what is free. Ranks of a group compute it together, so all groups in lockstep must ask at once
/// ([`DpEngine`](super::DpEngine)).
pub(super) fn budget(model: &dyn CausalLm, config: &EngineConfig, ex: &mut Exec) -> Result<Option<usize>> {
    match is_tight(model, config, ex)? {
        true => measure(model, config, ex).map(Some),
        false => Ok(None),
    }
}

/// Whether a cache on a GPU whose size nobody gave would take more than half of what is free there.
pub(super) fn is_tight(model: &dyn CausalLm, config: &EngineConfig, ex: &Exec) -> Result<bool> {
    if !ex.is_cuda() || config.kv_cache_memory.is_some() {
        return Ok(false);
    }
    // What an earlier engine has freed counts only once the stream is done.
    ex.synchronize()?;
    let info = model.info();
    let (free, budget) = config.free_and_budget(ex)?;
    let capacity = config.capacity(&info.states, info.max_context_len, free, budget)?;
    Ok(free.is_some_and(|free| capacity.bytes as u64 > free / 2))
}

/// Runs the largest step and returns how many bytes the KV cache may take then. All positions share one block, so no cache is
/// needed for it.
pub(super) fn measure(model: &dyn CausalLm, config: &EngineConfig, ex: &mut Exec) -> Result<usize> {
    let info = model.info();
    ex.synchronize()?;
    let (free, most) = config.free_and_budget(ex)?;
    let longest = config.capacity(&info.states, info.max_context_len, free, most)?.max_model_len;
    let mut kv = KvCache::new_on(ex.device(), &info.states, 1, config.block_size)?;
    kv.commit(ex)?;
    let rows = config.max_num_batched_tokens;
    let step = largest(rows, longest, info.vocab_size, info.states.have_latent_rows(), config)?;
    run(model, &step, &mut kv, ex).with_context(|| {
        format!(
            "the largest step, of {rows} rows, which says how much memory the KV cache may take, failed; if memory ran out, lower \
             --max-num-batched-tokens"
        )
    })?;
    drop(kv);
    // The runner has a place of its own for what the device samples from.
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
    // The stream of a failed world goes on; only this says so.
    model.ranks().map_or(Ok(()), |ranks| ranks.check())?;
    drop(logits);
    Ok(())
}

/// A step of `rows` rows, as sequences of at most `longest` tokens. Where a step makes keys and values out of latent rows of all
/// positions that it sees (`latent`), its rows are the last ones of their sequence.
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
    Ok(Step::new(sequences, config.block_size)?)
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
        let step = largest(30, 4000, 7, true, &config).unwrap();
        assert_eq!((step.num_tokens(), step.positions()[0], step.positions()[29]), (30, 3970, 3999));
    }
}
