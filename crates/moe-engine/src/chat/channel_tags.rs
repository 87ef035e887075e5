//! The tags of messages in channels (OpenAI's harmony format).

/// The tag before every message but the first one. The role of the message follows it.
pub(super) const START: &str = "<|start|>";
/// The tag before the name of a channel.
pub(super) const CHANNEL: &str = "<|channel|>";
/// The tag before the contents of a message.
pub(crate) const MESSAGE: &str = "<|message|>";
/// The tags before the text of an answer.
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";
/// All tags.
pub(super) const TAGS: [&str; 7] =
    [START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"];
