//! Headers of AutoRound's own exports (`quant_method: auto-round`). Their tensors are packed in the same way as GPTQ's
//! or AWQ's.

use super::common::BITS;
use super::header::Header;
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use super::{awq, gptq};
use crate::error::QuantError;
use crate::format::{Format, GptqZeros, IntFormat};

/// How a layer's integers are packed.
#[derive(Clone, Copy)]
enum Packing {
    Gptq(GptqZeros),
    Awq,
}

/// The words that `packing_format` may contain, and the packing that each means.
const PACKINGS: [(&str, Packing); 12] = [
    ("auto_round:auto_gptq", Packing::Gptq(GptqZeros::V1)),
    ("auto_round:gptq", Packing::Gptq(GptqZeros::V1)),
    ("auto_round:auto_gptq:exllamav2", Packing::Gptq(GptqZeros::V1)),
    ("auto_round:gptq:exllamav2", Packing::Gptq(GptqZeros::V1)),
    ("gptq:exllamav2", Packing::Gptq(GptqZeros::V1)),
    ("auto", Packing::Gptq(GptqZeros::V1)),
    ("auto_round:auto_awq", Packing::Awq),
    ("auto_round:awq", Packing::Awq),
    ("auto_round", Packing::Gptq(GptqZeros::V2)),
    ("auto_round:exllamav2", Packing::Gptq(GptqZeros::V2)),
    ("auto_round:tritonv2", Packing::Gptq(GptqZeros::V2)),
    ("auto_round:gptqmodel", Packing::Gptq(GptqZeros::V2)),
];

/// AutoRound quantises with fewer bits than this. 16 and more bits mean floats.
const FLOAT_BITS: i64 = 16;

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    let packing = packing(header)?;
    check_kind(header)?;
    let int = match packing {
        Packing::Gptq(_) => gptq::int_format(header, None)?,
        Packing::Awq => awq::int_format(header)?,
    };
    let mut rules = extra_config(header, packing, int)?;
    rules.extend(awq::left_out(header)?);
    let blocks = header.strings(&["block_name_to_quantize", "to_quant_block_names"])?;
    let blocks: Vec<_> = blocks.into_iter().flat_map(|names| names.split(',')).map(str::trim).collect();
    if !blocks.is_empty() {
        let below = |name: &str| Pattern::Below(name.trim_end_matches('.').to_string());
        rules.push(Rule::plain(Pattern::NoneOf(blocks.into_iter().map(below).collect())));
    }
    Ok(QuantConfig {
        modules: None,
        method: "auto-round",
        rules,
        otherwise: packed(packing, int),
        notes: Vec::new(),
        dequantised: false,
    })
}

fn packing(header: &Header) -> Result<Packing, QuantError> {
    let keys = ["packing_format", "backend"];
    header.only(&keys, &PACKINGS.map(|(name, _)| name))?;
    let name = header.str(&keys)?.unwrap_or("auto").to_lowercase();
    let found = PACKINGS.iter().find(|(known, _)| *known == name);
    Ok(found.map_or(Packing::Gptq(GptqZeros::V1), |(_, packing)| *packing))
}

fn packed(packing: Packing, int: IntFormat) -> Format {
    match packing {
        Packing::Gptq(zeros) => Format::Gptq { int, zeros },
        Packing::Awq => Format::Awq { int },
    }
}

/// Checks that weights are integers and activations are floats.
fn check_kind(header: &Header) -> Result<(), QuantError> {
    header.only(&["data_type"], &["int", "int_sym", "int_asym"])?;
    match header.int(&["act_bits"])? {
        Some((key, bits)) if bits < FLOAT_BITS => Err(QuantError::unsupported(
            format!("`{key}` = {bits}"),
            "AutoRound with 16 bits for activations works",
        )),
        _ => Ok(()),
    }
}

/// Returns the rules of layers with their own settings. Layers that are named in full come first, then names and
/// patterns that match several layers.
fn extra_config(header: &Header, packing: Packing, base: IntFormat) -> Result<Vec<Rule>, QuantError> {
    let Some(layers) = header.object("extra_config")? else { return Ok(Vec::new()) };
    let mut rules = Vec::new();
    for (name, settings) in layers.entries() {
        let path = layers.key(name);
        let format = layer_format(&Header::new(settings, path.clone())?, packing, base)?;
        let pattern = name_pattern(&path, name)?;
        rules.push((!matches!(pattern, Pattern::Exact(_)), Rule { pattern, format }));
    }
    rules.sort_by_key(|(several, _)| *several);
    Ok(rules.into_iter().map(|(_, rule)| rule).collect())
}

fn layer_format(settings: &Header, packing: Packing, base: IntFormat) -> Result<Format, QuantError> {
    if settings.int(&BITS)?.is_some_and(|(_, bits)| bits >= FLOAT_BITS) {
        return Ok(Format::Plain);
    }
    check_kind(settings)?;
    match packing {
        Packing::Awq => awq::override_format(settings, base),
        Packing::Gptq(zeros) => {
            let int = gptq::int_format(settings, Some(base))?;
            Ok(Format::Gptq { int: IntFormat { act_order: false, ..int }, zeros })
        }
    }
}

/// Returns the pattern of a name in the header. AutoRound writes full names, and regular expressions for several
/// layers.
fn name_pattern(path: &str, name: &str) -> Result<Pattern, QuantError> {
    const META: [char; 10] = ['*', '^', '$', '|', '(', ')', '[', ']', '?', '+'];
    if name.contains(META) {
        return Pattern::somewhere(path, name);
    }
    Ok(match name.starts_with("model.") || !name.contains('.') {
        true => Pattern::Exact(name.to_string()),
        false => Pattern::Segments(name.to_string()),
    })
}
