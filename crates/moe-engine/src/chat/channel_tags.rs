//! The tags of messages in channels (OpenAI's harmony format).

/// The tag before every message but the first one. The role of the message follows it.
pub(super) const START: &str = "<|start|>";
/// The text before the channel of every message of an answer but the first one.
pub(crate) const ASSISTANT: &str = "<|start|>assistant";
/// The tag before the name of a channel.
pub(crate) const CHANNEL: &str = "<|channel|>";
/// The tag before the contents of a message.
pub(crate) const MESSAGE: &str = "<|message|>";
/// The tag before the type of the contents.
pub(crate) const CONSTRAIN: &str = "<|constrain|>";
/// The end of the header of a call, whose contents are JSON.
pub(crate) const JSON_MESSAGE: &str = "<|constrain|>json<|message|>";
/// The tags before the text of an answer.
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";
/// All tags.
pub(super) const TAGS: [&str; 7] = [START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>", "<|return|>", "<|call|>"];
