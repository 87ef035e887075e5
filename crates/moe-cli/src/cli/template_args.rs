//! Flags about chat templates.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;
use moe_engine::chat::{AnswerForm, CALL_PARSERS, CallParser, ChatFiles, REASONING_PARSERS, ReasoningParser};
use serde_json::{Map, Value};

use crate::error::usage;

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
    /// How reasoning is told from text in answers of a chat: a form by vLLM's name, none, or auto: as the chat template
    /// shows (default: auto; batch: none).
    #[arg(long, value_name = "PARSER", value_parser = reasoning_names(), help_heading = "Chat")]
    pub reasoning_parser: Option<String>,
    /// How tool calls are found in answers of a chat: a form by vLLM's name, none, or auto: as the chat template shows
    /// (default: auto; batch: none).
    #[arg(long, value_name = "PARSER", value_parser = call_names(), help_heading = "Chat")]
    pub tool_call_parser: Option<String>,
}

/// As the chat template shows.
const AUTO: &str = "auto";
/// Nothing is looked for.
const NONE: &str = "none";

fn reasoning_names() -> PossibleValuesParser {
    PossibleValuesParser::new(
        [AUTO, NONE].into_iter().chain(REASONING_PARSERS.iter().map(|parser| parser.name)),
    )
}

fn call_names() -> PossibleValuesParser {
    PossibleValuesParser::new([AUTO, NONE].into_iter().chain(CALL_PARSERS.iter().map(|parser| parser.name)))
}

impl TemplateArgs {
    /// What is looked for in answers to prompts of these templates; `auto`: also where no flag says it.
    ///
    /// # Errors
    /// The flags name forms that do not fit each other.
    pub fn answer_form(&self, files: Option<&ChatFiles>, auto: bool) -> Result<AnswerForm> {
        let shown = files.map(AnswerForm::of).unwrap_or_default();
        let default = if auto { AUTO } else { NONE };
        let mut form = AnswerForm {
            reasoning: match self.reasoning_parser.as_deref().unwrap_or(default) {
                AUTO => shown.reasoning,
                name => ReasoningParser::named(name),
            },
            calls: match self.tool_call_parser.as_deref().unwrap_or(default) {
                AUTO => shown.calls,
                name => CallParser::named(name),
            },
        };
        // A form that a flag names stands; the one that the template shows gives way to it.
        if form.check().is_err() {
            let named = |flag: &Option<String>| flag.as_deref().is_some_and(|name| name != AUTO);
            match (named(&self.reasoning_parser), named(&self.tool_call_parser)) {
                (true, false) => form.calls = None,
                (false, true) => form.reasoning = None,
                _ => {}
            }
        }
        form.check().map_err(|reason| usage(format!("--reasoning-parser, --tool-call-parser: {reason}")))?;
        Ok(form)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn form(template: &str, reasoning: Option<&str>, calls: Option<&str>) -> Result<(String, String)> {
        let config = json!({ "chat_template": template }).to_string();
        let files = ChatFiles::from_tokenizer_config(config.as_bytes())?;
        let args = TemplateArgs {
            chat_template: None,
            chat_template_kwargs: None,
            embedded: None,
            reasoning_parser: reasoning.map(String::from),
            tool_call_parser: calls.map(String::from),
        };
        let AnswerForm { reasoning, calls } = args.answer_form(Some(&files), true)?;
        let name = |name: Option<&str>| name.unwrap_or("-").to_string();
        Ok((name(reasoning.map(|parser| parser.name)), name(calls.map(|parser| parser.name))))
    }

    #[test]
    fn a_flag_forces_a_form_and_the_template_gives_way() {
        let qwen = "{{ '</think>' }}<tool_call>";
        let of = |reasoning, calls| form(qwen, reasoning, calls).unwrap();
        let names = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(of(None, None), names("qwen3", "hermes"));
        assert_eq!(of(Some("auto"), Some("glm45")), names("qwen3", "glm45"));
        assert_eq!(of(Some("deepseek_r1"), Some("none")), names("deepseek_r1", "-"));
        assert_eq!(of(Some("openai_gptoss"), None), names("openai_gptoss", "-"));
        assert_eq!(of(None, Some("openai")), names("-", "openai"));
        assert_eq!(form("<|channel|>", None, None).unwrap(), names("openai_gptoss", "openai"));
        let error = form(qwen, Some("qwen3"), Some("openai")).unwrap_err().to_string();
        assert!(
            error.contains("qwen3") && error.contains("openai_gptoss and openai belong together"),
            "{error}"
        );
    }
}
