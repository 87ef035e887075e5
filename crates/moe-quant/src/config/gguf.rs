//! Headers of `quant_method: gguf`, which describe random weights of one type of ggml. A GGUF file says the type of
//! each tensor itself.

use moe_kernels::names::LM_HEAD;

use super::header::{Header, value_error};
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::Format;
use crate::ggml::{GgmlType, supported};

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    let Some((key, value)) = header.find(&["type"]) else {
        return Err(QuantError::unsupported(
            format!("a header without `{}`", header.key("type")),
            format!("the name of a type works: {}", supported()),
        ));
    };
    let named = |name: &str| GgmlType::all().find(|ggml| ggml.name().eq_ignore_ascii_case(name));
    let ggml = value
        .as_str()
        .and_then(named)
        .ok_or_else(|| value_error(key, format!("the name of a type ({})", supported()), value))?;
    let mut rules = Vec::new();
    for name in header.strings(&["modules_to_not_convert"])? {
        rules.push(Rule::plain(Pattern::Segments(name.to_string())));
    }
    if !header.bool(LM_HEAD)?.unwrap_or(false) {
        rules.push(Rule::plain(Pattern::Exact(LM_HEAD.to_string())));
    }
    Ok(QuantConfig {
        method: "gguf",
        modules: None,
        rules,
        otherwise: Format::Ggml(ggml),
        notes: Vec::new(),
        dequantised: false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(header: &Value) -> Result<QuantConfig, QuantError> {
        QuantConfig::from_header("quantization_config", header)
    }

    #[test]
    fn a_type_is_that_of_every_module_that_is_not_left_out() {
        let header = json!({"quant_method": "gguf", "type": "q4_k", "modules_to_not_convert": ["self_attn"]});
        let config = read(&header).unwrap();
        let format = |module: &str| config.format_of(module).unwrap();
        assert_eq!(format("model.layers.0.mlp.experts.3.up_proj"), Format::Ggml(GgmlType::Q4K));
        assert_eq!(format("model.layers.0.self_attn.q_proj"), Format::Plain);
        assert_eq!(format(LM_HEAD), Format::Plain);
        let with_head = json!({"quant_method": "gguf", "type": "Q4_K", "lm_head": true});
        assert_eq!(read(&with_head).unwrap().format_of(LM_HEAD).unwrap(), Format::Ggml(GgmlType::Q4K));
    }

    #[test]
    fn other_types_are_refused_with_the_ones_that_work() {
        for header in [json!({"quant_method": "gguf"}), json!({"quant_method": "gguf", "type": "IQ1_S"})] {
            let error = read(&header).unwrap_err().to_string();
            assert!(error.contains("quantization_config.type") && error.contains("Q4_K"), "{error}");
        }
    }
}
