//! The arguments of prepare: their checks, and the rows from which the experts start.

use candle_core::{DType, Result, bail};
use moe_kernels::arguments::{Shaped, expect, expect_float, expect_matrix};
use moe_kernels::{Exec, Lent, View, scale_rows_into};

/// Token rows with the experts that routing chose for them.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// [T, H] model dtype; never written.
    pub hidden: View<'a>,
    /// [T, K] u32 physical ids. `u32::MAX` means no expert.
    pub topk_ids: View<'a>,
    /// [T, K] f32.
    pub topk_weights: View<'a>,
}

impl<'a> Tokens<'a> {
    /// Rows with ids and weights. Prepare checks their dims and dtypes.
    pub fn new(hidden: View<'a>, topk_ids: View<'a>, topk_weights: View<'a>) -> Self {
        Self { hidden, topk_ids, topk_weights }
    }

    /// A contiguous range of the tokens.
    ///
    /// # Errors
    /// The range goes beyond the tokens.
    pub fn narrow(self, start: usize, len: usize) -> Result<Self> {
        Ok(Self {
            hidden: self.hidden.narrow(start, len)?,
            topk_ids: self.topk_ids.narrow(start, len)?,
            topk_weights: self.topk_weights.narrow(start, len)?,
        })
    }

    /// Fails unless hidden is [T, H] of a float dtype, ids are [T, K] u32 and weights [T, K] f32.
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        check_tokens(name, &self.hidden, &self.topk_ids, &self.topk_weights)
    }

    /// The rows from which the experts start: the caller's own rows, or a copy multiplied by the router weight, which
    /// is defined for K = 1 only.
    pub(crate) fn input_rows(&self, name: &str, weight_on_input: bool, ex: &mut Exec) -> Result<Lent<'a>> {
        if !weight_on_input {
            return Ok(self.hidden.into());
        }
        let top_k = self.topk_ids.dims()[1];
        if top_k != 1 {
            bail!("{name}: apply_router_weight_on_input needs top_k = 1, got {top_k}")
        }
        let mut rows = ex.scratch(self.hidden.dtype(), self.hidden.dims())?;
        scale_rows_into(self.hidden, self.topk_weights, rows.view_mut(), ex)?;
        Ok(rows.into())
    }
}

/// This is [`Tokens::check`] for views and tensors.
pub(crate) fn check_tokens<S: Shaped>(name: &str, hidden: &S, topk_ids: &S, topk_weights: &S) -> Result<()> {
    let (tokens, _) = expect_matrix(name, "hidden", hidden)?;
    expect_float(name, "hidden", hidden)?;
    let (_, top_k) = expect_matrix(name, "topk_ids", topk_ids)?;
    expect(name, "topk_ids", topk_ids, DType::U32, &[tokens, top_k])?;
    expect(name, "topk_weights", topk_weights, DType::F32, &[tokens, top_k])
}
