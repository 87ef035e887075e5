//! The largest chunk that fits a budget, and the smallest chunk that costs no time.

use std::fmt;
use std::num::NonZeroUsize;

/// A budget that is too small for one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetError {
    /// Bytes of the budget.
    pub budget: usize,
    /// Bytes that one token needs.
    pub needed: usize,
}

impl fmt::Display for BudgetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { budget, needed } = self;
        write!(
            f,
            "the MoE memory budget of {budget} bytes is too small: one token needs {needed} bytes of workspace; raise \
             `moe_memory_budget`"
        )
    }
}

impl std::error::Error for BudgetError {}

/// The largest chunk of at most `max_tokens` tokens whose workspace fits `budget` bytes.
/// `bytes(tokens)` is the workspace of a chunk, for any number of tokens from 1 to `max_tokens`. It must not fall as
/// tokens rise; if it does, the chunk fits the budget but may not be the largest. Without tokens the size is 1.
///
/// # Errors
/// A budget that is too small for one token.
pub fn size_for_budget(
    max_tokens: usize,
    budget: usize,
    bytes: impl Fn(usize) -> usize,
) -> Result<NonZeroUsize, BudgetError> {
    let needed = bytes(1);
    if needed > budget {
        return Err(BudgetError { budget, needed });
    }
    // `fits` is known to fit; `above` is the smallest size that may not fit.
    let mut fits = NonZeroUsize::MIN;
    let mut above = max_tokens.max(1).saturating_add(1);
    while above - fits.get() > 1 {
        let middle = fits.get() + (above - fits.get()) / 2;
        match NonZeroUsize::new(middle) {
            Some(size) if bytes(middle) <= budget => fits = size,
            _ => above = middle,
        }
    }
    Ok(fits)
}

/// The ridge of the roofline in tokens per chunk. Below it a chunk takes as long as reading the weights of all experts
/// takes, so smaller chunks cost time. `rows` is the number of rows of one expert at which arithmetic takes as long as
/// reading the expert's weights (peak FLOP/s over bandwidth in weights/s, over 2). A `top_k` of 0 counts as 1. Numbers
/// that no machine has give `usize::MAX`.
pub fn ridge_tokens(rows: usize, num_experts: usize, top_k: usize) -> usize {
    rows.saturating_mul(num_experts).div_ceil(top_k.max(1))
}
