//! Which tokens each round processes.
//!
//! The split is even, like numpy's `array_split`: chunks differ by at most one token. Otherwise the last chunk could be
//! a small rest that costs a whole pass over the weights. If ranks use collectives, all of them run as many rounds as
//! the rank with the most chunks. Ranks with fewer chunks pass no token in the last rounds (FastDeploy's rule in its
//! final form).

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

/// The number of chunks of at most `size` tokens into which `tokens` tokens are cut; 0 for no tokens.
pub fn num_chunks(tokens: usize, size: NonZeroUsize) -> usize {
    tokens.div_ceil(size.get())
}

/// The rounds of one rank.
///
/// ```
/// use std::num::NonZeroUsize;
/// use moe_chunking::ChunkPlan;
///
/// // 10 tokens, at most 4 in a chunk.
/// let plan = ChunkPlan::new(10, NonZeroUsize::new(4).ok_or("zero")?);
/// assert_eq!(plan.ranges().collect::<Vec<_>>(), [0..4, 4..7, 7..10]);
/// // A captured graph always runs 5 rounds; the last ones have no token.
/// assert_eq!(plan.with_rounds(5)?.range(4), 10..10);
/// assert!(plan.with_rounds(2).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    tokens: usize,
    chunks: usize,
    rounds: usize,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// The rank has no token count.
    UnknownRank {
        /// The rank that was asked for.
        rank: usize,
        /// Ranks whose counts are known.
        ranks: usize,
    },
    /// There are fewer rounds than chunks.
    TooFewRounds {
        /// Tokens to cut.
        tokens: usize,
        /// Chunks into which they are cut.
        chunks: usize,
        /// Rounds that were given.
        rounds: usize,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownRank { rank, ranks } => {
                write!(f, "chunked MoE: rank {rank} is outside of the token counts of {ranks} ranks")
            }
            Self::TooFewRounds { tokens, chunks, rounds } => write!(
                f,
                "chunked MoE: {tokens} tokens need {chunks} chunks, but only {rounds} rounds are run; raise the \
                 chunk size or the number of rounds"
            ),
        }
    }
}

impl std::error::Error for PlanError {}

impl ChunkPlan {
    /// The rounds of a rank that is alone: one per chunk.
    pub fn new(tokens: usize, size: NonZeroUsize) -> Self {
        let chunks = num_chunks(tokens, size);
        Self { tokens, chunks, rounds: chunks }
    }

    /// One round with all tokens, even if there are no tokens.
    pub fn whole(tokens: usize) -> Self {
        Self { tokens, chunks: 1, rounds: 1 }
    }

    /// The rounds of `rank` if rank r has `tokens[r]` tokens. Every rank has as many rounds as the rank with the most
    /// chunks needs.
    ///
    /// # Errors
    /// The rank has no count.
    pub fn for_ranks(rank: usize, tokens: &[usize], size: NonZeroUsize) -> Result<Self, PlanError> {
        let Some(&own) = tokens.get(rank) else {
            return Err(PlanError::UnknownRank { rank, ranks: tokens.len() });
        };
        let rounds = tokens.iter().map(|&tokens| num_chunks(tokens, size)).max().unwrap_or(0);
        Ok(Self { rounds, ..Self::new(own, size) })
    }

    /// The same chunks in a fixed number of rounds, which does not depend on the tokens. A captured graph replays this
    /// number of rounds.
    ///
    /// # Errors
    /// Fewer rounds than chunks.
    pub fn with_rounds(self, rounds: usize) -> Result<Self, PlanError> {
        if rounds < self.chunks {
            let Self { tokens, chunks, .. } = self;
            return Err(PlanError::TooFewRounds { tokens, chunks, rounds });
        }
        Ok(Self { rounds, ..self })
    }

    /// Number of rounds.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Number of rounds that have tokens, if there is any token.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// The tokens of a round. For a round without tokens it is an empty range at the end.
    pub fn range(&self, round: usize) -> Range<usize> {
        if round >= self.chunks {
            return self.tokens..self.tokens;
        }
        let base = self.tokens / self.chunks;
        let longer = self.tokens % self.chunks;
        let start = round * base + round.min(longer);
        start..start + base + usize::from(round < longer)
    }

    /// The tokens of every round.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let plan = *self;
        (0..plan.rounds).map(move |round| plan.range(round))
    }

    /// How many tokens each rank has in a round, if rank r has `tokens[r]` tokens in total.
    pub fn rank_tokens(round: usize, tokens: &[usize], size: NonZeroUsize) -> Vec<usize> {
        tokens.iter().map(|&tokens| Self::new(tokens, size).range(round).len()).collect()
    }
}
