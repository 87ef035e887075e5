//! The ways of rows to their experts.

/// How rows reach their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Every rank has the same tokens and a part of each expert.
    Cut,
    /// Every rank has the same tokens and experts of its own.
    Replicated,
    /// Every rank gets the tokens of all.
    AllGather,
    /// As `AllGather`, for at most so many tokens per rank and call, their slots listed by expert.
    AllGatherListed(usize),
    /// Every rank gets the tokens that its experts need, in the places that they have among the tokens of all.
    GatherNeeded,
    /// Every rank gets the rows that its experts need, packed.
    AllToAll,
    /// As `AllToAll`, in blocks of the step's most tokens, at most so many per rank and call, batched by expert.
    AllToAllBatched(usize),
}
