//! Which copies of an expert compute its rows in a step.
//!
//! A step of few rows waits for the experts' weights: a second copy reads them once more, and what it takes off the first one
//! costs nothing there. So each expert's rows are then computed by one of its copies. A step of many rows waits for products,
//! and copies share them.

use super::checks::expect_rows;
use super::{Form, Machine, QuantWeights, Rates, Reason};

/// Bits of a weight for which [`shared_rows`] is.
const SHARED_BITS: usize = 16;

/// Rows per expert, on average, from which on the products of bf16 weights count. A weight of 2 bytes arrives while each row
/// takes 2 FLOPs of it, so both take as long at as many rows as the FLOPs for a byte (130 on an H200); imbalance, which
/// copies are for, makes products count at half of it.
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

/// Who computes the rows of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopiesForm {
    /// One of its copies.
    Sole,
    /// All of its copies, a share each.
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
        // Nothing was measured for ranks on CPUs, which share their memory and reach the products' bound sooner.
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
