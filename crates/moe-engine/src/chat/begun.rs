//! The part of the answer that a prompt has already begun. Some templates open the reasoning, or open and close it. The
//! last message of a conversation may also be incomplete, and the answer continues it.

use super::channel_tags::FINAL;
use super::form::AnswerForm;
use super::parsers::{END_THINK, THINK};

/// The part of the answer that a prompt has already begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Begun {
    /// Nothing. If the model reasons, it writes the opening tag itself.
    #[default]
    Nothing,
    /// The reasoning: the prompt ends with its opening tag.
    Reasoning,
    /// The reasoning: the prompt contains text after its opening tag.
    MoreReasoning,
    /// The text: the prompt has closed the reasoning, or has none.
    Text,
}

impl Begun {
    /// Returns what this prompt has begun, if the answer is a new message in this form.
    pub fn of(prompt: &str, form: AnswerForm) -> Self {
        let prompt = prompt.trim_end();
        let (open, close) = tags(form);
        let text = form.has_channels().then_some(FINAL);
        match (prompt.ends_with(open), prompt.ends_with(close), text) {
            (true, ..) => Self::Reasoning,
            (_, true, None) => Self::Text,
            (.., Some(text)) if prompt.ends_with(text) => Self::Text,
            _ => Self::Nothing,
        }
    }

    /// Returns what this prompt has begun, if the answer continues the last message. The prompt ends with `content`,
    /// which is the beginning of that message.
    pub fn of_continued(prompt: &str, content: &str, form: AnswerForm) -> Self {
        let (open, close) = tags(form);
        let prompt = prompt.trim_end();
        let message = prompt.rfind(content.trim()).unwrap_or(prompt.len());
        // An opening tag that the template wrote directly before the message belongs to the message.
        let opened =
            prompt.rfind(open).filter(|at| prompt[(at + open.len()).min(message)..message].trim().is_empty());
        match opened {
            Some(at) if prompt[at..].contains(close) => Self::Text,
            Some(at) if at + open.len() == prompt.len() => Self::Reasoning,
            Some(_) => Self::MoreReasoning,
            None => Self::Text,
        }
    }

    /// Whether the answer continues with reasoning.
    pub fn reasons(self) -> bool {
        matches!(self, Self::Reasoning | Self::MoreReasoning)
    }
}

/// The tags of reasoning in this form, or the tags of most models if the form has none.
fn tags(form: AnswerForm) -> (&'static str, &'static str) {
    form.reasoning.map_or((THINK, END_THINK), |parser| (parser.open, parser.close))
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: AnswerForm = AnswerForm { reasoning: None, calls: None };

    #[test]
    fn the_end_of_a_prompt_tells_what_it_has_begun() {
        assert_eq!(Begun::of("<|im_start|>assistant\n<think>\n", QWEN), Begun::Reasoning);
        assert_eq!(Begun::of("<|im_start|>assistant\n<think>\n\n</think>\n\n", QWEN), Begun::Text);
        assert_eq!(
            Begun::of("<|im_start|>user\n<think>?<|im_end|>\n<|im_start|>assistant\n", QWEN),
            Begun::Nothing
        );
    }

    #[test]
    fn a_prompt_may_open_a_channel() {
        let form =
            AnswerForm { reasoning: super::super::ReasoningParser::named("openai_gptoss"), calls: None };
        let of =
            |end: &str| Begun::of(&format!("<|start|>user<|message|>Hi<|end|><|start|>assistant{end}"), form);
        assert_eq!(of(""), Begun::Nothing);
        assert_eq!(of("<|channel|>analysis<|message|>"), Begun::Reasoning);
        assert_eq!(of("<|channel|>final<|message|>"), Begun::Text);
        let continued =
            |text: &str| Begun::of_continued(&format!("<|channel|>final<|message|>{text}"), text, form);
        assert_eq!(continued("The answer"), Begun::Text);
    }

    #[test]
    fn a_message_may_be_left_open_within_its_reasoning() {
        let of =
            |before: &str, content: &str| Begun::of_continued(&format!("{before}{content}"), content, QWEN);
        let start = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(of(start, "<think>\nHm, let"), Begun::MoreReasoning);
        assert_eq!(of(start, "<think>\n"), Begun::Reasoning);
        assert_eq!(of(start, "<think>\nHm.\n</think>\n\nThe"), Begun::Text);
        assert_eq!(of(start, "The answer"), Begun::Text);
        // Qwen3's template writes an empty reasoning before every text.
        let closed = format!("{start}<think>\n\n</think>\n\n");
        assert_eq!(of(&closed, "<think>\nHm, let"), Begun::MoreReasoning);
        assert_eq!(of(&closed, "The answer"), Begun::Text);
        assert_eq!(of(&format!("{start}<think>\n"), "Hm, let"), Begun::MoreReasoning);
    }
}
