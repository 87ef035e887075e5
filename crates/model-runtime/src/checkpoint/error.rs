//! What can be wrong with a checkpoint on disk.

use std::path::Path;

use crate::config::ConfigError;

/// How many names an error message lists before it abbreviates.
pub(super) const LISTED: usize = 50;

/// Why a checkpoint cannot be used: the file, what is wrong with it, and what to do.
/// [`cause`](crate::cause) finds it in a candle error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused a file or a directory.
    #[error("cannot read {file}: {problem}")]
    Read {
        /// The file or directory.
        file: String,
        /// The words of the operating system.
        problem: String,
    },
    /// A file or a set of files that is missing, truncated, or not what its format says.
    #[error("{0}")]
    Files(String),
    /// The config that belongs to the weights.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Tensors that are missing, superfluous, or of another shape or dtype than the config describes.
    #[error("{0}")]
    Tensors(String),
    /// Quantised weights that are not as the header says, or that cannot be read so.
    #[error("{0}")]
    Quantised(String),
    /// Weights that are not finite.
    #[error("{0}")]
    NotFinite(String),
}

impl CheckpointError {
    /// Tensors that cannot be read.
    pub(super) fn of_tensors(e: candle_core::Error) -> Self {
        Self::Tensors(e.to_string())
    }

    /// The operating system refused a file or directory.
    pub(super) fn io(path: &Path, e: std::io::Error) -> Self {
        Self::Read { file: path.display().to_string(), problem: e.to_string() }
    }
}

impl From<CheckpointError> for candle_core::Error {
    fn from(error: CheckpointError) -> Self {
        moe_kernels::into_candle(error)
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
