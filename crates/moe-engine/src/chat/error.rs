//! The errors between a conversation and a prompt. Each says whether the checkpoint, the template or the request is
//! wrong.

use std::path::PathBuf;

/// Why a chat template could not be loaded or rendered.
#[derive(Clone, Debug, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum ChatError {
    /// A file of the checkpoint cannot be read, or its contents are not valid.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// No template is called `default`, and the conversation needs it.
    #[error("the checkpoint has no chat template `default`, only {}", available.join(", "))]
    NoDefault {
        /// The names that exist.
        available: Vec<String>,
    },
    /// The template is not valid, or fails on this conversation. Examples are an undefined variable, a wrong type and
    /// an unknown filter.
    #[error("chat template `{template}`, line {line}: {message}")]
    Template {
        /// The template's name; a single template is called `default`.
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
        /// The message of the template.
        message: String,
    },
    /// The template takes more time or memory than the limits allow, or more than the engine has.
    #[error("chat template `{template}`: {message}")]
    Limit {
        /// The template's name.
        template: String,
        /// Which limit was reached.
        message: String,
    },
    /// The request itself is malformed, so no template could render it.
    #[error("{0}")]
    Request(String),
}

crate::error::parts!(ChatError);
