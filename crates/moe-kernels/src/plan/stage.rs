//! The launches of a plan, in their listed form.

use std::ops::Range;

use super::reason::Reason;

/// A kernel that does not run, and why.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Rejected {
    /// The kernel's name.
    pub kernel: String,
    /// The first check that it failed.
    pub reason: Reason,
}

/// One kernel of a layer, or a few that always run together.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Stage {
    /// The parts of the layer that it computes: more than one where they are fused.
    pub computes: &'static [&'static str],
    /// The kernel's name, by which a context [notes](crate::Exec::launched) its launch.
    pub kernel: String,
    /// A remark in words: where the kernel runs, and for which rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// If rows are computed in parts, the parts for which it is launched. The next stages with the same parts belong
    /// together: all of them run for one part, then all for the next part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<Range<usize>>,
    /// The faster forms that were tried first, and why they do not run.
    pub rejected: Vec<Rejected>,
}

impl Stage {
    /// A kernel for which no other one was tried.
    pub fn new(computes: &'static [&'static str], kernel: impl Into<String>) -> Self {
        Self { computes, kernel: kernel.into(), note: None, parts: None, rejected: Vec::new() }
    }

    /// The same stage, with these kernels as the first ones that were tried.
    #[must_use]
    pub fn after(mut self, rejected: impl IntoIterator<Item = Rejected>) -> Self {
        self.rejected.splice(0..0, rejected);
        self
    }
}

/// The stages of rows that are computed in parts, each of the given number of rows.
pub fn in_parts(sizes: &[usize], stages: impl Fn(usize) -> Vec<Stage>) -> Vec<Stage> {
    let mut all = Vec::new();
    let mut first = 0;
    for run in sizes.chunk_by(|a, b| a == b) {
        let parts = (sizes.len() > 1).then_some(first..first + run.len());
        first += run.len();
        all.extend(stages(run[0]).into_iter().map(|stage| Stage { parts: parts.clone(), ..stage }));
    }
    all
}

/// The names of what a step launches by this plan, in their order.
pub fn launches(stages: &[Stage]) -> Vec<&str> {
    let groups = stages.chunk_by(|a, b| a.parts.is_some() && a.parts == b.parts);
    let repeated = groups.flat_map(|group| {
        let times = group[0].parts.as_ref().map_or(1, ExactSizeIterator::len);
        std::iter::repeat_n(group, times)
    });
    repeated.flatten().map(|stage| stage.kernel.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_equal_size_are_listed_once_and_launched_each() {
        let of = |rows: usize| ["a", "b"].map(|name| Stage::new(&[], format!("{name}{rows}"))).to_vec();
        let stages = in_parts(&[3, 3, 2], of);
        let listed: Vec<_> =
            stages.iter().map(|stage| (stage.kernel.as_str(), stage.parts.clone())).collect();
        assert_eq!(listed, [("a3", Some(0..2)), ("b3", Some(0..2)), ("a2", Some(2..3)), ("b2", Some(2..3))]);
        assert_eq!(launches(&stages), ["a3", "b3", "a3", "b3", "a2", "b2"]);
        let whole = in_parts(&[5], of);
        assert_eq!((launches(&whole), &whole[0].parts), (vec!["a5", "b5"], &None));
    }
}
