//! Where one choice stands in its grammar.
//!
//! It follows the tokens of the choice by their number: the caller shows all of them, and new ones are taken in. So
//! nothing has to be told when a sequence is preempted and computed again, and a token that is known one step before it
//! is collected can be shown early.

use std::sync::Arc;

use anyhow::bail;
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokTrie};

use super::compiler::{is_dead_end, reason};
use super::grammars::Grammar;
use super::lead::Stage;
use super::output::Reasoning;

/// The state of a choice.
pub(crate) struct Constraint {
    grammar: Arc<Grammar>,
    /// How far reasoning in front of the text has come.
    stage: Stage,
    /// Tokens that the stage knows of.
    seen: usize,
    /// While the stage is open: what has come begins a text of the grammar, too.
    fits: bool,
    /// The text's first token.
    begin: usize,
    /// Made when it is first needed: requests may wait for long.
    matcher: Option<Matcher>,
    /// Tokens up to here are known to the matcher, which begins at `begin`.
    taken: usize,
    /// The lexer is not shared.
    alone: bool,
}

const NO_TOKEN: &str = "no token of the vocabulary continues the text as it must";

/// The tokens that may come next.
pub(crate) struct Mask(SimpleVob);

impl Mask {
    /// Every token of a vocabulary.
    pub fn all(vocab_size: usize) -> Self {
        Self(SimpleVob::alloc_ones(vocab_size))
    }

    /// Excludes a token.
    pub fn exclude(&mut self, id: u32) {
        if (id as usize) < self.0.len() {
            self.0.disallow_token(id);
        }
    }

    /// Token i is bit i % 32 of word i / 32; tokens behind the end are excluded.
    pub fn words(&self) -> &[u32] {
        self.0.as_slice()
    }
}

impl Constraint {
    /// A constraint at the first token.
    #[cfg(test)]
    pub fn new(grammar: Arc<Grammar>) -> Self {
        Self::behind(None, grammar)
    }

    /// A constraint at the first token, of a text that `reasoning` may come before.
    pub fn behind(reasoning: Option<Reasoning>, grammar: Arc<Grammar>) -> Self {
        let stage = Stage::new(reasoning);
        Self { grammar, stage, seen: 0, fits: true, begin: 0, matcher: None, taken: 0, alone: false }
    }

    /// Whether the text is complete after these tokens: none can follow.
    ///
    /// # Errors
    /// The tokens do not follow the grammar, or it is too complex.
    pub fn is_complete(&mut self, output: &[u32]) -> Result<bool, String> {
        self.read(output);
        match self.stage {
            Stage::Start(_) if !self.fits => Ok(false),
            Stage::Reasoning(_) | Stage::Gap(_) => Ok(false),
            Stage::Start(_) | Stage::Text(_) => self.ask(output, |matcher| Ok(matcher.is_stopped())),
        }
    }

    /// The tokens that may follow `output`; `None` once the text is complete. `ends` may follow wherever the text may
    /// end; ordinary tokens in `only_there` nowhere else.
    ///
    /// # Errors
    /// No token can follow, the tokens do not follow the grammar, or it is too complex.
    pub fn mask(&mut self, output: &[u32], ends: &[u32], only_there: &[u32]) -> Result<Option<Mask>, String> {
        self.read(output);
        let tags = self.grammar.tags.clone();
        let mut mask = match &self.stage {
            Stage::Reasoning(tail) => {
                let ends = [ends, only_there].concat();
                return Ok(Some(Mask(tags.of_reasoning(*tail, &ends))));
            }
            Stage::Start(_) if !self.fits => SimpleVob::new(),
            Stage::Start(_) => match self.mask_of_text(output, ends, only_there) {
                Ok(Some(mask)) => mask,
                Ok(None) => return Ok(None),
                // Then the model may still reason first.
                Err(_) => SimpleVob::new(),
            },
            Stage::Gap(_) | Stage::Text(_) => match self.mask_of_text(output, ends, only_there)? {
                Some(mask) => mask,
                None => return Ok(None),
            },
        };
        match &self.stage {
            Stage::Start(seen) => tags.allow_opening(seen, &mut mask),
            Stage::Gap(lines) => tags.allow_gap(*lines, &mut mask),
            Stage::Reasoning(_) | Stage::Text(_) => {}
        }
        match mask.is_zero() {
            true => Err(NO_TOKEN.into()),
            false => Ok(Some(Mask(mask))),
        }
    }

    /// Follows the stage through tokens that it does not know yet.
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
            self.stage = stage.after(at, tags.token(token));
            self.seen = at + 1;
            match self.stage {
                Stage::Start(_) => {}
                Stage::Reasoning(_) | Stage::Gap(_) => self.begin_at(at + 1),
                Stage::Text(0) => {}
                Stage::Text(begin) => self.begin_at(begin),
            }
        }
    }

    /// The text begins at this token.
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

    /// Asks the matcher behind these tokens. What others did to a shared lexer must not make this one fail: then it is
    /// asked again with a lexer of its own.
    fn ask<T>(
        &mut self,
        output: &[u32],
        question: impl Fn(&mut Matcher) -> anyhow::Result<T>,
    ) -> Result<T, String> {
        let mut answer = self.matcher_behind(output).and_then(&question);
        if answer.is_err() && !self.alone {
            self.alone = true;
            (self.matcher, self.taken) = (Some(self.grammar.own_matcher()), self.begin);
            answer = self.matcher_behind(output).and_then(&question);
        }
        answer.map_err(|e| match is_dead_end(&e) {
            true => NO_TOKEN.into(),
            false => reason(&e),
        })
    }

    /// The matcher behind these tokens; it stays where the text is complete.
    fn matcher_behind(&mut self, output: &[u32]) -> anyhow::Result<&mut Matcher> {
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
                // A lexer that has reached its limit sees no way on either, and fails only at the next token.
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

/// Excludes ids that are ordinary tokens. A special one is there only if the grammar names it.
fn exclude(mask: &mut SimpleVob, ids: &[u32], tokens: &TokTrie) {
    for &id in ids {
        if (id as usize) < mask.len() && !tokens.is_special_token(id) {
            mask.disallow_token(id);
        }
    }
}
