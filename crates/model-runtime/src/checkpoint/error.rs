//! What can be wrong with a checkpoint on disk.

use std::path::Path;

use crate::config::ConfigError;

/// How many names an error message lists before it abbreviates.
pub(super) const LISTED: usize = 50;

/// Why a checkpoint cannot be used: the file, what is wrong with it, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CheckpointError(pub(super) String);

impl CheckpointError {
    /// Tensors that cannot be read.
    pub(super) fn of_tensors(e: candle_core::Error) -> Self {
        Self(e.to_string())
    }

    /// The operating system refused a file or directory.
    pub(super) fn io(path: &Path, e: std::io::Error) -> Self {
        Self(format!("cannot read {}: {e}", path.display()))
    }
}

impl From<ConfigError> for CheckpointError {
    fn from(e: ConfigError) -> Self {
        Self(e.to_string())
    }
}

impl From<CheckpointError> for candle_core::Error {
    fn from(e: CheckpointError) -> Self {
        Self::msg(e)
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
