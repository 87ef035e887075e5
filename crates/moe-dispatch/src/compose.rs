//! Whether a prepare/finalize backend and an experts backend fit together, checked once when a
//! layer is built.

use moe_kernels::{ActivationFormat, WeightAndReduce};

use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::reduces;

/// What an experts backend declares about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsSide<'a> {
    /// The name in error messages.
    pub name: &'a str,
    /// The layout of the rows that it takes.
    pub activation_format: ActivationFormat,
    /// What remains to be done with the rows that it returns; `Delegate` for unweighted rows.
    pub weight_and_reduce: WeightAndReduce,
    /// Tokens per dispatcher that it was built for: given in the BatchedExperts format only.
    pub max_num_tokens: Option<usize>,
    /// Dispatchers that it was built for: given in the BatchedExperts format only.
    pub num_dispatchers: Option<usize>,
}

/// Why prepare/finalize and experts do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompositionError {
    /// The two sides speak different formats.
    #[error(
        "{prepare} hands over the {prepare_format:?} format, but {experts} takes {experts_format:?}; \
         choose a pair with one format"
    )]
    Format {
        /// Name of the prepare side.
        prepare: String,
        /// Its format.
        prepare_format: ActivationFormat,
        /// Name of the experts side.
        experts: String,
        /// Its format.
        experts_format: ActivationFormat,
    },
    /// Rows outside of blocks have no fixed number, so a limit would be meaningless.
    #[error(
        "{experts} takes the {format:?} format and must not be given max_num_tokens or num_dispatchers, \
         got {max_num_tokens:?} and {num_dispatchers:?}"
    )]
    UnexpectedLimits {
        /// Name of the experts side.
        experts: String,
        /// Its format.
        format: ActivationFormat,
        /// What it was given.
        max_num_tokens: Option<usize>,
        /// What it was given.
        num_dispatchers: Option<usize>,
    },
    /// Batched buffers are sized by both limits.
    #[error(
        "{side} uses the BatchedExperts format and must be given max_num_tokens and num_dispatchers, \
         got {max_num_tokens:?} and {num_dispatchers:?}"
    )]
    MissingLimits {
        /// Name of the side that lacks them.
        side: String,
        /// What it was given.
        max_num_tokens: Option<usize>,
        /// What it was given.
        num_dispatchers: Option<usize>,
    },
    /// The experts have less room than prepare fills.
    #[error(
        "{prepare} fills up to {expected} rows per expert (max_num_tokens * num_dispatchers), \
         but {experts} was built for {got}"
    )]
    Room {
        /// Name of the prepare side.
        prepare: String,
        /// Rows that it may fill.
        expected: usize,
        /// Name of the experts side.
        experts: String,
        /// Rows that they were built for.
        got: usize,
    },
    /// The strategy reduces another format.
    #[error("{experts} takes the {format:?} format, whose rows {strategy:?} cannot reduce")]
    Strategy {
        /// Name of the experts side.
        experts: String,
        /// Its format.
        format: ActivationFormat,
        /// Its strategy.
        strategy: WeightAndReduce,
    },
    /// Blocks of rows carry no weights.
    #[error(
        "{experts} weights and reduces by itself (NoOp), but {prepare} hands over blocks of rows without their \
         weights; choose experts that return unweighted rows"
    )]
    ReducesBlocks {
        /// Name of the prepare side.
        prepare: String,
        /// Name of the experts side.
        experts: String,
    },
    /// By slot only the owner of a token may weight and add.
    #[error(
        "{experts} weights and reduces by itself (NoOp), but {prepare} adds by slot: the owners of the rows of \
         {num_dispatchers} ranks need them unweighted; add by rank, or choose experts that return unweighted rows"
    )]
    ReducesAcrossRanks {
        /// Name of the prepare side.
        prepare: String,
        /// Ranks whose tokens arrive.
        num_dispatchers: usize,
        /// Name of the experts side.
        experts: String,
    },
}

/// Fails unless the two sides fit: one format; limits given exactly in the BatchedExperts format
/// and large enough; a strategy that reduces that format; experts that reduce by themselves where rows
/// come with their weights, and not where the owners of rows weight them.
///
/// # Errors
/// The first rule that is broken, naming both sides.
pub fn check_composition(
    prepare: &dyn PrepareFinalize,
    experts: &ExpertsSide,
) -> Result<(), CompositionError> {
    let (prepare_name, experts_name) = (prepare.name().to_string(), experts.name.to_string());
    let format = experts.activation_format;
    if prepare.activation_format() != format {
        return Err(CompositionError::Format {
            prepare: prepare_name,
            prepare_format: prepare.activation_format(),
            experts: experts_name,
            experts_format: format,
        });
    }
    check_limits(prepare, experts)?;
    if !reduces(experts.weight_and_reduce, format) {
        let strategy = experts.weight_and_reduce;
        return Err(CompositionError::Strategy { experts: experts_name, format, strategy });
    }
    if experts.weight_and_reduce != WeightAndReduce::NoOp {
        return Ok(());
    }
    if !prepare.combine().takes_reduced_rows() {
        return Err(CompositionError::ReducesAcrossRanks {
            prepare: prepare_name,
            num_dispatchers: prepare.num_dispatchers(),
            experts: experts_name,
        });
    }
    if format == ActivationFormat::BatchedExperts {
        return Err(CompositionError::ReducesBlocks { prepare: prepare_name, experts: experts_name });
    }
    Ok(())
}

fn check_limits(prepare: &dyn PrepareFinalize, experts: &ExpertsSide) -> Result<(), CompositionError> {
    let (max_num_tokens, num_dispatchers) = (experts.max_num_tokens, experts.num_dispatchers);
    if experts.activation_format != ActivationFormat::BatchedExperts {
        return match (max_num_tokens, num_dispatchers) {
            (None, None) => Ok(()),
            _ => Err(CompositionError::UnexpectedLimits {
                experts: experts.name.to_string(),
                format: experts.activation_format,
                max_num_tokens,
                num_dispatchers,
            }),
        };
    }
    let (Some(tokens), Some(dispatchers)) = (max_num_tokens, num_dispatchers) else {
        let side = experts.name.to_string();
        return Err(CompositionError::MissingLimits { side, max_num_tokens, num_dispatchers });
    };
    let Some(most) = prepare.max_num_tokens_per_rank() else {
        return Err(CompositionError::MissingLimits {
            side: prepare.name().to_string(),
            max_num_tokens: None,
            num_dispatchers: Some(prepare.num_dispatchers()),
        });
    };
    let expected = most.saturating_mul(prepare.num_dispatchers());
    let got = tokens.saturating_mul(dispatchers);
    if got < expected {
        return Err(CompositionError::Room {
            prepare: prepare.name().to_string(),
            expected,
            experts: experts.name.to_string(),
            got,
        });
    }
    Ok(())
}
