//! Whether a prepare/finalize backend and an experts backend fit together, checked once when a
//! layer is built.

use candle_core::{Result, bail};
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
    /// Rows of an expert's block that it was built for: given in the BatchedExperts format only.
    pub max_rows: Option<usize>,
}

/// Fails unless the two sides fit: one format; a limit of rows given exactly in the BatchedExperts format
/// and large enough; a strategy that reduces that format; experts that reduce by themselves where rows
/// come with their weights, and not where the owners of rows weight them.
///
/// # Errors
/// The first rule that is broken, naming both sides.
pub fn check_composition(prepare: &dyn PrepareFinalize, experts: &ExpertsSide) -> Result<()> {
    let from = prepare.name();
    let by = experts.name;
    let handed = prepare.activation_format();
    let format = experts.activation_format;
    let strategy = experts.weight_and_reduce;
    if handed != format {
        bail!(
            "{from} hands over the {handed:?} format, but {by} takes {format:?}; choose a pair with one format"
        )
    }
    match (format, experts.max_rows, prepare.block_rows()) {
        (ActivationFormat::BatchedExperts, Some(rows), Some(filled)) if rows < filled => bail!(
            "{from} fills up to {filled} rows per expert (max_num_tokens * num_dispatchers), but {by} was built for {rows}"
        ),
        (ActivationFormat::BatchedExperts, Some(_), Some(_)) => {}
        (ActivationFormat::BatchedExperts, None, _) => {
            bail!("{by} takes the {format:?} format and must be told the most rows of an expert")
        }
        (ActivationFormat::BatchedExperts, _, None) => {
            bail!("{from} hands over the {format:?} format and must be told the most tokens of a rank")
        }
        (_, Some(rows), _) => {
            bail!("{by} takes the {format:?} format, whose rows have no limit, but was given one of {rows}")
        }
        (_, None, _) => {}
    }
    if !reduces(strategy, format) {
        bail!("{by} takes the {format:?} format, whose rows {strategy:?} cannot reduce")
    }
    if strategy != WeightAndReduce::NoOp {
        return Ok(());
    }
    if !prepare.combine().takes_reduced_rows() {
        bail!(
            "{by} weights and reduces by itself (NoOp), but {from} adds by slot: the owners of the rows of {} ranks \
             need them unweighted; add by rank, or choose experts that return unweighted rows",
            prepare.num_dispatchers()
        )
    }
    if format == ActivationFormat::BatchedExperts {
        bail!(
            "{by} weights and reduces by itself (NoOp), but {from} hands over blocks of rows without their weights; \
             choose experts that return unweighted rows"
        )
    }
    Ok(())
}
