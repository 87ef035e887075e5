//! What a caller brings to prepare: the door check, and the rows that the experts start from.

use candle_core::{DType, Result, bail};
use moe_kernels::door::{expect_dims, expect_dtype, expect_matrix};
use moe_kernels::{Exec, Lent, View, scale_rows_into};

/// Token rows with the experts that routing chose for them.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// [T, H] model dtype; never written.
    pub hidden: View<'a>,
    /// [T, K] u32 physical ids, `u32::MAX` = no expert.
    pub topk_ids: View<'a>,
    /// [T, K] f32.
    pub topk_weights: View<'a>,
}

impl<'a> Tokens<'a> {
    /// Rows with ids and weights, whose dims and dtypes prepare checks.
    pub fn new(hidden: View<'a>, topk_ids: View<'a>, topk_weights: View<'a>) -> Self {
        Self { hidden, topk_ids, topk_weights }
    }

    /// Some of the tokens, one after the other.
    ///
    /// # Errors
    /// Tokens that there are not.
    pub fn narrow(self, start: usize, len: usize) -> Result<Self> {
        Ok(Self {
            hidden: self.hidden.narrow(start, len)?,
            topk_ids: self.topk_ids.narrow(start, len)?,
            topk_weights: self.topk_weights.narrow(start, len)?,
        })
    }

    /// Fails unless hidden is [T, H] of a float dtype, ids are [T, K] u32 and weights [T, K] f32.
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let Self { hidden, topk_ids, topk_weights } = self;
        let (tokens, _) = expect_matrix(name, "hidden", hidden)?;
        if !matches!(hidden.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            bail!("{name}: expected hidden of dtype f32, bf16 or f16, got {}", hidden.dtype().as_str())
        }
        let (_, top_k) = expect_matrix(name, "topk_ids", topk_ids)?;
        expect_dtype(name, "topk_ids", topk_ids, DType::U32)?;
        expect_dims(name, "topk_ids", topk_ids, &[tokens, top_k])?;
        expect_dtype(name, "topk_weights", topk_weights, DType::F32)?;
        expect_dims(name, "topk_weights", topk_weights, &[tokens, top_k])
    }

    /// The rows that the experts start from: the caller's own, or a copy with the router weight
    /// applied, which is defined for K = 1 only.
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
