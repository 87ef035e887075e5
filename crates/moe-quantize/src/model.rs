//! The models whose checkpoints are made: those of every family, by their config.json.

use anyhow::Result;
use model_runtime::Config;
use moe_engine::ModelSpec;
use serde_json::Value;

/// Keys of config.json under which a header of quantisation may stand.
pub const QUANTISATION_KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// Reads a config.json, whether it is of a quantised checkpoint or not; `file` names it in errors.
///
/// # Errors
/// A model of no family; what the family's reader finds wrong.
pub fn model_of(config: &Value, file: &str) -> Result<Box<dyn ModelSpec>> {
    let mut plain = config.clone();
    if let Some(map) = plain.as_object_mut() {
        QUANTISATION_KEYS.iter().for_each(|key| drop(map.remove(*key)));
    }
    Ok(model_families::ALL.parse(&Config::parse(&plain.to_string(), file)?)?)
}
