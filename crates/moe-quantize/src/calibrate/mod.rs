//! Quantises a checkpoint by GPTQ, layer by layer. The input of each layer is the output that the quantised layers
//! before it compute for the calibration text. Memory holds one layer in f32 and the hidden states of the text.

mod attention;
mod layer;
mod mlp;
mod text;
mod weights;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use model_runtime::{
    Attention, AttentionConfig, DecoderConfig, MlaAttention, MlaConfig, MlaForm, RmsNorm, RopeConfig,
    TensorNames,
};
use moe_engine::{AttentionSpec, ModelSpec};
use safetensors::Dtype;

use crate::job::Job;
use crate::plan::Item;
use crate::progress;
use crate::settings::Calibration;
use crate::source::Source;
use layer::Layer;
use weights::Weights;

pub use text::windows;

const NO_LINEAR_ATTENTION: &str =
    "calibration does not run layers of linear attention yet: such a model cannot be quantised with a text";

/// Quantises and writes all tensors of `job`.
///
/// # Errors
/// The text does not fit the model, weights or hidden states are not finite, or reading or writing fails.
pub fn run(source: &Source, job: &mut Job, calibration: &Calibration) -> Result<()> {
    let decoder = source.model.decoder();
    ensure!(!source.model.attention().has_linear(), NO_LINEAR_ATTENTION);
    let names = &decoder.names;
    let context = decoder.max_position_embeddings();
    let windows = windows(&source.dir, &calibration.text, decoder.vocab_size, context)?;
    let (layers, others) = by_layer(std::mem::take(&mut job.items), names.layers);
    let (copied, head): (Items, Items) = others.into_iter().partition(|(item, _)| item.linears.is_empty());
    for (item, dtype) in copied {
        let tensor = job.read(&item)?;
        job.copy(&item, dtype, &tensor)?;
    }
    let hidden = through_layers(source, job, calibration, layers, &windows)?;
    let mut layer = Layer::load(job, calibration, "", head)?;
    layer.quantise(&[names.lm_head], &hidden)?;
    layer.finish()
}

/// Quantises the layers. Returns the hidden states [T, H] f32 after the last norm, of all windows one after the other.
fn through_layers(
    source: &Source,
    job: &mut Job,
    calibration: &Calibration,
    mut layers: BTreeMap<usize, Items>,
    windows: &[Vec<u32>],
) -> Result<Tensor> {
    let decoder = source.model.decoder();
    let names = &decoder.names;
    let ids = Tensor::new(windows.concat().as_slice(), &Device::Cpu)?;
    let embedding = source.tensors.tensor(&format!("{}.weight", names.embedding))?;
    let mut hidden = embedding.index_select(&ids, 0)?.to_dtype(DType::F32)?;
    drop(embedding);
    let bar = progress::bar("layers", decoder.num_layers());
    for index in 0..decoder.num_layers() {
        let prefix = format!("{}.{index}.", names.layers);
        let mut layer = Layer::load(job, calibration, &prefix, layers.remove(&index).unwrap_or_default())?;
        hidden = (&hidden
            + attention(&mut layer, source.model.as_ref(), index, &hidden, calibration.text.length)?)?;
        let x = norm(&layer.weights, names.post_attention_norm, decoder.rms_norm_eps, &hidden)?;
        hidden = (&hidden + mlp(&mut layer, decoder, index, &x)?)?;
        layer.finish()?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let name = format!("{}.weight", names.norm);
    let weight = source.tensors.tensor(&name)?.to_dtype(DType::F32)?;
    Ok(RmsNorm::new(weight, decoder.rms_norm_eps)?.forward(&hidden)?)
}

type Items = Vec<(Item, Dtype)>;

/// Groups the items by layer. The second result has the items of no layer.
fn by_layer(items: Items, layers: &str) -> (BTreeMap<usize, Items>, Items) {
    let mut of_layer = BTreeMap::<usize, Items>::new();
    let mut others = Vec::new();
    for item in items {
        let rest = item.0.source.name.strip_prefix(layers).and_then(|rest| rest.strip_prefix('.'));
        match rest.and_then(|rest| rest.split('.').next()?.parse().ok()) {
            Some(index) => of_layer.entry(index).or_default().push(item),
            None => others.push(item),
        }
    }
    (of_layer, others)
}

fn norm(weights: &Weights, name: &str, eps: f64, x: &Tensor) -> Result<Tensor> {
    Ok(RmsNorm::new(weights.get(&format!("{name}.weight"))?.clone(), eps)?.forward(x)?)
}

fn mlp(layer: &mut Layer, decoder: &DecoderConfig, index: usize, x: &Tensor) -> Result<Tensor> {
    match decoder.moe.as_ref().filter(|_| decoder.is_sparse[index]) {
        Some(moe) => {
            let number = decoder.is_sparse[..index].iter().filter(|sparse| **sparse).count();
            mlp::sparse(layer, x, decoder, moe, number)
        }
        None => mlp::dense(layer, decoder.names.mlp, x, decoder),
    }
}

/// Quantises the attention of layer `index`. Returns its output [T, H] for the residual stream `hidden` [T, H].
fn attention(
    layer: &mut Layer,
    model: &dyn ModelSpec,
    index: usize,
    hidden: &Tensor,
    length: usize,
) -> Result<Tensor> {
    let decoder = model.decoder();
    let rope = decoder.rope.get(index).context("the model has no rotary embedding for this layer")?;
    let x = norm(&layer.weights, decoder.names.input_norm, decoder.rms_norm_eps, hidden)?;
    let names = &decoder.names;
    let (attended, o) = match model.attention() {
        AttentionSpec::Layers(mixers) => {
            let mixer = mixers.get(index).context("the model has no attention for this layer")?;
            let config = mixer.attention().context(NO_LINEAR_ATTENTION)?;
            (grouped_query(layer, config, decoder, rope, &x, length)?, names.grouped_query.o)
        }
        AttentionSpec::Latent(config) => (latent(layer, config, decoder, rope, &x, length)?, names.latent.o),
    };
    let o = below_attention(names, o);
    layer.quantise(&[o.as_str()], &attended)?;
    layer.weights.linear(&o, &attended)
}

/// Returns the name of a module of a layer's attention, relative to the layer.
fn below_attention(names: &TensorNames, module: &str) -> String {
    format!("{}.{module}", names.attention)
}

/// Quantises q, k and v. Returns the input of the output product.
fn grouped_query(
    layer: &mut Layer,
    config: &AttentionConfig,
    decoder: &DecoderConfig,
    rope: &RopeConfig,
    x: &Tensor,
    length: usize,
) -> Result<Tensor> {
    let (below, names) = (|name: &str| below_attention(&decoder.names, name), decoder.names.grouped_query);
    let inputs = [names.q, names.k, names.v].map(below);
    layer.quantise(&inputs.each_ref().map(String::as_str), x)?;
    let kv = config.kv_layout(DType::F32);
    let probe = AttentionConfig { o_bias: false, ..config.clone() };
    let sizes = (config.hidden_size, config.num_heads * config.head_dim, length);
    attention::attended(x, sizes, rope, kv, |identity| {
        let mut weights = layer.weights.clone();
        weights.0.insert(format!("{}.weight", below(names.o)), identity);
        Ok(Attention::load(probe.clone(), names, weights.var_builder().pp(decoder.names.attention))?)
    })
}

/// Quantises the projections of latent attention. Returns the input of the output product.
fn latent(
    layer: &mut Layer,
    config: &MlaConfig,
    decoder: &DecoderConfig,
    rope: &RopeConfig,
    x: &Tensor,
    length: usize,
) -> Result<Tensor> {
    let names = decoder.names.latent;
    let mla = MlaConfig { form: MlaForm::Naive, ..config.clone() };
    let module = |name: &str| below_attention(&decoder.names, name);
    let q = module(names.q);
    let q_a = module(names.q_a);
    let q_b = module(names.q_b);
    let kv_a = module(names.kv_a);
    let kv_b = module(names.kv_b);
    layer.quantise(&[q.as_str(), q_a.as_str(), kv_a.as_str()], x)?;
    if mla.q_lora_rank.is_some() {
        let low = layer.weights.linear(&q_a, x)?;
        let low = norm(&layer.weights, &module(names.q_a_norm), mla.norm_eps, &low)?;
        layer.quantise(&[q_b.as_str()], &low)?;
    }
    let low = layer.weights.linear(&kv_a, x)?.narrow(1, 0, mla.kv_lora_rank)?.contiguous()?;
    let low = norm(&layer.weights, &module(names.kv_a_norm), mla.norm_eps, &low)?;
    layer.quantise(&[kv_b.as_str()], &low)?;
    let h = mla.hidden_size;
    let width = mla.num_heads * mla.v_head_dim;
    let kv = mla.kv_layout(DType::F32);
    attention::attended(x, (h, width, length), rope, kv, |identity| {
        let mut weights = layer.weights.clone();
        weights.0.insert(format!("{}.weight", module(names.o)), identity);
        if mla.bias {
            let none = Tensor::zeros(h, DType::F32, &Device::Cpu)?;
            weights.0.insert(format!("{}.bias", module(names.o)), none);
        }
        Ok(MlaAttention::load(mla.clone(), names, weights.var_builder().pp(decoder.names.attention))?)
    })
}

#[cfg(test)]
mod tests;
