//! A short description of the tensors of a checkpoint for which its model has no place.
//!
//! As in transformers they are left out with a warning: layers for speculation (`mtp.*`, or a layer after the last one)
//! and biases that no module uses. A tensor that belongs to a module that runs is described separately, because the
//! model would compute something else with it.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

/// How many groups a warning lists.
const LISTED: usize = 12;

/// The tensors that are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    origin: String,
    names: Vec<String>,
    /// Modules that the model does not have, with the number of their tensors.
    modules: BTreeMap<String, usize>,
    /// Tensors inside of modules that the model has.
    inside: BTreeMap<String, usize>,
}

impl LeftOut {
    /// Makes the list from the names of superfluous tensors. `expected` are the names of the model's tensors.
    pub(super) fn new<'a>(origin: &str, names: Vec<String>, expected: impl Iterator<Item = &'a str>) -> Self {
        let mut left_out = Self { origin: origin.to_string(), ..Self::default() };
        if names.is_empty() {
            return left_out;
        }
        let known: HashSet<&str> = expected.flat_map(prefixes).collect();
        for name in &names {
            let unknown = prefixes(name).find(|prefix| !known.contains(prefix)).unwrap_or(name);
            let (parent, last) = unknown.rsplit_once('.').unwrap_or(("", unknown));
            let is_tensor = unknown == name;
            let runs = is_tensor && !parent.is_empty() || parent.split('.').any(is_number);
            let group =
                format!("{}{}{last}{}", starred(parent), dot(parent), if is_tensor { "" } else { ".*" });
            *if runs { &mut left_out.inside } else { &mut left_out.modules }.entry(group).or_default() += 1;
        }
        left_out.names = names;
        left_out
    }

    /// Their names, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether no tensor is left out.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { origin, names, modules, inside } = self;
        let count = names.len();
        write!(
            f,
            "{origin}: tensors that the model of config.json has no place for are left out ({count} in all)"
        )?;
        if !modules.is_empty() {
            write!(f, "; {}", listed(modules))?;
        }
        if !inside.is_empty() {
            write!(
                f,
                "; parts of modules that run, with which the model would compute something else (if it was trained with \
                 them, config.json lacks a key such as attention_bias or topk_method): {}",
                listed(inside)
            )?;
        }
        Ok(())
    }
}

fn listed(groups: &BTreeMap<String, usize>) -> String {
    let shown = groups.iter().take(LISTED).map(|(name, count)| match count {
        1 => name.clone(),
        count => format!("{name} ({count})"),
    });
    let text = shown.collect::<Vec<_>>().join(", ");
    match groups.len().saturating_sub(LISTED) {
        0 => text,
        more => format!("{text} and {more} more groups"),
    }
}

/// A name up to each of its dots, and the name.
fn prefixes(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('.').map(|(at, _)| &name[..at]).chain([name])
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// The name with a star for each number, so that the same tensors of all layers are one group.
fn starred(name: &str) -> String {
    name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

fn dot(parent: &str) -> &'static str {
    if parent.is_empty() { "" } else { "." }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: [&str; 6] = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
    ];

    fn text(names: &[&str]) -> String {
        let names = names.iter().map(|name| name.to_string()).collect();
        LeftOut::new("x", names, EXPECTED.into_iter()).to_string()
    }

    #[test]
    fn groups_have_counts() {
        let got = text(&[
            "model.layers.2.mlp.gate.weight",
            "model.layers.2.self_attn.q_proj.weight",
            "mtp.0.fc.weight",
            "mtp.norm.weight",
            "lm_head.weight",
        ]);
        assert!(got.contains("left out (5 in all); "), "{got}");
        assert!(got.ends_with("; lm_head.*, model.layers.2.* (2), mtp.* (2)"), "{got}");
        let biases = ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"];
        let got = text(&[biases[0], biases[1], "model.layers.0.self_attn.q_norm.weight", "model.norm.bias"]);
        let inside =
            "model.layers.*.self_attn.q_norm.*, model.layers.*.self_attn.q_proj.bias (2), model.norm.bias";
        assert!(got.ends_with(inside) && got.contains("attention_bias"), "{got}");
        assert!(!text(&["mtp.x"]).contains("attention_bias"));
    }

    #[test]
    fn a_warning_has_an_end() {
        let names: Vec<String> = (0..1000).map(|i| format!("extra{i:03}.weight")).collect();
        let got = text(&names.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(got.ends_with("extra011.* and 988 more groups") && got.len() < 400, "{got}");
    }
}
