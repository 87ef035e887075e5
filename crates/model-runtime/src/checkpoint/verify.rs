//! Comparing what a model expects with what a checkpoint holds, and looking for weights that are not finite:
//! everything that is wrong, at once.

use std::collections::BTreeMap;

use super::decode;
use super::error::{CheckpointError, LISTED, abbreviate};
use super::files::TensorFiles;
use super::left_out::LeftOut;
use super::spec::TensorSpec;

/// Differences between a checkpoint and its model that do not keep the model from being loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Tensors that the model has no place for.
    pub left_out: LeftOut,
    /// Contradictions between the config and the file, in sentences.
    pub notes: Vec<String>,
}

impl Verified {
    /// A line of text for each difference.
    pub fn warnings(&self) -> impl Iterator<Item = String> + '_ {
        let left_out = (!self.left_out.is_empty()).then(|| self.left_out.to_string());
        self.notes.iter().cloned().chain(left_out)
    }
}

impl TensorFiles {
    /// Compares the checkpoint with the tensors that a model expects. One error lists all tensors that are missing or
    /// of another shape, with shapes, and all unexpected ones. Without an error, unexpected tensors are left out, as in
    /// transformers. `ignored` lists patterns of names that may be present without being expected or reported; `*`
    /// stands for any run of characters (`"*.rotary_emb.inv_freq"`).
    pub fn verify(
        &self,
        expected: impl IntoIterator<Item = TensorSpec>,
        ignored: &[&str],
    ) -> Result<Verified, CheckpointError> {
        let expected: Vec<TensorSpec> = expected.into_iter().collect();
        let mut missing = Vec::new();
        let mut wrong_shape = Vec::new();
        let mut unseen: BTreeMap<&str, &[usize]> = self.iter().map(|t| (t.name, t.shape)).collect();
        for TensorSpec { name, shape } in &expected {
            match unseen.remove(name.as_str()) {
                None => missing.push(format!("{name} {shape:?}")),
                Some(got) if got != shape => {
                    wrong_shape.push(format!("{name}: expected {shape:?}, got {got:?}"));
                }
                Some(_) => {}
            }
        }
        unseen.retain(|name, _| !ignored.iter().any(|pattern| matches(pattern, name)));
        if missing.is_empty() && wrong_shape.is_empty() {
            let names = unseen.into_keys().map(str::to_string).collect();
            let left_out = LeftOut::new(self.origin(), names, expected.iter().map(|spec| spec.name.as_str()));
            return Ok(Verified { left_out, notes: Vec::new() });
        }
        let unexpected = unseen.into_iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
        let groups = [("missing", missing), ("unexpected", unexpected), ("of another shape", wrong_shape)];
        let mut error = String::new();
        for (what, lines) in groups.iter().filter(|(_, lines)| !lines.is_empty()) {
            error += &format!("\n{} {what}:", lines.len());
            lines.iter().take(LISTED).for_each(|line| error += &format!("\n  {line}"));
            if lines.len() > LISTED {
                error += &format!("\n  ... and {} more", lines.len() - LISTED);
            }
        }
        let origin = self.origin();
        Err(CheckpointError::Tensors(format!(
            "{origin} does not hold the tensors that its config.json describes{error}"
        )))
    }

    /// Fails where one of these tensors is stored in a dtype that holds no floats to compute with.
    pub(super) fn check_floats(&self, expected: &[TensorSpec]) -> Result<(), CheckpointError> {
        let is_float =
            |name: &str| self.info(name).is_none_or(|info| info.dtype.is_some_and(|dtype| dtype.is_float()));
        let names = expected.iter().map(|spec| spec.name.clone());
        let others: Vec<String> = names.filter(|name| !is_float(name)).collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Quantised(format!(
            "{}: {} tensors are stored in dtypes of quantised weights, but config.json has no quantization_config that says \
             what they mean: {}",
            self.origin(),
            others.len(),
            abbreviate(&others)
        )))
    }

    /// Reads every float tensor.
    ///
    /// # Errors
    /// Every tensor with NaN or infinite elements, with the numbers of both.
    pub fn check_finite(&self) -> Result<(), CheckpointError> {
        let mut checked = 0;
        let mut found = Vec::new();
        self.visit(|name, dtype, bytes| {
            let Some((nan, inf)) = decode::count_non_finite(bytes, dtype) else { return };
            checked += 1;
            if nan + inf > 0 {
                found.push(format!("\n  {name}: {nan} NaN, {inf} infinite"));
            }
        });
        if found.is_empty() {
            return Ok(());
        }
        let bad = found.len();
        let lines = found.concat();
        Err(CheckpointError::NotFinite(format!(
            "{bad} of {checked} tensors hold weights that are not finite:{lines}"
        )))
    }
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
