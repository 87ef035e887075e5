//! Computes the input of the output product of an attention layer. It runs the layer itself, with rows of the identity
//! as the weights of that product.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use model_runtime::config::RopeConfig;
use model_runtime::{KvCache, KvLayout, LogitsRows, Mixer, MixerIo, Rope, SequenceStep, Step};
use moe_kernels::forward_rows;

/// The number of positions in a KV block.
const BLOCK: usize = 64;

/// Returns the input of the output product, [T, `width`], for `x` [T, `hidden`], which consists of sequences of
/// `length` tokens each. `load` creates the layer with an output product of weight [hidden, width].
///
/// # Errors
/// `load` or the layer fails.
pub fn attended<A: Mixer>(
    x: &Tensor,
    (hidden, width, length): (usize, usize, usize),
    rope: &RopeConfig,
    kv: KvLayout,
    load: impl Fn(Tensor) -> Result<A>,
) -> Result<Tensor> {
    let mut parts = Vec::new();
    for first in (0..width).step_by(hidden) {
        let columns = hidden.min(width - first);
        let layer = load(identity_rows(hidden, width, first)?)?;
        let part = run(&layer, x, (hidden, length), rope, kv)?;
        parts.push(part.narrow(1, 0, columns)?);
    }
    Ok(Tensor::cat(&parts, 1)?)
}

/// Returns [rows, width]: the rows of the identity from `first` on, followed by rows of zeros.
fn identity_rows(rows: usize, width: usize, first: usize) -> Result<Tensor> {
    let mut values = vec![0f32; rows * width];
    (0..rows.min(width - first)).for_each(|row| values[row * width + first + row] = 1.0);
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?)
}

/// Returns the layer's output [T, hidden]. The sequences run one after the other.
fn run(
    layer: &impl Mixer,
    x: &Tensor,
    (hidden, length): (usize, usize),
    rope: &RopeConfig,
    kv: KvLayout,
) -> Result<Tensor> {
    let rope = Rope::new(rope.clone());
    let blocks: Vec<u32> = (0..length.div_ceil(BLOCK) as u32).collect();
    let ids = vec![0; length];
    let sequence = SequenceStep {
        token_ids: &ids,
        start: 0,
        prompt_len: length,
        blocks: &blocks,
        logits: LogitsRows::None,
        scored: &[],
    };
    let step = Step::new([sequence], BLOCK)?;
    let states = kv.layers(1);
    let mut outputs = Vec::new();
    for first in (0..x.dims()[0]).step_by(length) {
        let mut cache = KvCache::new_on(&Device::Cpu, &states, blocks.len(), BLOCK)?;
        let x = x.narrow(0, first, length)?;
        outputs.push(forward_rows(&x, hidden, DType::F32, |x, out, ex| {
            let step = step.views()?;
            let rows = rope.rows(step.positions, step.rope_len, ex)?;
            layer.forward_into(MixerIo::Store { x: x.into(), out }, &step, &rows, cache.layer_mut(0)?, ex)
        })?);
    }
    Ok(Tensor::cat(&outputs, 0)?)
}
