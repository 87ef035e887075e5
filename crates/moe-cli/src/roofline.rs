//! Compares the bytes and operations that a step needs at least with the limits of this machine: the share of the
//! limits that a benchmark reaches.

use anyhow::{Result, bail};
use model_runtime::{Config, Geometry, ModelInfo, Roof, TensorSpec, is_gate_up_pack};
use moe_engine::Session;
use serde_json::{Value, json};

use crate::Program;
use crate::bench::Sizes;
use crate::cli::BenchArgs;

/// Size of some weights, in bytes and elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Amount {
    elements: f64,
    bytes: f64,
}

/// Weights that steps use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StepWeights {
    /// Weights that every token uses: all but routed experts and the vocabulary.
    dense: Amount,
    /// The vocabulary projection, used by every row of logits.
    vocabulary: Amount,
    /// One routed expert of each layer, all layers together.
    expert: Amount,
    /// Routed experts per token.
    top_k: f64,
}

impl StepWeights {
    /// Computes the sizes from the tensors of a model whose experts are listed one by one. `bytes` returns the bytes
    /// per weight of a tensor.
    fn new(tensors: &[TensorSpec], info: &ModelInfo, bytes: impl Fn(&TensorSpec) -> f64) -> Self {
        let sum = |amount: Amount, t: &TensorSpec| {
            let elements: f64 = t.shape.iter().map(|&d| d as f64).product();
            Amount { elements: amount.elements + elements, bytes: amount.bytes + elements * bytes(t) }
        };
        let (experts, others): (Vec<_>, Vec<_>) = tensors.iter().partition(|t| t.name.contains(".experts."));
        let is_vocabulary = |t: &TensorSpec| t.shape == [info.vocab_size, info.hidden_size];
        // Embedding rows are looked up. The projection, which is the last tensor of its shape, is read.
        let vocabulary = others.iter().rev().find(|t| is_vocabulary(t));
        let (num_experts, top_k) = info.moe.as_ref().map_or((1, 0), |moe| (moe.num_experts, moe.top_k));
        let experts = experts.into_iter().fold(Amount::default(), sum);
        let elements = experts.elements / num_experts as f64;
        let bytes = experts.bytes / num_experts as f64;
        Self {
            dense: others.iter().filter(|t| !is_vocabulary(t)).copied().fold(Amount::default(), sum),
            vocabulary: vocabulary.copied().into_iter().fold(Amount::default(), sum),
            expert: Amount { elements, bytes },
            top_k: top_k as f64,
        }
    }

    /// Bytes that a decode step of `sequences` moves: weights, with `distinct` routed experts per layer, `tokens`
    /// cached tokens, and recurrent states, which it reads and writes.
    fn decode_bytes(&self, info: &ModelInfo, distinct: f64, tokens: f64, sequences: f64) -> Result<f64> {
        let weights = self.dense.bytes + self.vocabulary.bytes + distinct * self.expert.bytes;
        let states = 2. * sequences * info.states.bytes_per_sequence()? as f64;
        Ok(weights + tokens * info.states.bytes_per_token()? as f64 + states)
    }

    /// FLOP of the products of a prefill. Attention is left out, and the last layer's MLP is counted for all rows.
    fn prefill_flops(&self, tokens: usize) -> f64 {
        let each = self.dense.elements + self.top_k * self.expert.elements;
        2. * (tokens as f64 * each + self.vocabulary.elements)
    }
}

/// Measures this machine's limits after the model was freed, and adds the comparison to a bench result.
pub fn measure(
    program: &Program,
    args: &BenchArgs,
    sizes: &Sizes,
    result: &Value,
    session: Session,
) -> Result<Value> {
    let Session { model, ex, checkpoint, .. } = session;
    let (spec, quantisation) = match (&args.config, checkpoint) {
        (Some(path), _) => {
            let config = Config::read(path)?;
            (program.families.parse(&config)?, args.run.config().held(config.quantisation()?)?)
        }
        (None, Some(checkpoint)) => (program.families.parse(&checkpoint.config)?, checkpoint.quantisation),
        (None, None) => bail!("a model without a config has no roofline"),
    };
    let info = model.info().clone();
    drop(model);
    let one_by_one = |name: &str| !is_gate_up_pack(name);
    let layout = spec.layout(&Geometry::default(), &one_by_one)?;
    // Routers and embeddings are floats, even if the header says that all modules are quantised.
    let quantised = |t: &TensorSpec| {
        let module = t.name.strip_suffix(".weight").filter(|m| !m.ends_with(".gate") && !m.contains("embed"));
        quantisation.as_ref()?.bytes_per_weight(module?, *t.shape.last()?).ok()?
    };
    let bytes = |t: &TensorSpec| quantised(t).unwrap_or(info.dtype.size_in_bytes() as f64);
    let weights = StepWeights::new(&layout.tensors, &info, bytes);
    let context = sizes.prompt as f64 + sizes.output as f64 / 2.;
    // The limits of a GPU are in its data sheet, so no comparison is made there.
    let roof = (!ex.is_cuda()).then(|| Roof::measure(&ex)).transpose()?;
    roofline(result, roof.as_ref(), &weights, &info, context)
}

/// The shares of the limits that a bench result reaches: its `decode`, `distinct_experts` and `prefill` compared with
/// `roof`. `context` is the mean number of cached tokens of a decode row.
fn roofline(
    result: &Value,
    roof: Option<&Roof>,
    weights: &StepWeights,
    info: &ModelInfo,
    context: f64,
) -> Result<Value> {
    let mut report = match roof {
        Some(roof) => json!({
            "read_gb_s": roof.read / 1e9,
            "f32_multiply_add_gflop_s": roof.fma / 1e9,
            "bf16_matrix_gflop_s": roof.matrix.map(|matrix| matrix / 1e9),
        }),
        None => json!({}),
    };
    (report["decode"], report["prefill"]) = (json!({}), json!({}));
    for (batch, row) in result["decode"].as_object().into_iter().flatten() {
        let seconds = row["step_ms"].as_f64().unwrap_or(f64::NAN) / 1e3;
        let distinct = result["distinct_experts"][batch]["mean"].as_f64().unwrap_or(0.);
        let sequences = batch.parse::<f64>()?;
        let bytes = weights.decode_bytes(info, distinct, sequences * context, sequences)?;
        report["decode"][batch] = json!({"bytes": bytes, "gb_s": bytes / seconds / 1e9});
        if let Some(roof) = roof {
            report["decode"][batch]["fraction"] = json!(bytes / seconds / roof.read);
        }
    }
    for (length, rate) in result["prefill"].as_object().into_iter().flatten() {
        let tokens = length.parse::<usize>()?;
        let seconds = tokens as f64 / rate.as_f64().unwrap_or(f64::NAN);
        let flops = weights.prefill_flops(tokens);
        report["prefill"][length] = json!({"flops": flops, "gflop_s": flops / seconds / 1e9});
        if let Some(roof) = roof {
            report["prefill"][length]["fraction"] = json!(flops / seconds / roof.fma);
        }
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;
    use model_runtime::{KvLayout, MoeInfo};

    fn info() -> ModelInfo {
        ModelInfo {
            vocab_size: 50,
            hidden_size: 10,
            num_layers: 2,
            max_context_len: 64,
            keys_depend_on_prompt_len: false,
            dtype: DType::BF16,
            states: KvLayout { num_kv_heads: 1, head_dim: 4, value_dim: Some(4), dtype: DType::BF16 }
                .layers(2),
            moe: Some(MoeInfo { layers: vec![0, 1], num_experts: 8, top_k: 2 }),
        }
    }

    fn weights() -> StepWeights {
        let mut tensors = vec![TensorSpec::new("embed", &[50, 10])];
        for _ in 0..2 {
            tensors.extend([TensorSpec::new("o", &[10, 10]), TensorSpec::new("norm", &[10])]);
            for expert in 0..8 {
                let spec = |name: &str, dims: &[usize]| {
                    TensorSpec::new(format!("mlp.experts.{expert}.{name}"), dims)
                };
                tensors.extend([spec("gate", &[3, 10]), spec("up", &[3, 10]), spec("down", &[10, 3])]);
            }
        }
        tensors.push(TensorSpec::new("head", &[50, 10]));
        StepWeights::new(&tensors, &info(), |t| if t.name == "head" { 0.5 } else { 2.0 })
    }

    /// Embedding rows are looked up and not read as a whole, so the vocabulary counts once, tied or not.
    #[test]
    fn weights_are_counted_by_use() {
        let amount = |elements, bytes| Amount { elements, bytes };
        let dense = amount(220., 440.);
        let vocabulary = amount(500., 250.);
        let expert = amount(180., 360.);
        assert_eq!(weights(), StepWeights { dense, vocabulary, expert, top_k: 2. });
    }

    #[test]
    fn fractions_are_of_the_measured_limits() -> Result<()> {
        let result = json!({
            "decode": {"4": {"step_ms": 2.}},
            "distinct_experts": {"4": {"mean": 5.}},
            "prefill": {"20": 1000.},
        });
        let roof = Roof { read: 1e7, fma: 1e7, matrix: None };
        let report = roofline(&result, Some(&roof), &weights(), &info(), 3.)?;
        // 220 + 5 * 180 elements of two bytes, 500 of half a byte, and 4 * 3 tokens of 2 * 2 * 4 * 2 bytes.
        let bytes = 2. * 1120. + 250. + 12. * 32.;
        assert_eq!(
            report["decode"]["4"],
            json!({"bytes": bytes, "gb_s": bytes / 2e-3 / 1e9, "fraction": bytes / 2e-3 / 1e7})
        );
        // 20 tokens use 220 + 2 * 180 elements each, the last one the vocabulary, in 20 ms.
        let flops = 2. * (20. * 580. + 500.);
        assert_eq!(
            report["prefill"]["20"],
            json!({"flops": flops, "gflop_s": flops / 0.02 / 1e9, "fraction": flops / 0.02 / 1e7})
        );
        Ok(())
    }
}
