//! The weights of a layer in f32, by their names below the layer, as modules of the runtime load them.

use std::collections::HashMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

/// Weights of a layer.
#[derive(Clone, Default)]
pub struct Weights(pub HashMap<String, Tensor>);

impl Weights {
    /// A tensor, such as `self_attn.q_proj.weight`.
    ///
    /// # Errors
    /// No such tensor.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.0.get(name).with_context(|| format!("the layer has no tensor {name}"))
    }

    /// The module that is loaded from these.
    pub fn var_builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.0.clone(), DType::F32, &Device::Cpu)
    }

    /// `x` [T, k] times the transpose of a linear layer, with its bias if it has one, [T, n].
    ///
    /// # Errors
    /// No such layer; other sizes.
    pub fn linear(&self, module: &str, x: &Tensor) -> Result<Tensor> {
        let product = x.matmul(&self.get(&format!("{module}.weight"))?.t()?)?;
        Ok(match self.0.get(&format!("{module}.bias")) {
            Some(bias) => product.broadcast_add(bias)?,
            None => product,
        })
    }
}
