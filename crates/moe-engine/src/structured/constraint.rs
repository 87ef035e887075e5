//! The position of one choice in its grammar.
//!
//! The constraint counts the tokens of the choice that it has read. The caller always passes all tokens, and the
//! constraint reads the new ones. So nothing special happens when a sequence is preempted and computed again. A token
//! that is known one step before it is collected can be passed early.

use std::sync::Arc;

use anyhow::bail;
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokTrie};

use super::compiler::{is_dead_end, reason};
use super::grammars::Grammar;
use super::lead::{Lead, Stage};
use super::output::Reasoning;

/// The state of one choice.
pub(crate) struct Constraint {
    grammar: Arc<Grammar>,
    /// The tags of the reasoning that may come before the text.
    lead: Lead,
    /// The stage that the choice has reached.
    stage: Stage,
    /// The number of tokens that are included in the stage.
    seen: usize,
    /// Whether the tokens so far could also be the beginning of a text of the grammar. It is used while the stage is
    /// not decided.
    fits: bool,
    /// The index of the text's first token.
    begin: usize,
    /// The matcher is made when it is first needed, because requests may wait for a long time.
    matcher: Option<Matcher>,
    /// The matcher has read the tokens from `begin` up to this index.
    taken: usize,
    /// Whether the lexer belongs to this choice only.
    alone: bool,
}

const NO_TOKEN: &str = "no token of the vocabulary continues the text as it must";

/// The set of the tokens that may come next.
pub(crate) struct Mask(SimpleVob);

impl Mask {
    /// Returns the mask that allows every token of a vocabulary.
    pub fn all(vocab_size: usize) -> Self {
        Self(SimpleVob::alloc_ones(vocab_size))
    }

    /// Excludes a token.
    pub fn exclude(&mut self, id: u32) {
        if (id as usize) < self.0.len() {
            self.0.disallow_token(id);
        }
    }

    /// Returns the words of the mask. Token i is bit i % 32 of word i / 32. Tokens after the end are excluded.
    pub fn words(&self) -> &[u32] {
        self.0.as_slice()
    }
}

impl Constraint {
    /// Creates a constraint before the first token.
    #[cfg(test)]
    pub fn new(grammar: Arc<Grammar>) -> Self {
        Self::after_reasoning(None, grammar)
    }

    /// Creates a constraint before the first token of a text. If there is `reasoning`, it may come before the text.
    pub fn after_reasoning(reasoning: Option<Reasoning>, grammar: Arc<Grammar>) -> Self {
        let lead = Lead::of(reasoning, grammar.has_header);
        let stage = Stage::new(reasoning, lead);
        Self { grammar, lead, stage, seen: 0, fits: true, begin: 0, matcher: None, taken: 0, alone: false }
    }

    /// Returns whether the text is complete after these tokens, so that none can follow.
    ///
    /// # Errors
    /// The tokens do not follow the grammar, or the grammar is too complex.
    pub fn is_complete(&mut self, output: &[u32]) -> Result<bool, String> {
        self.read(output);
        match self.stage {
            Stage::Start(_) if !self.fits => Ok(false),
            Stage::Reasoning(_) | Stage::Bridge(_) | Stage::Gap(_) => Ok(false),
            Stage::Start(_) | Stage::Text(_) => self.ask(output, |matcher| Ok(matcher.is_stopped())),
        }
    }

    /// Returns the tokens that may follow `output`, or `None` once the text is complete. The tokens in `ends` may
    /// follow wherever the text may end. The ordinary tokens in `only_there` may follow only there.
    ///
    /// # Errors
    /// No token can follow, the tokens do not follow the grammar, or the grammar is too complex.
    pub fn mask(&mut self, output: &[u32], ends: &[u32], only_there: &[u32]) -> Result<Option<Mask>, String> {
        self.read(output);
        let tags = self.grammar.tags.clone();
        let mut mask = match &self.stage {
            Stage::Reasoning(tail) => {
                let ends = [ends, only_there].concat();
                return Ok(Some(Mask(tags.of_reasoning(self.lead, *tail, &ends))));
            }
            Stage::Start(_) if !self.fits => SimpleVob::new(),
            Stage::Bridge(_) => SimpleVob::new(),
            Stage::Start(_) => match self.mask_of_text(output, ends, only_there) {
                Ok(Some(mask)) => mask,
                Ok(None) => return Ok(None),
                // The text cannot begin here, but the model may still begin its reasoning.
                Err(_) => SimpleVob::new(),
            },
            Stage::Gap(_) | Stage::Text(_) => match self.mask_of_text(output, ends, only_there)? {
                Some(mask) => mask,
                None => return Ok(None),
            },
        };
        match &self.stage {
            Stage::Start(seen) => tags.allow_opening(self.lead, seen, &mut mask),
            Stage::Bridge(written) => tags.allow_bridge(self.lead, *written, &mut mask),
            Stage::Gap(lines) => tags.allow_gap(*lines, &mut mask),
            Stage::Reasoning(_) | Stage::Text(_) => {}
        }
        match mask.is_zero() {
            true => Err(NO_TOKEN.into()),
            false => Ok(Some(Mask(mask))),
        }
    }

    /// Updates the stage with the tokens that it does not include yet.
    fn read(&mut self, output: &[u32]) {
        while self.seen < output.len() && !matches!(self.stage, Stage::Text(_)) {
            let at = self.seen;
            let token = output[self.seen];
            if self.fits && matches!(self.stage, Stage::Start(_)) {
                let follows = |matcher: &mut Matcher| Ok(matcher.validate_tokens(&[token])? == 1);
                self.fits = self.ask(&output[..at], follows).unwrap_or(false);
            }
            let tags = self.grammar.tags.clone();
            let stage = std::mem::replace(&mut self.stage, Stage::Text(0));
            self.stage = stage.after(self.lead, at, tags.token(token));
            self.seen = at + 1;
            match &self.stage {
                // Another message begins, which may be the text.
                Stage::Start(seen) if seen.is_empty() => {
                    self.fits = true;
                    self.begin_at(at + 1);
                }
                Stage::Start(_) => {}
                Stage::Reasoning(_) | Stage::Bridge(_) | Stage::Gap(_) => self.begin_at(at + 1),
                Stage::Text(0) => {}
                Stage::Text(begin) => self.begin_at(*begin),
            }
        }
    }

    /// Sets the index of the text's first token.
    fn begin_at(&mut self, begin: usize) {
        if self.begin != begin {
            (self.begin, self.taken, self.matcher) = (begin, begin, None);
        }
    }

    fn mask_of_text(
        &mut self,
        output: &[u32],
        ends: &[u32],
        only_there: &[u32],
    ) -> Result<Option<SimpleVob>, String> {
        self.ask(output, |matcher| {
            if matcher.is_stopped() {
                return Ok(None);
            }
            let may_end = matcher.is_accepting()?;
            let mut mask = match matcher.compute_mask() {
                Ok(mask) => mask,
                Err(e) if is_dead_end(&e) && may_end && !ends.is_empty() => SimpleVob::new(),
                Err(e) => return Err(e),
            };
            match may_end {
                true => allow(&mut mask, ends),
                false => exclude(&mut mask, only_there, matcher.tok_env()?.tok_trie()),
            }
            Ok(Some(mask))
        })
    }

    /// Asks the matcher that has read these tokens. Other choices may have brought a shared lexer to its limit, which
    /// must not make this choice fail. In that case the question is repeated with a lexer of its own.
    fn ask<T>(
        &mut self,
        output: &[u32],
        question: impl Fn(&mut Matcher) -> anyhow::Result<T>,
    ) -> Result<T, String> {
        let mut answer = self.matcher_after(output).and_then(&question);
        if answer.is_err() && !self.alone {
            self.alone = true;
            (self.matcher, self.taken) = (Some(self.grammar.own_matcher()), self.begin);
            answer = self.matcher_after(output).and_then(&question);
        }
        answer.map_err(|e| match is_dead_end(&e) {
            true => NO_TOKEN.into(),
            false => reason(&e),
        })
    }

    /// Returns the matcher after it has read these tokens. It reads no further once the text is complete.
    fn matcher_after(&mut self, output: &[u32]) -> anyhow::Result<&mut Matcher> {
        let matcher = self.matcher.get_or_insert_with(|| self.grammar.matcher());
        if let Some(error) = matcher.get_error() {
            bail!(error);
        }
        for &token in output.get(self.taken..).unwrap_or_default() {
            if matcher.is_stopped() {
                break;
            }
            matcher.consume_token(token)?;
            if matcher.is_stopped() {
                // A lexer that has reached its limit also reports that it is stopped, and fails only at the next token.
                matcher.rollback(1)?;
                matcher.consume_token(token)?;
            }
            self.taken += 1;
        }
        Ok(matcher)
    }
}

fn allow(mask: &mut SimpleVob, ids: &[u32]) {
    let len = ids.iter().map(|&id| id as usize + 1).max().unwrap_or(0);
    if len > mask.len() {
        mask.resize(len);
    }
    ids.iter().for_each(|&id| mask.allow_token(id));
}

/// Excludes those ids that are ordinary tokens. A special token is allowed only if the grammar names it.
fn exclude(mask: &mut SimpleVob, ids: &[u32], tokens: &TokTrie) {
    for &id in ids {
        if (id as usize) < mask.len() && !tokens.is_special_token(id) {
            mask.disallow_token(id);
        }
    }
}
