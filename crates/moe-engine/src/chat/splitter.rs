//! Splits an answer whose parts are in tags, while the answer arrives.

use super::arguments::Schemas;
use super::begun::Begun;
use super::call::{self, Unit};
use super::form::AnswerForm;
use super::parsers::{CallParser, ReasoningParser, Tags};
use super::part::{Part, give};
use super::tags::{Found, find};

/// Splits an answer whose parts are in tags.
pub(super) struct TagSplitter {
    form: AnswerForm,
    schemas: Schemas,
    state: State,
    /// The text that was not returned yet.
    held: String,
    /// Whether a tag has just ended. Line ends that follow it are left out.
    behind_tag: bool,
    /// Whether only white space has arrived since a call. It is left out before another call and at the end.
    after_call: bool,
    /// Whether an answer without an opening tag begins with reasoning.
    assumes: bool,
    /// Whether the position is within the tags around all calls.
    in_section: bool,
    /// Whether the tag before the text has arrived, and its closing tag has not.
    in_envelope: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Only white space has arrived.
    Start,
    Reasoning,
    Text,
    /// `held` begins with line ends and the opening tag of a call, or of all calls.
    Call,
}

/// The effect of a tag within the text.
#[derive(Clone, Copy)]
enum Mark {
    Call,
    EndOfSection,
    Envelope,
    EndOfEnvelope,
}

impl TagSplitter {
    pub fn new(form: AnswerForm, begun: Begun, schemas: Schemas) -> Self {
        let (state, held) = match form.reasoning {
            Some(parser) if parser.stays && begun.reasons() => (State::Text, parser.open),
            Some(parser) if parser.stays => (State::Text, ""),
            Some(_) if begun.reasons() => (State::Reasoning, ""),
            Some(_) => (State::Start, ""),
            None => (State::Text, ""),
        };
        let behind_tag = state == State::Reasoning && begun == Begun::Reasoning;
        // If the prompt has already begun the answer, its first part is known.
        let assumes = form.reasoning.is_some_and(|parser| parser.assumed) && begun == Begun::Nothing;
        let held = held.to_string();
        Self {
            form,
            schemas,
            state,
            held,
            behind_tag,
            after_call: false,
            assumes,
            in_section: false,
            in_envelope: false,
        }
    }

    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held += text;
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the answer and returns the remaining parts. The end of the reasoning or the closing tag of a call may be
    /// missing. An incomplete call is returned as text.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        while let (State::Call, Some(parser)) = (self.state, self.form.calls) {
            let unit = call::last(parser, &self.schemas, &self.held);
            self.take_unit(parser, unit, &mut parts);
            while self.advance(&mut parts) {}
        }
        let mut rest = std::mem::take(&mut self.held);
        if self.after_call && rest.trim().is_empty() {
            rest.clear();
        }
        let reasons = self.state == State::Reasoning || self.state == State::Start && self.assumes;
        give(&mut parts, if reasons { Part::Reasoning(rest) } else { Part::Text(rest) });
        parts
    }

    /// Reads one tag, or the text up to the next tag. Returns whether more can be read.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.behind_tag {
            self.held.drain(..self.held.len() - self.held.trim_start_matches('\n').len());
            self.behind_tag = self.held.is_empty();
        }
        match (self.state, self.form.reasoning, self.form.calls) {
            (State::Start, Some(parser), _) => self.begin(parser),
            (State::Reasoning, Some(parser), _) => self.reason(parser, parts),
            (State::Call, _, Some(parser)) => {
                let unit = call::next(parser, &self.schemas, &self.held);
                self.take_unit(parser, unit, parts)
            }
            _ => self.text(parts),
        }
    }

    /// Decides whether the answer begins with reasoning. Returns false as long as that is open.
    fn begin(&mut self, parser: &ReasoningParser) -> bool {
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(parser.open) {
            self.held = rest.to_string();
            (self.state, self.behind_tag) = (State::Reasoning, true);
            return true;
        }
        let undecided = parser.open.starts_with(text);
        if !undecided {
            self.state = if self.assumes { State::Reasoning } else { State::Text };
            self.behind_tag = self.assumes;
        }
        !undecided
    }

    fn reason(&mut self, parser: &ReasoningParser, parts: &mut Vec<Part>) -> bool {
        let tags = [Some(parser.close), parser.ends_before];
        let tags: Vec<&str> = tags.into_iter().flatten().collect();
        match self.pass(&tags, Part::Reasoning, parts) {
            None => false,
            Some(0) => {
                self.drop_tag(parser.close);
                self.state = State::Text;
                true
            }
            Some(_) => {
                self.state = State::Text;
                true
            }
        }
    }

    fn text(&mut self, parts: &mut Vec<Part>) -> bool {
        let marks = self.marks();
        let tags: Vec<&str> = marks.iter().map(|(tag, _)| *tag).collect();
        if tags.is_empty() {
            give(parts, Part::Text(std::mem::take(&mut self.held)));
            return false;
        }
        if self.after_call && self.waits_after_call(&tags) {
            return false;
        }
        let Some(found) = self.pass(&tags, Part::Text, parts) else { return false };
        let (tag, mark) = marks[found];
        match mark {
            Mark::Call => self.state = State::Call,
            Mark::EndOfSection => self.in_section = false,
            Mark::Envelope => self.in_envelope = true,
            Mark::EndOfEnvelope => self.in_envelope = false,
        }
        if !matches!(mark, Mark::Call) {
            self.drop_tag(tag);
        }
        true
    }

    /// Removes white space between a call and the next tag. Returns true as long as only white space has arrived.
    fn waits_after_call(&mut self, tags: &[&str]) -> bool {
        let (end, is_tag) = match find(&self.held, tags) {
            Found::Tag(_, at) => (at, true),
            Found::None(end) => (end, false),
        };
        match self.held[..end].trim().is_empty() {
            true if is_tag => drop(self.held.drain(..end)),
            true => return true,
            false => self.after_call = false,
        }
        false
    }

    /// The tags that may come next in the text.
    fn marks(&self) -> Vec<(&'static str, Mark)> {
        let mut marks = Vec::new();
        if let Some(CallParser { section, open, .. }) = self.form.calls {
            match section {
                Some(Tags { close, .. }) if self.in_section => {
                    marks.extend([(*open, Mark::Call), (*close, Mark::EndOfSection)]);
                }
                Some(Tags { open, .. }) => marks.push((*open, Mark::Call)),
                None => marks.push((*open, Mark::Call)),
            }
        }
        let envelope = self.form.reasoning.and_then(|parser| parser.envelope.as_ref());
        marks.extend(envelope.map(|Tags { open, close }| match self.in_envelope {
            true => (*close, Mark::EndOfEnvelope),
            false => (*open, Mark::Envelope),
        }));
        marks
    }

    /// Returns the text before the first of the tags as a part, without the line ends before the tag. If no tag is
    /// complete, the bytes that may become a tag are kept. The result is the index of the tag that was found.
    fn pass(&mut self, tags: &[&str], part: impl Fn(String) -> Part, parts: &mut Vec<Part>) -> Option<usize> {
        let (found, end) = match find(&self.held, tags) {
            Found::Tag(tag, at) => (Some(tag), at),
            Found::None(end) => (None, end),
        };
        let end = self.held[..end].trim_end_matches('\n').len();
        let rest = self.held.split_off(end);
        give(parts, part(std::mem::replace(&mut self.held, rest)));
        found
    }

    /// Removes a tag. Only line ends come before it.
    fn drop_tag(&mut self, tag: &str) {
        self.held.drain(..self.held.find(tag).unwrap_or(0) + tag.len());
        self.behind_tag = true;
    }

    /// Returns calls, or the text that only looked like a call. The result is whether more can be read.
    fn take_unit(&mut self, parser: &CallParser, unit: Unit, parts: &mut Vec<Part>) -> bool {
        let (calls, end) = match unit {
            Unit::Unfinished => return false,
            Unit::Calls(calls, end) => (Some(calls), end),
            Unit::Text(end) => (None, end),
        };
        let rest = self.held.split_off(end);
        let whole = std::mem::replace(&mut self.held, rest);
        self.state = State::Text;
        self.behind_tag = calls.is_some();
        self.after_call = calls.is_some();
        match calls {
            Some(calls) => {
                self.in_section = parser.section.is_some();
                parts.extend(calls.into_iter().map(Part::Call));
            }
            None => give(parts, Part::Text(whole)),
        }
        true
    }
}
