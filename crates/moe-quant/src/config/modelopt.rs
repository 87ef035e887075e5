//! Headers of NVIDIA's ModelOpt: `quantization_config` in config.json, or the same settings under `quantization` in a
//! file of their own, `hf_quant_config.json`.
//!
//! Source of the keys' meaning: vLLM's `modelopt.py`.

use std::collections::HashMap;
use std::sync::Arc;

use moe_kernels::QuantGroup;
use serde_json::json;

use super::common::missing;
use super::header::{Header, value_error};
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::{Format, Fp4Tensors, NV_BLOCK};

/// Each module has an algorithm of its own.
const MIXED: &str = "MIXED_PRECISION";
/// Algorithms that are read, for errors.
const WORKS: &str = "NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN and MIXED_PRECISION of these work";

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    let inner = header.object("quantization")?;
    let header = inner.as_ref().unwrap_or(header);
    let mut rules = Vec::new();
    for key in ["exclude_modules", "ignore"] {
        for name in header.strings(&[key])? {
            rules.push(Rule::plain(Pattern::glob(&header.key(key), name.trim_end_matches('.'))?));
        }
    }
    let name = header.str(&["quant_algo"])?.unwrap_or_default().to_uppercase();
    let mut notes = Vec::new();
    if !name.starts_with("W4A16") {
        notes.push(
            "the header asks for quantised activations; here only the weights are quantised, activations keep their dtype (FP8 with FP8 weights: `fp8_activations`)"
                .to_string(),
        );
    }
    if header.has("kv_cache_quant_algo") || header.has("kv_cache_scheme") {
        notes.push("the header asks for a quantised KV cache; here it keeps its dtype".to_string());
    }
    let (modules, otherwise) = match name.as_str() {
        MIXED => (Some(Arc::new(modules(header)?)), Format::Plain),
        _ => (None, algorithm(header)?),
    };
    Ok(QuantConfig { method: "modelopt", modules, rules, otherwise, notes, dequantised: false })
}

/// The format of an algorithm.
fn algorithm(header: &Header) -> Result<Format, QuantError> {
    let Some(name) = header.str(&["quant_algo"])? else {
        return Err(missing(header, "quant_algo", "the name of an algorithm, such as NVFP4"));
    };
    match name.to_uppercase().as_str() {
        // W4A16: its makers mean the same weights for activations in 16 bits.
        "NVFP4" | "W4A16_NVFP4" => match header.int(&["group_size"])? {
            Some((key, size)) if size != NV_BLOCK as i64 => {
                Err(value_error(key, format!("{NV_BLOCK}, the block of NVFP4"), &json!(size)))
            }
            _ => Ok(Format::Nvfp4(Fp4Tensors::Plain)),
        },
        "FP8" => Ok(Format::Fp8 { scales: QuantGroup::Tensor, scale_inv: false }),
        "FP8_PER_CHANNEL_PER_TOKEN" => Ok(Format::Fp8 { scales: QuantGroup::Channel, scale_inv: false }),
        _ => {
            let shown: String = name.chars().take(40).collect();
            let what = format!("ModelOpt's algorithm {shown} (`{}`)", header.key("quant_algo"));
            Err(QuantError::unsupported(what, WORKS))
        }
    }
}

/// The formats of modules that are named one by one, or by a module above them; all others are floats.
fn modules(header: &Header) -> Result<HashMap<String, Format>, QuantError> {
    let Some(layers) = header.object("quantized_layers")? else {
        return Err(missing(header, "quantized_layers", "modules with their `quant_algo`"));
    };
    let format = |(name, settings): (&String, _)| {
        let settings = Header::new(settings, layers.key(name))?;
        Ok((name.clone(), algorithm(&settings)?))
    };
    layers.entries().map(format).collect()
}
