//! Which copies of an expert compute its rows in a step.
//!
//! A step of few rows waits for the experts' weights. A second copy reads the weights once more, and the rows that it
//! takes from the first copy save nothing there. So each expert's rows are computed by one of its copies. A step of
//! many rows waits for products, and copies share them.

use super::checks::expect_rows;
use super::{Form, Machine, QuantWeights, Rates, Reason};

/// The bits of a weight for which [`shared_rows`] holds.
const SHARED_BITS: usize = 16;

/// The number of rows per expert, on average, from which on the products of bf16 weights count. A weight of 2 bytes is
/// loaded while each row takes 2 FLOPs for it. So both take the same time if the number of rows is the number of FLOPs
/// for a byte (130 on an H200). Copies are for imbalanced experts, so half of that is used.
fn shared_rows(rates: &Rates) -> usize {
    (rates.flops / rates.read / 2).max(1) as usize
}

/// A step of experts with copies.
#[derive(Clone, Copy, Debug)]
pub struct CopiesCall {
    /// Tokens of all ranks that share the experts.
    pub tokens: usize,
    /// Slots per token K.
    pub top_k: usize,
    /// Logical experts E.
    pub experts: usize,
    /// How w13 and w2 are quantised; `None`: they are floats.
    pub quant: Option<[QuantWeights; 2]>,
}

/// Which copies compute the rows of an expert.
// This enum is exhaustive: a layer must say which tables a new form reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopiesForm {
    /// One of the copies.
    Sole,
    /// All copies, each with a share of the rows.
    Shared,
}

impl Form for CopiesForm {
    type Call = CopiesCall;

    const ALL: &'static [Self] = &[Self::Sole, Self::Shared];

    fn name(self) -> &'static str {
        match self {
            Self::Sole => "one copy of each expert",
            Self::Shared => "all copies of each expert",
        }
    }

    fn fits(self, call: &CopiesCall, machine: &Machine) -> Result<(), Reason> {
        if self == Self::Shared {
            return Ok(());
        }
        // Ranks on CPUs were not measured: they share their memory and reach the bound of products earlier.
        let gpu = machine.expect_gpu()?;
        let bits = call.quant.map_or(SHARED_BITS, |[w13, _]| w13.scheme.bits());
        let rows = (shared_rows(&gpu.rates) * bits).div_ceil(SHARED_BITS);
        expect_rows(..(rows * call.experts).div_ceil(call.top_k.max(1)), call.tokens)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::plan::{ColumnOrder, Gpu};
    use crate::scheme::{QuantGroup, QuantScheme};

    #[test]
    fn copies_share_the_rows_of_large_steps() {
        let call = CopiesCall { tokens: 1, top_k: 8, experts: 128, quant: None };
        let hopper = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let form = |tokens, call| CopiesForm::choose(&CopiesCall { tokens, ..call }, &hopper);
        assert_eq!((form(1, call), form(1023, call)), (Some(CopiesForm::Sole), Some(CopiesForm::Sole)));
        assert_eq!(form(1024, call), Some(CopiesForm::Shared));
        let scheme = QuantScheme::int(4, QuantGroup::Size(128)).with_zero_points(true);
        let weights = |gate_up| QuantWeights {
            scheme,
            scales: DType::F16,
            gate_up,
            in_blocks: false,
            order: ColumnOrder::Input,
        };
        let int4 = CopiesCall { quant: Some([weights(true), weights(false)]), ..call };
        assert_eq!((form(255, int4), form(256, int4)), (Some(CopiesForm::Sole), Some(CopiesForm::Shared)));
        assert_eq!(CopiesForm::choose(&call, &Machine::default()), Some(CopiesForm::Shared));
    }
}
