//! A released candle model and the same model with its MoE block replaced by `SparseMoeBlock`: equal logits, and how
//! fast each runs.
//!
//!     cargo run --release -p moe-layer --example qwen3_moe                      # the CPU
//!     cargo run --release -p moe-layer --example qwen3_moe --features cuda      # a GPU, if there is one
//!
//! The weights are random, under the names of a checkpoint of Qwen3-MoE. For files, take
//! `VarBuilder::from_mmaped_safetensors` instead of [`checkpoint`].

mod model;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::qwen3_moe::{Config, ModelForCausalLM};

/// Sequences, tokens of their prompts, tokens after them.
const SIZES: (usize, usize, usize) = (2, 48, 24);
/// Largest difference of two logits, relative to the largest logit.
const TOLERANCE: f32 = 1e-3;

fn config() -> Config {
    Config {
        vocab_size: 512,
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        head_dim: 64,
        attention_bias: false,
        num_key_value_heads: 2,
        max_position_embeddings: 128,
        sliding_window: None,
        max_window_layers: 4,
        tie_word_embeddings: false,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
        decoder_sparse_step: 1,
        moe_intermediate_size: 128,
        num_experts_per_tok: 4,
        num_experts: 16,
        norm_topk_prob: true,
    }
}

/// The tensors of a checkpoint by their names, with random numbers.
fn checkpoint(cfg: &Config, device: &Device) -> Result<VarBuilder<'static>> {
    let h = cfg.hidden_size;
    let d = cfg.head_dim;
    let i = cfg.moe_intermediate_size;
    let q = cfg.num_attention_heads * d;
    let kv = cfg.num_key_value_heads * d;
    let mut all = HashMap::new();
    let mut put = |name: String, dims: &[usize]| -> Result<()> {
        let tensor = match dims {
            [_] => Tensor::ones(dims, DType::F32, device)?,
            _ => Tensor::randn(0f32, 1. / (dims[1] as f32).sqrt(), dims, device)?,
        };
        all.insert(name, tensor);
        Ok(())
    };
    put("model.embed_tokens.weight".into(), &[cfg.vocab_size, h])?;
    put("model.norm.weight".into(), &[h])?;
    put("lm_head.weight".into(), &[cfg.vocab_size, h])?;
    for layer in (0..cfg.num_hidden_layers).map(|layer| format!("model.layers.{layer}")) {
        put(format!("{layer}.input_layernorm.weight"), &[h])?;
        put(format!("{layer}.post_attention_layernorm.weight"), &[h])?;
        for (name, dims) in [("q_proj", [q, h]), ("k_proj", [kv, h]), ("v_proj", [kv, h]), ("o_proj", [h, q])]
        {
            put(format!("{layer}.self_attn.{name}.weight"), &dims)?;
        }
        for name in ["q_norm", "k_norm"] {
            put(format!("{layer}.self_attn.{name}.weight"), &[d])?;
        }
        put(format!("{layer}.mlp.gate.weight"), &[cfg.num_experts, h])?;
        for expert in 0..cfg.num_experts {
            for (name, dims) in [("gate_proj", [i, h]), ("up_proj", [i, h]), ("down_proj", [h, i])] {
                put(format!("{layer}.mlp.experts.{expert}.{name}.weight"), &dims)?;
            }
        }
    }
    Ok(VarBuilder::from_tensors(all, DType::F32, device))
}

/// Logits of the prompts' last tokens and of each step after them; tokens per second of the prompts and of the steps.
fn run(
    mut forward: impl FnMut(&Tensor, usize) -> Result<Tensor>,
    device: &Device,
) -> Result<(Vec<Vec<f32>>, f64, f64)> {
    let (batch, prompt, output) = SIZES;
    let token = |i: usize| ((i * 7919 + 13) % 512) as u32;
    let ids = |range: std::ops::Range<usize>| {
        let rows = range.len();
        let ids = (0..batch).flat_map(|b| range.clone().map(move |t| token(b * 1000 + t)));
        Tensor::from_vec(ids.collect::<Vec<u32>>(), (batch, rows), device)
    };
    let host = |logits: Tensor| logits.flatten_all()?.to_vec1::<f32>();
    let start = Instant::now();
    let mut logits = vec![host(forward(&ids(0..prompt)?, 0)?)?];
    let prefill = start.elapsed().as_secs_f64();
    for t in prompt..prompt + output {
        logits.push(host(forward(&ids(t..t + 1)?, t)?)?);
    }
    let decode = start.elapsed().as_secs_f64() - prefill;
    Ok((logits, (batch * prompt) as f64 / prefill, (batch * output) as f64 / decode))
}

/// The largest difference, relative to the largest value.
fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let largest = a.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
    a.iter().flatten().zip(b.iter().flatten()).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let cfg = config();
    let vb = checkpoint(&cfg, &device)?;
    let mut theirs = ModelForCausalLM::new(&cfg, vb.clone())?;
    let mut ours = model::Model::new(&cfg, vb)?;
    // Once to warm up, then to measure.
    run(|ids, offset| theirs.forward(ids, offset), &device)?;
    theirs.clear_kv_cache();
    run(|ids, offset| ours.forward(ids, offset), &device)?;
    ours.clear_kv_cache();
    let (want, their_prefill, their_decode) = run(|ids, offset| theirs.forward(ids, offset), &device)?;
    let (got, our_prefill, our_decode) = run(|ids, offset| ours.forward(ids, offset), &device)?;
    println!("{:?}, f32, {} sequences; tokens per second", device.location(), SIZES.0);
    println!("candle-transformers 0.11.1: prompt {their_prefill:8.0}, decode {their_decode:8.0}");
    println!("with SparseMoeBlock:        prompt {our_prefill:8.0}, decode {our_decode:8.0}");
    let difference = difference(&want, &got);
    println!("largest difference of {} logits: {difference:.1e} of the largest", want.concat().len());
    // Not a number is no agreement either.
    if difference.is_nan() || difference > TOLERANCE {
        bail!("the logits differ by more than {TOLERANCE:e}")
    }
    Ok(())
}
