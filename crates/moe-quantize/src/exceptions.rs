//! Describes, in the header, the modules whose format differs from most. A pattern describes the same module of all
//! layers and experts. Names are used where layers differ.

use std::collections::BTreeMap;

use moe_quant::Format;
use moe_quant::write::Exception;

/// Returns the exceptions among modules with their formats. Modules whose names differ only in numbers get one pattern
/// if all of them have the same format.
pub fn exceptions(modules: &[(String, Format)], base: Format) -> Vec<Exception> {
    let mut alike: BTreeMap<String, Vec<&(String, Format)>> = BTreeMap::new();
    for module in modules {
        alike.entry(without_numbers(&module.0)).or_default().push(module);
    }
    let mut found = Vec::new();
    for (pattern, modules) in alike {
        let exceptional: Vec<_> = modules.iter().filter(|(_, format)| *format != base).collect();
        let (Some((_, first)), same) = (exceptional.first(), |format: Format| {
            exceptional.len() == modules.len() && modules.iter().all(|(_, other)| *other == format)
        }) else {
            continue;
        };
        if same(*first) {
            found.push(exception(pattern, *first));
        } else {
            found.extend(exceptional.iter().map(|(name, format)| exception(escaped(name), *format)));
        }
    }
    found
}

fn exception(pattern: String, format: Format) -> Exception {
    let format = (format != Format::Plain).then_some(format);
    Exception { pattern: format!("{pattern}$"), format }
}

/// Returns a pattern for all names that differ from this one only in whole numbers between dots.
fn without_numbers(name: &str) -> String {
    let segment = |segment: &str| match segment.bytes().all(|b| b.is_ascii_digit()) {
        true => r"\d+".to_string(),
        false => escaped(segment),
    };
    name.split('.').map(segment).collect::<Vec<_>>().join(r"\.")
}

/// Escapes a name, which consists of letters, digits, underscores and dots.
fn escaped(name: &str) -> String {
    fancy_regex::escape(name).into_owned()
}

#[cfg(test)]
mod tests {
    use moe_quant::{GptqZeros, IntFormat, QuantGroup};

    use super::*;

    #[test]
    fn layers_that_agree_are_one_pattern() {
        let int = IntFormat { bits: 4, group: QuantGroup::Size(32), zero_point: false, act_order: false };
        let base = Format::Gptq { int, zeros: GptqZeros::V1 };
        let modules: Vec<(String, Format)> = [
            ("model.layers.0.mlp.gate", Format::Plain),
            ("model.layers.1.mlp.gate", Format::Plain),
            ("model.layers.0.mlp.experts.0.up_proj", base),
            ("model.layers.0.mlp.down_proj", Format::Plain),
            ("model.layers.1.mlp.down_proj", base),
        ]
        .map(|(name, format)| (name.to_string(), format))
        .into();
        let patterns: Vec<_> = exceptions(&modules, base).into_iter().map(|e| e.pattern).collect();
        assert_eq!(patterns, [r"model\.layers\.0\.mlp\.down_proj$", r"model\.layers\.\d+\.mlp\.gate$"]);
    }
}
