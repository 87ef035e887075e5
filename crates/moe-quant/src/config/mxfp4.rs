//! Headers of `quant_method: mxfp4`: gpt-oss as it was published, with experts in MXFP4 and everything else in floats.
//!
//! Codes and scales of all experts are in one tensor each (`gate_up_proj_blocks`, `gate_up_proj_scales`), which the
//! code that opens files shows as matrices of [`Format::Mxfp4`] with the tensors of compressed-tensors.

use super::header::Header;
use super::pattern::Pattern;
use super::rules::{QuantConfig, Rule};
use crate::error::QuantError;
use crate::format::{Format, Fp4Tensors};

/// The segment that names of experts' modules have.
const EXPERTS: &str = "experts";

pub(super) fn read(header: &Header) -> Result<QuantConfig, QuantError> {
    let mut rules = Vec::new();
    for name in header.strings(&["modules_to_not_convert"])? {
        rules.push(Rule::plain(Pattern::glob(&header.key("modules_to_not_convert"), name)?));
    }
    rules.push(Rule {
        pattern: Pattern::Segments(EXPERTS.to_string()),
        format: Format::Mxfp4(Fp4Tensors::Packed),
    });
    Ok(QuantConfig {
        method: QuantConfig::PACKED_EXPERTS,
        modules: None,
        rules,
        otherwise: Format::Plain,
        notes: Vec::new(),
        dequantised: false,
    })
}
