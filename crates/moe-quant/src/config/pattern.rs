//! Patterns of module names, in the ways in which the makers of the formats match names.

use fancy_regex::{Regex, RegexBuilder};

use crate::error::QuantError;

/// The largest number of steps for one name. No useful pattern takes more, and it limits the time to milliseconds.
const BACKTRACK_LIMIT: usize = 100_000;
/// The largest memory of a compiled pattern, in bytes.
const SIZE_LIMIT: usize = 1 << 20;
/// The longest pattern, in bytes.
const LONGEST: usize = 4096;

/// A set of module names.
#[derive(Clone, Debug)]
pub(crate) enum Pattern {
    /// Every module.
    Any,
    /// The module of this name.
    Exact(String),
    /// Modules whose name contains these segments between dots, without a gap. `mlp.gate` is contained in
    /// `model.layers.0.mlp.gate`, but not in `model.layers.0.mlp.gate_proj`.
    Segments(String),
    /// All modules inside this module.
    Below(String),
    /// Modules that match a regular expression in Python's syntax.
    Regex(Box<Regex>),
    /// Modules that match none of these patterns.
    NoneOf(Vec<Pattern>),
}

impl Pattern {
    /// Matches like Python's `re.match`: from the beginning of the name, and not necessarily to its end.
    pub fn starting(key: &str, pattern: &str) -> Result<Self, QuantError> {
        Self::compile(key, pattern, &format!(r"\A(?:{pattern})"))
    }

    /// Matches like Python's `re.search`: anywhere in the name.
    pub fn somewhere(key: &str, pattern: &str) -> Result<Self, QuantError> {
        Self::compile(key, pattern, pattern)
    }

    /// Matches a name in which `*` stands for any characters, and all modules inside such a module.
    pub fn glob(key: &str, pattern: &str) -> Result<Self, QuantError> {
        let parts: Vec<_> = pattern.split('*').map(fancy_regex::escape).collect();
        Self::compile(key, pattern, &format!(r"\A{}(?:\.|\z)", parts.join(".*")))
    }

    fn compile(key: &str, given: &str, pattern: &str) -> Result<Self, QuantError> {
        let invalid = |why: String| QuantError::Value {
            key: key.to_string(),
            expected: "a regular expression".to_string(),
            got: format!("{:?} ({why})", given.chars().take(80).collect::<String>()),
        };
        if given.len() > LONGEST {
            return Err(invalid(format!("longer than {LONGEST} bytes")));
        }
        let built = RegexBuilder::new(pattern)
            .backtrack_limit(BACKTRACK_LIMIT)
            .delegate_size_limit(SIZE_LIMIT)
            .delegate_dfa_size_limit(SIZE_LIMIT)
            .build();
        built.map(|regex| Self::Regex(Box::new(regex))).map_err(|e| invalid(e.to_string()))
    }

    /// Whether a module matches.
    ///
    /// # Errors
    /// A regular expression that takes too many steps.
    pub fn matches(&self, module: &str) -> Result<bool, QuantError> {
        Ok(match self {
            Self::Any => true,
            Self::Exact(name) => name == module,
            Self::Segments(part) => has_segments(module, part),
            Self::Below(parent) => module
                .strip_prefix(parent.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.')),
            Self::Regex(regex) => regex.is_match(module).map_err(|e| {
                QuantError::matrix(module, format!("the pattern {:?} cannot be matched: {e}", regex.as_str()))
            })?,
            Self::NoneOf(patterns) => {
                for pattern in patterns {
                    if pattern.matches(module)? {
                        return Ok(false);
                    }
                }
                true
            }
        })
    }
}

fn has_segments(module: &str, part: &str) -> bool {
    let part = part.trim_matches('.');
    let whole = |at: usize| {
        let before = at == 0 || module.as_bytes().get(at - 1) == Some(&b'.');
        let end = at + part.len();
        before && (end == module.len() || module.as_bytes().get(end) == Some(&b'.'))
    };
    !part.is_empty() && module.match_indices(part).any(|(at, _)| whole(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_whole() {
        let has = |module: &str, part: &str| Pattern::Segments(part.to_string()).matches(module).unwrap();
        assert!(has("model.layers.0.mlp.gate", "gate"));
        assert!(has("model.layers.0.mlp.gate", "mlp.gate"));
        assert!(has("model.layers.0.mlp.gate", "model.layers.0."));
        assert!(has("lm_head", "lm_head"));
        assert!(!has("model.layers.0.mlp.gate_proj", "gate"));
        assert!(!has("model.layers.10.mlp.gate", "layers.1"));
        assert!(!has("model", ""));
    }

    #[test]
    fn expressions_are_pythons() {
        let start = |pattern| Pattern::starting("k", pattern).unwrap();
        assert!(start("model.*").matches("model.layers").unwrap());
        assert!(!start("layers").matches("model.layers").unwrap());
        assert!(start("layers|model").matches("model.layers").unwrap());
        assert!(start(r"(?!.*experts).*").matches("model.self_attn").unwrap());
        assert!(!start(r"(?!.*experts).*").matches("model.experts.1").unwrap());
        assert!(Pattern::somewhere("k", "layers$").unwrap().matches("model.layers").unwrap());
        let error = Pattern::starting("quantization_config.ignore", "(").unwrap_err().to_string();
        assert!(error.contains("`quantization_config.ignore`: expected a regular expression"), "{error}");
    }

    #[test]
    fn a_star_is_any_run_of_characters() {
        let glob = |pattern| Pattern::glob("k", pattern).unwrap();
        let attention = glob("model.layers.*.self_attn");
        assert!(attention.matches("model.layers.3.self_attn.q_proj").unwrap());
        assert!(attention.matches("model.layers.3.self_attn").unwrap());
        assert!(!attention.matches("model.layers.3.self_attn_norm").unwrap());
        assert!(!attention.matches("xmodel.layers.3.self_attn").unwrap());
        assert!(!glob("lm.head").matches("lm_head").unwrap());
    }

    #[test]
    fn an_explosive_pattern_ends() {
        let pattern = Pattern::starting("k", r"(?:(a|aa|a\b)+)+(?!a)\bz").unwrap();
        let _ = pattern.matches(&"a".repeat(200)).map_err(|e| assert!(e.to_string().contains("pattern")));
    }

    #[test]
    fn below_a_block() {
        let below = Pattern::Below("model.layers".to_string());
        assert!(below.matches("model.layers.0.x").unwrap());
        assert!(!below.matches("model.layers_extra.0").unwrap());
        assert!(!Pattern::NoneOf(vec![below]).matches("model.layers").unwrap());
    }
}
