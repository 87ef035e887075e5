//! Flags about chat templates.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use moe_engine::chat::{AnswerForm, ChatFiles};
use serde_json::{Map, Value};

/// How conversations become prompts, and answers messages.
#[derive(Args, Debug, Clone)]
pub struct TemplateArgs {
    /// Jinja file to use instead of the checkpoint's chat template.
    #[arg(long, value_name = "FILE", help_heading = "Chat")]
    pub chat_template: Option<PathBuf>,
    /// Variables for the chat template, such as '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON", value_parser = crate::values::parse_object, help_heading = "Chat")]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// The template that the program brings for its own checkpoint.
    #[arg(skip)]
    pub embedded: Option<&'static str>,
    /// How reasoning is told from text in answers of a chat: qwen3 (think tags), none, or auto: as the chat template
    /// shows (default: auto; batch: none).
    #[arg(long, value_name = "PARSER", help_heading = "Chat")]
    pub reasoning_parser: Option<ReasoningParser>,
    /// How tool calls are found in answers of a chat: hermes (JSON in <tool_call>), none, or auto: as the chat
    /// template shows (default: auto; batch: none).
    #[arg(long, value_name = "PARSER", help_heading = "Chat")]
    pub tool_call_parser: Option<ToolCallParser>,
}

/// Who tells reasoning from text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReasoningParser {
    /// `Qwen3`, where the chat template shows that the model reasons so.
    Auto,
    /// Nobody.
    None,
    /// Reasoning is what `<think>` and `</think>` enclose.
    Qwen3,
}

/// Who finds tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ToolCallParser {
    /// `Hermes`, where the chat template shows that the model calls so.
    Auto,
    /// Nobody.
    None,
    /// A call is JSON in `<tool_call>` and `</tool_call>`.
    Hermes,
}

impl TemplateArgs {
    /// What is looked for in answers to prompts of these templates; `auto`: also where no flag says it.
    pub fn answer_form(&self, files: Option<&ChatFiles>, auto: bool) -> AnswerForm {
        let shown = files.map(AnswerForm::of).unwrap_or_default();
        AnswerForm {
            reasoning: match self.reasoning_parser {
                None => auto && shown.reasoning,
                Some(ReasoningParser::Auto) => shown.reasoning,
                Some(parser) => parser == ReasoningParser::Qwen3,
            },
            calls: match self.tool_call_parser {
                None => auto && shown.calls,
                Some(ToolCallParser::Auto) => shown.calls,
                Some(parser) => parser == ToolCallParser::Hermes,
            },
        }
    }
}
