//! The gate of a router whose correction bias the checkpoint keeps elsewhere than next to the gate's weight.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use moe_kernels::names::{CorrectionBiasNames, TensorNames};

/// What a router loads its parameters from: the gate of the MLP at `mlp`, which shows the correction bias under its usual name.
pub fn router_gate<'a>(names: &TensorNames, mlp: &VarBuilder<'a>) -> VarBuilder<'a> {
    let bias = names.correction_bias;
    if bias == CorrectionBiasNames::USUAL {
        return mlp.pp(names.gate);
    }
    let stored = bias.stored(|name| mlp.contains_tensor(name));
    let shown = Shown { mlp: mlp.clone(), bias, stored };
    VarBuilder::from_backend(Box::new(shown), mlp.dtype(), mlp.device().clone()).pp(names.gate)
}

/// An MLP that shows its correction bias under the usual name and in the usual shape.
struct Shown<'a> {
    mlp: VarBuilder<'a>,
    bias: CorrectionBiasNames,
    stored: &'static str,
}

impl Shown<'_> {
    fn is_bias(&self, name: &str) -> bool {
        name == CorrectionBiasNames::USUAL.published
    }
}

impl SimpleBackend for Shown<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if !self.is_bias(name) {
            return self.mlp.get_with_hints_dtype(shape, name, init, dtype)?.to_device(device);
        }
        let dims = self.bias.dims(shape.elem_count());
        let bias = self.mlp.get_with_hints_dtype(dims, self.stored, init, dtype)?;
        bias.reshape(shape)?.to_device(device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if !self.is_bias(name) {
            return self.mlp.get_unchecked_dtype(name, dtype)?.to_device(device);
        }
        self.mlp.get_unchecked_dtype(self.stored, dtype)?.flatten_all()?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.mlp.contains_tensor(if self.is_bias(name) { self.stored } else { name })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn a_row_next_to_the_gate_is_shown_as_its_bias() -> Result<()> {
        let device = Device::Cpu;
        let tensors = HashMap::from([
            ("mlp.gate.weight".to_string(), Tensor::ones((3, 2), DType::F32, &device)?),
            ("mlp.statics.bias".to_string(), Tensor::new(&[[1f32, 2.0, 3.0]], &device)?),
        ]);
        let mlp = VarBuilder::from_tensors(tensors, DType::BF16, &device).pp("mlp");
        let correction_bias =
            CorrectionBiasNames { published: "statics.bias", packed: "gate.statics.bias", is_row: true };
        let gate = router_gate(&TensorNames { correction_bias, ..TensorNames::USUAL }, &mlp);
        let name = "e_score_correction_bias";
        assert!(
            gate.contains_tensor(name) && gate.contains_tensor("weight") && !gate.contains_tensor("bias")
        );
        let bias = gate.get_with_hints_dtype(3, name, Default::default(), DType::F32)?;
        assert_eq!(bias.to_vec1::<f32>()?, [1.0, 2.0, 3.0]);
        assert_eq!(gate.get_unchecked_dtype(name, DType::F32)?.dims(), [3]);
        assert_eq!(gate.get((3, 2), "weight")?.dtype(), DType::BF16);
        assert!(gate.get_with_hints_dtype(4, name, Default::default(), DType::F32).is_err());
        Ok(())
    }
}
