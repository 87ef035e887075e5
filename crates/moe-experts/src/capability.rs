//! The abilities of a backend as plain data, and the checks that compare them with a specification.
//!
//! The order of the checks is that of vLLM's modular kernels (device, activation, quantisation,
//! parallel configuration, sizes, activation format, batch invariance), so that a
//! reader who knows one system finds the same first reason in the other.

use candle_core::DType;
use moe_kernels::{ActivationFormat, ExpertsSpec, QuantScheme};

use moe_kernels::plan::{Reason, Target, activation_kind, expect_codec};

/// One row of the oracle's table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capability {
    pub target: Target,
    /// The names of activations, in the form that [`activation_kind`] returns.
    pub activations: &'static [&'static str],
    pub bias: bool,
    /// Whether it also reads quantised weights, in all number formats that kernels have a codec for.
    pub quantised: bool,
    pub dtypes: &'static [DType],
    /// Whether experts may be split along their intermediate size.
    pub tensor_parallel: bool,
    pub hidden_multiple_of: usize,
    pub intermediate_multiple_of: usize,
    pub format: ActivationFormat,
    /// Whether it also takes rows in the Listed format. It does not need the lists.
    pub listed: bool,
    pub batch_invariant: bool,
}

impl Capability {
    /// The first check that fails, in the documented order.
    pub fn check(&self, spec: &ExpertsSpec) -> Result<(), Reason> {
        self.target.expect(spec.gpu.as_ref())?;
        self.check_weights(spec)?;
        self.check_layout(spec)
    }

    fn check_weights(&self, spec: &ExpertsSpec) -> Result<(), Reason> {
        if !self.activations.contains(&activation_kind(spec.activation)) {
            return Err(Reason::Activation { got: spec.activation, accepted: self.activations.to_vec() });
        }
        if spec.has_bias && !self.bias {
            return Err(Reason::Bias);
        }
        if spec.quant != QuantScheme::NONE {
            if !self.quantised {
                return Err(Reason::Quant { got: spec.quant });
            }
            expect_codec(spec.quant, spec.gpu.is_some())?;
        }
        if !self.dtypes.contains(&spec.dtype) {
            let accepted = self.dtypes.iter().map(DType::as_str).collect();
            return Err(Reason::Dtype { got: spec.dtype.as_str(), accepted });
        }
        Ok(())
    }

    fn check_layout(&self, spec: &ExpertsSpec) -> Result<(), Reason> {
        if spec.tp_size > 1 && !self.tensor_parallel {
            return Err(Reason::TensorParallel { tp_size: spec.tp_size });
        }
        for (dimension, multiple_of, got) in [
            ("hidden_size", self.hidden_multiple_of, spec.hidden_size),
            ("intermediate_size", self.intermediate_multiple_of, spec.intermediate_size),
        ] {
            if !got.is_multiple_of(multiple_of) {
                return Err(Reason::Shape { dimension, multiple_of, got });
            }
        }
        let listed = self.listed && spec.activation_format == ActivationFormat::Listed;
        if spec.activation_format != self.format && !listed {
            return Err(Reason::ActivationFormat { needs: self.format, got: spec.activation_format });
        }
        if spec.batch_invariant && !self.batch_invariant {
            return Err(Reason::BatchInvariance);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::tests::spec;
    use moe_kernels::plan::{Gpu, WARPGROUPS};
    use moe_kernels::{Activation, QuantGroup};

    /// A GPU kernel with many restrictions, so that every check can fail.
    const PICKY: Capability = Capability {
        target: Target::Tuned(WARPGROUPS),
        activations: &["swiglu"],
        bias: false,
        quantised: false,
        dtypes: &[DType::BF16],
        tensor_parallel: false,
        hidden_multiple_of: 64,
        intermediate_multiple_of: 32,
        format: ActivationFormat::Standard,
        listed: false,
        batch_invariant: false,
    };

    type Change = fn(&mut ExpertsSpec);

    /// Faults in the order of the checks: a change that causes the fault, its check, and a part of its text.
    const FAULTS: [(Change, &str, &str); 10] = [
        (
            |s| s.gpu = Gpu::new((8, 9), 101_376, 142).ok(),
            "device",
            "uses tensor maps and bulk copies, which its code for compute capability 8.9 does not have",
        ),
        (
            |s| s.activation = Activation::SwiGluOai { alpha: 1.5, limit: 7. },
            "activation",
            "swiglu_oai(alpha = 1.5, limit = 7); it has swiglu",
        ),
        (|s| s.has_bias = true, "bias", "adds no biases"),
        (|s| s.dtype = DType::F16, "dtype", "computes in bf16, but the activations are f16"),
        (|s| s.tp_size = 2, "tensor_parallel", "tp_size = 2"),
        (|s| s.hidden_size = 100, "shape", "hidden_size that is a multiple of 64, got 100"),
        (|s| s.intermediate_size = 33, "shape", "intermediate_size that is a multiple of 32, got 33"),
        (
            |s| s.activation_format = ActivationFormat::BatchedExperts,
            "activation_format",
            "takes rows in the Standard format, but prepare hands over BatchedExperts",
        ),
        (|s| s.batch_invariant = true, "batch_invariance", "depend on its batch"),
        (|s| s.gpu = None, "device", "but this rank computes on the CPU"),
    ];

    fn fitting() -> ExpertsSpec {
        ExpertsSpec {
            gpu: Some(Gpu::HOPPER),
            dtype: DType::BF16,
            hidden_size: 128,
            intermediate_size: 96,
            ..spec()
        }
    }

    #[test]
    fn each_check_fails_with_its_own_reason() {
        assert_eq!(PICKY.check(&fitting()), Ok(()));
        for (change, check, text) in FAULTS {
            let mut spec = fitting();
            change(&mut spec);
            let reason = PICKY.check(&spec).unwrap_err();
            assert_eq!(reason.check(), check);
            assert!(reason.to_string().contains(text), "{reason}");
        }
    }

    #[test]
    fn the_first_of_several_faults_is_the_reason() {
        // The last fault is again one of the first check.
        for first in 0..FAULTS.len() - 1 {
            let mut spec = fitting();
            FAULTS[first..FAULTS.len() - 1].iter().for_each(|(change, ..)| change(&mut spec));
            assert_eq!(PICKY.check(&spec).unwrap_err().check(), FAULTS[first].1);
        }
    }

    #[test]
    fn a_quantisation_scheme_that_is_not_read_is_refused() {
        let fp8 = QuantScheme::fp8(QuantGroup::Tensor);
        let int =
            |bits| QuantScheme::int(bits, QuantGroup::Size(32)).with_zero_points(true).with_act_order(true);
        let both = Capability { quantised: true, ..PICKY };
        for quant in [fp8, int(4), int(8)] {
            let spec = ExpertsSpec { quant, ..fitting() };
            assert_eq!(PICKY.check(&spec), Err(Reason::Quant { got: quant }));
            assert_eq!(both.check(&spec), Ok(()));
        }
        assert_eq!(both.check(&fitting()), Ok(()));
        let quant = int(3);
        assert_eq!(both.check(&ExpertsSpec { quant, ..fitting() }), Err(Reason::Quant { got: quant }));
    }
}
