//! The routing of a step for launches: where they record choices and read forced ones, and choices that spread evenly.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use candle_core::{DType, Result, bail};

use super::args::{BalanceIdsArgs, StepRoutingArgs};
use super::{CudaExec, ffi, small};
use crate::arguments::{expect, expect_dtype, expect_optional, expect_rank3};
use crate::exec::Exec;
use crate::step_routing::{ForcedWeights, LayerRouting};
use crate::view::{View, ViewMut};

impl StepRoutingArgs {
    /// Nothing is recorded or forced.
    pub(super) const NONE: Self =
        Self { heat: null_mut(), routed: null_mut(), forced: null(), stride: 0, keep_weights: 0 };

    /// The arguments for a layer, for launches over `tokens` rows that choose `top_k` of `experts`.
    pub(super) fn of(
        op: &str,
        routing: &LayerRouting<'_>,
        (tokens, experts, top_k): (usize, usize, usize),
        cuda: &CudaExec,
    ) -> Result<Self> {
        routing.check(op, tokens, experts, top_k)?;
        let (forced, weights) = routing.forced.unzip();
        Ok(Self {
            heat: cuda.read_or_null::<c_void>(op, "heat", routing.heat)?.cast_mut(),
            routed: cuda.read_or_null::<c_void>(op, "routed", routing.routed)?.cast_mut(),
            forced: cuda.read_or_null(op, "forced", forced)?,
            stride: small(op, routing.stride)?,
            keep_weights: i32::from(weights == Some(ForcedWeights::OfChosen)),
        })
    }
}

impl LayerRouting<'_> {
    /// Fails unless the arrays fit `experts` experts and `tokens` rows of `top_k` choices.
    fn check(&self, op: &str, tokens: usize, experts: usize, top_k: usize) -> Result<()> {
        expect_optional(op, "heat", self.heat.as_ref(), DType::U32, &[experts])?;
        let forced = self.forced.as_ref().map(|(ids, _)| ids);
        for (name, ids) in [("routed", self.routed.as_ref()), ("forced", forced)] {
            let Some(ids) = ids else { continue };
            expect_dtype(op, name, ids, DType::U32)?;
            let needed = tokens.saturating_sub(1) * self.stride + top_k;
            if tokens > 0 && (self.stride < top_k || ids.elem_count() < needed) {
                bail!(
                    "{op}: {name}: expected at least {needed} ids for {tokens} rows of {top_k}, got {} with {} from row to row",
                    ids.elem_count(),
                    self.stride
                )
            }
        }
        Ok(())
    }
}

/// Choices that spread evenly, as `StepContext::force_balance` has them: ids [T, L, K] u32 of `experts`, for rows and
/// MoE layers from `place` on. `step` \[1\] u32 is the number of the step.
///
/// # Errors
/// A CPU context; wrong dims or dtypes; more choices than experts.
pub fn balance_ids_into(
    seed: u64,
    step: View<'_>,
    place: (usize, usize),
    experts: usize,
    mut ids: ViewMut<'_>,
    ex: &Exec,
) -> Result<()> {
    let op = "balance_ids";
    let cuda = ex.cuda("balance_ids")?;
    let (rows, layers, top_k) = expect_rank3(op, "ids", &ids)?;
    expect(op, "ids", &ids, DType::U32, &[rows, layers, top_k])?;
    expect(op, "step", &step, DType::U32, &[1])?;
    if top_k > experts {
        bail!("{op}: expected at most {experts} choices, as many as experts, got {top_k}")
    }
    let args = BalanceIdsArgs {
        step: cuda.read(op, "step", step)?,
        ids: cuda.write(op, "ids", &mut ids)?,
        seed,
        rows: small(op, rows)?,
        layers: small(op, layers)?,
        top_k: small(op, top_k)?,
        experts: small(op, experts)?,
        first_row: place.0 as u32,
        first_layer: place.1 as u32,
    };
    // SAFETY: `ids` holds as many words as the launch writes, `step` one.
    cuda.check(op, unsafe { ffi::moe_balance_ids(&args, cuda.raw()?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_that_are_too_short_are_refused() {
        let ids = vec![0u32; 10];
        let heat = vec![0u32; 5];
        let view = |words: &'static [u32]| View::new(words, &[words.len()]).unwrap();
        let routing = LayerRouting {
            heat: Some(view(heat.leak())),
            routed: Some(view(ids.leak())),
            forced: None,
            stride: 6,
        };
        routing.check("test", 2, 5, 2).unwrap();
        let text = |result: Result<()>| result.unwrap_err().to_string();
        assert!(
            text(routing.check("test", 3, 5, 2)).contains("expected at least 14 ids for 3 rows of 2, got 10")
        );
        assert!(text(routing.check("test", 2, 6, 2)).contains("heat"));
        assert!(text(routing.check("test", 2, 5, 7)).contains("6 from row to row"));
    }
}
