//! Which products of many rows quantise their activations to FP8 because the weights are FP8 (W8A8).

use super::checks::{expect_bf16, expect_rows, expect_steps};
use super::quant::{QuantWeights, expect_quantised};
use super::{Fp8Activations, LinearCall, Machine, Reason, WARPGROUPS};
use crate::fp8::FP8_GROUP;
use crate::scheme::{Codes, QuantGroup};

/// From this many rows on, dense products with FP8 activations are not slower than with 16 bits if a separate launch
/// quantises the rows (17.7 and 17.8 us for qkv and o_proj of Qwen3-30B-A3B at 64 rows, 17.0 and 15.3 at 32, one H200).
/// They are 3 us faster if the launches before quantise them.
const LINEAR_ROWS: usize = 48;
/// From this many rows on, cuBLASLt is as fast, although the pack must be converted to rows for it: 47.6 us for both at
/// 512 rows and 47.4 without, 50.4 and 56.8 at 768.
const BLAS_ROWS: usize = 512;
/// Rows and columns of the weights that share a scale, for cuBLASLt.
const BLOCK: usize = 128;

impl QuantWeights {
    /// Whether the products with FP8 activations can read a matrix [n, k] with this quantisation.
    fn expect_fp8_activations(&self, n: usize, k: usize, allowed: Fp8Activations) -> Result<(), Reason> {
        if self.scheme.codes != Codes::E4m3 {
            return Err(Reason::Quant { got: self.scheme });
        }
        match (allowed, self.scheme.group) {
            (Fp8Activations::Off, _) => return Err(Reason::Activations { setting: allowed }),
            (Fp8Activations::On, _) | (_, QuantGroup::Block { k: FP8_GROUP, .. }) => {}
            _ => return Err(Reason::Activations { setting: allowed }),
        }
        expect_steps("k", k, FP8_GROUP)?;
        self.expect_fast(n, k)
    }
}

/// Whether products of matrices [n, k] with these weights may quantise their activations on this machine. With batch
/// invariance they may not, because few rows keep 16 bits.
///
/// # Errors
/// The first reason why not.
pub(super) fn expect_fp8_products(
    matrices: &[(Option<QuantWeights>, usize, usize)],
    machine: &Machine,
) -> Result<(), Reason> {
    for &(quant, n, k) in matrices {
        expect_quantised(quant)?.expect_fp8_activations(n, k, machine.fp8_activations)?;
    }
    machine.expect_tuned(WARPGROUPS)?;
    machine.expect_batch_variant()
}

/// Whether a dense product quantises its activations and multiplies the pack in the pack's own order.
///
/// # Errors
/// The first reason why not.
pub(super) fn expect_fp8_linear(call: &LinearCall, machine: &Machine) -> Result<(), Reason> {
    expect_fp8_products(&[(call.quant, call.n, call.k)], machine)?;
    expect_bf16(call.dtype)?;
    if call.quant.is_some_and(|quant| quant.gate_up) {
        return Err(Reason::Part { part: "gate and up rows in one pack" });
    }
    expect_rows(LINEAR_ROWS.., call.rows)?;
    if call.aligned { Ok(()) } else { Err(Reason::Alignment) }
}

/// Whether a dense product turns the pack into rows for cuBLASLt instead.
///
/// # Errors
/// The first reason why not.
pub(super) fn expect_fp8_blas(call: &LinearCall, machine: &Machine) -> Result<(), Reason> {
    expect_fp8_linear(call, machine)?;
    machine.expect_library()?;
    if call.bias {
        return Err(Reason::Bias);
    }
    expect_steps("n", call.n, BLOCK)?;
    match call.quant {
        Some(QuantWeights { in_blocks: false, .. }) => {
            Err(Reason::Part { part: "scales that change within 128 rows" })
        }
        _ => expect_rows(BLAS_ROWS.., call.rows),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::Fp8Order;
    use crate::plan::{ColumnOrder, EpilogueCall, ExpertsCall, ExpertsForm, Form, Gpu, LinearForm};
    use crate::scheme::QuantScheme;

    fn machine(fp8_activations: Fp8Activations) -> Machine {
        Machine { gpu: Some(Gpu::HOPPER), fp8_activations, ..Machine::default() }
    }

    fn weights(scales: QuantGroup, gate_up: bool) -> QuantWeights {
        QuantWeights {
            scheme: QuantScheme::fp8(scales),
            scales: DType::F32,
            gate_up,
            in_blocks: true,
            order: ColumnOrder::Input,
        }
    }

    #[test]
    fn experts_say_why_they_keep_16_bits() {
        let call = |tokens, inter, scales| ExpertsCall {
            tokens,
            top_k: 8,
            num_ids: 128,
            num_local: 128,
            hidden: 2048,
            inter,
            quant: Some([weights(scales, true), weights(scales, false)]),
            passes: 1,
            epilogue: EpilogueCall::PLAIN,
        };
        let block = QuantGroup::Block { n: 128, k: 128 };
        let [auto, on, off] = [Fp8Activations::Auto, Fp8Activations::On, Fp8Activations::Off].map(machine);
        let exact = Machine { batch_invariant: true, ..on };
        assert_eq!(ExpertsForm::choose(&call(8192, 768, block), &auto), Some(ExpertsForm::Fp8));
        assert_eq!(ExpertsForm::choose(&call(64, 768, block), &auto), Some(ExpertsForm::Tensor));
        assert_eq!(ExpertsForm::choose(&call(8192, 768, QuantGroup::Tensor), &on), Some(ExpertsForm::Fp8));
        assert_eq!(ExpertsForm::choose(&call(8192, 768, block), &off), Some(ExpertsForm::Wide));
        assert_eq!(ExpertsForm::choose(&call(8192, 768, block), &exact), Some(ExpertsForm::Tensor));
        let why = |call, machine: &Machine| {
            ExpertsForm::Fp8.fits(&call, machine).map_err(|reason| reason.to_string()).unwrap_err()
        };
        assert!(why(call(8192, 768, block), &off).contains("`fp8_activations` off"));
        assert!(why(call(8192, 768, QuantGroup::Channel), &auto).contains("`fp8_activations` auto"));
        assert!(why(call(8192, 704, block), &auto).contains("multiple of 128, got 704"));
        let floats = ExpertsCall { quant: None, ..call(8192, 768, block) };
        assert_eq!(ExpertsForm::Fp8.fits(&floats, &auto), Err(Reason::Floats));
    }

    #[test]
    fn dense_products_say_why_they_keep_16_bits() {
        let block = weights(QuantGroup::Block { n: 128, k: 128 }, false);
        let apart = QuantWeights { in_blocks: false, ..block };
        let call = |rows, quant| LinearCall {
            rows,
            n: 5120,
            k: 2048,
            dtype: DType::BF16,
            quant: Some(quant),
            bias: false,
            aligned: true,
        };
        let [auto, on, off] = [Fp8Activations::Auto, Fp8Activations::On, Fp8Activations::Off].map(machine);
        let exact = Machine { batch_invariant: true, ..on };
        for (call, machine, form) in [
            (call(8192, block), auto, LinearForm::Fp8Blas),
            (call(256, block), auto, LinearForm::Fp8),
            (call(32, block), auto, LinearForm::Tensor),
            (call(8192, apart), auto, LinearForm::Fp8),
            (LinearCall { bias: true, ..call(8192, block) }, auto, LinearForm::Fp8),
            (LinearCall { n: 160, ..call(8192, block) }, auto, LinearForm::Fp8),
            (LinearCall { k: 2112, ..call(8192, block) }, auto, LinearForm::QuantBlas),
            (LinearCall { aligned: false, ..call(256, block) }, auto, LinearForm::QuantAny),
            (call(8192, weights(QuantGroup::Channel, false)), auto, LinearForm::QuantBlas),
            (call(8192, weights(QuantGroup::Tensor, false)), on, LinearForm::Fp8Blas),
            (call(256, weights(QuantGroup::Block { n: 128, k: 128 }, true)), auto, LinearForm::Tensor),
            (call(8192, block), off, LinearForm::QuantBlas),
            (call(8192, block), exact, LinearForm::Tensor),
        ] {
            assert_eq!(LinearForm::choose(&call, &machine), Some(form), "{call:?} {machine:?}");
        }
        // The order in which the launch before writes rows; cuBLASLt takes only multiples of four rows.
        for (call, order) in [
            (call(256, block), Some(Fp8Order::Quads)),
            (call(131, block), Some(Fp8Order::Quads)),
            (call(8192, block), Some(Fp8Order::Rows)),
            (call(8191, block), None),
            (call(8191, apart), Some(Fp8Order::Quads)),
            (call(32, block), None),
        ] {
            let form = LinearForm::choose(&call, &auto).unwrap();
            assert_eq!(form.fp8_order(call.rows), order, "{call:?}");
            let adds = form == LinearForm::Fp8Blas;
            assert_eq!(form.adds(call.rows).is_ok(), adds, "{call:?}");
        }
        let why = |call: &LinearCall, machine: &Machine| {
            LinearForm::Fp8.fits(call, machine).map_err(|reason| reason.to_string()).unwrap_err()
        };
        assert!(why(&call(8192, block), &off).contains("`fp8_activations` off"));
        assert!(why(&call(32, block), &auto).contains("48"));
    }

    #[test]
    fn names_come_back() {
        for setting in [Fp8Activations::Auto, Fp8Activations::On, Fp8Activations::Off] {
            assert_eq!(setting.to_string().parse(), Ok(setting));
        }
        assert!("w8a8".parse::<Fp8Activations>().is_err());
    }
}
