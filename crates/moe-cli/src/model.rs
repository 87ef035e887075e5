//! The model that a command runs.

use std::path::Path;

/// The model of a command.
#[derive(Clone, Copy)]
pub enum Model<'a> {
    /// A checkpoint folder or a model of the hub; `None`: the embedded checkpoint.
    Checkpoint(Option<&'a str>),
    /// Random weights for this config.
    Random(&'a Path),
}

impl Model<'_> {
    /// The name by which the ranks of a run identify it.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Checkpoint(name) => name.unwrap_or("embedded").to_string(),
            Self::Random(path) => path.to_string_lossy().into_owned(),
        }
    }
}
