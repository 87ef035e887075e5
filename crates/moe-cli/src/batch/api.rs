//! The APIs whose requests are answered.

/// The APIs of a line's `url`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}
