//! The memory that a model needs on the ranks of one process or host, computed from its config before any weight is
//! read.

use std::collections::HashMap;

use candle_core::DType;
use model_runtime::{Config, Geometry, LayerStates, QuantConfig, QuantScheme, TensorLayout, is_gate_up_pack};

use crate::device::DeviceChoice;
use crate::engine::EngineConfig;
use crate::error::{Context, Result, usage};
use crate::family::ModelSpec;
use crate::run_config::RunConfig;

/// Integers of 4 and of 8 bits with a scale in f16 for each 128 columns, bits a weight.
pub(crate) const INT4_BITS: f64 = 4.125;
const INT8_BITS: f64 = 8.125;
/// Activations of a step that exist at the same time, in rows as wide as the residual stream: q, k, v, the rows of the
/// chosen experts and the rows between their products.
const STEP_ROWS: u64 = 16;

/// The memory of several ranks together, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Footprint {
    /// Weights in the form that products use.
    pub weights: u64,
    /// A second copy of the largest weight of each rank, which exists while that weight is reordered.
    pub copies: u64,
    /// The part of the weights that belongs to experts.
    pub experts: u64,
    /// Weights in floats that a quantised checkpoint would have quantised.
    pub floats: u64,
    /// Bytes of one such weight.
    pub float_size: u64,
    /// The weights in the form of the file, if a quantised checkpoint is loaded as floats.
    pub stored: Option<u64>,
    /// Number of ranks.
    pub ranks: u64,
}

impl Footprint {
    /// The footprint of these ranks of a run, with weights in `dtype`.
    ///
    /// # Errors
    /// Sizes that cannot be divided over the ranks.
    pub fn of(
        model: &dyn ModelSpec,
        raw: &Config,
        quantisation: Option<&QuantConfig>,
        run: &RunConfig,
        ranks: impl Iterator<Item = usize> + Clone,
        dtype: DType,
    ) -> Result<Self> {
        // Quantised checkpoints store experts one by one, and other checkpoints need the same number of bytes in packs.
        let has = |name: &str| quantisation.is_none() || !is_gate_up_pack(name);
        let mut sum = Self { float_size: dtype.size_in_bytes() as u64, ..Self::default() };
        if let Some(stored) = quantisation.filter(|config| config.is_dequantised()) {
            let stored = stored.clone().as_stored();
            sum.stored = Some(Self::of(model, raw, Some(&stored), run, ranks.clone(), dtype)?.weights);
        }
        for rank in ranks {
            let layout = model.layout(&run.parallel.geometry(rank)?, &has)?;
            let decoder = model.decoder();
            // A GPU looks rows of the embedding up in floats, however a GGUF file stores it.
            let floats = Some(decoder.names.embedding).filter(|_| run.device != DeviceChoice::Cpu);
            sum.add(&layout, quantisation, floats, copies_of_experts(raw, run)?, dtype)?;
            if let (Some(config), Some(embedding), true) = (quantisation, floats, decoder.tie_word_embeddings)
            {
                // Tied to an embedding that the file has quantised, the projection is a matrix of its own.
                let scheme = config.scheme_of(embedding)?;
                if scheme != QuantScheme::NONE {
                    sum.weights +=
                        scheme.matrix_bytes((decoder.vocab_size, decoder.hidden_size), dtype) as u64;
                }
            }
        }
        Ok(sum)
    }

    /// Adds a rank that has `copies` copies of each expert on average, and the module `floats` in floats.
    fn add(
        &mut self,
        layout: &TensorLayout,
        quantisation: Option<&QuantConfig>,
        floats: Option<&str>,
        copies: f64,
        dtype: DType,
    ) -> Result<()> {
        let mut largest = layout.packs.iter().fold(HashMap::<&str, u64>::new(), |mut packs, part| {
            *packs.entry(&part.name).or_default() += part.elements() as u64 * dtype.size_in_bytes() as u64;
            packs
        });
        if quantisation.is_some_and(|config| !config.is_dequantised()) {
            // Quantised packs are filled from the file a few rows at a time.
            largest.clear();
        }
        for held in layout.held() {
            let name = held.stored.name.as_str();
            let are_floats = held.stored.shape.len() != 2 || layout.floats.contains(name);
            let scheme = match (quantisation, name.strip_suffix(".weight")) {
                (Some(config), Some(module)) if !are_floats && Some(module) != floats => {
                    config.scheme_of(module)?
                }
                _ => QuantScheme::NONE,
            };
            let whole: u64 = held.stored.shape.iter().map(|&dim| dim as u64).product();
            let elements = held.elements as u64;
            // The values of a tensor that keeps its digits are not known yet, so it is counted in f32.
            let dtype = if layout.exact.contains(name) { DType::F32 } else { dtype };
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

    /// Bytes of the weights if a quantised checkpoint had `bits` bits for each weight that is a float.
    pub fn quantised(&self, bits: f64) -> u64 {
        let shrunk = self.floats as f64 * bits / (8 * self.float_size.max(1)) as f64;
        self.weights - self.floats + shrunk as u64
    }

    /// Fails if loading takes more than `free` bytes; the error says what would fit.
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
            "the weights need {} of {}{while_loaded}, but {} are available; {fits}; leave out this check (`check_memory`) to try it all the \
             same",
            gib(here),
            place.name(),
            gib(free)
        )))
    }

    /// Ways to run the model in `free` bytes, which are `lacking` bytes too few.
    fn what_fits(&self, free: u64, lacking: u64, place: &Place) -> Vec<String> {
        let mut ways = Vec::new();
        let copies = if place.on_gpu { 0 } else { self.copies };
        if self.float_size == 4 && self.weights / 2 + copies / 2 <= free {
            ways.push(format!("`dtype` bf16, about {}", gib(self.weights / 2)));
        }
        if let Some(stored) = self.stored.filter(|stored| !place.on_gpu && *stored <= free) {
            ways.push(format!(
                "the weights as they are stored, about {}: leave out `dequantise`",
                gib(stored)
            ));
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
            ways.push(format!("`expert_offload` {more}, which keeps experts in host memory"));
        }
        if place.on_gpu && self.ranks == 1 && place.gpus > 1 {
            let ranks = self.weights.div_ceil(free.max(1)).next_power_of_two();
            if ranks <= place.gpus as u64 {
                ways.push(format!("`tp` {ranks}, a part of the model on each of {ranks} GPUs"));
            }
        }
        ways
    }

    /// Fails if the requested KV cache does not fit in addition to the weights and a step; the error says how many
    /// tokens would fit. On a GPU the step is not counted here, because the GPU runs its largest step before the cache
    /// is made, and the memory of the step is checked then.
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
                "{e}; in addition to the weights ({}) and a step ({}), {} of {} have room for {tokens} tokens",
                gib(weights),
                gib(step),
                gib(free),
                place.name(),
            ))
        })
    }
}

/// Bytes of the head for multi-token prediction in this dtype, with the weights that a quantised checkpoint has
/// quantised as they are; `None` for a model that has no such head.
///
/// # Errors
/// A quantisation of its matrices that is not read.
pub fn mtp_bytes(
    model: &dyn ModelSpec,
    quantisation: Option<&QuantConfig>,
    dtype: DType,
) -> Result<Option<u64>> {
    let Some(mtp) = model.mtp() else { return Ok(None) };
    let has = |name: &str| quantisation.is_none() || !is_gate_up_pack(name);
    let mut sum = Footprint::default();
    let layout = mtp.layout(&Geometry::default(), &has)?;
    sum.add(&layout, quantisation, None, 1.0, dtype)?;
    Ok(Some(sum.weights))
}

/// The place where the ranks run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    /// Whether it is a GPU.
    pub on_gpu: bool,
    /// Bytes of experts in host memory.
    pub offload: u64,
    /// Free bytes of host memory, if the system reports them.
    pub host_free: Option<u64>,
    /// Number of GPUs that this process sees.
    pub gpus: usize,
}

impl Place {
    fn name(&self) -> &'static str {
        if self.on_gpu { "GPU memory" } else { "memory" }
    }
}

/// The sizes that determine the buffers of a step.
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

    /// The approximate bytes of a step: its logits and activations in f32.
    fn bytes(&self, engine: &EngineConfig) -> u64 {
        let logits = engine.max_num_seqs as u64 * self.vocab_size as u64;
        let activations = engine.max_num_batched_tokens as u64 * self.hidden_size as u64 * STEP_ROWS;
        logits.saturating_add(activations).saturating_mul(4)
    }
}

/// The average number of copies of an expert: one, or more with redundant experts.
fn copies_of_experts(raw: &Config, run: &RunConfig) -> Result<f64> {
    let experts = raw.opt_size(&moe_layer::hf::NUM_EXPERTS, 1..=1 << 20).context("the number of experts")?;
    let redundant = run.placements.num_redundant_experts as f64;
    Ok(experts.map_or(1.0, |experts| 1.0 + redundant / experts as f64))
}

/// Whether quantised checkpoints store this matrix as integers: the products of the layers, without routers.
fn is_quantisable(name: &str, shape: &[usize]) -> bool {
    shape.len() >= 2 && name.contains(".layers.") && !name.ends_with(".gate.weight")
}

/// Bytes in GiB, for people.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
#[path = "footprint_tests.rs"]
mod tests;
