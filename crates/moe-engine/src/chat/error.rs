//! What can go wrong between a conversation and a prompt, said so that the reader knows whether
//! the checkpoint, the template or the request is at fault.

use std::path::PathBuf;

/// Why a chat template could not be loaded or rendered.
#[derive(Clone, Debug, thiserror::Error, serde::Serialize, serde::Deserialize)]
pub enum ChatError {
    /// A file of the checkpoint cannot be read or does not say what it must.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// No template is called `default`, and the conversation calls for no other.
    #[error("the checkpoint has no chat template `default`, only {}", available.join(", "))]
    NoDefault {
        /// The names that exist.
        available: Vec<String>,
    },
    /// The template is not valid, or fails on this conversation: an undefined variable, a wrong
    /// type, an unknown filter.
    #[error("chat template `{template}`, line {line}: {message}")]
    Template {
        /// The template's name, `default` for a single one.
        template: String,
        /// Line in the template, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// The template called `raise_exception`: it does not accept this conversation.
    #[error("the chat template `{template}` refuses this conversation: {message}")]
    Refused {
        /// The template's name.
        template: String,
        /// The template's own words.
        message: String,
    },
    /// The template takes more than any real one does, or more than the engine can give.
    #[error("chat template `{template}`: {message}")]
    Limit {
        /// The template's name.
        template: String,
        /// Which limit was reached.
        message: String,
    },
    /// The request is malformed, whatever the template.
    #[error("{0}")]
    Request(String),
}
