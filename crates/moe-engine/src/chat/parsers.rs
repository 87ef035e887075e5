//! The forms in which model families write reasoning and tool calls, as data. Their names are vLLM's.
//! Each row gives the tags at the beginning and the end of a part. [`answer`](super::answer) splits answers with them,
//! [`written`](super::written) writes answers with them, and structured output finds the end of the reasoning with
//! them. The forms come from the published chat templates of the models; vLLM's parsers read the same forms.

use serde::{Deserialize, Deserializer, Serializer};

use super::ChatFiles;
use super::channel_tags::{CHANNEL, CONSTRAIN, MESSAGE, TAGS};

/// How a model writes its reasoning.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ReasoningParser {
    /// vLLM's name.
    pub name: &'static str,
    /// The tag before the reasoning.
    pub open: &'static str,
    /// The tag after the reasoning.
    pub close: &'static str,
    /// Whether an answer begins with reasoning even if neither the prompt nor the model has written the opening tag.
    pub(crate) assumed: bool,
    /// A text before which the reasoning also ends.
    pub(crate) ends_before: Option<&'static str>,
    /// Tags around the text that follows the reasoning; the model may leave them out.
    pub(crate) envelope: Option<Tags>,
    /// Whether the reasoning stays in the text, with its tags.
    pub(crate) stays: bool,
    /// Whether the answer is a sequence of messages, each in a channel (harmony).
    pub(crate) channels: bool,
    /// Texts that a chat template of such a model must contain. If there are none, templates do not show this form.
    shown: &'static [&'static str],
}

/// A pair of tags.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Tags {
    /// The tag at the beginning.
    pub open: &'static str,
    /// The tag at the end.
    pub close: &'static str,
}

/// How a model writes tool calls.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct CallParser {
    /// vLLM's name.
    pub name: &'static str,
    /// The tags around all calls of an answer, if the form has such tags.
    pub section: Option<Tags>,
    /// The text before each call.
    pub open: &'static str,
    /// The text after each call. It is empty if a call ends where its JSON ends.
    pub close: &'static str,
    /// How the call is written between these two texts.
    pub body: CallBody,
    /// Texts that a chat template of such a model contains; it contains none of the texts in `hidden`.
    shown: &'static [&'static str],
    hidden: &'static [&'static str],
}

/// The name and the arguments of a call.
#[derive(Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallBody {
    /// A JSON object: `{"name": "f", "arguments": {..}}`.
    Object,
    /// The name, and then the arguments as JSON.
    Named {
        /// The text before the name.
        before: &'static str,
        /// The text between the name and the arguments.
        between: &'static str,
        /// The text after the arguments.
        after: &'static str,
        /// Whether the name is written as `functions.f:0` with the number of the call. It is then also the id of the
        /// call.
        numbered: bool,
    },
    /// Each argument in tags, as text without a type. The schema of the function gives the type.
    Arguments(ArgumentTags),
    /// A list of objects, or a name with its arguments as JSON. There is no closing tag (Mistral).
    Untagged,
    /// A message to a function in the channel `commentary` (harmony).
    Channel,
}

/// The tags of arguments.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ArgumentTags {
    /// The tags around the name of the function. If there is no closing tag, the name ends at the first argument or at
    /// the end of the call.
    pub function: Tags,
    /// The tags around the name of an argument.
    pub key: Tags,
    /// The tags around the value of an argument.
    pub value: Tags,
    /// The text after the last argument.
    pub end: &'static str,
    /// The text that is written before each argument.
    pub line: &'static str,
    /// Whether a line end on either side of a value belongs to the form and not to the value.
    pub lines: bool,
}

pub(crate) const THINK: &str = "<think>";
pub(crate) const END_THINK: &str = "</think>";
const DEEPSEEK_CALLS: &str = "<｜tool▁calls▁begin｜>";
const KIMI_CALLS: &str = "<|tool_calls_section_begin|>";
const MINIMAX_CALLS: &str = "<minimax:tool_call>";
const MISTRAL_CALLS: &str = "[TOOL_CALLS]";
/// The tag before the arguments of a call (Mistral). Older tokenizers do not have it.
pub(crate) const CALL_ARGUMENTS: &str = "[ARGS]";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";
const RESPONSE: Tags = Tags { open: "<response>", close: "</response>" };

/// Reasoning in think tags; a model that reasons writes both of them.
pub(super) const THINK_TAGS: ReasoningParser = ReasoningParser {
    name: "qwen3",
    open: THINK,
    close: END_THINK,
    assumed: false,
    ends_before: None,
    envelope: None,
    stays: false,
    channels: false,
    shown: &[END_THINK],
};

/// All forms of reasoning. If a template shows several of them, the first one counts.
pub static REASONING_PARSERS: [ReasoningParser; 8] = [
    ReasoningParser {
        name: "openai_gptoss",
        open: "<|channel|>analysis<|message|>",
        close: "<|end|>",
        channels: true,
        shown: &[CHANNEL],
        ..THINK_TAGS
    },
    ReasoningParser { name: "minimax_m2", assumed: true, shown: &[END_THINK, MINIMAX_CALLS], ..THINK_TAGS },
    ReasoningParser { name: "minimax_m2_append_think", stays: true, shown: &[], ..THINK_TAGS },
    ReasoningParser {
        name: "kimi_k2",
        assumed: true,
        ends_before: Some(KIMI_CALLS),
        shown: &[END_THINK, KIMI_CALLS],
        ..THINK_TAGS
    },
    ReasoningParser {
        name: "ernie45",
        assumed: true,
        envelope: Some(RESPONSE),
        shown: &[END_THINK, RESPONSE.open],
        ..THINK_TAGS
    },
    ReasoningParser {
        name: "deepseek_r1",
        assumed: true,
        shown: &[END_THINK, "<｜Assistant｜>"],
        ..THINK_TAGS
    },
    ReasoningParser { name: "glm45", shown: &[END_THINK, "[gMASK]"], ..THINK_TAGS },
    THINK_TAGS,
];

/// Calls that are JSON objects in tags.
const HERMES: CallParser = CallParser {
    name: "hermes",
    section: None,
    open: CALL,
    close: END_CALL,
    body: CallBody::Object,
    shown: &[CALL],
    hidden: &["<function=", "<arg_key>"],
};

/// The form of calls that is written if calls are required and the model's form is not known.
pub(crate) static DEFAULT_CALLS: &CallParser = &CALL_PARSERS[9];

/// All forms of tool calls. If a template shows several of them, the first one counts.
pub static CALL_PARSERS: [CallParser; 10] = [
    CallParser {
        name: "openai",
        open: "to=functions.",
        close: "<|call|>",
        body: CallBody::Channel,
        shown: &[CHANNEL],
        hidden: &[],
        ..HERMES
    },
    CallParser {
        name: "deepseek_v3",
        section: Some(Tags { open: DEEPSEEK_CALLS, close: "<｜tool▁calls▁end｜>" }),
        open: "<｜tool▁call▁begin｜>",
        close: "<｜tool▁call▁end｜>",
        body: CallBody::Named {
            before: "function<｜tool▁sep｜>",
            between: "\n```json\n",
            after: "\n```",
            numbered: false,
        },
        shown: &[DEEPSEEK_CALLS, "```json"],
        hidden: &[],
    },
    CallParser {
        name: "deepseek_v31",
        section: Some(Tags { open: DEEPSEEK_CALLS, close: "<｜tool▁calls▁end｜>" }),
        open: "<｜tool▁call▁begin｜>",
        close: "<｜tool▁call▁end｜>",
        body: CallBody::Named { before: "", between: "<｜tool▁sep｜>", after: "", numbered: false },
        shown: &[DEEPSEEK_CALLS],
        hidden: &["```json"],
    },
    CallParser {
        name: "kimi_k2",
        section: Some(Tags { open: KIMI_CALLS, close: "<|tool_calls_section_end|>" }),
        open: "<|tool_call_begin|>",
        close: "<|tool_call_end|>",
        body: CallBody::Named {
            before: "",
            between: "<|tool_call_argument_begin|>",
            after: "",
            numbered: true,
        },
        shown: &[KIMI_CALLS],
        hidden: &[],
    },
    CallParser {
        name: "minimax_m2",
        section: Some(Tags { open: MINIMAX_CALLS, close: "</minimax:tool_call>" }),
        open: "<invoke name=\"",
        close: "</invoke>",
        body: CallBody::Arguments(ArgumentTags {
            function: Tags { open: "", close: "\">" },
            key: Tags { open: "<parameter name=\"", close: "\">" },
            value: Tags { open: "", close: "</parameter>" },
            end: "\n",
            line: "\n",
            lines: true,
        }),
        shown: &[MINIMAX_CALLS],
        hidden: &[],
    },
    CallParser {
        name: "glm45",
        body: CallBody::Arguments(ArgumentTags {
            function: Tags { open: "", close: "" },
            key: Tags { open: "<arg_key>", close: "</arg_key>" },
            value: Tags { open: "<arg_value>", close: "</arg_value>" },
            end: "\n",
            line: "\n",
            lines: false,
        }),
        shown: &["<arg_key>"],
        hidden: &[],
        ..HERMES
    },
    CallParser {
        name: "qwen3_coder",
        body: CallBody::Arguments(ArgumentTags {
            function: Tags { open: "\n<function=", close: ">" },
            key: Tags { open: "<parameter=", close: ">" },
            value: Tags { open: "", close: "</parameter>" },
            end: "\n</function>\n",
            line: "\n",
            lines: true,
        }),
        shown: &[CALL, "<function="],
        hidden: &[],
        ..HERMES
    },
    CallParser {
        name: "mistral",
        open: MISTRAL_CALLS,
        close: "",
        body: CallBody::Untagged,
        shown: &[MISTRAL_CALLS],
        hidden: &[],
        ..HERMES
    },
    CallParser { name: "ernie45", shown: &[CALL, RESPONSE.open], hidden: &[], ..HERMES },
    HERMES,
];

impl ReasoningParser {
    /// Returns the tags of the form.
    pub(super) fn tags(&self) -> Vec<&'static str> {
        let envelope = self.envelope.iter().flat_map(|Tags { open, close }| [*open, *close]);
        let channels = if self.channels { &TAGS[..] } else { &[] };
        [self.open, self.close].into_iter().chain(envelope).chain(channels.iter().copied()).collect()
    }

    /// Returns the form with a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        REASONING_PARSERS.iter().find(|parser| parser.name == name)
    }

    /// Returns the form that a checkpoint's templates show.
    pub fn of(files: &ChatFiles) -> Option<&'static Self> {
        REASONING_PARSERS.iter().find(|parser| !parser.shown.is_empty() && shows(files, parser.shown, &[]))
    }
}

impl CallParser {
    /// Whether calls are messages in a channel (harmony).
    pub(crate) fn is_channel(&self) -> bool {
        self.body == CallBody::Channel
    }

    /// Returns the tags of the form.
    pub(crate) fn tags(&self) -> Vec<&'static str> {
        let section = self.section.iter().flat_map(|Tags { open, close }| [*open, *close]);
        let inner: &[&'static str] = match &self.body {
            CallBody::Object => &[],
            CallBody::Named { between, .. } => &[*between],
            CallBody::Arguments(tags) => &[tags.key.open, tags.key.close, tags.value.open, tags.value.close],
            CallBody::Untagged => &[CALL_ARGUMENTS, "[CALL_ID]"],
            CallBody::Channel => &TAGS,
        };
        section
            .chain([self.open, self.close])
            .chain(inner.iter().copied())
            .filter(|tag| !tag.is_empty())
            .collect()
    }

    /// Returns the form with a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CALL_PARSERS.iter().find(|parser| parser.name == name)
    }

    /// Returns the form that a checkpoint's templates show.
    pub fn of(files: &ChatFiles) -> Option<&'static Self> {
        CALL_PARSERS.iter().find(|parser| shows(files, parser.shown, parser.hidden))
    }

    /// Returns the tags that a tokenizer must have as tokens, so that a grammar can require calls of this form.
    pub(crate) fn token_tags(&self) -> &'static [&'static str] {
        match self.body {
            CallBody::Untagged => &[MISTRAL_CALLS],
            CallBody::Channel => &[CHANNEL, CONSTRAIN, MESSAGE],
            _ => &[],
        }
    }
}

/// Whether the templates contain all of `texts` and none of `hidden`.
fn shows(files: &ChatFiles, texts: &[&str], hidden: &[&str]) -> bool {
    let one = |text: &str| files.templates.values().any(|template| template.contains(text));
    texts.iter().all(|text| one(text)) && !hidden.iter().any(|text| one(text))
}

/// A module that writes forms of a kind as their names, for serde.
macro_rules! by_name {
    ($module:ident, $parser:ident, $what:literal) => {
        pub(crate) mod $module {
            use super::*;

            pub fn serialize<S: Serializer>(parser: &&'static $parser, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(parser.name)
            }

            pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<&'static $parser, D::Error> {
                let name = String::deserialize(from)?;
                let unknown = || serde::de::Error::custom(format!("there is no {} {name:?}", $what));
                $parser::named(&name).ok_or_else(unknown)
            }
        }
    };
}

by_name!(reasoning_by_name, ReasoningParser, "reasoning parser");
by_name!(calls_by_name, CallParser, "tool-call parser");
