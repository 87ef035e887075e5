//! The reasoning before a text that follows a grammar. The reasoning is free up to its closing tag, and the text comes
//! after it.
//!
//! The reasoning is read token by token as bytes. A tag may be a token of its own, or may be split over several tokens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::toktrie::{SimpleVob, TokEnv, TokTrie};

use super::output::Reasoning;
use crate::chat::{ASSISTANT, FINAL, MESSAGE};

/// The largest number of line ends between the closing tag and the text, as models write them.
const GAP: usize = 2;
/// The largest number of white-space characters before the opening tag.
const BLANKS: usize = 4;

/// The tags of reasoning.
#[derive(Clone, Copy)]
pub(super) struct Lead {
    open: &'static str,
    /// The tag up to which the reasoning is free.
    close: &'static str,
    /// The text that must stand between the closing tag and the text of the grammar.
    bridge: &'static str,
    /// Whether a call in a channel follows. Then each message of reasoning is ordinary text up to its closing tag, and
    /// another one may follow instead of the call.
    before_call: bool,
}

impl Lead {
    /// Returns the tags. Without reasoning there are none. With channels everything is free up to the channel of the
    /// text. The header of this channel may name a type of content before [`MESSAGE`], unless the header is
    /// constrained. A text that has a header of its own (`has_header`) comes after messages of reasoning only.
    pub fn of(reasoning: Option<Reasoning>, has_header: bool) -> Self {
        let Some(Reasoning { parser, .. }) = reasoning else {
            return Self { open: "", close: "", bridge: "", before_call: false };
        };
        let tags = Self { open: parser.open, close: parser.close, bridge: "", before_call: false };
        match (parser.channels, has_header) {
            (true, true) => Self { bridge: ASSISTANT, before_call: true, ..tags },
            (true, false) => {
                Self { close: FINAL.strip_suffix(MESSAGE).unwrap_or(FINAL), bridge: MESSAGE, ..tags }
            }
            (false, _) => tags,
        }
    }

    /// Returns the text of a token. The tags are the only special tokens that have a text.
    fn text<'t>(&self, token: &'t [u8]) -> &'t [u8] {
        let Some(content) = token.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]) else { return token };
        let holds = |tag: &str| tag.as_bytes().windows(content.len().max(1)).any(|part| part == content);
        match [self.open, self.close, self.bridge].into_iter().any(holds) {
            true => content,
            false => &[],
        }
    }

    /// Returns the stage after `more` of the reasoning. Before that, the reasoning ended in the first `tail` bytes of
    /// the closing tag.
    fn reasoning(&self, mut tail: usize, more: &[u8]) -> Stage {
        for (i, &byte) in more.iter().enumerate() {
            tail = self.tail_after(tail, byte);
            if tail == self.close.len() {
                if !self.bridge.is_empty() {
                    return Stage::Bridge(0);
                }
                let lines = more[i + 1..].iter().filter(|byte| **byte == b'\n').count();
                return Stage::Gap(lines.min(GAP));
            }
        }
        Stage::Reasoning(tail)
    }

    /// Returns how many bytes of the closing tag a text ends in after one more byte. Before that byte it ended in
    /// `tail` bytes of the tag.
    fn tail_after(&self, tail: usize, byte: u8) -> usize {
        let tag = self.close.as_bytes();
        let seen = [&tag[..tail], &[byte]].concat();
        (0..=seen.len()).rev().find(|&n| tag.starts_with(&seen[seen.len() - n..])).unwrap_or(0)
    }

    fn opening<'s>(&self, seen: &'s [u8]) -> Opening<'s> {
        let tag = self.open.as_bytes();
        let rest = seen.trim_ascii_start();
        match rest.strip_prefix(tag) {
            Some(after) => Opening::Whole(after),
            None if tag.starts_with(rest) && seen.len() - rest.len() <= BLANKS => Opening::Partial,
            None => Opening::None,
        }
    }
}

/// The part of the answer that a choice has reached.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stage {
    /// The choice has white space and the beginning of the opening tag.
    Start(Vec<u8>),
    /// The reasoning has begun, and ends in this number of bytes of the closing tag.
    Reasoning(usize),
    /// The closing tag is complete, followed by this number of bytes of the text that must follow it.
    Bridge(usize),
    /// The closing tag is complete, followed by this number of line ends.
    Gap(usize),
    /// The text has begun at the token with this index.
    Text(usize),
}

/// What the beginning of an answer can become.
enum Opening<'a> {
    /// It can become reasoning or a text of the grammar.
    Partial,
    /// The opening tag is complete, and these bytes follow it.
    Whole(&'a [u8]),
    /// It can only be a text of the grammar.
    None,
}

impl Stage {
    pub fn new(reasoning: Option<Reasoning>, lead: Lead) -> Self {
        match reasoning {
            None => Self::Text(0),
            Some(Reasoning { parser, open }) => match open || parser.channels && !lead.before_call {
                true => Self::Reasoning(0),
                false => Self::Start(Vec::new()),
            },
        }
    }

    /// Returns the stage after one more token, whose index is `at`.
    #[must_use]
    pub fn after(self, lead: Lead, at: usize, token: &[u8]) -> Self {
        match self {
            // A special token without a text cannot begin the reasoning.
            Self::Start(_) if lead.text(token).is_empty() => Self::Text(0),
            Self::Start(mut seen) => {
                seen.extend(lead.text(token));
                match lead.opening(&seen) {
                    Opening::Partial => Self::Start(seen),
                    Opening::Whole(rest) => lead.reasoning(0, rest),
                    Opening::None => Self::Text(0),
                }
            }
            Self::Reasoning(tail) => lead.reasoning(tail, lead.text(token)),
            Self::Bridge(written) => match written + lead.text(token).len() {
                written if written < lead.bridge.len() => Self::Bridge(written),
                _ if lead.before_call => Self::Start(Vec::new()),
                _ => Self::Text(at + 1),
            },
            Self::Gap(lines) if is_lines(token) && lines + token.len() <= GAP => {
                Self::Gap(lines + token.len())
            }
            Self::Gap(_) => Self::Text(at),
            Self::Text(begin) => Self::Text(begin),
        }
    }
}

fn is_lines(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| *byte == b'\n')
}

/// The tokens that end a closing tag and continue with something else than line ends. The index is the number of bytes
/// of the tag that came before the token.
type Beyond = Vec<Vec<u32>>;

/// How the tokens of a vocabulary relate to the tags.
pub(super) struct Tags {
    tokens: TokEnv,
    /// The set of all tokens.
    all: SimpleVob,
    /// The tokens that go beyond a tag, by closing tag.
    beyond: Mutex<HashMap<&'static str, Arc<Beyond>>>,
    /// The tokens that consist of line ends only.
    lines: Vec<u32>,
    /// The special tokens.
    special: Vec<u32>,
}

impl Tags {
    pub fn new(tokens: TokEnv) -> Self {
        let trie = tokens.tok_trie();
        let ids = || 0..trie.vocab_size() as u32;
        let mut all = trie.alloc_token_set();
        ids().for_each(|id| all.allow_token(id));
        let lines = ids().filter(|&id| is_lines(trie.token(id))).collect();
        let special = ids().filter(|&id| trie.is_special_token(id)).collect();
        Self { all, beyond: Mutex::default(), lines, special, tokens }
    }

    /// Returns the bytes of a token. Special tokens are marked.
    pub fn token(&self, id: u32) -> &[u8] {
        self.tokens.tok_trie().token(id)
    }

    /// Returns the tokens that go beyond the closing tag. They are computed once for each tag, because that reads all
    /// tokens.
    fn beyond(&self, lead: Lead) -> Arc<Beyond> {
        let mut known = self.beyond.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(lead.close).or_insert_with(|| Arc::new(self.find_beyond(lead))).clone()
    }

    fn find_beyond(&self, lead: Lead) -> Beyond {
        let trie = self.tokens.tok_trie();
        let tag = lead.close.as_bytes();
        let closes = |id: &u32| tag.last().is_some_and(|last| trie.token(*id).contains(last));
        let closing: Vec<u32> = (0..trie.vocab_size() as u32).filter(closes).collect();
        let goes_beyond = |tail: usize, id: u32| {
            let written = [&tag[..tail], lead.text(trie.token(id))].concat();
            let end = written.windows(tag.len()).position(|window| window == tag);
            end.is_some_and(|at| written[at + tag.len()..].iter().any(|byte| *byte != b'\n'))
        };
        (0..tag.len())
            .map(|tail| closing.iter().copied().filter(|&id| goes_beyond(tail, id)).collect())
            .collect()
    }

    /// Returns the tokens that may continue the reasoning. These are all tokens except `ends` and the tokens that would
    /// write into the text. Before a call in a channel only the special token of the closing tag may come.
    pub fn of_reasoning(&self, lead: Lead, tail: usize, ends: &[u32]) -> SimpleVob {
        let mut mask = self.all.clone();
        if lead.before_call {
            let other = |id: &&u32| self.token(**id)[1..] != *lead.close.as_bytes();
            self.special.iter().filter(other).for_each(|&id| mask.disallow_token(id));
        }
        let known = ends.iter().filter(|id| (**id as usize) < mask.len()).copied().collect::<Vec<_>>();
        known.iter().chain(&self.beyond(lead)[tail]).for_each(|&id| mask.disallow_token(id));
        mask
    }

    /// Adds the tokens that continue an opening tag.
    pub fn allow_opening(&self, lead: Lead, seen: &[u8], mask: &mut SimpleVob) {
        let opens = |id: &u32| {
            let token = lead.text(self.token(*id));
            let first = token
                .first()
                .is_some_and(|byte| byte.is_ascii_whitespace() || lead.open.as_bytes().contains(byte));
            first
                && match lead.opening(&[seen, token].concat()) {
                    Opening::Partial => true,
                    Opening::Whole(rest) => rest.iter().all(|byte| *byte == b'\n'),
                    Opening::None => false,
                }
        };
        self.allow(mask, (0..self.all.len() as u32).filter(opens));
    }

    /// Adds the tokens that continue the text which must follow the closing tag.
    pub fn allow_bridge(&self, lead: Lead, written: usize, mask: &mut SimpleVob) {
        let left = &lead.bridge.as_bytes()[written..];
        let fits = |id: &u32| {
            let token = lead.text(self.token(*id));
            !token.is_empty() && left.starts_with(token)
        };
        self.allow(mask, (0..self.all.len() as u32).filter(fits));
    }

    /// Adds the tokens of line ends that may follow the closing tag and `lines` other line ends.
    pub fn allow_gap(&self, lines: usize, mask: &mut SimpleVob) {
        let fits = |id: &u32| lines + self.token(*id).len() <= GAP;
        self.allow(mask, self.lines.iter().copied().filter(fits));
    }

    fn allow(&self, mask: &mut SimpleVob, ids: impl Iterator<Item = u32>) {
        if mask.len() < self.all.len() {
            mask.resize(self.all.len());
        }
        ids.for_each(|id| mask.allow_token(id));
    }
}
