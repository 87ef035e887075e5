//! Splits an answer that is a sequence of messages, each in a channel (OpenAI's harmony format, which gpt-oss uses).
//!
//! ```text
//! <|channel|>analysis<|message|>reasoning<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
//! <|start|>assistant<|channel|>final<|message|>text<|return|>
//! ```
//!
//! There are no line ends between the messages. The prompt ends in `<|start|>assistant`. The tokens `<|return|>` and
//! `<|call|>` end an answer, so its text does not contain them. Anything that is not such a message becomes text, with
//! its tags.

use super::begun::Begun;
use super::call::{ToolCall, arguments};
use super::channel_tags::{CHANNEL, MESSAGE, START};
use super::form::AnswerForm;
use super::part::{Part, give};
use super::tags::{Found, find};

/// The tags that end a message. The first three belong to that message, and the others to the next one.
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", START, CHANNEL];
const OWN_ENDS: usize = 3;
/// The types of content that a header may name.
const CONTENTS: [&str; 3] = ["json", "code", "text"];
/// The text between two messages that are joined.
const BETWEEN: &str = "\n";

/// Splits messages in channels.
pub(super) struct ChannelSplitter {
    form: AnswerForm,
    state: State,
    /// The text that was not returned yet. In a call it begins with the header of the message.
    held: String,
    reasoned: bool,
    spoke: bool,
}

#[derive(Clone, PartialEq)]
enum State {
    /// The header of the next message is expected.
    Header,
    Reasoning,
    Text,
    /// A message that the form does not contain, or that is not well-formed. It becomes text with its tags.
    AsItIs,
    /// A call of this function. Its arguments begin at this byte of `held`.
    Call(String, usize),
}

impl ChannelSplitter {
    pub fn new(form: AnswerForm, begun: Begun) -> Self {
        let state = match begun {
            Begun::Nothing => State::Header,
            Begun::Reasoning | Begun::MoreReasoning if form.reasoning.is_some() => State::Reasoning,
            Begun::Reasoning | Begun::MoreReasoning => State::AsItIs,
            Begun::Text => State::Text,
        };
        let reasoned = state == State::Reasoning;
        Self { form, state, held: String::new(), reasoned, spoke: false }
    }

    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held += text;
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if let State::Call(name, begin) = &self.state
            && let Some(arguments) = arguments(&self.held[*begin..])
        {
            parts.push(Part::Call(ToolCall::new(name, arguments)));
            return parts;
        }
        // Text that only looked like a header or a call may contain a message.
        if matches!(self.state, State::Header | State::Call(..)) {
            self.state = State::AsItIs;
            let after = self.held.find(MESSAGE).map_or(self.held.len(), |at| at + MESSAGE.len());
            self.give_as_it_is(after, &mut parts);
            while self.advance(&mut parts) {}
            if matches!(self.state, State::Header | State::Call(..)) && !self.held.is_empty() {
                parts.extend(self.finish());
                return parts;
            }
        }
        let rest = self.held.len();
        self.give(rest, &mut parts);
        parts
    }

    /// Reads one header, or the text up to the end of a message. Returns whether more can be read.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state.clone() {
            State::Header => self.header(parts),
            State::Call(name, begin) => self.call(&name, begin, parts),
            State::Reasoning | State::Text | State::AsItIs => self.content(parts),
        }
    }

    /// Reads the header of the next message, if it is complete.
    fn header(&mut self, parts: &mut Vec<Part>) -> bool {
        let text = self.held.trim_start();
        if text.is_empty() {
            return false;
        }
        let begins = |tag: &str| text.starts_with(tag) || tag.starts_with(text);
        if !(begins(START) || begins(CHANNEL) || begins("to=")) {
            self.state = State::Text;
            return true;
        }
        let Found::Tag(tag, at) = find(&self.held, &[MESSAGE, "<|end|>", "<|return|>", "<|call|>"]) else {
            return false;
        };
        let after = at + MESSAGE.len();
        let header = Header::of(&self.held[..at]).filter(|_| tag == 0);
        let state = match header {
            Some(Header { to: Some(function), .. }) if self.form.calls.is_some() => {
                self.state = State::Call(function.to_string(), after);
                return true;
            }
            Some(Header { to: Some(_), .. }) | None => State::AsItIs,
            Some(Header { channel: "analysis", .. }) if self.form.reasoning.is_some() => State::Reasoning,
            Some(Header { channel: "final" | "commentary", .. }) => State::Text,
            Some(_) => State::AsItIs,
        };
        self.state = state;
        match self.state {
            State::AsItIs => self.give_as_it_is(if tag == 0 { after } else { at }, parts),
            _ => drop(self.held.drain(..after)),
        }
        self.separate(parts);
        true
    }

    /// Adds a line end between this message and an earlier message of the same kind.
    fn separate(&mut self, parts: &mut Vec<Part>) {
        match self.state {
            State::Reasoning if std::mem::replace(&mut self.reasoned, true) => {
                give(parts, Part::Reasoning(BETWEEN.into()));
            }
            State::Text if std::mem::replace(&mut self.spoke, true) => {
                give(parts, Part::Text(BETWEEN.into()))
            }
            _ => {}
        }
    }

    /// Returns the text up to the end of the message, or up to the bytes that may become an end.
    fn content(&mut self, parts: &mut Vec<Part>) -> bool {
        match find(&self.held, &ENDS) {
            Found::None(end) => {
                self.give(end, parts);
                false
            }
            Found::Tag(tag, at) => {
                self.end(tag, at, parts);
                true
            }
        }
    }

    /// Ends the message at a tag.
    fn end(&mut self, tag: usize, at: usize, parts: &mut Vec<Part>) {
        let own = if tag < OWN_ENDS { ENDS[tag].len() } else { 0 };
        match self.state {
            State::AsItIs => self.give_as_it_is(at + own, parts),
            _ => {
                self.give(at, parts);
                self.held.drain(..own);
            }
        }
        self.state = State::Header;
    }

    /// Reads the call, if it is complete. A tag within a string of its arguments belongs to the string.
    fn call(&mut self, name: &str, begin: usize, parts: &mut Vec<Part>) -> bool {
        let Some((tag, at)) = end_of_json(&self.held[begin..]) else { return false };
        let complete = arguments(&self.held[begin..begin + at]);
        match complete {
            Some(arguments) => {
                parts.push(Part::Call(ToolCall::new(name, arguments)));
                self.held.drain(..begin + at);
                self.state = State::Text;
            }
            None => {
                self.give_as_it_is(begin + at, parts);
                self.state = State::AsItIs;
            }
        }
        self.end(tag, 0, parts);
        true
    }

    /// Returns the first bytes of `held` as a part of the current kind.
    fn give(&mut self, end: usize, parts: &mut Vec<Part>) {
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        if self.state == State::Text && !text.is_empty() {
            self.spoke = true;
        }
        give(
            parts,
            match self.state {
                State::Reasoning => Part::Reasoning(text),
                _ => Part::Text(text),
            },
        );
    }

    /// Returns the first bytes of `held` as text.
    fn give_as_it_is(&mut self, end: usize, parts: &mut Vec<Part>) {
        let rest = self.held.split_off(end);
        give(parts, Part::Text(std::mem::replace(&mut self.held, rest)));
    }
}

/// Returns the first tag after JSON, as its index and its place. A tag in a string belongs to the string.
fn end_of_json(json: &str) -> Option<(usize, usize)> {
    let mut in_string = false;
    let mut escaped = false;
    for (at, byte) in json.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            // A string of JSON cannot contain line ends, so this is not JSON.
            0..0x20 if in_string => {
                return match find(json, &ENDS) {
                    Found::Tag(tag, at) => Some((tag, at)),
                    Found::None(_) => None,
                };
            }
            b'<' if !in_string => {
                if let Some(tag) = ENDS.iter().position(|tag| json[at..].starts_with(tag)) {
                    return Some((tag, at));
                }
            }
            _ => {}
        }
    }
    None
}

/// The contents of a message's header, which is the text before `<|message|>`.
struct Header<'a> {
    channel: &'a str,
    /// The function that is called, if the message is a call.
    to: Option<&'a str>,
}

impl<'a> Header<'a> {
    /// Reads a header: a role, a recipient, a channel and a type of content, in this order, or with the recipient after
    /// the channel. Returns `None` if the text is not a header.
    fn of(text: &'a str) -> Option<Self> {
        let text = text.trim();
        let text = match text.strip_prefix(START) {
            Some(rest) => rest.trim_start().strip_prefix("assistant")?,
            None => text,
        };
        let (before, after) = text.split_once(CHANNEL).unwrap_or((text, ""));
        let (after, content) = after.split_once("<|constrain|>").unwrap_or((after, ""));
        let is_content = |word: &str| CONTENTS.iter().any(|content| word.eq_ignore_ascii_case(content));
        if !content.trim().is_empty() && !is_content(content.trim()) {
            return None;
        }
        let mut words = after.split_whitespace();
        let channel = words.next().unwrap_or("commentary");
        let mut to = None;
        for word in before.split_whitespace().chain(words) {
            match word.strip_prefix("to=") {
                Some(recipient) if to.is_none() => {
                    to = Some(recipient.strip_prefix("functions.").unwrap_or(recipient));
                }
                // This is a type of content without its tag.
                None if is_content(word) => {}
                _ => return None,
            }
        }
        let named = |word: &str| !word.is_empty() && !word.contains(['<', '>']);
        (named(channel) && to.is_none_or(named)).then_some(Self { channel, to })
    }
}
