//! The settings, under the names that users write: FastDeploy's names, and a memory budget.

use std::num::NonZeroUsize;

use crate::size::{BudgetError, size_for_budget};

/// FastDeploy's default.
pub const DEFAULT_CHUNKED_MOE_SIZE: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);

/// Whether and how the tokens of a layer are cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkedMoe {
    /// Whether tokens are cut into chunks.
    pub enable_chunked_moe: bool,
    /// The largest number of tokens in a chunk.
    pub chunked_moe_size: NonZeroUsize,
    /// The largest number of bytes of a layer's workspace. If it is set, it decides the size of chunks instead of
    /// `chunked_moe_size`. Without `enable_chunked_moe` it has no effect.
    pub moe_memory_budget: Option<usize>,
}

impl Default for ChunkedMoe {
    fn default() -> Self {
        Self {
            enable_chunked_moe: false,
            chunked_moe_size: DEFAULT_CHUNKED_MOE_SIZE,
            moe_memory_budget: None,
        }
    }
}

impl ChunkedMoe {
    /// Chunks of this size.
    pub fn of_size(size: NonZeroUsize) -> Self {
        Self { enable_chunked_moe: true, chunked_moe_size: size, moe_memory_budget: None }
    }

    /// Chunks whose workspace fits `budget` bytes.
    pub fn within(budget: usize) -> Self {
        Self { enable_chunked_moe: true, moe_memory_budget: Some(budget), ..Self::default() }
    }

    /// The size of chunks for steps of at most `max_tokens` tokens; `bytes(tokens)` is the workspace of a chunk. `None`
    /// without chunking.
    ///
    /// # Errors
    /// A budget that is too small for one token.
    pub fn size(
        &self,
        max_tokens: usize,
        bytes: impl Fn(usize) -> usize,
    ) -> Result<Option<NonZeroUsize>, BudgetError> {
        match (self.enable_chunked_moe, self.moe_memory_budget) {
            (false, _) => Ok(None),
            (true, None) => Ok(Some(self.chunked_moe_size)),
            (true, Some(budget)) => size_for_budget(max_tokens, budget, bytes).map(Some),
        }
    }
}
