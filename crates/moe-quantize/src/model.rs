//! The models for which checkpoints can be written. These are all families. Their sizes are read from config.json.

use anyhow::Result;
use model_runtime::Config;
use moe_engine::ModelSpec;
use serde_json::Value;

/// The keys of config.json that may contain a quantisation header.
pub const QUANTISATION_KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// Reads the config.json of a checkpoint, quantised or not. `file` names it in errors.
///
/// # Errors
/// No family has this model, or the family's reader reports an error.
pub fn model_of(config: &Value, file: &str) -> Result<Box<dyn ModelSpec>> {
    let mut plain = config.clone();
    if let Some(map) = plain.as_object_mut() {
        QUANTISATION_KEYS.iter().for_each(|key| drop(map.remove(*key)));
    }
    Ok(model_families::ALL.parse(&Config::parse(&plain.to_string(), file)?)?)
}
