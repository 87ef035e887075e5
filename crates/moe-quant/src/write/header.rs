//! Writes the `quantization_config` of a checkpoint.
//!
//! Keys and their meaning are the same as in GPTQModel's `QuantizeConfig` and in compressed-tensors'
//! `QuantizationConfig`.

use moe_kernels::QuantGroup;
use moe_kernels::names::LM_HEAD;
use serde_json::{Map, Value, json};

use super::written;
use crate::error::QuantError;
use crate::format::{Format, GptqZeros, IntFormat};

/// Modules whose format differs from the format of all others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    /// A regular expression in Python's syntax. It must match from the first letter of a module's name on.
    pub pattern: String,
    /// Their format; `None` means that they stay in floats.
    pub format: Option<Format>,
}

/// Returns the `quantization_config` of a checkpoint whose linear layers are in `format`, except for `exceptions`.
/// `lm_head` says whether the vocabulary projection is quantised, too.
///
/// # Errors
/// A format that cannot be written; an exception in a format of another kind.
pub fn header(format: Format, lm_head: bool, exceptions: &[Exception]) -> Result<Value, QuantError> {
    written(format)?;
    for other in exceptions.iter().filter_map(|exception| exception.format) {
        let alike = match (format, other) {
            (Format::Gptq { zeros, .. }, Format::Gptq { zeros: other, .. }) => zeros == other,
            (Format::PackQuantized { .. }, Format::PackQuantized { .. }) => true,
            _ => false,
        };
        if !alike {
            let what = format!("{} among modules in {}", other.name(), format.name());
            return Err(QuantError::unsupported(what, "one kind of format in a checkpoint works"));
        }
    }
    Ok(match format {
        Format::Gptq { int, zeros } => gptq(int, zeros, lm_head, exceptions),
        _ => compressed(format, lm_head, exceptions),
    })
}

fn group_size(int: IntFormat) -> i64 {
    match int.group {
        QuantGroup::Size(size) => size as i64,
        _ => -1,
    }
}

fn gptq(int: IntFormat, zeros: GptqZeros, lm_head: bool, exceptions: &[Exception]) -> Value {
    let mut header = json!({
        "quant_method": "gptq",
        "bits": int.bits,
        "group_size": group_size(int),
        "sym": !int.zero_point,
        "desc_act": int.act_order,
        LM_HEAD: lm_head,
        "checkpoint_format": if zeros == GptqZeros::V2 { "gptq_v2" } else { "gptq" },
        "pack_dtype": "int32",
    });
    let overrides: Map<String, Value> = exceptions
        .iter()
        .map(|Exception { pattern, format }| match format.and_then(Format::int) {
            None => (format!("-:{pattern}"), json!({})),
            Some(int) => {
                let settings = json!({
                    "bits": int.bits, "group_size": group_size(int), "sym": !int.zero_point,
                    "desc_act": int.act_order,
                });
                (format!("+:{pattern}"), settings)
            }
        })
        .collect();
    if !overrides.is_empty() {
        header["dynamic"] = Value::Object(overrides);
    }
    header
}

fn compressed(format: Format, lm_head: bool, exceptions: &[Exception]) -> Value {
    let ignored = exceptions.iter().filter(|exception| exception.format.is_none());
    let patterns = ignored.map(|exception| format!("re:{}", exception.pattern));
    let ignore: Vec<String> = (!lm_head).then(|| LM_HEAD.to_string()).into_iter().chain(patterns).collect();
    let group = |target: String, format: Format| {
        json!({
            "targets": [target],
            "weights": weights(format),
            "input_activations": null,
            "output_activations": null,
        })
    };
    let others =
        exceptions.iter().filter_map(|e| e.format.map(|format| group(format!("re:{}", e.pattern), format)));
    let groups: Map<String, Value> = std::iter::once(group("Linear".to_string(), format))
        .chain(others)
        .enumerate()
        .map(|(at, group)| (format!("group_{at}"), group))
        .collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": format.name(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": null,
    })
}

fn weights(format: Format) -> Value {
    let Some(int) = format.int() else { return fp4_weights(format) };
    let mut weights = json!({
        "num_bits": int.bits,
        "type": "int",
        "symmetric": !int.zero_point,
        "strategy": "channel",
        "actorder": null,
        "dynamic": false,
    });
    if let QuantGroup::Size(size) = int.group {
        weights["strategy"] = json!("group");
        weights["group_size"] = json!(size);
    }
    if int.act_order {
        weights["actorder"] = json!("group");
    }
    weights
}

/// The presets `MXFP4` and `NVFP4`.
fn fp4_weights(format: Format) -> Value {
    let is_nvfp4 = matches!(format, Format::Nvfp4(_));
    json!({
        "num_bits": 4,
        "type": "float",
        "symmetric": true,
        "strategy": if is_nvfp4 { "tensor_group" } else { "group" },
        "group_size": format.block(),
        "scale_dtype": if is_nvfp4 { "torch.float8_e4m3fn" } else { "torch.uint8" },
        "dynamic": false,
    })
}
