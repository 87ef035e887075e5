//! Launches that contain the router: which of them computes a step, and with which fusion.

use candle_core::DType;

use super::checks::{expect_bf16, expect_gate};
use super::{ColumnOrder, ExpertsCall, Form, Fusion, Machine, QuantWeights, Reason, RouterCall, RouterForm};

/// A step of an expert layer with a router that the kernels support.
#[derive(Clone, Copy, Debug)]
pub struct MonolithicCall {
    /// Sizes on this rank.
    pub experts: ExpertsCall,
    /// Dtype of rows and weights.
    pub dtype: DType,
    /// Dtype of the gate: the same, or f32.
    pub gate: DType,
    /// The ops before and after that are to be computed in the same launches.
    pub fusion: Fusion,
}

/// The monolithic kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MonolithicForm {
    /// Everything in one launch, for a few tokens (`layer_stream`).
    OneLaunch,
    /// Router with lists of slots, FP8 weights with activations that become FP8, too, weighted sum (`gate_route`,
    /// `fp8_experts`, `combine`).
    Fp8,
    /// Router with lists of slots, warpgroup products in tiles of up to 256 rows, weighted sum: three launches
    /// (`gate_route`, `experts_wide`, `combine`).
    Wide,
    /// [`Wide`](Self::Wide) with the warpgroup products for fewer rows (`experts_tensor`).
    Tensor,
}

impl MonolithicForm {
    /// The name of the kernels for floats or for quantised weights, as `w13` is.
    pub fn name_of(self, w13: Option<QuantWeights>) -> &'static str {
        let sorted = w13.is_some_and(|w13| w13.order == ColumnOrder::Sorted);
        match (self, w13.is_some()) {
            (_, false) | (Self::Fp8, _) => self.name(),
            (Self::OneLaunch, true) => "quant_layer_stream",
            (Self::Wide, true) if sorted => "gate_route + order_rows + quant_experts_wide + combine",
            (Self::Wide, true) => "gate_route + quant_experts_wide + combine",
            (Self::Tensor, true) if sorted => "gate_route + order_rows + quant_experts_tensor + combine",
            (Self::Tensor, true) => "gate_route + quant_experts_tensor + combine",
        }
    }
}

impl Form for MonolithicForm {
    type Call = MonolithicCall;

    const ALL: &'static [Self] = &[Self::OneLaunch, Self::Fp8, Self::Wide, Self::Tensor];

    fn name(self) -> &'static str {
        match self {
            Self::OneLaunch => "layer_stream",
            Self::Fp8 => "gate_route + fp8_experts (W8A8: activations are quantised) + combine",
            Self::Wide => "gate_route + experts_wide + combine",
            Self::Tensor => "gate_route + experts_tensor + combine",
        }
    }

    fn kernel(self, call: &MonolithicCall) -> String {
        self.name_of(call.experts.quant.map(|[w13, _]| w13)).to_string()
    }

    fn fits(self, call: &MonolithicCall, machine: &Machine) -> Result<(), Reason> {
        expect_bf16(call.dtype)?;
        match (self, call.fusion) {
            (_, Fusion::Add) => Err(Reason::NoGain("the norm after the experts can add")),
            (Self::OneLaunch, Fusion::Nothing | Fusion::NormAdd) => {
                call.experts.fits_one_launch(machine)?;
                expect_gate(call.gate, call.dtype)
            }
            (Self::OneLaunch, Fusion::AddNorm) => {
                Err(Reason::NoGain("its blocks end at different times, so none sees whole rows to norm"))
            }
            (Self::Fp8 | Self::Wide | Self::Tensor, Fusion::Nothing | Fusion::AddNorm) => {
                let ExpertsCall { hidden, num_ids, top_k, .. } = call.experts;
                match self {
                    Self::Fp8 => call.experts.fits_fp8(machine)?,
                    Self::Wide => call.experts.fits_wide(machine)?,
                    _ => call.experts.fits_tensor(machine)?,
                }
                let router =
                    RouterCall { hidden, experts: num_ids, top_k, dtype: call.dtype, gate: call.gate };
                RouterForm::OneLaunch.fits(&router, machine)
            }
            (Self::Fp8, Fusion::NormAdd) if call.experts.quant.is_none() => Err(Reason::Floats),
            (Self::Fp8 | Self::Wide | Self::Tensor, Fusion::NormAdd) => {
                Err(Reason::NoGain("its router reads normed rows, which the launch before can write"))
            }
        }
    }
}
