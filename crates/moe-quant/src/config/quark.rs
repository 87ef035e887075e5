//! Headers of AMD's Quark, of which MXFP4 is read.
//!
//! Source of the keys' meaning: vLLM's `quark.py`. A module has the settings of the first name in `layer_quant_config`
//! that means it, else the settings of `global_quant_config`.

use moe_kernels::QuantGroup;
use serde_json::{Value, json};

use super::common::{group, missing};
use super::header::{Header, shown};
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::{Format, Fp4Tensors, MX_BLOCK};

/// What is read, for errors.
const WORKS: &str = "MXFP4 works: `dtype` fp4, `qscheme` per_group, `group_size` 32, `scale_format` e8m0";

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    let export = header.object("export")?;
    if let Some(export) = &export {
        export.only(&["weight_format"], &["real_quantized"])?;
    }
    if let Some((key, value)) = header.find(&["layer_type_quant_config"]).filter(|(_, v)| **v != json!({})) {
        let what = format!("`{key}` = {}", shown(value));
        return Err(QuantError::unsupported(what, "settings in `layer_quant_config` work"));
    }
    let mut rules = Vec::new();
    for name in header.strings(&["exclude"])? {
        rules.push(Rule::plain(target(&header.key("exclude"), name)?));
    }
    if let Some(layers) = header.object("layer_quant_config")? {
        for (name, settings) in layers.entries() {
            let settings = Header::new(settings, layers.key(name))?;
            rules.push(Rule { pattern: target(&layers.key(name), name)?, format: format(&settings)? });
        }
    }
    let Some(all) = header.object("global_quant_config")? else {
        return Err(missing(header, "global_quant_config", "settings with `weight`"));
    };
    let mut notes = Vec::new();
    if all.has("input_tensors") {
        notes.push(
            "the header asks for quantised activations; here only the weights are quantised, activations keep their dtype"
                .to_string(),
        );
    }
    if export.is_some_and(|export| export.find(&["kv_cache_group"]).is_some_and(|(_, v)| *v != json!([]))) {
        notes.push("the header asks for a quantised KV cache; here it keeps its dtype".to_string());
    }
    Ok(QuantConfig {
        method: "quark",
        modules: None,
        rules,
        otherwise: format(&all)?,
        notes,
        dequantised: false,
    })
}

/// A regular expression, a name in which `*` is any run of characters, or a module and what is below it.
fn target(key: &str, name: &str) -> Result<Pattern, QuantError> {
    match name.strip_prefix("re:") {
        Some(pattern) => Pattern::starting(key, pattern),
        None if name.contains('*') => Pattern::glob(key, name),
        None => Ok(Pattern::Below(name.to_string())),
    }
}

/// The format that settings give a module's weights.
fn format(settings: &Header) -> Result<Format, QuantError> {
    let weights = match settings.find(&["weight"]) {
        None => return Ok(Format::Plain),
        Some((key, Value::Array(levels))) => {
            return Err(QuantError::unsupported(format!("`{key}` in {} levels", levels.len()), WORKS));
        }
        Some((key, weights)) => Header::new(weights, key)?,
    };
    let is = |key: &str, word: &str| {
        let value = weights.find(&[key]).map_or(&Value::Null, |(_, value)| value);
        if value.as_str().is_some_and(|value| value.eq_ignore_ascii_case(word)) {
            return Ok(());
        }
        Err(QuantError::unsupported(format!("`{}` = {}", weights.key(key), shown(value)), WORKS))
    };
    is("dtype", "fp4")?;
    is("qscheme", "per_group")?;
    is("scale_format", "e8m0")?;
    if weights.bool("is_dynamic")?.unwrap_or(false) {
        let what = format!("`{}` = true", weights.key("is_dynamic"));
        return Err(QuantError::unsupported(what, "weights that are stored quantised work"));
    }
    match group(&weights, &["group_size"])? {
        QuantGroup::Size(MX_BLOCK) => Ok(Format::Mxfp4(Fp4Tensors::Plain)),
        _ => Err(QuantError::unsupported(
            format!("a `{}` that is not {MX_BLOCK}", weights.key("group_size")),
            WORKS,
        )),
    }
}
