//! The weights of a layer in f32, named relative to the layer. Modules of the runtime load them.

use std::collections::HashMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

/// The weights of a layer, by name.
#[derive(Clone, Default)]
pub struct Weights(pub HashMap<String, Tensor>);

impl Weights {
    /// Returns a tensor, such as `self_attn.q_proj.weight`.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.0.get(name).with_context(|| format!("the layer has no tensor {name}"))
    }

    /// Returns a builder from which a module loads these weights.
    pub fn var_builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.0.clone(), DType::F32, &Device::Cpu)
    }

    /// Returns `x` [T, k] times the transpose of a linear layer, plus its bias if it has one: [T, n].
    ///
    /// # Errors
    /// There is no such layer, or the sizes differ.
    pub fn linear(&self, module: &str, x: &Tensor) -> Result<Tensor> {
        let product = x.matmul(&self.get(&format!("{module}.weight"))?.t()?)?;
        Ok(match self.0.get(&format!("{module}.bias")) {
            Some(bias) => product.broadcast_add(bias)?,
            None => product,
        })
    }
}
