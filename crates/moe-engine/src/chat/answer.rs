//! An answer taken apart while it comes: reasoning, text and tool calls.
//!
//! Qwen3 and models of its kind write
//!
//! ```text
//! <think>
//! reasoning
//! </think>
//!
//! text
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```
//!
//! The tags are ordinary text, which may arrive in any pieces: what the parts come to does not depend on them.
//! Line ends beside a tag belong to the form and are left out.

use super::ChatFiles;
use super::begun::{Begun, END_THINK, THINK};
use super::call::{self, CALL, END_CALL, ToolCall};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the text.
    Text(String),
    /// A whole tool call.
    Call(ToolCall),
}

/// What is looked for in an answer; by default nothing, and all of it is text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// Reasoning between `<think>`, where it is how the answer begins, and `</think>`.
    pub reasoning: bool,
    /// Calls as JSON between `<tool_call>` and `</tool_call>` (Hermes).
    pub calls: bool,
}

impl AnswerForm {
    /// What a checkpoint's templates show that its model writes.
    pub fn of(files: &ChatFiles) -> Self {
        let shows = |text: &str| files.templates.values().any(|template| template.contains(text));
        // With `<function=` the calls are not JSON.
        Self { reasoning: shows(END_THINK), calls: shows(CALL) && !shows("<function=") }
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// `None`: the model did not reason.
    pub reasoning: Option<String>,
    /// What is neither reasoning nor a call.
    pub text: String,
    /// In their order.
    pub calls: Vec<ToolCall>,
}

impl Answer {
    /// Takes a whole text apart, of which the prompt has begun this.
    pub fn of(text: &str, form: AnswerForm, begun: Begun) -> Self {
        let mut splitter = Splitter::new(form, begun);
        let mut answer = Self::default();
        answer.extend(splitter.push(text));
        answer.extend(splitter.finish());
        answer
    }

    /// Adds what came.
    pub fn extend(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Reasoning(text) => *self.reasoning.get_or_insert_default() += &text,
                Part::Text(text) => self.text += &text,
                Part::Call(call) => self.calls.push(call),
            }
        }
    }
}

/// Takes an answer apart while it comes.
pub struct Splitter {
    form: AnswerForm,
    state: State,
    /// What is not given out yet.
    held: String,
    /// A tag is right before: line ends are left out.
    behind_tag: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Only white space has come.
    Start,
    Reasoning,
    Text,
    /// `held` begins with line ends and `<tool_call>`.
    Call,
}

impl Splitter {
    /// A splitter of an answer in this form, of which the prompt has begun this.
    pub fn new(form: AnswerForm, begun: Begun) -> Self {
        let state = match form.reasoning {
            true if begun.reasons() => State::Reasoning,
            true => State::Start,
            false => State::Text,
        };
        let behind_tag = state == State::Reasoning && begun == Begun::Reasoning;
        Self { form, state, held: String::new(), behind_tag }
    }

    /// Adds text: the parts that have become certain.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held += text;
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// The rest. Reasoning may lack its end and a call its closing tag; what is no call is text.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        while self.state == State::Call {
            let mut whole = std::mem::take(&mut self.held);
            if let Some(call) = call::read(&whole) {
                give(&mut parts, Part::Call(call));
                return parts;
            }
            // A string without an end may hide the closing tag.
            let end = call::any_end(&whole).map_or(whole.len(), |at| at + END_CALL.len());
            self.held = whole.split_off(end);
            self.state = State::Text;
            give(&mut parts, Part::Text(whole));
            while self.advance(&mut parts) {}
        }
        let rest = std::mem::take(&mut self.held);
        give(
            &mut parts,
            if self.state == State::Reasoning { Part::Reasoning(rest) } else { Part::Text(rest) },
        );
        parts
    }

    /// Goes over one tag, or as far as there is text; whether there may be more to do.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.behind_tag {
            self.held.drain(..self.held.len() - self.held.trim_start_matches('\n').len());
            self.behind_tag = self.held.is_empty();
        }
        match self.state {
            State::Start => self.begin(),
            State::Reasoning => {
                let closed = self.pass(END_THINK, Part::Reasoning, parts);
                if closed {
                    self.held.drain(..self.held.find(END_THINK).unwrap_or(0) + END_THINK.len());
                    (self.state, self.behind_tag) = (State::Text, true);
                }
                closed
            }
            State::Text if self.form.calls => {
                let opened = self.pass(CALL, Part::Text, parts);
                if opened {
                    self.state = State::Call;
                }
                opened
            }
            State::Text => {
                give(parts, Part::Text(std::mem::take(&mut self.held)));
                false
            }
            State::Call => self.end_call(parts),
        }
    }

    /// Decides whether the answer begins with reasoning.
    fn begin(&mut self) -> bool {
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(THINK) {
            self.held = rest.to_string();
            (self.state, self.behind_tag) = (State::Reasoning, true);
            return true;
        }
        let undecided = THINK.starts_with(text);
        if !undecided {
            self.state = State::Text;
        }
        !undecided
    }

    /// Gives out what comes before a tag and the line ends in front of it, or before what may become one; whether the
    /// tag is there.
    fn pass(&mut self, tag: &str, part: impl Fn(String) -> Part, parts: &mut Vec<Part>) -> bool {
        let found = self.held.find(tag);
        let end = found.unwrap_or_else(|| match self.held.rfind('<') {
            Some(at) if tag.starts_with(&self.held[at..]) => at,
            _ => self.held.len(),
        });
        let end = self.held[..end].trim_end_matches('\n').len();
        let rest = self.held.split_off(end);
        give(parts, part(std::mem::replace(&mut self.held, rest)));
        found.is_some()
    }

    /// Reads the call, once all of it is there.
    fn end_call(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(mut at) = call::end(&self.held) else { return false };
        if call::read(&self.held[..at]).is_none() {
            // No call: then an earlier closing tag is in no string either.
            at = call::any_end(&self.held).unwrap_or(at);
        }
        let rest = self.held.split_off(at + END_CALL.len());
        let whole = std::mem::replace(&mut self.held, rest);
        let call = call::read(&whole[..at]);
        (self.state, self.behind_tag) = (State::Text, call.is_some());
        give(parts, call.map_or(Part::Text(whole), Part::Call));
        true
    }
}

fn give(parts: &mut Vec<Part>, part: Part) {
    match &part {
        Part::Reasoning(text) | Part::Text(text) if text.is_empty() => {}
        _ => parts.push(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const ALL: AnswerForm = AnswerForm { reasoning: true, calls: true };

    /// Adjacent pieces of one kind as one.
    fn joined(pieces: impl IntoIterator<Item = Part>) -> Vec<Part> {
        let mut all: Vec<Part> = Vec::new();
        for piece in pieces {
            match (all.last_mut(), piece) {
                (Some(Part::Reasoning(text)), Part::Reasoning(more))
                | (Some(Part::Text(text)), Part::Text(more)) => text.push_str(&more),
                (_, piece) => all.push(piece),
            }
        }
        all
    }

    fn parts(pieces: &[&str], form: AnswerForm, opened: bool) -> Vec<Part> {
        let mut splitter = Splitter::new(form, begun(opened));
        let mut all: Vec<Part> = pieces.iter().flat_map(|piece| splitter.push(piece)).collect();
        all.extend(splitter.finish());
        joined(all)
    }

    fn begun(opened: bool) -> Begun {
        if opened { Begun::Reasoning } else { Begun::Nothing }
    }

    fn text(text: &str) -> Part {
        Part::Text(text.into())
    }

    fn reasoning(text: &str) -> Part {
        Part::Reasoning(text.into())
    }

    fn called(name: &str, arguments: &str) -> Part {
        Part::Call(ToolCall { name: name.into(), arguments: arguments.into() })
    }

    #[test]
    fn an_answer_of_qwen3_has_three_kinds_of_parts() {
        let answer = "<think>\nHm.\n\nYes.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": \
                      {\"x\": [1, \"é\"]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>";
        let want = [
            reasoning("Hm.\n\nYes."),
            text("Let me see."),
            called("f", r#"{"x":[1,"é"]}"#),
            called("g", "{}"),
        ];
        assert_eq!(parts(&[answer], ALL, false), want);
        let whole = Answer::of(answer, ALL, Begun::Nothing);
        assert_eq!((whole.reasoning.as_deref(), whole.calls.len()), (Some("Hm.\n\nYes."), 2));
        let as_it_is = Answer { text: answer.into(), ..Answer::default() };
        assert_eq!(Answer::of(answer, AnswerForm::default(), Begun::Nothing), as_it_is);
    }

    #[test]
    fn the_prompt_may_have_opened_the_reasoning() {
        assert_eq!(parts(&["Hm.\n</think>\n\nYes.\n"], ALL, true), [reasoning("Hm."), text("Yes.\n")]);
        assert_eq!(parts(&["Hm.\n"], ALL, true), [reasoning("Hm.\n")], "it never ends");
        assert_eq!(parts(&["\n\n</think>\n\nYes"], ALL, true), [text("Yes")], "nothing was thought");
    }

    #[test]
    fn what_only_looks_like_a_tag_is_text() {
        for answer in [
            "",
            " \n",
            "<thin",
            "I say <think> is a tag.</think>",
            "\n x",
            "a < b <tool",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\n</tool_call>\n",
            "x\n<tool_call>{\"arguments\": {}}</tool_call> y",
            "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
            "\n\n<tool_call>[]",
        ] {
            let want: Vec<Part> = [text(answer)].into_iter().filter(|_| !answer.is_empty()).collect();
            assert_eq!(parts(&[answer], ALL, false), want);
        }
        assert_eq!(
            parts(&["<tool_call>{\"name\": \"f\", \"arguments\": {}}"], ALL, false),
            [called("f", "{}")],
            "the closing tag may be lost with the end of the text"
        );
    }

    #[test]
    fn a_closing_tag_in_the_arguments_is_part_of_them() {
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"a</tool_call>b\"}}\n</tool_call>";
        let want = called("f", "{\"x\":\"a</tool_call>b\"}");
        assert_eq!(parts(&[&format!("{call}\n{call}")], ALL, false), [want.clone(), want]);
        // A string that never ends hides no later call.
        let broken = "<tool_call>{\"name\": \"f</tool_call> <tool_call>{\"name\": \"g\"}</tool_call>";
        let got = parts(&[broken], ALL, false);
        assert_eq!(got.last(), Some(&called("g", "{}")), "{got:?}");
    }

    #[test]
    fn reasoning_that_the_prompt_is_within_keeps_its_line_ends() {
        let of = |begun| Answer::of("\n\nso</think>\n\nYes", ALL, begun).reasoning;
        assert_eq!(of(Begun::MoreReasoning).as_deref(), Some("\n\nso"));
        assert_eq!(of(Begun::Reasoning).as_deref(), Some("so"));
    }

    #[test]
    fn parts_come_out_as_soon_as_they_are_certain() {
        let mut splitter = Splitter::new(ALL, Begun::Nothing);
        let mut push = |text: &str| splitter.push(text);
        assert_eq!([push("<th"), push("ink>"), push("\n")], [vec![], vec![], vec![]]);
        assert_eq!(push("So"), [reasoning("So")]);
        assert_eq!((push(" it <"), push("/x")), (vec![reasoning(" it ")], vec![reasoning("</x")]));
        assert_eq!((push("\n</thi"), push("nk>\n\nYes")), (vec![], vec![text("Yes")]));
    }

    #[test]
    fn templates_show_what_their_models_write() {
        let of = |template: &str| {
            let config = json!({ "chat_template": template }).to_string();
            AnswerForm::of(&ChatFiles::from_tokenizer_config(config.as_bytes()).unwrap())
        };
        let qwen3 = "{% if '</think>' in content %}..{% endif %}{{ '<tool_call>\\n{\"name\": \"' }}";
        assert_eq!(of(qwen3), ALL);
        assert_eq!(of("<tool_call>\n<function={{ name }}>"), AnswerForm::default());
        assert_eq!(of("{{ messages[0].content }}"), AnswerForm::default());
    }

    proptest! {
        #[test]
        fn parts_do_not_depend_on_the_pieces(
            words in prop::collection::vec(prop::sample::select(vec![
                THINK, END_THINK, CALL, END_CALL, "\n", "\n\n", " ", "<", "</", "a", "é€", "{\"name\": \"f\"}",
                "{\"name\": \"f\", \"arguments\": {\"x\": 1}}", "{\"name\": \"</tool_call>\"}", "\"", "\\", "{\"name\"", "tool_call>", "<think", "think>",
            ]), 0..14),
            cuts in prop::collection::vec(0usize..200, 0..12),
            form in (any::<bool>(), any::<bool>()),
            opened in any::<bool>(),
        ) {
            let form = AnswerForm { reasoning: form.0, calls: form.1 };
            let whole = words.concat();
            let mut at: Vec<usize> = cuts.into_iter().map(|cut| whole.floor_char_boundary(cut)).collect();
            at.extend([0, whole.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|pair| &whole[pair[0]..pair[1]]).collect();
            prop_assert_eq!(parts(&pieces, form, opened), parts(&[&whole], form, opened));
        }
    }
}
