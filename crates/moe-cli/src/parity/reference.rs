//! A recorded reference: what Hugging Face transformers computed for a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use model_runtime::ModelInfo;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// The tensors of `reference.safetensors`. All but ids and logits may be missing.
pub struct Reference {
    /// Sequences B.
    pub batch: usize,
    /// Tokens T of each sequence.
    pub length: usize,
    /// [B, T] token ids.
    pub input_ids: Vec<u32>,
    /// [B, T, V] f32.
    pub logits: Vec<f32>,
    /// [B, T, H] f32 by index: 0 = embeddings, i = after layer i, the last after the final norm.
    pub hidden_states: BTreeMap<usize, Vec<f32>>,
    /// [B * T, E] f32 by decoder layer.
    pub router_logits: BTreeMap<usize, Vec<f32>>,
    /// N and [B, N] greedy tokens.
    pub generated: Option<(usize, Vec<u32>)>,
    /// Relative error of transformers' own bf16 run.
    pub bf16_noise: Option<f32>,
}

impl Reference {
    /// Reads a reference and checks it against the model's sizes.
    pub fn read(path: &Path, info: &ModelInfo) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&bytes, info).with_context(|| format!("{} is not a usable reference", path.display()))
    }

    fn parse(bytes: &[u8], info: &ModelInfo) -> Result<Self> {
        let file = SafeTensors::deserialize(bytes)?;
        let ids = file.tensor("input_ids")?;
        let &[batch, length] = ids.shape() else {
            bail!("input_ids: expected [B, T], got {:?}", ids.shape())
        };
        ensure!(batch > 0 && length > 0, "input_ids: expected at least one token, got {:?}", ids.shape());
        let rows = batch * length;
        let mut reference = Self {
            batch,
            length,
            input_ids: token_ids("input_ids", &ids, info)?,
            logits: floats("logits", &file.tensor("logits")?, rows * info.vocab_size)?,
            hidden_states: BTreeMap::new(),
            router_logits: BTreeMap::new(),
            generated: None,
            bf16_noise: None,
        };
        for (name, tensor) in file.tensors() {
            reference.optional(&name, &tensor, info)?;
        }
        Ok(reference)
    }

    fn optional(&mut self, name: &str, tensor: &TensorView, info: &ModelInfo) -> Result<()> {
        let rows = self.batch * self.length;
        if let Some(index) = name.strip_prefix("hidden_states.") {
            let index: usize = index.parse().with_context(|| format!("{name} has no index"))?;
            ensure!(index <= info.num_layers, "{name}: the model has {} layers", info.num_layers);
            self.hidden_states.insert(index, floats(name, tensor, rows * info.hidden_size)?);
        } else if let Some(layer) = name.strip_prefix("router_logits.") {
            let layer: usize = layer.parse().with_context(|| format!("{name} has no layer"))?;
            let Some(moe) = info.moe.as_ref().filter(|moe| moe.layers.contains(&layer)) else {
                bail!("{name}: layer {layer} of the model has no router")
            };
            self.router_logits.insert(layer, floats(name, tensor, rows * moe.num_experts)?);
        } else if name == "generated" {
            let &[batch, count] = tensor.shape() else {
                bail!("generated: expected [B, N], got {:?}", tensor.shape())
            };
            ensure!(batch == self.batch, "generated: expected {} sequences, got {batch}", self.batch);
            self.generated = Some((count, token_ids(name, tensor, info)?));
        } else if name == "bf16_noise" {
            let noise = floats(name, tensor, 1)?.first().copied().unwrap_or(f32::NAN);
            ensure!(
                noise.is_finite() && noise > 0.,
                "bf16_noise: expected a finite number above 0, got {noise}"
            );
            self.bf16_noise = Some(noise);
        }
        Ok(())
    }

    /// The token ids of one sequence.
    pub fn sequence(&self, b: usize) -> &[u32] {
        &self.input_ids[b * self.length..(b + 1) * self.length]
    }
}

fn floats(name: &str, tensor: &TensorView, len: usize) -> Result<Vec<f32>> {
    ensure!(tensor.dtype() == Dtype::F32, "{name}: expected f32, got {:?}", tensor.dtype());
    let values: Vec<f32> = tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    ensure!(
        values.len() == len,
        "{name}: expected {len} values for this model and these input_ids, got dims {:?}",
        tensor.shape()
    );
    Ok(values)
}

fn token_ids(name: &str, tensor: &TensorView, info: &ModelInfo) -> Result<Vec<u32>> {
    ensure!(tensor.dtype() == Dtype::I64, "{name}: expected i64, got {:?}", tensor.dtype());
    let ids = tensor.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b));
    ids.map(|id| match u32::try_from(id) {
        Ok(valid) if (valid as usize) < info.vocab_size => Ok(valid),
        _ => bail!("{name}: token id {id} is outside of the vocabulary of {}", info.vocab_size),
    })
    .collect()
}
