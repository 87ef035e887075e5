//! The memory that a model needs on one rank, computed from its config alone: in the published form, and in the forms
//! to which it may be quantised. The same plan refuses a run that does not fit.

use candle_core::DType;
use model_runtime::{Config, Geometry, QuantConfig};

use crate::error::Result;
use crate::family::ModelSpec;
use crate::footprint::{Footprint, INT4_BITS};
use crate::run_config::RunConfig;

/// Bits of a weight in FP8 with a scale in f32 for each block of 128 x 128.
const FP8_BITS: f64 = 8.0 + 32.0 / (128.0 * 128.0);

/// Memory of a model on one rank, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes of its weights, in the form in which products use them.
    pub weights: u64,
    /// Bytes that loading on a CPU needs in addition, for a short time.
    pub while_loading: u64,
    /// Bytes of the KV cache for one token in bf16, in all layers together.
    pub cache_of_token: u64,
}

/// Bytes of the weights of a model on one rank in three forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightForms {
    /// Bytes if all weights are in bf16.
    pub bf16: u64,
    /// Bytes if the products of the layers are in FP8 with a scale for each block of 128 x 128, and routers, norms, the
    /// embedding and the vocabulary projection in bf16.
    pub fp8: u64,
    /// Bytes if the same products are integers of 4 bits in groups of 128.
    pub int4: u64,
}

impl MemoryPlan {
    /// The plan of a model with this quantisation; weights that it does not cover are in bf16.
    ///
    /// # Errors
    /// Quantisation schemes that cannot be read.
    pub fn of(model: &dyn ModelSpec, config: &Config, quantisation: Option<&QuantConfig>) -> Result<Self> {
        let footprint = footprint(model, config, quantisation)?;
        let states = model.states(&Geometry::default(), None, DType::BF16)?;
        Ok(Self {
            weights: footprint.weights,
            while_loading: footprint.copies,
            cache_of_token: states.bytes_per_token()? as u64,
        })
    }

    /// The bytes that must be free to load the weights, on a GPU or on the CPU.
    pub fn to_load(&self, on_gpu: bool) -> u64 {
        self.weights.saturating_add(if on_gpu { 0 } else { self.while_loading })
    }
}

impl WeightForms {
    /// The forms of a model.
    ///
    /// # Errors
    /// Impossible sizes.
    pub fn of(model: &dyn ModelSpec, config: &Config) -> Result<Self> {
        let footprint = footprint(model, config, None)?;
        Ok(Self {
            bf16: footprint.weights,
            fp8: footprint.quantised(FP8_BITS),
            int4: footprint.quantised(INT4_BITS),
        })
    }
}

fn footprint(
    model: &dyn ModelSpec,
    config: &Config,
    quantisation: Option<&QuantConfig>,
) -> Result<Footprint> {
    Footprint::of(model, config, quantisation, &RunConfig::default(), 0..1, DType::BF16)
}
