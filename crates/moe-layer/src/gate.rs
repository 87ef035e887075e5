//! The gate of a block, as it is loaded: the router, and the weight from which the logits are computed.

use candle_nn::VarBuilder;
use moe_kernels::candle::{DType, Device, Result, Tensor};
use moe_kernels::{Float, with_float};
use moe_router::Router;

use crate::options::BlockOptions;

/// The router with its tensors, which every rank holds.
pub(crate) struct Gate {
    pub router: Router,
    /// [E + zero experts, H], in the dtype of the model or in f32.
    pub weight: Tensor,
    /// [E + zero experts] of the weight's dtype, if the router is configured with one.
    pub bias: Option<Tensor>,
}

impl Gate {
    pub fn load(options: &BlockOptions, vb: VarBuilder) -> Result<Self> {
        let config = &options.router;
        let router = Router::load(config, vb.clone())?;
        let dims = (config.num_logits(), options.hidden_size);
        let weight = if config.f32_gate { exact(dims, &vb)? } else { vb.get(dims, "weight")? };
        let bias = || vb.to_dtype(weight.dtype()).get(config.num_logits(), "bias");
        let bias = config.gate_bias.then(bias).transpose()?;
        Ok(Self { router, weight, bias })
    }
}

/// The weight with all of its digits: in the dtype of `vb` if this dtype holds every value, and otherwise in f32.
///
/// The first case is a checkpoint in the model's dtype. Its products equal the products of the weight widened to f32,
/// because the rows are in the model's dtype, too: the product of two bf16 or two f16 values has at most 22 significant
/// bits, so f32 holds it exactly, and every kernel sums products in f32. Only the order of the sums may differ, as
/// between any two kernels. So kernels that read both in the model's dtype may compute the logits.
///
/// In the second case bf16 would move a value by up to 2^-8 of itself, and with it the logits. Two experts that differ
/// in later digits alone would become one, and other experts would be chosen.
fn exact(dims: (usize, usize), vb: &VarBuilder) -> Result<Tensor> {
    let host = vb.to_dtype(DType::F32).set_device(Device::Cpu);
    let weight = host.get(dims, "weight")?;
    let values = weight.flatten_all()?.to_vec1::<f32>()?;
    let dtype = vb.dtype();
    let holds_all = with_float!(dtype, "router gate", T => {
        Ok(values.iter().all(|value| T::narrow(*value).widen() == *value))
    })?;
    weight.to_dtype(if holds_all { dtype } else { DType::F32 })?.to_device(vb.device())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use moe_router::RouterConfig;

    use super::*;

    fn load(values: [f32; 4], f32_gate: bool, dtype: DType) -> Result<Gate> {
        let weight = Tensor::from_vec(values.to_vec(), (2, 2), &Device::Cpu)?;
        let bias = Tensor::new(&[0.1f32, 0.2], &Device::Cpu)?;
        let tensors = HashMap::from([("weight".to_string(), weight), ("bias".to_string(), bias)]);
        let router = RouterConfig { f32_gate, gate_bias: true, ..RouterConfig::new(2, 1) };
        Gate::load(&BlockOptions::new(router, 2, 1), VarBuilder::from_tensors(tensors, dtype, &Device::Cpu))
    }

    #[test]
    fn a_gate_keeps_its_digits_where_the_reference_does() -> Result<()> {
        // f16 has three bits more than bf16, and a smaller range.
        let in_bf16 = [1.0, -2.5, 0.015625, -0.0];
        let in_f16 = [1.0 + 1.0 / 1024.0, -2.5, 0.0, -0.0];
        let in_neither = [1.0, 1.00001, -2.5, 0.0];
        for (values, dtype, f32_gate, kept) in [
            (in_bf16, DType::BF16, true, DType::BF16),
            (in_f16, DType::BF16, true, DType::F32),
            (in_f16, DType::F16, true, DType::F16),
            ([1e30, 0.0, 0.0, 0.0], DType::F16, true, DType::F32),
            (in_neither, DType::BF16, true, DType::F32),
            (in_neither, DType::F16, true, DType::F32),
            (in_neither, DType::F32, true, DType::F32),
            (in_neither, DType::BF16, false, DType::BF16),
        ] {
            let gate = load(values, f32_gate, dtype)?;
            assert_eq!(gate.weight.dtype(), kept, "{values:?} in {dtype:?}");
            assert_eq!(gate.bias.map(|bias| bias.dtype()), Some(kept), "{values:?} in {dtype:?}");
            if f32_gate {
                let got = gate.weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                assert_eq!(got, values, "{dtype:?}");
            }
        }
        Ok(())
    }
}
