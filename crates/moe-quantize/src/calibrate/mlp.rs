//! Quantises MLPs and experts. Each expert is calibrated on the tokens that the router sends to it.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use model_runtime::{DecoderConfig, MoeConfig, TensorNames, router_gate};
use moe_kernels::{Activation, NO_EXPERT, gated_activation_into, with_tensors};
use moe_layer::{BlockContext, BlockOptions, GatedMlp, MoePath, Router, SharedExperts, load_layer_on};

use super::layer::Layer;

/// The number of tokens that run through the experts at once.
const ROWS: usize = 4096;

/// Quantises a dense MLP for its inputs `x` [T, H], and returns its output [T, H].
pub fn dense(layer: &mut Layer, prefix: &str, x: &Tensor, decoder: &DecoderConfig) -> Result<Tensor> {
    let activation = decoder.activation;
    let [gate, up, down] = decoder.names.matrices.matrices().map(|name| format!("{prefix}.{name}"));
    layer.quantise(&[gate.as_str(), up.as_str()], x)?;
    let activated = match x.dims()[0] {
        // candle cannot multiply matrices without rows.
        0 => Tensor::zeros(
            (0, layer.weights.get(&format!("{down}.weight"))?.dims()[1]),
            DType::F32,
            &Device::Cpu,
        )?,
        _ => gated(&layer.weights.linear(&gate, x)?, &layer.weights.linear(&up, x)?, activation)?,
    };
    layer.quantise(&[down.as_str()], &activated)?;
    match x.dims()[0] {
        0 => Ok(x.clone()),
        _ => layer.weights.linear(&down, &activated),
    }
}

fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    Ok(with_tensors([gate, up], [], |[gate, up], [], ex| {
        let mut out = ex.output(DType::F32, gate.dims())?;
        gated_activation_into(gate, up, activation, out.view_mut(), ex)?;
        out.into_tensor()
    })?)
}

/// The prefixes of the modules of a sparse layer, relative to the layer.
struct Block {
    mlp: String,
    gate: String,
    experts: String,
    shared: Option<String>,
    shared_gate: Option<String>,
}

impl Block {
    fn new(layer: &Layer, decoder: &DecoderConfig, moe: &MoeConfig) -> Self {
        let names = &decoder.names;
        let mlp = names.sparse_mlp(|name| layer.weights.0.contains_key(name));
        let below = |name: &str| format!("{mlp}.{name}");
        let shared = names.shared_experts.filter(|_| moe.shared_intermediate_size > 0);
        Self {
            gate: below(names.gate),
            experts: below(names.experts),
            shared: shared.map(below),
            shared_gate: names.shared_expert_gate.map(below),
            mlp: mlp.to_string(),
        }
    }

    /// Returns the builder from which the router loads its parameters.
    fn router<'a>(&self, vb: &VarBuilder<'a>, names: &TensorNames) -> VarBuilder<'a> {
        router_gate(names, &vb.pp(&self.mlp))
    }
}

/// Quantises the experts of a sparse layer, each for the tokens that the router sends to it. Returns the block's output
/// [T, H]. `number` counts the sparse layers.
pub fn sparse(
    layer: &mut Layer,
    x: &Tensor,
    decoder: &DecoderConfig,
    moe: &MoeConfig,
    number: usize,
) -> Result<Tensor> {
    let block = Block::new(layer, decoder, moe);
    let tokens = tokens_of_experts(layer, &block, x, decoder, moe)?;
    for (expert, rows) in tokens.into_iter().enumerate() {
        let rows = Tensor::new(rows.as_slice(), &Device::Cpu)?;
        let x = match rows.elem_count() {
            0 => x.narrow(0, 0, 0)?,
            _ => x.index_select(&rows, 0)?,
        };
        dense(layer, &format!("{}.{expert}", block.experts), &x, decoder)?;
    }
    if let Some(shared) = &block.shared {
        dense(layer, shared, x, decoder)?;
    }
    let options = BlockOptions {
        router: moe.router.clone(),
        hidden_size: decoder.hidden_size,
        intermediate_size: moe.intermediate_size,
        activation: decoder.activation,
        expert_bias: moe.expert_bias,
        layer: number,
        backend: None,
    };
    let context = BlockContext { names: decoder.names.matrices, ..BlockContext::default() };
    output(layer, &block, x, &options, decoder, &context)
}

/// Returns the rows of `x` that each expert gets.
fn tokens_of_experts(
    layer: &Layer,
    block: &Block,
    x: &Tensor,
    decoder: &DecoderConfig,
    moe: &MoeConfig,
) -> Result<Vec<Vec<u32>>> {
    let router = Router::load(&moe.router, block.router(&layer.weights.var_builder(), &decoder.names))?;
    let ids = router.route(&layer.weights.linear(&block.gate, x)?)?.topk_ids.to_vec2::<u32>()?;
    let mut tokens = vec![Vec::new(); moe.router.num_experts];
    for (row, ids) in ids.iter().enumerate() {
        for id in ids.iter().filter(|id| **id != NO_EXPERT) {
            if let Some(tokens) = tokens.get_mut(*id as usize) {
                tokens.push(row as u32);
            }
        }
    }
    Ok(tokens)
}

/// Returns the output of the whole block with its current weights.
fn output(
    layer: &Layer,
    names: &Block,
    x: &Tensor,
    options: &BlockOptions,
    decoder: &DecoderConfig,
    context: &BlockContext,
) -> Result<Tensor> {
    let vb = layer.weights.var_builder();
    let gate = names.router(&vb, &decoder.names);
    let experts = vb.pp(&names.experts);
    let (mut block, _) = load_layer_on(MoePath::Fused, options, context, gate, experts)?;
    if let Some(shared) = &names.shared {
        let hidden = options.hidden_size;
        let shared_width = decoder.moe.as_ref().map_or(0, |moe| moe.shared_intermediate_size);
        let activation = options.activation;
        let mlp = GatedMlp::load_on(hidden, shared_width, activation, vb.pp(shared), context)?;
        let gate = names.shared_gate.as_ref().map(|gate| vb.pp(gate));
        block = block.with_shared_experts(SharedExperts::load_gated(mlp, gate)?)?;
    }
    let rows = x.dims()[0];
    let part = |first: usize| Ok(block.forward(&x.narrow(0, first, ROWS.min(rows - first))?)?);
    let parts = (0..rows).step_by(ROWS).map(part).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&parts, 0)?)
}
