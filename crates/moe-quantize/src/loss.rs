//! Computes the loss of a checkpoint on a text, in f32. The weights of a quantised checkpoint are the floats that its
//! integers mean.

use std::path::Path;

use anyhow::{Result, bail};
use candle_nn::var_builder::SimpleBackend;
use model_runtime::{
    CausalLm, Exec, Geometry, KvCache, LogitsRows, SequenceStep, Step, StepContext, TensorFiles, host_logits,
    run_step,
};
use moe_engine::{LoadOptions, ModelSpec};
use serde_json::Value;

use crate::calibrate::windows;
use crate::dequantised::Dequantised;
use crate::progress;
use crate::settings::TextSettings;
use crate::source::{read_config, read_model};

/// The number of positions in a KV block.
const BLOCK: usize = 64;

/// How well a model predicts a text.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// The mean of -ln of the probability of each token, except the first token of each window.
    pub nats_per_token: f64,
    /// The mean Kullback-Leibler divergence of the model's predictions from the reference's, in nats. `None` without a
    /// reference.
    pub divergence: Option<f64>,
    /// The number of tokens that were predicted.
    pub tokens: usize,
}

/// Returns the loss of the checkpoint in `model` on windows of a text. With `reference` it also compares the
/// predictions of the two checkpoints. Whole models are held in memory in f32.
///
/// # Errors
/// Reading the checkpoints or the text fails, or the reference has another vocabulary.
pub fn loss(model: &Path, reference: Option<&Path>, text: &TextSettings) -> Result<Loss> {
    let (config, spec) = open(model)?;
    let decoder = spec.decoder();
    let windows = windows(model, text, decoder.vocab_size, decoder.max_position_embeddings())?;
    let model = load(model, &config, spec.as_ref())?;
    let reference = reference.map(|dir| open_reference(dir, decoder.vocab_size)).transpose()?;
    let mut ex = Exec::cpu();
    let mut nats = 0.0;
    let mut divergence = 0.0;
    let mut tokens = 0;
    let bar = progress::bar("windows", windows.len());
    for window in &windows {
        let rows = log_probabilities(model.as_ref(), window, &mut ex)?;
        let others =
            reference.as_ref().map(|model| log_probabilities(model.as_ref(), window, &mut ex)).transpose()?;
        for (at, next) in window[1..].iter().enumerate() {
            nats -= rows[at][*next as usize];
            divergence += others.as_ref().map_or(0.0, |others| divergence_of(&others[at], &rows[at]));
            tokens += 1;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mean = |sum: f64| sum / tokens as f64;
    Ok(Loss { nats_per_token: mean(nats), divergence: reference.map(|_| mean(divergence)), tokens })
}

fn open(dir: &Path) -> Result<(Value, Box<dyn ModelSpec>)> {
    let config = read_config(&dir.join("config.json"))?;
    let (config, spec, _) = read_model(dir, config, &TensorFiles::open_dir(dir)?)?;
    Ok((config, spec))
}

fn load(dir: &Path, config: &Value, spec: &dyn ModelSpec) -> Result<Box<dyn CausalLm>> {
    let weights = Dequantised::open(dir, config)?;
    let expected = spec.layout(&Geometry::default(), &|name| weights.contains_tensor(name))?.tensors;
    Ok(spec.load(&LoadOptions::default(), weights.only(&expected).var_builder())?.model)
}

fn open_reference(dir: &Path, vocab: usize) -> Result<Box<dyn CausalLm>> {
    let (config, spec) = open(dir)?;
    let got = spec.decoder().vocab_size;
    if got != vocab {
        bail!("the reference {}: expected a vocabulary of {vocab}, got {got}", dir.display())
    }
    load(dir, &config, spec.as_ref())
}

/// Returns the logarithms of the probabilities that the model gives each id after each token of a window.
fn log_probabilities(model: &dyn CausalLm, window: &[u32], ex: &mut Exec) -> Result<Vec<Vec<f64>>> {
    let blocks: Vec<u32> = (0..window.len().div_ceil(BLOCK) as u32).collect();
    let mut cache = KvCache::new_on(ex.device(), &model.info().states, blocks.len(), BLOCK)?;
    let sequence = SequenceStep {
        token_ids: window,
        start: 0,
        prompt_len: window.len(),
        blocks: &blocks,
        logits: LogitsRows::All,
        scored: &[],
    };
    let step = Step::new([sequence], BLOCK)?;
    let logits = run_step(model, &step, &mut cache, None, &mut StepContext::default(), ex)?;
    let logits = host_logits(model, &logits, ex)?;
    Ok(logits.view().cpu::<f32>()?.chunks(model.info().vocab_size).map(log_softmax).collect())
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = f64::from(logits.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x)));
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - largest).exp()).sum();
    logits.iter().map(|x| f64::from(*x) - largest - sum.ln()).collect()
}

/// Returns the sum of p (ln p - ln q), from ln p and ln q.
fn divergence_of(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum()
}
