//! What an expert layer computes in addition to its products.

use candle_core::{DType, Result, bail};

use crate::arguments::expect_optional;
use crate::cuda::CudaExec;
use crate::cuda::args::ExpertEpilogueArgs;
use crate::plan::{EpilogueCall, activation_name};
use crate::tags::Activation;
use crate::view::View;

/// The biases of the experts' products and the activation between them.
#[derive(Clone, Copy, Debug)]
pub struct ExpertEpilogue<'a> {
    /// [E_local, 2I] bf16: gate, then up.
    pub w13_bias: Option<View<'a>>,
    /// [E_local, H] bf16.
    pub w2_bias: Option<View<'a>>,
    /// The activation of gate and up.
    pub activation: Activation,
}

impl ExpertEpilogue<'_> {
    /// SwiGLU without biases.
    pub const PLAIN: Self = Self { w13_bias: None, w2_bias: None, activation: Activation::SwiGlu };

    /// Checks the biases of experts of these sizes.
    pub(super) fn check(&self, op: &str, [num_local, hidden, inter]: [usize; 3]) -> Result<EpilogueCall> {
        let Self { w13_bias, w2_bias, activation } = *self;
        expect_optional(op, "w13_bias", w13_bias.as_ref(), DType::BF16, &[num_local, 2 * inter])?;
        expect_optional(op, "w2_bias", w2_bias.as_ref(), DType::BF16, &[num_local, hidden])?;
        Ok(EpilogueCall { bias: w13_bias.is_some() || w2_bias.is_some(), activation })
    }

    /// The launchers' arguments.
    ///
    /// # Errors
    /// Another activation than SwiGLU and that of gpt-oss.
    pub(super) fn args(&self, op: &str, cuda: &CudaExec) -> Result<ExpertEpilogueArgs> {
        let [alpha, limit, shift] = match self.activation {
            Activation::SwiGlu => [1.0, f32::INFINITY, 0.0],
            Activation::SwiGluOai { alpha, limit } => [alpha, limit, 1.0],
            other => bail!("{op}: the kernels of whole expert layers have no {}", activation_name(other)),
        };
        Ok(ExpertEpilogueArgs {
            w13_bias: cuda.read_or_null(op, "w13_bias", self.w13_bias)?,
            w2_bias: cuda.read_or_null(op, "w2_bias", self.w2_bias)?,
            alpha,
            limit,
            shift,
        })
    }
}
