//! Headers of GPTQ (AutoGPTQ, GPTQModel).
//!
//! The keys have the meaning that they have in GPTQModel's `QuantizeConfig`, and `modules_in_block_to_quantize` the
//! meaning in transformers' `GPTQConfig`.

use moe_kernels::QuantGroup;
use moe_kernels::names::LM_HEAD;

use super::common::{BITS, GROUP_SIZE, bits, group};
use super::dynamic;
use super::header::Header;
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::{Format, GptqZeros, IntFormat};

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    let zeros = zeros(header)?;
    header.only(&["pack_dtype"], &["int32"])?;
    if let Some((key, value)) = header.find(&["rotation"]) {
        return Err(QuantError::unsupported(format!("`{key}` = {value}"), "GPTQ without rotation works"));
    }
    let int = int_format(header, None)?;
    let mut rules = Vec::new();
    if !header.bool(LM_HEAD)?.unwrap_or(false) {
        rules.push(Rule::plain(Pattern::Exact(LM_HEAD.to_string())));
    }
    rules.extend(dynamic::rules(header, |settings| override_format(settings, int, zeros))?);
    let inside = header.strings(&["modules_in_block_to_quantize"])?;
    if !inside.is_empty() {
        let listed = inside.into_iter().map(|name| Pattern::Segments(name.to_string())).collect();
        rules.push(Rule::plain(Pattern::NoneOf(listed)));
    }
    let left_out = header.strings(&["modules_to_not_convert"])?;
    rules.splice(0..0, left_out.into_iter().map(|name| Rule::plain(Pattern::Segments(name.to_string()))));
    Ok(QuantConfig {
        modules: None,
        method: "gptq",
        rules,
        otherwise: Format::Gptq { int, zeros },
        notes: Vec::new(),
        dequantised: false,
    })
}

fn zeros(header: &Header) -> Result<GptqZeros, QuantError> {
    if header.bool("is_marlin_format")?.unwrap_or(false) {
        let what = format!("`{}` = true", header.key("is_marlin_format"));
        return Err(QuantError::unsupported(what, "checkpoint_format gptq or gptq_v2 works"));
    }
    // GPTQModel writes both keys. Older readers know only `checkpoint_format`.
    let keys = ["checkpoint_format", "format"];
    header.only(&keys, &["gptq", "gptq_v2"])?;
    let v2 = header.str(&keys)?.is_some_and(|format| format.eq_ignore_ascii_case("gptq_v2"));
    Ok(if v2 { GptqZeros::V2 } else { GptqZeros::V1 })
}

/// Reads bits, group, symmetry and act-order. Values that an override does not have come from `base`.
pub(super) fn int_format(header: &Header, base: Option<IntFormat>) -> Result<IntFormat, QuantError> {
    let bits = match base {
        Some(base) if header.find(&BITS).is_none() => base.bits,
        _ => bits(header, &BITS, "GPTQ", &[4, 8])?,
    };
    let group = match base {
        Some(base) if header.find(&GROUP_SIZE).is_none() => base.group,
        _ => group(header, &GROUP_SIZE)?,
    };
    let zero_point = match header.bool("sym")? {
        Some(sym) => !sym,
        None => base.is_some_and(|base| base.zero_point),
    };
    let act_order = header.bool("desc_act")?.unwrap_or(base.is_some_and(|base| base.act_order));
    // If the group is the whole row, columns cannot be in an order by group.
    Ok(IntFormat { bits, group, zero_point, act_order: act_order && group != QuantGroup::Channel })
}

/// Returns the format of modules with their own settings in GPTQ.
fn override_format(settings: &Header, base: IntFormat, zeros: GptqZeros) -> Result<Format, QuantError> {
    for key in ["method", "quant_method"] {
        settings.only(&[key], &["gptq"])?;
    }
    settings.only(&["format", "checkpoint_format"], &[zeros_name(zeros)])?;
    Ok(Format::Gptq { int: int_format(settings, Some(base))?, zeros })
}

fn zeros_name(zeros: GptqZeros) -> &'static str {
    match zeros {
        GptqZeros::V1 => "gptq",
        GptqZeros::V2 => "gptq_v2",
    }
}
