//! Random weights under the names of a checkpoint, made when they are asked for, so that peak memory is the model's.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

/// Names and dims, and whether values are rounded to bf16 whatever dtype they are asked for in.
#[derive(Default)]
pub struct Tensors {
    dims: BTreeMap<String, Vec<usize>>,
    rounded: bool,
}

impl Tensors {
    pub fn put(&mut self, name: &str, dims: &[usize]) {
        self.dims.insert(name.to_string(), dims.to_vec());
    }

    /// The same tensors with values that bf16 holds, so that a model in f32 computes with the weights of one in bf16.
    pub fn rounded(self) -> Self {
        Self { rounded: true, ..self }
    }

    /// A checkpoint of these tensors in `dtype`.
    pub fn checkpoint(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }
}

/// The same values for the same name in every process, from a linear congruential generator that the name seeds.
fn values(name: &str, len: usize, scale: f32) -> Vec<f32> {
    let mut state =
        name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next() * scale).collect()
}

impl SimpleBackend for Tensors {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.dims.get(name) {
            Some(dims) if dims == shape.dims() => self.get_unchecked(name, dtype, device),
            Some(dims) => bail!("{name}: expected shape {shape:?}, the checkpoint has {dims:?}"),
            None => bail!("cannot find tensor {name}"),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(dims) = self.dims.get(name) else { bail!("cannot find tensor {name}") };
        if dims.len() == 1 {
            return Tensor::ones(dims.as_slice(), dtype, device);
        }
        // Uniform numbers of variance 1 / K.
        let scale = (12.0 / dims[1] as f32).sqrt();
        let values = values(name, dims.iter().product(), scale);
        let values = Tensor::from_vec(values, dims.as_slice(), &Device::Cpu)?;
        let values = if self.rounded { values.to_dtype(DType::BF16)? } else { values };
        values.to_dtype(dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.dims.contains_key(name)
    }
}
