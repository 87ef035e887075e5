//! The errors of parallel settings and geometry.
//!
//! Settings are host-only logic, so their errors are a plain enum that tests can match. Each
//! message says what was asked for and what to change; `?` turns one into a candle error.

use crate::names::EpBackend;

/// Why parallel settings, or a model's sizes under them, are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A parallel size is zero.
    #[error("{name} must be at least 1, got 0")]
    ZeroSize {
        /// The setting.
        name: &'static str,
    },
    /// `dp * tp` is beyond [`MAX_WORLD_SIZE`](crate::MAX_WORLD_SIZE).
    #[error("dp {dp} x tp {tp} is more than {max} ranks, the most that is supported")]
    WorldTooLarge {
        /// Data-parallel size.
        dp: usize,
        /// Tensor-parallel size.
        tp: usize,
        /// The largest world.
        max: usize,
    },
    /// A rank outside of its world.
    #[error("rank {rank} is outside of a world of {world_size} (dp x tp) ranks")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// `dp * tp`.
        world_size: usize,
    },
    /// The number of started ranks is not `dp * tp`.
    #[error(
        "dp {dp} x tp {tp} needs {expected} ranks, but {got} were started; change dp, tp or the launcher"
    )]
    WorldMismatch {
        /// Data-parallel size.
        dp: usize,
        /// Tensor-parallel size.
        tp: usize,
        /// `dp * tp`.
        expected: usize,
        /// Ranks that exist.
        got: usize,
    },
    /// A name that no setting has.
    #[error("unknown {what} {got:?}; expected one of {expected}")]
    UnknownName {
        /// The setting.
        what: &'static str,
        /// The name given.
        got: String,
        /// The names that exist.
        expected: String,
    },
    /// An expert-parallel backend without expert parallelism.
    #[error(
        "the MoE backend {backend} needs expert parallelism; add --enable-expert-parallel, or choose auto or disabled"
    )]
    BackendNeedsExpertParallel {
        /// The backend asked for.
        backend: EpBackend,
    },
    /// Expert parallelism with the backend `disabled`.
    #[error(
        "expert parallelism is enabled but the MoE backend is disabled; drop --enable-expert-parallel, or choose \
         auto, local_allreduce, allgather_reducescatter or deepep"
    )]
    ExpertParallelDisabled,
    /// `local_allreduce` where ranks hold different tokens.
    #[error(
        "the MoE backend local_allreduce needs the same tokens on every rank, so dp must be 1, got {dp}; choose \
         auto, allgather_reducescatter or deepep"
    )]
    LocalAllreduceWithDp {
        /// Data-parallel size.
        dp: usize,
    },
    /// A DeepEP mode with another backend.
    #[error(
        "the DeepEP mode {mode} has no effect on the MoE backend {backend}; choose deepep, or the mode auto"
    )]
    ModeWithoutDeepEp {
        /// The mode's name.
        mode: &'static str,
        /// The backend in use.
        backend: EpBackend,
    },
    /// A number of experts that no placement has.
    #[error("the number of experts must be between 1 and {max}, got {got}")]
    ExpertCount {
        /// The number given.
        got: usize,
        /// The most that an i32 expert_map addresses.
        max: usize,
    },
    /// A size that the ranks do not divide.
    #[error("{what} {size} is not divisible by tp {tp}; choose a tp that divides it{hint}")]
    NotDivisible {
        /// The size's name.
        what: &'static str,
        /// The size.
        size: usize,
        /// Tensor-parallel size.
        tp: usize,
        /// What else helps, or nothing.
        hint: &'static str,
    },
    /// A row-parallel product that tp would cut inside one of its segments.
    #[error(
        "{what} {size} is added up in {segments} segments, which tp {tp} does not divide; choose a tp that \
         divides {segments}{hint}"
    )]
    Segments {
        /// The size's name.
        what: &'static str,
        /// The reduced size K.
        size: usize,
        /// Its number of segments S.
        segments: usize,
        /// Tensor-parallel size.
        tp: usize,
        /// What else helps, or nothing.
        hint: &'static str,
    },
    /// Heads that cannot be grouped.
    #[error(
        "{num_heads} query heads cannot be grouped over {num_kv_heads} KV heads; the latter must divide the former"
    )]
    HeadGroups {
        /// Query heads.
        num_heads: usize,
        /// KV heads.
        num_kv_heads: usize,
    },
    /// KV heads that can neither be split nor replicated.
    #[error(
        "{num_kv_heads} KV heads can neither be split over tp {tp} nor replicated; choose a tp that divides \
         {num_kv_heads} or is a multiple of it"
    )]
    KvHeads {
        /// KV heads.
        num_kv_heads: usize,
        /// Tensor-parallel size.
        tp: usize,
    },
}

impl From<GeometryError> for candle_core::Error {
    fn from(e: GeometryError) -> Self {
        candle_core::Error::msg(e)
    }
}
