//! Shows an answer while it arrives. At a terminal the reasoning is dimmed and tool calls are named.

use std::io::IsTerminal;

use moe_engine::chat::{Answer, AnswerForm, Begun, Part, Schemas, Splitter};
use moe_engine::terminal::visible;

use crate::log;

/// How the parts of an answer are distinguished for the reader.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Look {
    /// The text is written exactly as the model wrote it. This is for programs.
    Raw,
    /// The text is written as the model wrote it, after the opening tag of reasoning if the prompt contains that. This
    /// is for a terminal without colours.
    Tags,
    /// Reasoning is dimmed.
    Dimmed,
}

impl Look {
    /// The form that stdout can show.
    pub fn of_stdout() -> Self {
        match (std::io::stdout().is_terminal(), log::colours()) {
            (false, _) => Self::Raw,
            (true, false) => Self::Tags,
            (true, true) => Self::Dimmed,
        }
    }
}

/// An answer that is being shown.
pub struct Shown {
    splitter: Splitter,
    look: Look,
    /// The answer so far.
    answer: Answer,
    begun: bool,
    /// The opening tag of the reasoning, if the prompt contains it.
    opened: Option<&'static str>,
    /// Whether the text that was shown last is reasoning.
    reasoning: bool,
}

impl Shown {
    /// Makes an answer in this form. `begun` is the part of it that the prompt has already begun.
    pub fn new(form: AnswerForm, begun: Begun, look: Look) -> Self {
        let opened = form.reasoning.filter(|_| begun.reasons()).map(|parser| parser.open);
        let splitter = Splitter::new(form, begun, Schemas::default());
        Self { splitter, look, answer: Answer::default(), begun: false, opened, reasoning: false }
    }

    /// Adds text, and returns the text to print now.
    pub fn push(&mut self, text: &str) -> String {
        let parts = self.splitter.push(text);
        self.show(text, parts)
    }

    /// Ends the answer, and returns the rest of the text to print.
    pub fn finish(&mut self) -> String {
        let parts = self.splitter.finish();
        self.show("", parts)
    }

    /// Returns the whole answer.
    pub fn into_answer(self) -> Answer {
        self.answer
    }

    fn show(&mut self, text: &str, parts: Vec<Part>) -> String {
        let shown = match self.look {
            Look::Raw => text.to_string(),
            Look::Tags => {
                let first = !std::mem::replace(&mut self.begun, true);
                let tag = self.opened.filter(|_| first).map(|tag| format!("{tag}\n"));
                format!("{}{}", tag.unwrap_or_default(), visible(text))
            }
            Look::Dimmed => parts.iter().map(|part| self.dimmed(part)).collect(),
        };
        self.answer.extend(parts);
        shown
    }

    fn dimmed(&mut self, part: &Part) -> String {
        let behind_reasoning = std::mem::replace(&mut self.reasoning, matches!(part, Part::Reasoning(_)));
        let something = std::mem::replace(&mut self.begun, true);
        match part {
            // Each piece is written by itself, so that a program that is killed does not leave the terminal dim.
            Part::Reasoning(text) => format!("\x1b[2m{}\x1b[22m", visible(text)),
            Part::Text(text) => format!("{}{}", if behind_reasoning { "\n\n" } else { "" }, visible(text)),
            Part::Call(call) => {
                let before = if something { "\n" } else { "" };
                let words = format!("{} {}", call.name, call.arguments);
                format!("{before}\x1b[1m[tool call]\x1b[22m {}", visible(&words))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form() -> AnswerForm {
        let calls = moe_engine::chat::CallParser::named("hermes");
        AnswerForm { reasoning: moe_engine::chat::ReasoningParser::named("qwen3"), calls }
    }

    fn shown(look: Look, opened: bool, pieces: &[&str]) -> (String, Answer) {
        let begun = if opened { Begun::Reasoning } else { Begun::Nothing };
        let mut shown = Shown::new(form(), begun, look);
        let mut text: String = pieces.iter().map(|piece| shown.push(piece)).collect();
        text += &shown.finish();
        (text, shown.into_answer())
    }

    #[test]
    fn reasoning_is_dimmed_and_calls_are_named() {
        let pieces =
            ["<thi", "nk>\nHm", ".\n</think>", "\n\nSure.\n<tool_call>{\"name\": \"f\"}</tool_call>"];
        let (text, answer) = shown(Look::Dimmed, false, &pieces);
        assert_eq!(text, "\x1b[2mHm\x1b[22m\x1b[2m.\x1b[22m\n\nSure.\n\x1b[1m[tool call]\x1b[22m f {}");
        assert_eq!((answer.reasoning.as_deref(), answer.text.as_str()), (Some("Hm."), "Sure."));
        let (raw, same) = shown(Look::Raw, false, &pieces);
        assert_eq!((raw, &same), (pieces.concat(), &answer));
        assert_eq!(shown(Look::Tags, false, &pieces), (pieces.concat(), answer));
    }

    /// A model may have learnt to write control sequences that move the cursor or set the title of a window, or a
    /// prompt may make it do so.
    #[test]
    fn a_terminal_does_not_obey_the_model_and_a_pipe_gets_every_byte() {
        let pieces = ["<think>\u{1b}]0;x\u{7}</think>", "a\u{1b}[2Jb", "\u{9b}c\r"];
        for look in [Look::Dimmed, Look::Tags] {
            let text = shown(look, false, &pieces).0;
            let own = text.replace("\x1b[2m", "").replace("\x1b[22m", "");
            assert!(!own.contains(['\u{1b}', '\u{7}', '\u{9b}', '\r']), "{look:?}: {text:?}");
            assert!(own.contains(r"a\u{1b}[2Jb\u{9b}c\r"), "{look:?}: {text:?}");
        }
        assert_eq!(shown(Look::Raw, false, &pieces).0, pieces.concat());
    }

    #[test]
    fn reasoning_that_the_prompt_began_gets_its_tag_where_tags_are_shown() {
        let pieces = ["Hm.\n</think>\n\n", "Sure."];
        assert_eq!(shown(Look::Tags, true, &pieces).0, format!("<think>\n{}", pieces.concat()));
        assert_eq!(shown(Look::Raw, true, &pieces).0, pieces.concat());
        assert_eq!(shown(Look::Dimmed, true, &pieces).0, "\x1b[2mHm.\x1b[22m\n\nSure.");
    }
}
