//! Headers of `quant_method: fp8` (DeepSeek-V3, Qwen3-FP8, AutoFP8, transformers).

use moe_kernels::QuantGroup;
use moe_kernels::names::LM_HEAD;
use serde_json::Value;

use super::header::{Header, value_error};
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::Format;

/// The longest side of a block that a header may have.
const LARGEST_SIDE: u64 = 1 << 20;

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    header.only(&["fmt"], &["e4m3"])?;
    if let Some((key, value)) = header.find(&["weight_scale_semantics"]) {
        let works =
            "scales that weights are multiplied by, as DeepSeek, Qwen and llm-compressor write them, work";
        return Err(QuantError::unsupported(format!("`{key}` = {value}"), works));
    }
    header.only(&["activation_scheme"], &["dynamic", "static"])?;
    // With ue8m0 the scales are powers of two, but they are also stored as floats.
    header.only(&["scale_fmt"], &["float", "float32", "ue8m0"])?;
    let format = match header.find(&["weight_block_size"]) {
        Some((key, value)) => Format::Fp8 { scales: block(&key, value)?, scale_inv: true },
        None => Format::Fp8 { scales: QuantGroup::Tensor, scale_inv: false },
    };
    let mut rules = vec![Rule::plain(Pattern::Exact(LM_HEAD.to_string()))];
    for key in ["modules_to_not_convert", "ignored_layers"] {
        let names = header.strings(&[key])?;
        rules.extend(names.into_iter().map(|name| Rule::plain(Pattern::Segments(name.to_string()))));
    }
    let scheme = header.str(&["activation_scheme"])?.unwrap_or("dynamic");
    let notes = vec![format!(
        "the header asks for activations in FP8 ({scheme}); here only the weights are, activations keep their dtype but in steps of many rows on a GPU (`fp8_activations`)"
    )];
    Ok(QuantConfig { modules: None, method: "fp8", rules, otherwise: format, notes, dequantised: false })
}

/// Reads the `[rows, columns]` of a block. Older versions of compressed-tensors wrote them as "128x128".
pub(super) fn block(key: &str, value: &Value) -> Result<QuantGroup, QuantError> {
    let sides: Vec<Option<u64>> = match value {
        Value::Array(sides) => sides.iter().map(Value::as_u64).collect(),
        Value::String(text) => text.split('x').map(|side| side.parse().ok()).collect(),
        _ => Vec::new(),
    };
    match sides[..] {
        [Some(n @ 1..=LARGEST_SIDE), Some(k @ 1..=LARGEST_SIDE)] => {
            Ok(QuantGroup::Block { n: n as usize, k: k as usize })
        }
        _ => Err(value_error(key, "two sizes above 0, rows and columns, such as [128, 128]", value)),
    }
}
