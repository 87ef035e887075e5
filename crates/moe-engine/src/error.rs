//! A wrong call, told apart from a failure: a program exits with another code for it.

/// A mistake in how a run was asked for: settings that contradict each other, or that this build, this
/// machine or this model cannot meet. Find it in an [`anyhow::Error`] with `downcast_ref`.
#[derive(Debug)]
pub struct UsageError(String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// A [`UsageError`] with this message.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(UsageError(message.into()))
}
