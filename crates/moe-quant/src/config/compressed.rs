//! Headers of compressed-tensors (llm-compressor).
//!
//! Source of the keys' meaning: `QuantizationConfig` and `QuantizationArgs` of the library of that name. Of several
//! groups that name a module, one that names it exactly comes first, then patterns, then the class `Linear`.

use moe_kernels::QuantGroup;
use serde_json::{Value, json};

use super::common::{bits, group, missing};
use super::fp8::block;
use super::header::{Header, value_error};
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::{Format, Fp4Tensors, IntFormat, MX_BLOCK, NV_BLOCK};

/// Formats that are read.
const FORMATS: [&str; 5] =
    ["pack-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"];

/// What `config_groups` holds, for errors.
const GROUPS: &str = "groups of modules with their `weights`";

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    refuse_transforms(header)?;
    // Checkpoints of 2024 call themselves frozen and are compressed all the same.
    header.only(&["quantization_status"], &["compressed", "frozen"])?;
    let mut notes = Vec::new();
    if header.has("kv_cache_scheme") {
        notes.push("the header asks for a quantised KV cache; here it keeps its dtype".to_string());
    }
    let Some(groups) = header.object("config_groups")? else {
        return Err(missing(header, "config_groups", GROUPS));
    };
    // A checkpoint of which only the KV cache is quantised has no groups.
    if groups.entries().next().is_none() && !header.has("kv_cache_scheme") {
        return Err(value_error(header.key("config_groups"), format!("{GROUPS}, at least one"), &json!({})));
    }
    let ignored = header.strings(&["ignore"])?;
    let key = header.key("ignore");
    let ignored = ignored.into_iter().map(|name| Ok(Rule::plain(target(&key, name)?)));
    let mut rules = ignored.collect::<Result<Vec<_>, QuantError>>()?;
    let mut chosen = Vec::new();
    for (name, value) in groups.entries() {
        let settings = group_settings(&groups.key(name), value)?;
        let Some(format) = format(header, &settings)? else { continue };
        notes.extend(activation_note(&settings)?);
        let key = settings.key("targets");
        let targets = settings.strings(&["targets"])?;
        if targets.is_empty() {
            let got = settings.find(&["targets"]).map_or("nothing", |_| "none");
            let expected = "the modules of the group, at least one, such as [\"Linear\"]".to_string();
            return Err(QuantError::Value { key, expected, got: got.to_string() });
        }
        for name in targets {
            chosen.push((rank(name), Rule { pattern: target(&key, name)?, format }));
        }
    }
    chosen.sort_by_key(|(rank, _)| *rank);
    rules.extend(chosen.into_iter().map(|(_, rule)| rule));
    notes.dedup();
    Ok(QuantConfig {
        modules: None,
        method: "compressed-tensors",
        rules,
        otherwise: Format::Plain,
        notes,
        dequantised: false,
    })
}

/// What changes weights or activations in ways that are not read.
fn refuse_transforms(header: &Header) -> Result<(), QuantError> {
    if let Some((key, value)) = header.find(&["transform_config"]).filter(|(_, v)| **v != json!({})) {
        let what = format!("`{key}` = {}", super::header::shown(value));
        return Err(QuantError::unsupported(what, "a checkpoint without transforms works"));
    }
    match header.object("sparsity_config")? {
        Some(sparsity) => sparsity.only(&["format"], &["dense"]),
        None => Ok(()),
    }
}

fn group_settings<'a>(path: &str, value: &'a Value) -> Result<Header<'a>, QuantError> {
    if value.is_array() {
        let works = "a group with `targets` and `weights` spelt out works";
        return Err(QuantError::unsupported(format!("the preset `{path}`"), works));
    }
    Header::new(value, path)
}

/// Exact names before patterns before classes.
fn rank(target: &str) -> u8 {
    match target {
        "Linear" => 2,
        name if name.starts_with("re:") => 1,
        _ => 0,
    }
}

fn target(key: &str, name: &str) -> Result<Pattern, QuantError> {
    match name.strip_prefix("re:") {
        Some(pattern) => Pattern::starting(key, pattern),
        None if name == "Linear" => Ok(Pattern::Any),
        None => Ok(Pattern::Exact(name.to_string())),
    }
}

/// The format of a group's weights; `None` if they are not quantised.
fn format(header: &Header, settings: &Header) -> Result<Option<Format>, QuantError> {
    let Some(weights) = settings.object("weights")? else { return Ok(None) };
    settings.only(&["format"], &FORMATS)?;
    let name = match settings.str(&["format"])? {
        Some(name) => name,
        None => {
            header.only(&["format"], &FORMATS)?;
            header
                .str(&["format"])?
                .ok_or_else(|| missing(header, "format", FORMATS.join(" or ").as_str()))?
        }
    };
    if weights.bool("dynamic")?.unwrap_or(false) {
        return Err(value_error(weights.key("dynamic"), "false: weights are stored", &json!(true)));
    }
    let kind = weights.str(&["type"])?.unwrap_or("int").to_lowercase();
    match (name, kind.as_str()) {
        ("pack-quantized", "int") => Ok(Some(Format::PackQuantized { int: int_format(&weights)? })),
        ("float-quantized" | "naive-quantized", "float") => {
            Ok(Some(Format::Fp8 { scales: fp8_scales(&weights)?, scale_inv: false }))
        }
        ("mxfp4-pack-quantized", "float") => {
            fp4(&weights, name, MXFP4).map(|()| Some(Format::Mxfp4(Fp4Tensors::Packed)))
        }
        ("nvfp4-pack-quantized", "float") => {
            fp4(&weights, name, NVFP4).map(|()| Some(Format::Nvfp4(Fp4Tensors::Packed)))
        }
        (_, "int" | "float") => Err(QuantError::unsupported(
            format!("`{}` = {kind} with the format {name}", weights.key("type")),
            "int with pack-quantized, or float with float-quantized, mxfp4-pack-quantized or nvfp4-pack-quantized works",
        )),
        _ => Err(value_error(weights.key("type"), "int or float", &json!(kind))),
    }
}

fn int_format(weights: &Header) -> Result<IntFormat, QuantError> {
    let bits = bits(weights, &["num_bits"], "pack-quantized", &[4, 8])?;
    let sized = weights.int(&["group_size"])?.is_some();
    let strategy = match weights.str(&["strategy"])? {
        Some(strategy) => strategy.to_lowercase(),
        None if sized => "group".to_string(),
        None => "tensor".to_string(),
    };
    let group = match strategy.as_str() {
        "group" => group(weights, &["group_size"])?,
        "channel" => QuantGroup::Channel,
        other => {
            return Err(QuantError::unsupported(
                format!("`{}` = {other} with integers", weights.key("strategy")),
                "the strategy group or channel works",
            ));
        }
    };
    let zero_point = !weights.bool("symmetric")?.unwrap_or(true);
    let act_order = actorder(weights)? && group != QuantGroup::Channel;
    Ok(IntFormat { bits, group, zero_point, act_order })
}

/// `group` (and its other names) stores `weight_g_idx`; with `weight` groups stay in order.
fn actorder(weights: &Header) -> Result<bool, QuantError> {
    let Some((key, value)) = weights.find(&["actorder"]) else { return Ok(false) };
    match (value, value.as_str().map(str::to_lowercase).as_deref()) {
        (Value::Bool(on), _) => Ok(*on),
        (_, Some("group" | "dynamic")) => Ok(true),
        (_, Some("weight" | "static")) => Ok(false),
        _ => Err(value_error(key, "null, group, weight, dynamic or static", value)),
    }
}

/// Blocks of E2M1 codes: the presets of the library of that name.
struct Fp4 {
    name: &'static str,
    block: usize,
    strategy: &'static str,
    scale_dtypes: [&'static str; 2],
}

const MXFP4: Fp4 =
    Fp4 { name: "MXFP4", block: MX_BLOCK, strategy: "group", scale_dtypes: ["torch.uint8", "uint8"] };
const NVFP4: Fp4 = Fp4 {
    name: "NVFP4",
    block: NV_BLOCK,
    strategy: "tensor_group",
    scale_dtypes: ["torch.float8_e4m3fn", "float8_e4m3fn"],
};

/// Fails unless the settings are a preset's.
fn fp4(weights: &Header, format: &str, preset: Fp4) -> Result<(), QuantError> {
    let Fp4 { name, block, strategy, scale_dtypes } = preset;
    bits(weights, &["num_bits"], format, &[4])?;
    weights.only(&["strategy"], &[strategy])?;
    weights.only(&["scale_dtype"], &scale_dtypes)?;
    if !weights.bool("symmetric")?.unwrap_or(true) {
        let expected = format!("true: {name} has no zero points");
        return Err(value_error(weights.key("symmetric"), expected, &json!(false)));
    }
    if group(weights, &["group_size"])? == QuantGroup::Size(block) {
        return Ok(());
    }
    Err(QuantError::unsupported(
        format!("a `{}` that is not {block}, of {name}", weights.key("group_size")),
        format!("blocks of {block} columns work"),
    ))
}

fn fp8_scales(weights: &Header) -> Result<QuantGroup, QuantError> {
    bits(weights, &["num_bits"], "float-quantized", &[8])?;
    if !weights.bool("symmetric")?.unwrap_or(true) {
        return Err(value_error(weights.key("symmetric"), "true: FP8 has no zero points", &json!(false)));
    }
    match weights.str(&["strategy"])?.unwrap_or("tensor").to_lowercase().as_str() {
        "tensor" => Ok(QuantGroup::Tensor),
        "channel" => Ok(QuantGroup::Channel),
        "block" => match weights.find(&["block_structure"]) {
            Some((key, value)) => block(&key, value),
            None => {
                Err(missing(weights, "block_structure", "rows and columns of a block, such as [128, 128]"))
            }
        },
        other => Err(QuantError::unsupported(
            format!("`{}` = {other} with floats", weights.key("strategy")),
            "the strategy tensor, channel or block works",
        )),
    }
}

fn activation_note(settings: &Header) -> Result<Option<String>, QuantError> {
    let Some(activations) = settings.object("input_activations")? else { return Ok(None) };
    let kind = activations.str(&["type"])?.unwrap_or("int");
    let bits = activations.int(&["num_bits"])?.map_or(8, |(_, bits)| bits);
    Ok(Some(format!(
        "the header asks for activations in {kind}{bits}; here only the weights are quantised, activations keep their dtype (FP8 with FP8 weights: `fp8_activations`)"
    )))
}
