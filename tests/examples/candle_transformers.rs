//! The rival: candle-transformers' Qwen3-MoE, with random weights, under the protocol
//! of the model binaries' `bench` (random prompt tokens, temperature 1, end-of-sequence ignored;
//! decode figure = a run with all output tokens minus a run with one). A length or batch that it cannot run is told
//! with its error.
//!
//!     cargo run --release -p moe-tests --example candle_transformers -- CONFIG.json [f32|bf16] [BATCHES] [PROMPT]
//!     [OUTPUT] [LENGTHS] [cpu|cuda]
//!
//! `cuda` needs the feature `cuda` of moe-tests, built for the card's own capability (CUDA_COMPUTE_CAP=90 on Hopper):
//! built for 80, candle's expert kernels ended the program on an H200.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, IndexOp, Shape, Tensor};
use candle_nn::{VarBuilder, var_builder::SimpleBackend};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::qwen3_moe::{Config, ModelForCausalLM};
use serde_json::{Value, json};

/// Random weights of any shape; norms are 1.
struct RandomWeights;

impl SimpleBackend for RandomWeights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if name.contains("norm") {
            return Tensor::ones(shape, dtype, device);
        }
        Tensor::randn(0f32, 0.02, shape, device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name}: a random weight needs a shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

fn list(text: &str) -> Result<Vec<usize>> {
    text.split(',').filter(|s| !s.is_empty()).map(|s| Ok(s.parse()?)).collect()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

struct Rival {
    model: ModelForCausalLM,
    device: Device,
    vocab: u32,
    seed: u64,
}

impl Rival {
    /// Seconds to generate `output` tokens for `batch` random prompts.
    fn run(&mut self, batch: usize, prompt: usize, output: usize) -> Result<f64> {
        self.seed += 1;
        let mut state = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut token = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            1000 + ((state >> 33) as u32) % (self.vocab - 3000)
        };
        let ids: Vec<u32> = (0..batch * prompt).map(|_| token()).collect();
        let mut sampler = LogitsProcessor::new(self.seed, Some(1.), None);
        self.model.clear_kv_cache();
        let start = Instant::now();
        let mut input = Tensor::from_vec(ids, (batch, prompt), &self.device)?;
        let mut offset = 0;
        for _ in 0..output {
            let logits = self.model.forward(&input, offset)?.to_dtype(DType::F32)?;
            offset += input.dim(1)?;
            let next: Vec<u32> =
                (0..batch).map(|b| sampler.sample(&logits.i((b, 0))?)).collect::<candle_core::Result<_>>()?;
            input = Tensor::from_vec(next, (batch, 1), &self.device)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the median of three runs. A short run comes first to warm up.
    fn repeat(&mut self, batch: usize, prompt: usize, output: usize) -> Result<f64> {
        self.run(batch, prompt, output.min(4))?;
        Ok(median((0..3).map(|_| self.run(batch, prompt, output)).collect::<Result<_>>()?))
    }

    fn prefill(&mut self, length: usize) -> Result<Value> {
        let rate = length as f64 / self.repeat(1, length, 1)?;
        eprintln!("prefill {length}: {rate:.1} tok/s");
        Ok(rate.into())
    }

    fn decode(&mut self, batch: usize, prompt: usize, output: usize) -> Result<Value> {
        let one = self.repeat(batch, prompt, 1)?;
        let full = self.repeat(batch, prompt, output)?;
        let step = (full - one) / (output - 1) as f64;
        let rate = batch as f64 / step;
        eprintln!("decode {batch}: {rate:.2} tok/s");
        let end_to_end = (batch * output) as f64 / full;
        Ok(json!({"tok_s": rate, "step_ms": step * 1e3, "end_to_end_tok_s": end_to_end}))
    }
}

/// The result, or why there is none.
fn or_error(what: &str, result: Result<Value>) -> Value {
    result.unwrap_or_else(|error| {
        let error = format!("{error:#}");
        eprintln!("{what}: fails: {error}");
        json!({"error": error})
    })
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_string());
    let path = args.first().context("the first argument is the model's config.json")?;
    let dtype = match arg(1, "f32").as_str() {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        other => bail!("dtype {other:?}: expected f32 or bf16"),
    };
    let device = match arg(6, "cpu").as_str() {
        "cpu" => Device::Cpu,
        "cuda" => Device::new_cuda(0)?,
        other => bail!("device {other:?}: expected cpu or cuda"),
    };
    let batches = list(&arg(2, "1,8"))?;
    let lengths = list(&arg(5, "128,512"))?;
    let (prompt, output): (usize, usize) = (arg(3, "128").parse()?, arg(4, "64").parse()?);
    let config: Config = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let vocab = u32::try_from(config.vocab_size)?;
    let weights = VarBuilder::from_backend(Box::new(RandomWeights), dtype, device.clone());
    let mut rival = Rival { model: ModelForCausalLM::new(&config, weights)?, device, vocab, seed: 0 };
    let mut result = json!({
        "engine": "candle-transformers 0.11.1", "device": arg(6, "cpu"), "dtype": arg(1, "f32"), "decode": {}, "prefill": {},
    });
    for length in lengths {
        result["prefill"][length.to_string()] = or_error(&format!("prefill {length}"), rival.prefill(length));
    }
    for batch in batches {
        let row = rival.decode(batch, prompt, output);
        result["decode"][batch.to_string()] = or_error(&format!("decode {batch}"), row);
    }
    println!("{}", serde_json::to_string_pretty(&result)?);
    Ok(())
}
