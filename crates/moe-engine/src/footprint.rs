//! What a model takes of memory on the ranks of one process or host, known from its config before a weight is read.

use std::collections::HashMap;

use anyhow::{Context, Result};
use candle_core::DType;
use model_runtime::{Config, LayerStates, QuantConfig, QuantScheme, TensorLayout, is_gate_up_pack};

use crate::engine::EngineConfig;
use crate::family::ModelSpec;
use crate::run_config::RunConfig;
use crate::usage;

/// Integers of 4 and of 8 bits with a scale in f16 for each 128 columns, bits a weight.
const INT4_BITS: f64 = 4.125;
const INT8_BITS: f64 = 8.125;
/// Activations of a step that are there at once, in rows as wide as the residual stream: q, k, v, the rows of the chosen
/// experts and what is between their products.
const STEP_ROWS: u64 = 16;

/// Memory of ranks, in bytes, all of them together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Footprint {
    /// Weights in the form in which they are computed with.
    pub weights: u64,
    /// A second copy of the largest weight of each rank, which is there while that is put into another order.
    pub copies: u64,
    /// Of the weights, those of experts.
    pub experts: u64,
    /// Weights in floats that a quantised checkpoint would have quantised.
    pub floats: u64,
    /// Bytes of such a weight.
    pub float_size: u64,
    /// Ranks.
    pub ranks: u64,
}

impl Footprint {
    /// The footprint of these ranks of a run, with weights in `dtype`.
    ///
    /// # Errors
    /// Sizes that ranks cannot cut.
    pub fn of(
        model: &dyn ModelSpec,
        raw: &Config,
        quantisation: Option<&QuantConfig>,
        run: &RunConfig,
        ranks: impl Iterator<Item = usize>,
        dtype: DType,
    ) -> Result<Self> {
        // Quantised checkpoints hold experts one by one, and others take as many bytes in packs.
        let has = |name: &str| quantisation.is_none() || !is_gate_up_pack(name);
        let mut sum = Self { float_size: dtype.size_in_bytes() as u64, ..Self::default() };
        for rank in ranks {
            let layout = model.layout(&run.parallel.geometry(rank)?, &has)?;
            sum.add(&layout, quantisation, copies_of_experts(raw, run)?, dtype)?;
        }
        Ok(sum)
    }

    /// Adds a rank, whose experts are there `copies` times on average.
    fn add(
        &mut self,
        layout: &TensorLayout,
        quantisation: Option<&QuantConfig>,
        copies: f64,
        dtype: DType,
    ) -> Result<()> {
        let mut largest = layout.packs.iter().fold(HashMap::<&str, u64>::new(), |mut packs, part| {
            *packs.entry(&part.name).or_default() += part.elements() as u64 * dtype.size_in_bytes() as u64;
            packs
        });
        if quantisation.is_some() {
            // Quantised packs are filled from the file some rows at a time.
            largest.clear();
        }
        for held in layout.held() {
            let name = held.stored.name.as_str();
            let scheme = match (quantisation, name.strip_suffix(".weight")) {
                (Some(config), Some(module)) if held.stored.shape.len() == 2 => config.scheme_of(module)?,
                _ => QuantScheme::NONE,
            };
            let whole: u64 = held.stored.shape.iter().map(|&dim| dim as u64).product();
            let elements = held.elements as u64;
            let bytes = match held.stored.shape.as_slice() {
                &[n, k] if whole > 0 => scheme.matrix_bytes((n, k), dtype) as u64 * elements / whole,
                _ => elements * dtype.size_in_bytes() as u64,
            };
            let is_expert = name.contains(".experts.");
            let bytes = if is_expert { (bytes as f64 * copies) as u64 } else { bytes };
            self.weights += bytes;
            if is_expert {
                self.experts += bytes;
            }
            if scheme == QuantScheme::NONE {
                largest.insert(name, bytes);
                if is_quantisable(name, &held.stored.shape) {
                    self.floats += bytes;
                }
            }
        }
        self.copies += largest.into_values().max().unwrap_or(0);
        self.ranks += 1;
        Ok(())
    }

    /// Bytes of the weights if a quantised checkpoint had so many bits for each of those in floats.
    fn quantised(&self, bits: f64) -> u64 {
        let shrunk = self.floats as f64 * bits / (8 * self.float_size.max(1)) as f64;
        self.weights - self.floats + shrunk as u64
    }

    /// Fails where loading takes more than `free` bytes, with what would fit.
    pub fn check_weights(&self, free: u64, place: &Place) -> Result<()> {
        let here = self.weights.saturating_sub(place.offload);
        let copies = if place.on_gpu { 0 } else { self.copies };
        if here.saturating_add(copies) <= free {
            return Ok(());
        }
        let while_loaded = match copies {
            0 => String::new(),
            _ => format!(", and {} more while they are loaded", gib(copies)),
        };
        let fits = self.what_fits(free, here + copies - free, place);
        let fits = match fits.is_empty() {
            true => "no form of it that this program knows fits".to_string(),
            false => format!("what would fit: {}", fits.join("; ")),
        };
        Err(usage(format!(
            "the weights need {} of {}{while_loaded}, but {} are available; {fits}; --skip-memory-check tries it all the \
             same",
            gib(here),
            place.name(),
            gib(free)
        )))
    }

    /// Ways to run the model in `free` bytes, of which `lacking` are missing.
    fn what_fits(&self, free: u64, lacking: u64, place: &Place) -> Vec<String> {
        let mut ways = Vec::new();
        let copies = if place.on_gpu { 0 } else { self.copies };
        if self.float_size == 4 && self.weights / 2 + copies / 2 <= free {
            ways.push(format!("--dtype bf16, about {}", gib(self.weights / 2)));
        }
        let forms = [("8", self.quantised(INT8_BITS)), ("4", self.quantised(INT4_BITS))];
        let fitting =
            forms.into_iter().filter(|(_, bytes)| *bytes < self.weights && bytes + copies / 4 <= free);
        ways.extend(
            fitting
                .map(|(bits, bytes)| format!("a checkpoint quantised to {bits} bits, about {}", gib(bytes))),
        );
        let more = (lacking + (1 << 30)).div_ceil(1 << 30) + place.offload / (1 << 30);
        if place.on_gpu && more << 30 <= self.experts && place.host_free.is_none_or(|free| more << 30 < free)
        {
            ways.push(format!("--expert-offload {more}, which keeps experts in host memory"));
        }
        if place.on_gpu && self.ranks == 1 && place.gpus > 1 {
            let ranks = self.weights.div_ceil(free.max(1)).next_power_of_two();
            if ranks <= place.gpus as u64 {
                ways.push(format!("--tp {ranks}, a part of the model on each of {ranks} GPUs"));
            }
        }
        ways
    }

    /// Fails where the KV cache that is asked for has no room beside the weights and a step, with the tokens that have. A GPU runs
    /// its largest step before the cache is made, and is asked then.
    pub fn check_cache(
        &self,
        free: u64,
        states: &LayerStates,
        sizes: &StepSizes,
        engine: &EngineConfig,
        place: &Place,
    ) -> Result<()> {
        let weights = self.weights.saturating_sub(place.offload);
        let step = if place.on_gpu { 0 } else { sizes.bytes(engine).saturating_mul(self.ranks) };
        let left = free.saturating_sub(weights).saturating_sub(step) / self.ranks.max(1);
        let budget = EngineConfig::budget(Some(left), place.on_gpu);
        let checked = engine.capacity(states, sizes.max_context_len, Some(left), budget);
        checked.map(drop).map_err(|e| {
            let tokens = left / states.bytes_per_token().unwrap_or(1).max(1) as u64;
            usage(format!(
                "{e}; beside the weights ({}) and a step ({}), {} of {} have room for {tokens} tokens",
                gib(weights),
                gib(step),
                gib(free),
                place.name(),
            ))
        })
    }
}

/// Where the ranks run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    /// On a GPU, or on the CPU.
    pub on_gpu: bool,
    /// Bytes of experts that are in host memory.
    pub offload: u64,
    /// Free bytes of host memory, if the system tells.
    pub host_free: Option<u64>,
    /// GPUs that this process sees.
    pub gpus: usize,
}

impl Place {
    fn name(&self) -> &'static str {
        if self.on_gpu { "GPU memory" } else { "memory" }
    }
}

/// What the buffers of a step depend on.
pub(crate) struct StepSizes {
    /// The model's context.
    pub max_context_len: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
}

impl StepSizes {
    /// The sizes in a config.
    ///
    /// # Errors
    /// Sizes that no model has.
    pub fn of(raw: &Config, max_context_len: usize) -> Result<Self> {
        let size = |key: &str| raw.opt_size(&[key], 0..=1 << 30).map(Option::unwrap_or_default);
        let vocab_size = size("vocab_size")?;
        let hidden_size = size("hidden_size")?;
        Ok(Self { max_context_len, vocab_size, hidden_size })
    }

    /// About as many bytes as a step of the engine takes: its logits and activations in f32.
    fn bytes(&self, engine: &EngineConfig) -> u64 {
        let logits = engine.max_num_seqs as u64 * self.vocab_size as u64;
        let activations = engine.max_num_batched_tokens as u64 * self.hidden_size as u64 * STEP_ROWS;
        logits.saturating_add(activations).saturating_mul(4)
    }
}

/// How often an expert is there on average: once, or more with redundant ones.
fn copies_of_experts(raw: &Config, run: &RunConfig) -> Result<f64> {
    let experts = raw.opt_size(&moe_layer::hf::NUM_EXPERTS, 1..=1 << 20).context("the number of experts")?;
    let redundant = run.placements.num_redundant_experts as f64;
    Ok(experts.map_or(1.0, |experts| 1.0 + redundant / experts as f64))
}

/// Whether quantised checkpoints have integers in place of this matrix: the products of the layers, without routers.
fn is_quantisable(name: &str, shape: &[usize]) -> bool {
    shape.len() >= 2 && name.contains(".layers.") && !name.ends_with(".gate.weight")
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use model_runtime::KvLayout;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// About Qwen3-30B-A3B in bf16.
    fn footprint() -> Footprint {
        let weights = 57 * GIB;
        let copies = GIB;
        let experts = 54 * GIB;
        let floats = 55 * GIB;
        Footprint { weights, copies, experts, floats, float_size: 2, ranks: 1 }
    }

    fn refused(footprint: &Footprint, free: u64, place: &Place) -> String {
        let error = footprint.check_weights(free, place).unwrap_err();
        assert!(error.downcast_ref::<crate::UsageError>().is_some(), "{error}");
        error.to_string()
    }

    #[test]
    fn weights_that_do_not_fit_name_what_would() {
        let footprint = footprint();
        let cpu = Place::default();
        assert!(footprint.check_weights(58 * GIB, &cpu).is_ok());
        let error = refused(&footprint, 24 * GIB, &cpu);
        let expected = "the weights need 57.00 GiB of memory, and 1.00 GiB more while they are loaded, but 24.00 GiB are \
                        available; what would fit: a checkpoint quantised to 4 bits, about 16.18 GiB; --skip-memory-check";
        assert!(error.starts_with(expected), "{error}");
        assert!(
            refused(&footprint, 40 * GIB, &cpu)
                .contains("8 bits, about 29.93 GiB; a checkpoint quantised to 4")
        );
        assert!(refused(&footprint, 2 * GIB, &cpu).contains("no form of it that this program knows fits"));
        let wide = Footprint { float_size: 4, ..footprint };
        assert!(refused(&wide, 40 * GIB, &cpu).contains("--dtype bf16, about 28.50 GiB"));
    }

    #[test]
    fn a_gpu_has_host_memory_and_other_gpus() {
        let gpu = Place { on_gpu: true, host_free: Some(100 * GIB), gpus: 4, ..Place::default() };
        assert!(footprint().check_weights(57 * GIB, &gpu).is_ok(), "packs are not copied there");
        let error = refused(&footprint(), 24 * GIB, &gpu);
        assert!(error.contains("need 57.00 GiB of GPU memory, but 24.00 GiB are available"), "{error}");
        assert!(error.contains("--expert-offload 34") && error.contains("--tp 4"), "{error}");
        let offloading = Place { offload: 34 * GIB, ..gpu.clone() };
        assert!(footprint().check_weights(24 * GIB, &offloading).is_ok());
        assert!(refused(&footprint(), 20 * GIB, &offloading).contains("--expert-offload 38"));
        let alone = Place { host_free: Some(10 * GIB), gpus: 1, ..gpu };
        let error = refused(&footprint(), 24 * GIB, &alone);
        assert!(!error.contains("--expert-offload") && !error.contains("--tp"), "{error}");
    }

    #[test]
    fn a_cache_has_room_beside_the_weights() {
        let kv = KvLayout { num_kv_heads: 4, head_dim: 128, value_dim: Some(128), dtype: DType::BF16 };
        let states = kv.layers(48);
        let sizes = StepSizes { max_context_len: 40_960, vocab_size: 151_936, hidden_size: 2048 };
        let check = |engine: &EngineConfig, free| {
            footprint().check_cache(free, &states, &sizes, engine, &Place::default())
        };
        let asked = EngineConfig { kv_cache_memory: Some(8 << 30), ..EngineConfig::default() };
        assert!(check(&asked, 70 * GIB).is_ok());
        let error = check(&asked, 64 * GIB).unwrap_err().to_string();
        assert!(error.contains("--kv-cache-memory needs 8589") && error.contains("have room for"), "{error}");
        let long = EngineConfig { max_model_len: Some(40_960), ..EngineConfig::default() };
        assert!(check(&long, 70 * GIB).is_ok());
        let error = check(&long, 60 * GIB).unwrap_err().to_string();
        assert!(error.contains("ask for shorter ones (--max-model-len"), "{error}");
        assert!(
            check(&EngineConfig::default(), 60 * GIB).is_ok(),
            "a cache that nobody sized takes what is left"
        );
    }

    #[test]
    fn routers_and_embeddings_stay_floats() {
        for (name, quantised) in [
            ("model.layers.0.mlp.experts.3.up_proj.weight", true),
            ("model.layers.0.mlp.gate.weight", false),
            ("model.layers.0.self_attn.q_proj.weight", true),
            ("model.embed_tokens.weight", false),
            ("lm_head.weight", false),
        ] {
            assert_eq!(is_quantisable(name, &[8, 8]), quantised, "{name}");
        }
        assert!(!is_quantisable("model.layers.0.input_layernorm.weight", &[8]));
    }
}
