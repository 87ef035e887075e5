//! Prompts over latent rows: with keys and values of every head, or in latent space.

use candle_core::DType;

use super::checks::{expect_bf16, expect_rows};
use super::{Form, Machine, Reason, WARPGROUPS};

/// From this many rows on the products that make keys and values cost less than attention in latent space.
const EXPANDED_ROWS: usize = 256;
/// Most bytes of the keys and values that are made for a prompt.
const EXPANDED_BYTES: usize = 4 << 30;
/// Sizes that the kernels are compiled for: of the latent, of the parts of a key, of a value.
const SIZES: [usize; 4] = [512, 128, 64, 128];
/// Shared memory of attention over these keys and values, bytes; the kernel asserts the same.
const SHARED_BYTES: usize = 214_016;

/// Rows of prompts over latent rows.
#[derive(Clone, Copy, Debug)]
pub struct PromptCall {
    /// Rows T.
    pub rows: usize,
    /// Positions that they see, over their sequences; `None` in a plan, where there are no sequences yet: as many as
    /// rows.
    pub positions: Option<usize>,
    /// Query heads.
    pub num_heads: usize,
    /// Sizes L of the latent, N and R of the parts of a key, V of a value.
    pub dims: [usize; 4],
    /// Dtype of the cache.
    pub dtype: DType,
    /// Whether all views begin at multiples of 16 bytes.
    pub aligned: bool,
}

/// How [`mla_prompt_into`](crate::mla_prompt_into) computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PromptForm {
    /// Keys and values of every head, then attention on Hopper's warpgroup products (`mla_expand`, cuBLAS,
    /// `attention_expanded`).
    Expanded,
    /// In latent space.
    Latent,
}

impl Form for PromptForm {
    type Call = PromptCall;

    const ALL: &'static [Self] = &[Self::Expanded, Self::Latent];

    fn name(self) -> &'static str {
        match self {
            Self::Expanded => "mla_expand + cublas + attention_expanded",
            Self::Latent => "in latent space",
        }
    }

    fn fits(self, call: &PromptCall, machine: &Machine) -> Result<(), Reason> {
        if self == Self::Latent {
            return Ok(());
        }
        machine.expect_tuned(WARPGROUPS)?.expect_shared_memory(SHARED_BYTES)?;
        machine.expect_batch_variant()?;
        expect_bf16(call.dtype)?;
        if call.dims != SIZES {
            return Err(Reason::Part { part: "latent rows of other sizes than DeepSeek's" });
        }
        expect_rows(EXPANDED_ROWS.., call.rows)?;
        let [_, n, r, v] = call.dims;
        let positions = call.positions.unwrap_or(call.rows);
        let needs = positions.saturating_mul(call.num_heads).saturating_mul(2 * (n + r + v));
        if needs > EXPANDED_BYTES {
            return Err(Reason::Memory { needs, has: EXPANDED_BYTES });
        }
        if call.aligned { Ok(()) } else { Err(Reason::Alignment) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Gpu;

    #[test]
    fn many_rows_of_deepseeks_sizes_are_expanded() {
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let call = PromptCall {
            rows: 4096,
            positions: None,
            num_heads: 16,
            dims: [512, 128, 64, 128],
            dtype: DType::BF16,
            aligned: true,
        };
        let form = |call: &PromptCall, machine: &Machine| PromptForm::choose(call, machine);
        assert_eq!(form(&call, &hopper), Some(PromptForm::Expanded));
        let exact = Machine { batch_invariant: true, ..hopper };
        for machine in [exact, Machine::default()] {
            assert_eq!(form(&call, &machine), Some(PromptForm::Latent));
        }
        for other in [
            PromptCall { rows: 255, ..call },
            PromptCall { positions: Some(1 << 20), ..call },
            PromptCall { dims: [512, 128, 64, 64], ..call },
            PromptCall { dtype: DType::F16, ..call },
            PromptCall { aligned: false, ..call },
        ] {
            assert_eq!(form(&other, &hopper), Some(PromptForm::Latent), "{other:?}");
        }
    }
}
