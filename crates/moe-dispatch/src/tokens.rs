//! What a caller brings to prepare: the door check, and the rows that the experts start from.

use candle_core::{DType, Result, bail};
use moe_kernels::door::{expect_dims, expect_dtype, expect_matrix};
use moe_kernels::{Exec, Lent, View, scale_rows_into};

/// Checked arguments of a prepare call.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    name: &'static str,
    hidden: View<'a>,
    topk_weights: View<'a>,
    /// Slots per token K.
    pub top_k: usize,
}

impl<'a> Tokens<'a> {
    /// Fails unless hidden is [T, H] of a float dtype, ids are [T, K] u32 and weights [T, K] f32.
    pub fn check(
        name: &'static str,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
    ) -> Result<Self> {
        let (tokens, _) = expect_matrix(name, "hidden", &hidden)?;
        if !matches!(hidden.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            bail!("{name}: expected hidden of dtype f32, bf16 or f16, got {}", hidden.dtype().as_str())
        }
        let (_, top_k) = expect_matrix(name, "topk_ids", &topk_ids)?;
        expect_dtype(name, "topk_ids", &topk_ids, DType::U32)?;
        expect_dims(name, "topk_ids", &topk_ids, &[tokens, top_k])?;
        expect_dtype(name, "topk_weights", &topk_weights, DType::F32)?;
        expect_dims(name, "topk_weights", &topk_weights, &[tokens, top_k])?;
        Ok(Self { name, hidden, topk_weights, top_k })
    }

    /// The rows that the experts start from: the caller's own, or a copy with the router weight
    /// applied, which is defined for K = 1 only.
    pub fn input_rows(&self, router_weight_on_input: bool, ex: &mut Exec) -> Result<Lent<'a>> {
        if !router_weight_on_input {
            return Ok(self.hidden.into());
        }
        if self.top_k != 1 {
            bail!("{}: apply_router_weight_on_input needs top_k = 1, got {}", self.name, self.top_k)
        }
        let mut rows = ex.scratch(self.hidden.dtype(), self.hidden.dims())?;
        scale_rows_into(self.hidden, self.topk_weights, rows.view_mut(), ex)?;
        Ok(rows.into())
    }
}
