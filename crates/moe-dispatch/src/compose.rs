//! Whether a prepare/finalize backend and an experts backend fit together, checked once when a
//! layer is built.

use candle_core::Result;
use moe_kernels::{ActivationFormat, WeightAndReduce};

use crate::error::refuse;
use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::reduces;

/// What an experts backend declares about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsSide<'a> {
    /// Its name in error messages.
    pub name: &'a str,
    /// The layout of the rows that it takes as input.
    pub activation_format: ActivationFormat,
    /// What remains to be done with its output rows; `Delegate` for unweighted rows.
    pub weight_and_reduce: WeightAndReduce,
    /// The number of rows in an expert's block for which it was built. It is only given in the BatchedExperts format.
    pub max_rows: Option<usize>,
}

/// Fails unless the two sides fit. Both must have one format. A limit of rows must be given in the BatchedExperts
/// format, be large enough, and not be given in other formats. The strategy must be able to reduce the format. Experts
/// may reduce by themselves only if rows come with their weights, and not if the rows' owners weight them.
///
/// # Errors
/// The first rule that is broken; the message names both sides.
pub fn check_composition(prepare: &dyn PrepareFinalize, experts: &ExpertsSide) -> Result<()> {
    let from = prepare.name();
    let by = experts.name;
    let handed = prepare.activation_format();
    let format = experts.activation_format;
    let strategy = experts.weight_and_reduce;
    if handed != format {
        refuse!(
            Composition,
            "{from} hands over the {handed:?} format, but {by} takes {format:?}; choose a pair with one format"
        )
    }
    match (format, experts.max_rows, prepare.block_rows()) {
        (ActivationFormat::BatchedExperts, Some(rows), Some(filled)) if rows < filled => refuse!(
            Composition,
            "{from} fills up to {filled} rows per expert (max_num_tokens * num_dispatchers), but {by} was built for {rows}"
        ),
        (ActivationFormat::BatchedExperts, Some(_), Some(_)) => {}
        (ActivationFormat::BatchedExperts, None, _) => {
            refuse!(
                Composition,
                "{by} takes the {format:?} format and must be told the most rows of an expert"
            )
        }
        (ActivationFormat::BatchedExperts, _, None) => {
            refuse!(
                Composition,
                "{from} hands over the {format:?} format and must be told the most tokens of a rank"
            )
        }
        (_, Some(rows), _) => {
            refuse!(
                Composition,
                "{by} takes the {format:?} format, whose rows have no limit, but was given one of {rows}"
            )
        }
        (_, None, _) => {}
    }
    if !reduces(strategy, format) {
        refuse!(Composition, "{by} takes the {format:?} format, whose rows {strategy:?} cannot reduce")
    }
    if strategy != WeightAndReduce::NoOp {
        return Ok(());
    }
    if !prepare.combine().takes_reduced_rows() {
        refuse!(
            Composition,
            "{by} weights and reduces by itself (NoOp), but {from} adds by slot: the owners of the rows of {} ranks \
             need them unweighted; add by rank, or choose experts that return unweighted rows",
            prepare.num_dispatchers()
        )
    }
    if format == ActivationFormat::BatchedExperts {
        refuse!(
            Composition,
            "{by} weights and reduces by itself (NoOp), but {from} hands over blocks of rows without their weights; \
             choose experts that return unweighted rows"
        )
    }
    Ok(())
}
