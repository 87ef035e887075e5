//! The gate of a router, for checkpoints that do not store the correction bias next to the gate's weight.

use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use moe_kernels::candle::{DType, Device, Result, Shape, Tensor};
use moe_kernels::names::CorrectionBiasNames;

use super::names::BlockNames;

/// Returns the builder from which a router loads its parameters: the gate of the block under `block`. The correction
/// bias has its usual name and its usual shape there.
pub fn router_gate<'a>(names: &BlockNames, block: &VarBuilder<'a>) -> VarBuilder<'a> {
    let bias = names.correction_bias;
    let gate = block.pp(names.gate);
    if bias == CorrectionBiasNames::USUAL {
        return gate;
    }
    let stored = bias.stored(|name| block.contains_tensor(name));
    let shown = format!("{}.e_score_correction_bias", gate.prefix());
    let backend = Shown { block: block.clone(), bias, stored, shown };
    VarBuilder::from_backend(Box::new(backend), block.dtype(), block.device().clone()).pp(gate.prefix())
}

/// A view of a checkpoint in which a block's correction bias has another name.
struct Shown<'a> {
    block: VarBuilder<'a>,
    bias: CorrectionBiasNames,
    /// The name in the checkpoint, below the block.
    stored: &'static str,
    /// The name that loaders use, from the root.
    shown: String,
}

impl SimpleBackend for Shown<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if name != self.shown {
            return self.block.root().get_with_hints_dtype(shape, name, init, dtype)?.to_device(device);
        }
        let dims = self.bias.dims(shape.elem_count());
        let bias = self.block.get_with_hints_dtype(dims, self.stored, init, dtype)?;
        bias.reshape(shape)?.to_device(device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if name != self.shown {
            return self.block.root().get_unchecked_dtype(name, dtype)?.to_device(device);
        }
        self.block.get_unchecked_dtype(self.stored, dtype)?.flatten_all()?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        match name == self.shown {
            true => self.block.contains_tensor(self.stored),
            false => self.block.root().contains_tensor(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn a_bias_elsewhere_is_shown_next_to_the_gate() -> Result<()> {
        let device = Device::Cpu;
        let stored = HashMap::from([
            ("model.mlp.router.weight".to_string(), Tensor::ones((3, 2), DType::F32, &device)?),
            ("model.mlp.statics.bias".to_string(), Tensor::new(&[[1f32, 2.0, 3.0]], &device)?),
        ]);
        let vb = VarBuilder::from_tensors(stored, DType::BF16, &device);
        let correction_bias =
            CorrectionBiasNames { published: "statics.bias", packed: "router.bias", is_row: true };
        let names = BlockNames { gate: "router", correction_bias, ..BlockNames::USUAL };
        for mlp in [vb.pp("model.mlp"), vb.pp("model").pp("mlp")] {
            let gate = router_gate(&names, &mlp);
            let name = "e_score_correction_bias";
            assert_eq!(gate.prefix(), "model.mlp.router");
            let bias = gate.get_with_hints_dtype(3, name, Init::default(), DType::F32)?;
            assert_eq!(bias.to_vec1::<f32>()?, [1.0, 2.0, 3.0]);
            assert_eq!(gate.get_unchecked_dtype(name, DType::F32)?.dims(), [3]);
            assert_eq!(gate.get((3, 2), "weight")?.dtype(), DType::BF16);
            assert!(gate.contains_tensor(name) && gate.contains_tensor("weight"));
            assert!(!gate.contains_tensor("tid2eid") && !gate.contains_tensor("bias"));
            assert!(gate.get_with_hints_dtype(4, name, Init::default(), DType::F32).is_err());
        }
        Ok(())
    }
}
