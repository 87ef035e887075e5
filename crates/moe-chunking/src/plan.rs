//! Which tokens each round has.
//!
//! The split is even, as numpy's `array_split`: chunks that differ by at most one token keep the
//! last one from being a remnant with the cost of a whole pass over the weights. With ranks that
//! meet in collectives, all run as many rounds as the one with the most chunks; those that have
//! fewer pass no token in the last rounds (FastDeploy's rule in its final form).

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

/// Chunks of at most `size` tokens that `tokens` tokens need; 0 for none.
pub fn num_chunks(tokens: usize, size: NonZeroUsize) -> usize {
    tokens.div_ceil(size.get())
}

/// The rounds of one rank.
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
        /// The rank.
        rank: usize,
        /// Ranks whose counts are known.
        ranks: usize,
    },
    /// A fixed number of rounds is too small.
    TooFewRounds {
        /// Tokens to cut.
        tokens: usize,
        /// Chunks that they need.
        chunks: usize,
        /// Rounds that there are.
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
    /// The rounds of a rank alone: one per chunk.
    pub fn new(tokens: usize, size: NonZeroUsize) -> Self {
        let chunks = num_chunks(tokens, size);
        Self { tokens, chunks, rounds: chunks }
    }

    /// One round with all tokens, also if there is none.
    pub fn whole(tokens: usize) -> Self {
        Self { tokens, chunks: 1, rounds: 1 }
    }

    /// The rounds of `rank` where rank r has `tokens[r]` tokens: on every rank as many as the one
    /// with the most chunks needs.
    ///
    /// # Errors
    /// A rank without a count.
    pub fn for_ranks(rank: usize, tokens: &[usize], size: NonZeroUsize) -> Result<Self, PlanError> {
        let Some(&own) = tokens.get(rank) else {
            return Err(PlanError::UnknownRank { rank, ranks: tokens.len() });
        };
        let rounds = tokens.iter().map(|&tokens| num_chunks(tokens, size)).max().unwrap_or(0);
        Ok(Self { rounds, ..Self::new(own, size) })
    }

    /// The same chunks in a fixed number of rounds, whatever the tokens: what a captured graph
    /// replays.
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

    /// The tokens of a round; an empty range at the end for one without any.
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

    /// How many tokens each rank has in a round, where rank r has `tokens[r]` in all.
    pub fn rank_tokens(round: usize, tokens: &[usize], size: NonZeroUsize) -> Vec<usize> {
        tokens.iter().map(|&tokens| Self::new(tokens, size).range(round).len()).collect()
    }
}
