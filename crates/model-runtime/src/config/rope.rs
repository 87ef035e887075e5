//! RoPE settings from either config style.
//!
//! The hub's style has `rope_theta` next to `rope_scaling` (whose kind is `type` or `rope_type`); transformers 5 writes
//! both into `rope_parameters`. Precedence and defaults are the same as in transformers 5.17, `modeling_rope_utils.py`
//! (`RotaryEmbeddingConfigMixin`).

use serde_json::Value;

use super::error::ConfigError;
use super::limits;
use super::value::Config;

/// Bounds within which every frequency is a finite f32.
const LARGEST_FACTOR: f64 = 1e6;
const LARGEST_THETA: f64 = 1e15;
/// Default of `rope_theta`, as in transformers.
const DEFAULT_THETA: f64 = 10_000.0;

/// Rotary position embedding of one head.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head, the first ones; even.
    pub dim: usize,
    /// Dimensions of a head that rows have cosines and sines for, D; those after `dim` keep their values.
    pub head_dim: usize,
    /// `max_position_embeddings` of the config.
    pub max_position_embeddings: usize,
    /// How positions beyond the original context are handled.
    pub scaling: RopeScaling,
}

/// Kinds of context extension.
// This enum is exhaustive: latent attention must say how each scaling changes its scores.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None: Su et al. 2021.
    Default,
    /// Frequencies divided by `factor`.
    Linear {
        /// Extension factor.
        factor: f64,
    },
    /// Dynamic NTK: the base grows with the sequence once it passes `max_position_embeddings`.
    Dynamic {
        /// Extension factor.
        factor: f64,
    },
    /// YaRN (Peng et al. 2023).
    Yarn(Yarn),
}

/// Parameters of YaRN, named as in the config.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Extension factor.
    pub factor: f64,
    /// Context length of pre-training.
    pub original_max_position_embeddings: usize,
    /// Multiplies cos and sin; derived from `factor`, `mscale`, `mscale_all_dim` if not given.
    pub attention_factor: f64,
    /// Rotations above which a dimension keeps its frequency.
    pub beta_fast: f64,
    /// Rotations below which a dimension is interpolated.
    pub beta_slow: f64,
    /// Whether the bounds of the ramp are rounded to whole dimensions.
    pub truncate: bool,
}

/// YaRN's temperature for a context extended by `scale`: `0.1 * mscale * ln(scale) + 1`.
pub fn yarn_mscale(scale: f64, mscale: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
}

impl RopeConfig {
    /// Reads the RoPE settings of a config for heads of which all `head_dim` dimensions are rotated.
    ///
    /// # Errors
    /// Values out of bounds; scaling of another type; a `partial_rotary_factor`.
    pub fn from_config(
        config: &Config,
        head_dim: usize,
        max_position_embeddings: usize,
    ) -> Result<Self, ConfigError> {
        let rope = Self::partial_from_config(config, head_dim, max_position_embeddings, 1.0)?;
        match rope.dim == head_dim {
            true => Ok(rope),
            false => Err(config.unsupported(
                format!("partial_rotary_factor {}", rope.dim as f64 / head_dim as f64),
                "; heads of this model are rotated as a whole",
            )),
        }
    }

    /// Reads the RoPE settings of a config for heads of which a part is rotated: the `partial_rotary_factor` of their
    /// `head_dim` dimensions, which is `factor` if the config has none.
    ///
    /// # Errors
    /// The errors of [`from_config`](Self::from_config); an odd number of rotated dimensions, or more than there are; a
    /// part with scaling that changes with the prompt.
    pub fn partial_from_config(
        config: &Config,
        head_dim: usize,
        max_position_embeddings: usize,
        factor: f64,
    ) -> Result<Self, ConfigError> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(config.invalid("head_dim", "an even number of rotated dimensions", head_dim));
        }
        let scaling = Self::section(config)?;
        let mut theta = config.positive_float_or(&["rope_theta"], DEFAULT_THETA)?;
        let mut rotary = config.positive_float_or(&["partial_rotary_factor"], factor)?;
        let mut kind = RopeScaling::Default;
        if let Some(section) = &scaling {
            if section.object().values().any(Value::is_object) {
                return Err(config.unsupported("RoPE with parameters for each layer type", ""));
            }
            theta = section.positive_float_or(&["rope_theta"], theta)?;
            rotary = section.positive_float_or(&["partial_rotary_factor"], rotary)?;
            kind = scaling_kind(config, section, max_position_embeddings)?;
        }
        let dim = (head_dim as f64 * rotary) as usize;
        if rotary > 1.0 || dim == 0 || !dim.is_multiple_of(2) {
            let expected =
                format!("the share of {head_dim} dimensions of a head that is an even number of them");
            return Err(config.invalid("partial_rotary_factor", &expected, rotary));
        }
        if dim < head_dim && matches!(kind, RopeScaling::Dynamic { .. }) {
            return Err(config.unsupported("dynamic RoPE for a part of each head", ""));
        }
        match kind {
            _ if !(1.0..=LARGEST_THETA).contains(&theta) => {
                Err(config.invalid("rope_theta", &format!("a number from 1 to {LARGEST_THETA:e}"), theta))
            }
            RopeScaling::Dynamic { .. } if dim < 4 => {
                Err(config.invalid("head_dim", "at least 4 for dynamic RoPE", dim))
            }
            RopeScaling::Yarn(_) if theta <= 1.0 => {
                Err(config.invalid("rope_theta", "a number above 1 for YaRN", theta))
            }
            scaling => Ok(Self { theta, dim, head_dim, max_position_embeddings, scaling }),
        }
    }

    /// The object with the settings: `rope_scaling` wins where a config also has `rope_parameters`, as
    /// in transformers; `{}` counts as absent.
    pub fn section(config: &Config) -> Result<Option<Config>, ConfigError> {
        let section = |key| -> Result<Option<Config>, ConfigError> {
            Ok(config.section(&[key])?.filter(|s| !s.object().is_empty()))
        };
        let scaling = section("rope_scaling")?;
        if scaling.is_some() { Ok(scaling) } else { section("rope_parameters") }
    }

    /// Whether the frequencies of a token depend on the length of its prompt.
    pub fn depends_on_prompt_len(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. })
    }

    /// The longest sequence that the positions are made for: `max_position_embeddings`, times the
    /// factor of linear and dynamic scaling; for YaRN the original context times the factor, but
    /// not less than `max_position_embeddings` (the rule of vLLM's `max_model_len`).
    pub fn max_context_len(&self) -> usize {
        let stretched = |len: usize, factor: f64| (len as f64 * factor) as usize;
        let declared = self.max_position_embeddings;
        match &self.scaling {
            RopeScaling::Default => declared,
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => {
                stretched(declared, *factor).max(declared)
            }
            RopeScaling::Yarn(yarn) => {
                stretched(yarn.original_max_position_embeddings, yarn.factor).max(declared)
            }
        }
    }
}

fn scaling_kind(config: &Config, section: &Config, max: usize) -> Result<RopeScaling, ConfigError> {
    // `rope_type` wins over the older `type`; some checkpoints carry both.
    let kind = match section.opt_string(&["rope_type"])? {
        Some(kind) => kind,
        None => section.opt_string(&["type"])?.unwrap_or("default"),
    };
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: factor(section)? }),
        "dynamic" => Ok(RopeScaling::Dynamic { factor: factor(section)? }),
        "yarn" => yarn(config, section, max).map(RopeScaling::Yarn),
        other => Err(config.unsupported(
            format!("RoPE type `{other}`"),
            "; supported are default, linear, dynamic and yarn",
        )),
    }
}

fn factor(section: &Config) -> Result<f64, ConfigError> {
    let factor = section.float(&["factor"])?;
    if !(1.0..=LARGEST_FACTOR).contains(&factor) {
        return Err(section.invalid("factor", &format!("a number from 1 to {LARGEST_FACTOR}"), factor));
    }
    Ok(factor)
}

/// YaRN's factor where the config names none: by how much it extends the original context.
fn derived_factor(config: &Config, max: usize, original: usize) -> Result<f64, ConfigError> {
    let factor = max as f64 / original as f64;
    if !(1.0..=LARGEST_FACTOR).contains(&factor) {
        let expected = format!(
            "1 to {LARGEST_FACTOR} times original_max_position_embeddings = {original}, as YaRN without a factor extends one \
             context to the other"
        );
        return Err(config.invalid("max_position_embeddings", &expected, max));
    }
    Ok(factor)
}

fn yarn(config: &Config, section: &Config, max: usize) -> Result<Yarn, ConfigError> {
    const ORIGINAL: &[&str] = &["original_max_position_embeddings"];
    // A value at the top level (as in Phi-3) wins over the section's.
    let original = match config.opt_size(ORIGINAL, limits::POSITIONS)? {
        Some(original) => original,
        None => section.size_or(ORIGINAL, max, limits::POSITIONS)?,
    };
    let factor = match section.has("factor") {
        true => factor(section)?,
        false => derived_factor(config, max, original)?,
    };
    let mscale = section.float_or(&["mscale"], 0.0)?;
    let all_dim = section.float_or(&["mscale_all_dim"], 0.0)?;
    let attention_factor = match section.opt_float(&["attention_factor"])? {
        Some(given) => given,
        None if mscale != 0.0 && all_dim != 0.0 => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
        None => yarn_mscale(factor, 1.0),
    };
    if !(attention_factor > 0.0 && attention_factor <= LARGEST_FACTOR) {
        let expected = format!("a number above 0 and up to {LARGEST_FACTOR}");
        return Err(section.invalid("attention_factor", &expected, attention_factor));
    }
    // Zero counts as absent, as in transformers (`or 32`).
    let beta = |key, default| -> Result<f64, ConfigError> {
        Ok(section.opt_float(&[key])?.filter(|b| *b != 0.0).unwrap_or(default))
    };
    let beta_fast = beta("beta_fast", 32.0)?;
    let beta_slow = beta("beta_slow", 1.0)?;
    if beta_slow <= 0.0 || beta_fast < beta_slow {
        return Err(section.invalid(
            "beta_fast",
            "beta_fast >= beta_slow > 0",
            format!("{beta_fast} and {beta_slow}"),
        ));
    }
    Ok(Yarn {
        factor,
        original_max_position_embeddings: original,
        attention_factor,
        beta_fast,
        beta_slow,
        truncate: section.bool_or(&["truncate"], true)?,
    })
}
