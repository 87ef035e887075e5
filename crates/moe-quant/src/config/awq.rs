//! Headers of AWQ, as AutoAWQ, llm-compressor and AutoRound write them.

use moe_kernels::names::LM_HEAD;

use super::common::{BITS, GROUP_SIZE, bits, group};
use super::header::Header;
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use super::{dynamic, gptq};
use crate::error::QuantError;
use crate::format::{Format, IntFormat};

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    // The other packings (gemv, gemv_fast, marlin, llm-awq) store integers in another order.
    header.only(&["version", "format", "checkpoint_format"], &["gemm"])?;
    header.only(&["backend"], &["autoawq", "auto"])?;
    let int = int_format(header)?;
    let mut rules = left_out(header)?;
    rules.extend(dynamic::rules(header, |settings| {
        for (keys, word) in [(["method", "quant_method"], "awq"), (["format", "version"], "gemm")] {
            settings.only(&keys, &[word])?;
        }
        override_format(settings, int)
    })?);
    Ok(QuantConfig {
        modules: None,
        method: "awq",
        rules,
        otherwise: Format::Awq { int },
        notes: Vec::new(),
        dequantised: false,
    })
}

/// Returns the format of layers with their own settings. Settings that are not given are those in `base`.
pub(super) fn override_format(settings: &Header, base: IntFormat) -> Result<Format, QuantError> {
    let int = gptq::int_format(settings, Some(base))?;
    if int.bits != 4 {
        let path = settings.key(BITS[0]);
        return Err(QuantError::unsupported(format!("AWQ with {} bits (`{path}`)", int.bits), "4 bits work"));
    }
    let zero_point = settings.bool("zero_point")?.unwrap_or(int.zero_point);
    Ok(Format::Awq { int: IntFormat { zero_point, act_order: false, ..int } })
}

pub(super) fn int_format(header: &Header) -> Result<IntFormat, QuantError> {
    let bits = bits(header, &BITS, "AWQ", &[4])?;
    let group = group(header, &GROUP_SIZE)?;
    let symmetric = header.bool("sym")?.unwrap_or(false);
    let zero_point = header.bool("zero_point")?.unwrap_or(!symmetric);
    Ok(IntFormat { bits, group, zero_point, act_order: false })
}

/// The vocabulary projection is outside of the blocks that AWQ quantises.
pub(super) fn left_out(header: &Header) -> Result<Vec<Rule>, QuantError> {
    let mut rules = vec![Rule::plain(Pattern::Exact(LM_HEAD.to_string()))];
    let names = header.strings(&["modules_to_not_convert"])?;
    rules.extend(names.into_iter().map(|name| Rule::plain(Pattern::Segments(name.to_string()))));
    Ok(rules)
}
