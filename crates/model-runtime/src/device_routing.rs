//! The routing arrays of steps on a CUDA device ([`StepContext::routing`]): made, filled and read.

use std::sync::Arc;

use candle_core::{DType, Result, bail};

use moe_kernels::cuda::{PinnedWords, balance_ids_into};
use moe_kernels::{
    Buffer, DeviceRouting, Exec, ExpertHeat, ForcedWeights, NO_EXPERT, RoutedExperts, StepContext, View,
};

use crate::model::MoeInfo;

/// Arrays for steps of up to a number of rows. The array of forced choices is allocated when a step first forces some.
/// No graph is being captured then, because each step runs once before its graph is captured.
pub struct RoutingArrays {
    moe: MoeInfo,
    rows: usize,
    heat: Option<Arc<Buffer>>,
    routed: Option<Arc<Buffer>>,
    forced: Option<Arc<Buffer>>,
    /// Page-locked memory for forced choices that are about to be copied; two arrays are used in turn.
    pinned: Option<[PinnedWords; 2]>,
    turn: usize,
}

impl RoutingArrays {
    /// Makes the arrays for steps of up to `rows` rows of a model with these experts. `counts` and `records` say
    /// whether choices are counted, and whether they are kept.
    ///
    /// # Errors
    /// A device without the memory.
    pub fn new(moe: &MoeInfo, rows: usize, counts: bool, records: bool, ex: &Exec) -> Result<Self> {
        let MoeInfo { layers, num_experts, top_k } = moe;
        let array = |wanted: bool, dims: &[usize]| {
            wanted.then(|| ex.zeros(DType::U32, dims).map(Arc::new)).transpose()
        };
        Ok(Self {
            heat: array(counts, &[layers.len(), *num_experts])?,
            routed: array(records, &[rows, layers.len(), *top_k])?,
            forced: None,
            pinned: None,
            turn: 0,
            rows,
            moe: moe.clone(),
        })
    }

    /// Ids of a row, in all MoE layers.
    fn row_len(&self) -> usize {
        self.moe.layers.len() * self.moe.top_k
    }

    /// Copies the choices of `replay`, to force them on the first of `rows` rows; the other rows choose freely. Returns
    /// at once.
    ///
    /// # Errors
    /// More rows than there is room for, a replay of another model, no memory.
    pub fn replay(&mut self, replay: Option<&RoutedExperts>, rows: usize, ex: &Exec) -> Result<()> {
        let row_len = self.row_len();
        let most = self.rows * self.row_len();
        let ids = replay.map_or(&[][..], RoutedExperts::ids);
        if rows > self.rows || ids.len() > rows * row_len || !ids.len().is_multiple_of(row_len.max(1)) {
            bail!(
                "replayed routing of {} ids does not fit {rows} rows of {row_len}, of at most {}",
                ids.len(),
                self.rows
            )
        }
        let pinned = match &mut self.pinned {
            Some(pinned) => pinned,
            none => none.insert([ex.pinned(most)?, ex.pinned(most)?]),
        };
        self.turn = 1 - self.turn;
        let pinned = &mut pinned[self.turn];
        let (own, free) = pinned.wait()?[..rows * row_len].split_at_mut(ids.len());
        own.copy_from_slice(ids);
        free.fill(NO_EXPERT);
        let forced = forced(&mut self.forced, [self.rows, self.moe.layers.len(), self.moe.top_k], ex)?;
        ex.upload(pinned, forced.view_mut().narrow(0, rows)?)
    }

    /// Spreads the choices of `rows` rows evenly, by a launch; `step` \[1\] u32 is the number of the step.
    ///
    /// # Errors
    /// More choices than experts; no memory.
    pub fn balance(&mut self, seed: u64, step: View<'_>, rows: usize, ex: &Exec) -> Result<()> {
        let forced = forced(&mut self.forced, [self.rows, self.moe.layers.len(), self.moe.top_k], ex)?;
        let ids = forced.view_mut().narrow(0, rows)?;
        balance_ids_into(seed, step, (0, 0), self.moe.num_experts, ids, ex)
    }

    /// The arrays for a step that forces choices or does not. The step's context shares them: as long as it does, no
    /// choices can be forced on another step.
    pub fn of_step(&self, forced: Option<ForcedWeights>) -> DeviceRouting {
        DeviceRouting {
            heat: self.heat.clone(),
            routed: self.routed.clone(),
            forced: self.forced.clone().zip(forced),
        }
    }

    /// The counts of all steps so far, [L_moe, E] u32 modulo 2^32, if there are any.
    pub fn heat(&self) -> Option<View<'_>> {
        self.heat.as_ref().map(|heat| heat.view())
    }

    /// The choices of the last step's first `rows` rows, [rows, L_moe, K] u32, if they are kept.
    ///
    /// # Errors
    /// More rows than there are.
    pub fn routed(&self, rows: usize) -> Result<Option<View<'_>>> {
        self.routed.as_ref().map(|routed| routed.view().narrow(0, rows)).transpose()
    }
}

/// The array of forced choices, exclusively.
fn forced<'a>(array: &'a mut Option<Arc<Buffer>>, dims: [usize; 3], ex: &Exec) -> Result<&'a mut Buffer> {
    let array = match array {
        Some(array) => array,
        none => none.insert(Arc::new(ex.zeros(DType::U32, &dims)?)),
    };
    match Arc::get_mut(array) {
        Some(array) => Ok(array),
        None => bail!("forced routing: the array is still lent to another step"),
    }
}

/// Runs a step of `rows` rows whose context records or forces routing in host memory. Arrays on the device do this
/// instead, so that the step uses the same kernels as any other. Their contents are then copied to the context, for
/// which this waits for the device.
///
/// # Errors
/// Any error of `run`; a context for another model or step. The context then asks for the same as before.
pub(crate) fn with_arrays(
    moe: &MoeInfo,
    rows: usize,
    number: View<'_>,
    context: &mut StepContext,
    ex: &mut Exec,
    run: impl FnOnce(&mut StepContext, &mut Exec) -> Result<()>,
) -> Result<()> {
    let (arrays, forced) = arrays_for(moe, rows, number, context, ex)?;
    // While the arrays do this, host memory neither records nor forces anything.
    let capture = context.capture.take();
    let heat = context.heat.take();
    let replay = context.replay.take();
    let balance = context.force_balance.take();
    context.routing = arrays.of_step(forced);
    let ran = run(context, ex);
    context.routing = DeviceRouting::default();
    (context.capture, context.heat) = (capture, heat);
    (context.replay, context.force_balance) = (replay, balance);
    ran?;
    bring_back(moe, rows, &arrays, context, ex)
}

/// Makes the arrays that the context asks for, filled with the choices that it forces. Also returns which weights
/// forced experts get.
fn arrays_for(
    moe: &MoeInfo,
    rows: usize,
    number: View<'_>,
    context: &StepContext,
    ex: &Exec,
) -> Result<(RoutingArrays, Option<ForcedWeights>)> {
    let counts = context.heat.is_some();
    let records = context.capture.is_some();
    let forced = match (context.force_balance, &context.replay) {
        (Some(_), Some(_)) => bail!("force_balance and replay both dictate the experts; use one of them"),
        (Some(_), None) => Some(ForcedWeights::OfChosen),
        (None, Some(replay)) => {
            replay.check(rows, moe.layers.len(), moe.top_k, moe.num_experts)?;
            Some(ForcedWeights::OfForced)
        }
        (None, None) => None,
    };
    let mut arrays = RoutingArrays::new(moe, rows, counts, records, ex)?;
    if let Some(seed) = context.force_balance {
        arrays.balance(seed, number, rows, ex)?;
    }
    if let Some(replay) = &context.replay {
        arrays.replay(Some(replay), rows, ex)?;
    }
    Ok((arrays, forced))
}

/// Adds the counts of a step to the context's, and replaces the captured choices by the step's.
fn bring_back(
    moe: &MoeInfo,
    rows: usize,
    arrays: &RoutingArrays,
    context: &mut StepContext,
    ex: &Exec,
) -> Result<()> {
    if let (Some(sums), Some(counts)) = (&mut context.heat, arrays.heat()) {
        let counts = ex.to_host(counts)?;
        let counts = counts.view().cpu::<u32>()?.iter().map(|&count| u64::from(count)).collect();
        sums.add(&ExpertHeat::from_counts(moe.num_experts, counts)?);
    }
    if let (Some(capture), Some(ids)) = (&mut context.capture, arrays.routed(rows)?) {
        let ids = ex.to_host(ids)?.view().cpu::<u32>()?.to_vec();
        *capture = RoutedExperts::from_ids(rows, moe.layers.len(), moe.top_k, ids)?;
    }
    Ok(())
}
