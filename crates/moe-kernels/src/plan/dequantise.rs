//! Quantised matrices turned into floats on a GPU: which kernel writes them out.

use candle_core::DType;

use super::checks::expect_bf16;
use super::{Form, Machine, QuantWeights, Reason};

/// Packed matrices [.., n, k], and the floats into which they are converted.
#[derive(Clone, Copy, Debug)]
pub struct DequantiseCall {
    /// Rows of a matrix.
    pub n: usize,
    /// Columns of a matrix.
    pub k: usize,
    /// How they are quantised.
    pub quant: QuantWeights,
    /// Dtype of the floats.
    pub dtype: DType,
    /// Whether they begin at a multiple of 16 bytes.
    pub aligned: bool,
}

/// The kernels that turn a pack into floats; all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DequantiseForm {
    /// Packs that the fast kernels read, to bf16, at the rate of memory (`quant_dequantise`).
    Fast,
    /// Any scheme, shape and dtype (`any_dequantise`).
    Any,
}

impl DequantiseForm {
    /// The form for bf16 rows in scratch memory, which is aligned for every kernel.
    pub(super) fn for_blas(n: usize, k: usize, quant: QuantWeights) -> Self {
        let call = DequantiseCall { n, k, quant, dtype: DType::BF16, aligned: true };
        if call.expect_fast().is_ok() { Self::Fast } else { Self::Any }
    }
}

impl DequantiseCall {
    fn expect_fast(&self) -> Result<(), Reason> {
        expect_bf16(self.dtype)?;
        self.quant.expect_fast(self.n, self.k)?;
        self.quant.expect_order_of_x()?;
        if self.aligned { Ok(()) } else { Err(Reason::Alignment) }
    }
}

impl Form for DequantiseForm {
    type Call = DequantiseCall;

    const ALL: &'static [Self] = &[Self::Fast, Self::Any];

    fn name(self) -> &'static str {
        match self {
            Self::Fast => "quant_dequantise",
            Self::Any => "any_dequantise",
        }
    }

    fn fits(self, call: &DequantiseCall, machine: &Machine) -> Result<(), Reason> {
        machine.expect_gpu()?;
        match self {
            Self::Fast => call.expect_fast(),
            Self::Any => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{ColumnOrder, Gpu, LinearCall, LinearForm};
    use crate::scheme::{QuantGroup, QuantScheme};

    #[test]
    fn packs_of_the_fast_kernels_are_written_out_by_the_fast_one() {
        let int = |group, act_order| {
            QuantScheme::int(4, QuantGroup::Size(group)).with_zero_points(true).with_act_order(act_order)
        };
        let block = QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 });
        let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let order_of = |scheme: QuantScheme| match scheme.act_order {
            true => ColumnOrder::Sorted,
            false => ColumnOrder::Input,
        };
        let form = |scheme, scales, k, dtype, aligned| {
            let order = order_of(scheme);
            let quant = QuantWeights { scheme, scales, gate_up: false, in_blocks: false, order };
            DequantiseForm::choose(&DequantiseCall { n: 256, k, quant, dtype, aligned }, &machine)
        };
        let f16 = DType::F16;
        let bf16 = DType::BF16;
        let f32 = DType::F32;
        assert_eq!(form(int(32, false), f16, 512, bf16, true), Some(DequantiseForm::Fast));
        assert_eq!(form(block, f32, 512, bf16, true), Some(DequantiseForm::Fast));
        for other in [
            form(int(32, false), f16, 512, f32, true),
            form(int(32, false), f16, 512, bf16, false),
            form(int(48, false), f16, 480, bf16, true),
            form(int(32, true), f16, 512, bf16, true),
            form(int(32, false), f32, 512, bf16, true),
            form(block, f32, 72, bf16, true),
        ] {
            assert_eq!(other, Some(DequantiseForm::Any));
        }
        let explained = |scheme, scales, order, aligned| {
            let quant = Some(QuantWeights { scheme, scales, gate_up: false, in_blocks: false, order });
            let call = LinearCall { rows: 512, n: 256, k: 512, dtype: bf16, quant, bias: false, aligned };
            LinearForm::choose(&call, &machine).map(|form| (form.kernel(&call), form.orders_rows(&call)))
        };
        let blas = |kernel: &str, orders| Some((kernel.to_string(), orders));
        let sorted = int(32, true);
        for (got, want) in [
            (explained(block, f32, ColumnOrder::Input, true), blas("quant_dequantise + cublas", false)),
            // Rows of x are first put into the order of the columns, if a launch can do that.
            (
                explained(sorted, f16, ColumnOrder::Sorted, true),
                blas("order_rows + quant_dequantise + cublas", true),
            ),
            (explained(sorted, f16, ColumnOrder::Sorted, false), blas("any_dequantise + cublas", false)),
            (explained(sorted, f32, ColumnOrder::Sorted, true), blas("any_dequantise + cublas", false)),
            (explained(sorted, f16, ColumnOrder::Filled, true), blas("any_dequantise + cublas", false)),
        ] {
            assert_eq!(got, want);
        }
    }
}
