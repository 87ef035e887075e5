//! What a KV cache has room for: blocks of tokens, recurrent states of sequences, and saved states of prefixes.

use model_runtime::{CacheSizes, LayerStates};
use tracing::warn;

use super::config::EngineConfig;
use super::states::INTERVAL;
use crate::error::{Result, ensure};

/// The sizes for which an engine has room.
pub(crate) struct Capacity {
    /// Blocks, states and saved states.
    pub sizes: CacheSizes,
    /// Bytes of all of them.
    pub bytes: usize,
    /// The requested length of the longest sequence.
    pub context_len: usize,
    /// The longest sequence that also fits the KV cache.
    pub max_model_len: usize,
    /// What the cache has less room for than was asked.
    cuts: Vec<String>,
}

impl EngineConfig {
    /// Computes the size of the KV cache of a model with this context, if `free` bytes are left (when that is known).
    /// It is at most what all sequences can use at the same time. `budget` is the default size, without
    /// `kv_cache_memory`.
    pub(crate) fn capacity(
        &self,
        states: &LayerStates,
        max_context_len: usize,
        free: Option<u64>,
        budget: usize,
    ) -> Result<Capacity> {
        let context_len = self.check(max_context_len)?;
        let budget = self.kv_cache_memory.unwrap_or(budget);
        let block_size = self.block_size;
        let num_states = self.num_states(states, budget)?;
        let num_saved = self.num_saved(states, budget, context_len)?;
        let mut sizes = CacheSizes { num_blocks: 0, block_size, num_states, num_saved };
        let state_bytes = states.bytes(&sizes)?;
        let budget = budget.saturating_sub(state_bytes);
        // Slot numbers are 32 bits wide.
        let addressable = (u32::MAX as usize - 1) / block_size;
        let useful = context_len.div_ceil(block_size).saturating_mul(self.max_num_seqs);
        sizes.num_blocks = useful.min(states.blocks_in(budget, block_size)?).min(addressable);
        // A saved state is at the end of a block.
        sizes.num_saved = num_saved.min(sizes.num_blocks);
        let states_too = match state_bytes {
            0 => String::new(),
            bytes => format!(" in addition to {bytes} bytes of recurrent states"),
        };
        ensure!(
            sizes.num_blocks > 0,
            "a KV cache of {budget} bytes{states_too} holds no block: one of {block_size} tokens needs {} bytes; raise \
             `kv_cache_memory` or lower `block_size`",
            states.bytes_per_token()? * block_size,
        );
        let bytes = states.bytes(&sizes).unwrap_or(usize::MAX);
        ensure!(
            free.is_none_or(|free| bytes as u64 <= free),
            "the KV cache of `kv_cache_memory` needs {bytes} bytes, but only {} bytes of memory are available; ask \
             for less",
            free.unwrap_or_default()
        );
        // The last token of a sequence is never written to the cache.
        let held = sizes.num_blocks * block_size + 1;
        let mut cuts = self.cuts(states, &sizes)?;
        if held < context_len {
            let cut = cut(bytes, held, context_len);
            ensure!(self.max_model_len.is_none(), "{cut}");
            cuts.push(format!("{cut}; until then no sequence gets longer than {held} tokens"));
        }
        Ok(Capacity { sizes, bytes, context_len, max_model_len: context_len.min(held), cuts })
    }

    /// Recurrent states of prefixes that a KV cache of the default size has room for.
    ///
    /// # Errors
    /// States of sizes that overflow.
    pub fn saved_by_default(&self, states: &LayerStates, context_len: usize) -> Result<usize> {
        self.num_saved(states, Self::budget(None, false), context_len)
    }

    /// Sequences that recurrent states are kept for: all that may run at once, or as many as half of `budget` holds.
    fn num_states(&self, states: &LayerStates, budget: usize) -> Result<usize> {
        match (budget / 2).checked_div(states.bytes_per_sequence()?) {
            Some(held) => Ok(self.max_num_seqs.min(held).max(1)),
            None => Ok(self.max_num_seqs),
        }
    }

    /// Recurrent states that can be saved: as many as prompts can leave, or as `prefix_state_memory` holds.
    fn num_saved(&self, states: &LayerStates, budget: usize, context_len: usize) -> Result<usize> {
        let held = self.prefix_state_memory.unwrap_or(budget / 4).checked_div(states.bytes_per_sequence()?);
        let Some(held) = held.filter(|_| self.enable_prefix_caching) else { return Ok(0) };
        let useful = (context_len / INTERVAL + 2).saturating_mul(self.max_num_seqs);
        Ok(held.min(useful))
    }

    /// What a cache of these sizes has too few recurrent states for.
    fn cuts(&self, states: &LayerStates, sizes: &CacheSizes) -> Result<Vec<String>> {
        let mut cuts = Vec::new();
        let CacheSizes { num_states, num_saved, .. } = *sizes;
        let asked = self.max_num_seqs;
        if states.are_recurrent() && num_states < asked {
            cuts.push(format!(
                "half of the KV cache's memory holds the recurrent states of {num_states} sequences: that many run at once, not \
                 the {asked} of `max_num_seqs`; raise `kv_cache_memory` for more"
            ));
        }
        let wanted = self.enable_prefix_caching && self.prefix_state_memory != Some(0);
        if states.are_recurrent() && num_saved == 0 && wanted {
            let bytes = states.bytes_per_sequence()?;
            cuts.push(format!(
                "prefixes are not shared: the recurrent states of one take {bytes} bytes, and `prefix_state_memory`, by default \
                 a quarter of the KV cache's memory, has less"
            ));
        }
        Ok(cuts)
    }

    /// Whether sequences share the blocks of common prefixes: where layers keep recurrent states, only if some can be
    /// saved.
    pub(super) fn shares_prefixes(&self, states: &LayerStates, sizes: &CacheSizes) -> bool {
        self.enable_prefix_caching && (!states.are_recurrent() || sizes.num_saved > 0)
    }
}

impl Capacity {
    /// Warns if the cache cannot hold a sequence of the whole context, or the states of all sequences.
    pub fn warn_if_cut(&self) {
        for cut in &self.cuts {
            warn!("{cut}");
        }
    }
}

fn cut(bytes: usize, held: usize, context_len: usize) -> String {
    format!(
        "the KV cache of {bytes} bytes holds {held} tokens, and a sequence may have {context_len}: raise `kv_cache_memory`, or \
         ask for shorter ones (`max_model_len`, `max_tokens`)"
    )
}

#[cfg(test)]
mod tests {
    use model_runtime::candle::DType;
    use model_runtime::{DeltaHeads, KvLayout, LayerState, StateLayout};

    use super::*;

    /// A token takes 64 bytes, a sequence 128.
    fn states() -> LayerStates {
        let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 4, value_dim: 8 };
        let kv = KvLayout { num_kv_heads: 1, head_dim: 8, value_dim: Some(8), dtype: DType::F32 };
        let state = StateLayout { heads, conv_width: 1 };
        [LayerState::Paged(kv), LayerState::Recurrent(state)].into_iter().collect()
    }

    fn config(bytes: usize) -> EngineConfig {
        EngineConfig { kv_cache_memory: Some(bytes), ..EngineConfig::default() }
    }

    fn capacity(config: &EngineConfig) -> Capacity {
        config.capacity(&states(), 32, None, 0).unwrap()
    }

    /// Blocks, states, saved states.
    fn sizes(capacity: &Capacity) -> [usize; 3] {
        [capacity.sizes.num_blocks, capacity.sizes.num_states, capacity.sizes.num_saved]
    }

    #[test]
    fn states_take_half_of_the_cache_at_most_and_saved_ones_a_quarter() {
        let roomy = capacity(&config(1 << 20));
        assert_eq!(sizes(&roomy), [128, 64, 128]);
        assert_eq!(roomy.bytes, (64 + 128) * 128 + 128 * 16 * 64);
        assert!(roomy.cuts.is_empty(), "{:?}", roomy.cuts);
        let narrow = capacity(&config(8192));
        assert_eq!(sizes(&narrow), [2, 32, 2]);
        assert_eq!(narrow.bytes, (32 + 2) * 128 + 2 * 16 * 64);
        assert!(
            narrow.cuts[0]
                .contains("the recurrent states of 32 sequences: that many run at once, not the 64")
        );
        let error = config(500).capacity(&states(), 32, None, 0).map(drop).unwrap_err().to_string();
        assert!(error.contains("holds no block"), "{error}");
    }

    #[test]
    fn saved_states_have_a_budget_of_their_own() {
        let asked = |bytes| EngineConfig { prefix_state_memory: Some(bytes), ..config(1 << 16) };
        assert_eq!(sizes(&capacity(&asked(1280)))[2], 10);
        let states = states();
        for (config, num_saved, warns) in [
            (asked(100), 0, true),
            (asked(0), 0, false),
            (EngineConfig { enable_prefix_caching: false, ..asked(1280) }, 0, false),
        ] {
            let capacity = capacity(&config);
            assert_eq!(capacity.sizes.num_saved, num_saved);
            assert!(!config.shares_prefixes(&states, &capacity.sizes));
            assert_eq!(capacity.cuts.iter().any(|cut| cut.contains("prefixes are not shared")), warns);
        }
        assert!(config(1 << 20).shares_prefixes(&states, &capacity(&config(1 << 20)).sizes));
    }
}
