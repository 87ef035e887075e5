//! Headers of `quant_method: fp8` (DeepSeek-V3, Qwen3-FP8, AutoFP8).

use moe_kernels::Fp8Scales;
use serde_json::Value;

use super::header::{Header, value_error};
use super::pattern::Pattern;
use super::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::Format;

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    header.only(&["fmt"], &["e4m3"])?;
    header.only(&["activation_scheme"], &["dynamic", "static"])?;
    // ue8m0: scales are powers of two, held in floats all the same.
    header.only(&["scale_fmt"], &["float", "float32", "ue8m0"])?;
    let format = match header.find(&["weight_block_size"]) {
        Some((key, value)) => Format::Fp8 { scales: block(&key, value)?, scale_inv: true },
        None => Format::Fp8 { scales: Fp8Scales::Tensor, scale_inv: false },
    };
    let mut rules = vec![Rule::plain(Pattern::Exact("lm_head".to_string()))];
    for key in ["modules_to_not_convert", "ignored_layers"] {
        let names = header.strings(&[key])?;
        rules.extend(names.into_iter().map(|name| Rule::plain(Pattern::Segments(name.to_string()))));
    }
    let scheme = header.str(&["activation_scheme"])?.unwrap_or("dynamic");
    let notes = vec![format!(
        "the header asks for activations in FP8 ({scheme}); here only the weights are, activations keep their dtype but in prompts on a GPU (--fp8-activations)"
    )];
    Ok(QuantConfig { method: "fp8", rules, otherwise: format, notes })
}

/// `[rows, columns]` of a block.
pub(super) fn block(key: &str, value: &Value) -> Result<Fp8Scales, QuantError> {
    let side = |v: &Value| v.as_u64().filter(|side| (1..=1 << 20).contains(side)).map(|side| side as usize);
    let sides = value.as_array().map(|sides| sides.iter().map(side).collect::<Vec<_>>());
    match sides.as_deref() {
        Some([Some(n), Some(k)]) => Ok(Fp8Scales::Block { n: *n, k: *k }),
        _ => Err(value_error(key, "two sizes above 0, rows and columns, such as [128, 128]", value)),
    }
}
