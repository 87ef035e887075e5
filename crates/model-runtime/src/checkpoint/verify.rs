//! Comparing what a model expects with what a checkpoint holds: everything that is wrong, at once.

use std::collections::HashMap;
use std::fmt;

use super::error::CheckpointError;
use super::files::TensorFiles;

/// How many names an error message lists before it abbreviates.
const LISTED: usize = 50;

/// Name and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name in the checkpoint.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor of this name and shape.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }
}

/// Every difference between the tensors that a model expects and those of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Mismatches {
    /// Directory or file of the checkpoint.
    origin: String,
    /// Expected, but not in the checkpoint.
    missing: Vec<TensorSpec>,
    /// In the checkpoint, but not expected.
    unexpected: Vec<TensorSpec>,
    /// Expected shape, and the shape in the checkpoint.
    wrong_shape: Vec<(TensorSpec, Vec<usize>)>,
}

impl Mismatches {
    /// Whether the checkpoint is exactly what the model expects.
    fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.wrong_shape.is_empty()
    }
}

impl fmt::Display for Mismatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} does not hold the tensors that its config.json describes", self.origin)?;
        let specs = |specs: &[TensorSpec]| -> Vec<String> {
            specs.iter().map(|t| format!("{} {:?}", t.name, t.shape)).collect()
        };
        let shapes = |(t, got): &(TensorSpec, Vec<usize>)| {
            format!("{}: expected {:?}, got {:?}", t.name, t.shape, got)
        };
        let groups = [
            ("missing", specs(&self.missing)),
            ("unexpected", specs(&self.unexpected)),
            ("of another shape", self.wrong_shape.iter().map(shapes).collect()),
        ];
        for (what, lines) in groups {
            if lines.is_empty() {
                continue;
            }
            write!(f, "\n{} {what}:", lines.len())?;
            for line in lines.iter().take(LISTED) {
                write!(f, "\n  {line}")?;
            }
            if lines.len() > LISTED {
                write!(f, "\n  ... and {} more", lines.len() - LISTED)?;
            }
        }
        Ok(())
    }
}

impl TensorFiles {
    /// Compares the checkpoint with the tensors that a model expects. All that are missing,
    /// unexpected or of another shape come in one error, with shapes. `ignored` lists patterns of
    /// names that may be present without being expected; `*` stands for any run of characters
    /// (`"*.rotary_emb.inv_freq"`).
    pub fn verify(
        &self,
        expected: impl IntoIterator<Item = TensorSpec>,
        ignored: &[&str],
    ) -> Result<(), CheckpointError> {
        let mut found = Mismatches { origin: self.origin().to_string(), ..Default::default() };
        let mut unseen: HashMap<&str, &[usize]> = self.iter().map(|t| (t.name, t.shape)).collect();
        for spec in expected {
            match unseen.remove(spec.name.as_str()) {
                None => found.missing.push(spec),
                Some(shape) if shape != spec.shape => found.wrong_shape.push((spec, shape.to_vec())),
                Some(_) => {}
            }
        }
        let unexpected = unseen.into_iter().filter(|(name, _)| !ignored.iter().any(|p| matches(p, name)));
        found.unexpected = unexpected.map(|(name, shape)| TensorSpec::new(name, shape)).collect();
        found.unexpected.sort_by(|a, b| a.name.cmp(&b.name));
        if found.is_empty() { Ok(()) } else { Err(CheckpointError(found.to_string())) }
    }
}

/// Names joined by commas, at most [`LISTED`] of them.
pub(super) fn abbreviate(names: &[String]) -> String {
    let mut text = names.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > LISTED {
        text += &format!(" and {} more", names.len() - LISTED);
    }
    text
}

/// Whether `name` matches a pattern in which `*` stands for any run of characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(head) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let tail = parts.pop().unwrap_or("");
    for part in parts {
        // The leftmost match leaves the most text for the parts after it.
        let Some(at) = name.find(part) else { return false };
        name = &name[at + part.len()..];
    }
    name.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, name, want) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*.inv_freq", "model.layers.0.rotary_emb.inv_freq", true),
            ("*.inv_freq", "inv_freq", false),
            ("model.*.rotary*freq", "model.layers.0.rotary_emb.inv_freq", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("*ab*ab", "abab", true),
            ("*ab*ab", "ab", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }
}
