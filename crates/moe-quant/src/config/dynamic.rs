//! Settings by pattern (`dynamic`), which GPTQModel writes into headers of GPTQ and AWQ.

use serde_json::Value;

use super::header::Header;
use super::pattern::Pattern;
use super::rules::Rule;
use crate::error::QuantError;
use crate::format::Format;

/// Returns the rules in a header's `dynamic`. A pattern that begins with `-:` keeps modules in floats. One with `+:` or
/// no prefix changes settings, from which `format` makes the format of the modules. As in GPTQModel, the first pattern
/// that matches counts, and the patterns that keep modules in floats come first.
pub(super) fn rules(
    header: &Header,
    format: impl Fn(&Header) -> Result<Format, QuantError>,
) -> Result<Vec<Rule>, QuantError> {
    let Some(overrides) = header.object("dynamic")? else { return Ok(Vec::new()) };
    let left_out = |(pattern, _): &(&String, &Value)| pattern.starts_with("-:");
    let (first, then): (Vec<_>, Vec<_>) = overrides.entries().partition(left_out);
    let rule = |(pattern, settings): (&String, &Value)| {
        let path = overrides.key(pattern);
        if let Some(pattern) = pattern.strip_prefix("-:") {
            return Ok(Rule::plain(Pattern::starting(&path, pattern)?));
        }
        let format = format(&Header::new(settings, path.clone())?)?;
        let pattern = Pattern::starting(&path, pattern.strip_prefix("+:").unwrap_or(pattern))?;
        Ok(Rule { pattern, format })
    };
    first.into_iter().chain(then).map(rule).collect()
}
