//! `quantization_config` of a config.json: which module is stored in which format.
//!
//! Every header becomes the same plain data, an ordered list of rules; the first that matches a module's name says its
//! format.

mod autoround;
mod awq;
mod common;
mod compressed;
mod dynamic;
mod fp8;
mod gguf;
mod gptq;
mod header;
mod modelopt;
mod mxfp4;
mod pattern;
mod quark;
mod rules;

use serde_json::Value;

use crate::error::QuantError;
use header::{Header, value_error};

pub use rules::QuantConfig;

/// The keys of config.json that may hold the header.
const KEYS: [&str; 2] = ["quantization_config", "compression_config"];
/// Methods that are read, for errors.
const METHODS: &str = "gptq, awq, compressed-tensors, fp8, auto-round, modelopt, quark and mxfp4 work, or the checkpoint in its original float dtype";

/// Names of tensors that may be present in addition to quantised modules and are not read, where `*` is any run of
/// characters: scales of activations and of a KV cache, which keep their dtype here.
pub const UNREAD_TENSORS: &[&str] = &[
    "*.input_scale",
    "*.input_global_scale",
    "*.input_zero_point",
    "*.activation_scale",
    "*.output_scale",
    "*.q_scale",
    "*.k_scale",
    "*.v_scale",
    "*.kv_scale",
];

impl QuantConfig {
    /// Reads the header of a config.json, at `quantization_config` or `compression_config`, there or in `text_config`;
    /// `None` if the checkpoint is not quantised.
    ///
    /// # Errors
    /// A header that contradicts itself, or a method or option that is not read. The error names the key, what was
    /// expected and what is there, or what would work.
    pub fn from_json(config: &Value) -> Result<Option<Self>, QuantError> {
        let root = config.get("text_config").filter(|text| KEYS.iter().any(|key| text.get(key).is_some()));
        let root = root.unwrap_or(config);
        let found = KEYS.iter().find_map(|key| root.get(key).filter(|v| !v.is_null()).map(|v| (*key, v)));
        found.map(|(key, header)| Self::from_header(key, header)).transpose()
    }

    /// Reads the header itself, as `quantize_config.json` of older GPTQ checkpoints holds it, and
    /// `hf_quant_config.json` of ModelOpt's. `path` stands before each key in errors.
    ///
    /// # Errors
    /// The errors of [`from_json`](Self::from_json).
    pub fn from_header(path: &str, header: &Value) -> Result<Self, QuantError> {
        let header = Header::new(header, path)?;
        let method = match header.find(&["quant_method"]) {
            Some((key, value)) => {
                value.as_str().ok_or_else(|| value_error(key, "the name of a method", value))?.to_lowercase()
            }
            None if header.has("config_groups") => "compressed-tensors".to_string(),
            None if header.has("desc_act") => "gptq".to_string(),
            None if header.has("quantization") => "modelopt".to_string(),
            None => {
                let key = header.key("quant_method");
                return Err(QuantError::unsupported(format!("a header without `{key}`"), METHODS));
            }
        };
        match method.as_str() {
            "gptq" => gptq::read(&header),
            "awq" => awq::read(&header),
            "compressed-tensors" => compressed::read(&header),
            "fp8" => fp8::read(&header),
            "mxfp4" => mxfp4::read(&header),
            "gguf" => gguf::read(&header),
            "modelopt" | "modelopt_fp4" => modelopt::read(&header),
            "quark" => quark::read(&header),
            "auto-round" | "auto_round" | "intel/auto-round" => autoround::read(&header),
            other => Err(QuantError::unsupported(
                format!("quantisation method `{}` (`{path}`)", other.chars().take(40).collect::<String>()),
                METHODS,
            )),
        }
    }
}
