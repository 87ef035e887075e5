//! A recorded reference: the results of Hugging Face transformers for a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::DType;
use model_runtime::checkpoint::TensorFiles;
use model_runtime::config::limits;
use model_runtime::{Config, ModelInfo};
use moe_layer::hf::NUM_EXPERTS;
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

/// The sizes of a model that a reference must match. Its sequences may be longer than the context, because transformers
/// computes these, too.
pub struct Sizes {
    vocab_size: usize,
    hidden_size: usize,
    num_layers: usize,
    /// `None` if only the family knows it.
    num_experts: Option<usize>,
    /// Decoder layers with a router; `None`: only the family knows.
    routed_layers: Option<Vec<usize>>,
}

impl Sizes {
    /// The sizes of a loaded model.
    pub fn of(info: &ModelInfo) -> Self {
        let moe = info.moe.as_ref();
        Self {
            vocab_size: info.vocab_size,
            hidden_size: info.hidden_size,
            num_layers: info.num_layers,
            num_experts: Some(moe.map_or(0, |moe| moe.num_experts)),
            routed_layers: Some(moe.map(|moe| moe.layers.clone()).unwrap_or_default()),
        }
    }

    /// The sizes as far as a config gives them, before weights are read.
    pub fn of_config(config: &Config) -> Result<Self> {
        Ok(Self {
            vocab_size: config.size(&["vocab_size"], limits::VOCAB)?,
            hidden_size: config.size(&["hidden_size"], limits::WIDTH)?,
            num_layers: config.size(&["num_hidden_layers"], limits::LAYERS)?,
            num_experts: config.opt_size(&NUM_EXPERTS, limits::EXPERTS)?,
            routed_layers: None,
        })
    }

    /// The number of values of an f32 tensor over `rows` tokens; `None` for a tensor of another kind.
    fn values(&self, name: &str, rows: usize) -> Result<Option<usize>> {
        if let Some(index) = name.strip_prefix("hidden_states.") {
            let index: usize = index.parse().with_context(|| format!("{name} has no index"))?;
            ensure!(index <= self.num_layers, "{name}: the model has {} layers", self.num_layers);
            return Ok(Some(rows.saturating_mul(self.hidden_size)));
        }
        if let Some(layer) = name.strip_prefix("router_logits.") {
            let layer: usize = layer.parse().with_context(|| format!("{name} has no layer"))?;
            let has_router = match &self.routed_layers {
                Some(layers) => layers.contains(&layer),
                None => layer < self.num_layers,
            };
            ensure!(has_router, "{name}: layer {layer} of the model has no router");
            return Ok(self.num_experts.map(|experts| rows.saturating_mul(experts)));
        }
        Ok(match name {
            "logits" => Some(rows.saturating_mul(self.vocab_size)),
            "bf16_noise" => Some(1),
            _ => None,
        })
    }
}

impl Reference {
    /// Checks the header of a reference, and its token ids: whether it can belong to this model. Nothing large is read.
    pub fn check_header(path: &Path, sizes: &Sizes) -> Result<()> {
        let check = || -> Result<()> {
            let file = TensorFiles::open_file(path)?;
            let shape = |name: &str| file.info(name).map(|tensor| tensor.shape);
            let &[batch, length] = shape("input_ids").context("it has no tensor input_ids")? else {
                bail!("input_ids: expected [B, T], got {:?}", shape("input_ids").unwrap_or_default())
            };
            ensure!(shape("logits").is_some(), "it has no tensor logits");
            let rows = batch.saturating_mul(length);
            for tensor in file.iter() {
                let Some(expected) = sizes.values(tensor.name, rows)? else { continue };
                check_values(tensor.name, tensor.shape, expected)?;
            }
            let ids = file.tensor("input_ids")?.flatten_all()?;
            ensure!(ids.dtype() == DType::I64, "input_ids: expected i64, got {:?}", ids.dtype());
            ids.to_vec1()?.into_iter().try_for_each(|id| token_id("input_ids", id, sizes).map(drop))
        };
        check().with_context(|| format!("{} is not a usable reference", path.display()))
    }

    /// Reads a reference and checks it against the model's sizes.
    pub fn read(path: &Path, sizes: &Sizes) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&bytes, sizes).with_context(|| format!("{} is not a usable reference", path.display()))
    }

    fn parse(bytes: &[u8], sizes: &Sizes) -> Result<Self> {
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
            input_ids: token_ids("input_ids", &ids, sizes)?,
            logits: floats("logits", &file.tensor("logits")?, rows * sizes.vocab_size)?,
            hidden_states: BTreeMap::new(),
            router_logits: BTreeMap::new(),
            generated: None,
            bf16_noise: None,
        };
        for (name, tensor) in file.tensors() {
            reference.optional(&name, &tensor, sizes)?;
        }
        Ok(reference)
    }

    fn optional(&mut self, name: &str, tensor: &TensorView, sizes: &Sizes) -> Result<()> {
        if name == "generated" {
            let &[batch, count] = tensor.shape() else {
                bail!("generated: expected [B, N], got {:?}", tensor.shape())
            };
            ensure!(batch == self.batch, "generated: expected {} sequences, got {batch}", self.batch);
            self.generated = Some((count, token_ids(name, tensor, sizes)?));
            return Ok(());
        }
        let values = sizes.values(name, self.batch * self.length)?.filter(|_| name != "logits");
        let Some(values) = values.map(|len| floats(name, tensor, len)).transpose()? else { return Ok(()) };
        match name.rsplit_once('.').map(|(kind, index)| (kind, index.parse())) {
            Some(("hidden_states", Ok(index))) => drop(self.hidden_states.insert(index, values)),
            Some(("router_logits", Ok(layer))) => drop(self.router_logits.insert(layer, values)),
            _ => {
                let noise = values.first().copied().unwrap_or(f32::NAN);
                ensure!(
                    noise.is_finite() && noise > 0.,
                    "bf16_noise: expected a finite number above 0, got {noise}"
                );
                self.bf16_noise = Some(noise);
            }
        }
        Ok(())
    }

    /// The token ids of one sequence.
    pub fn sequence(&self, b: usize) -> &[u32] {
        &self.input_ids[b * self.length..(b + 1) * self.length]
    }
}

fn check_values(name: &str, shape: &[usize], expected: usize) -> Result<()> {
    let values = shape.iter().fold(1, |n: usize, &dim| n.saturating_mul(dim));
    ensure!(
        values == expected,
        "{name}: expected {expected} values for this model and these input_ids, got dims {shape:?}"
    );
    Ok(())
}

fn floats(name: &str, tensor: &TensorView, len: usize) -> Result<Vec<f32>> {
    ensure!(tensor.dtype() == Dtype::F32, "{name}: expected f32, got {:?}", tensor.dtype());
    check_values(name, tensor.shape(), len)?;
    Ok(tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn token_ids(name: &str, tensor: &TensorView, sizes: &Sizes) -> Result<Vec<u32>> {
    ensure!(tensor.dtype() == Dtype::I64, "{name}: expected i64, got {:?}", tensor.dtype());
    let ids = tensor.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b));
    ids.map(|id| token_id(name, id, sizes)).collect()
}

fn token_id(name: &str, id: i64, sizes: &Sizes) -> Result<u32> {
    let vocab_size = sizes.vocab_size;
    match u32::try_from(id) {
        Ok(valid) if (valid as usize) < vocab_size => Ok(valid),
        _ => bail!("{name}: token id {id} is outside of the vocabulary of {vocab_size}"),
    }
}
