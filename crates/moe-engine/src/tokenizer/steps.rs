//! Converts text to tokens with the library's own steps, and limits each step.
//!
//! A tokenizer.json may come from an untrusted source. Its steps can make a text larger, for example by a replacement
//! that doubles it forty times, or can run for ever, for example by a pattern that backtracks. The library runs all
//! steps in one call that cannot be stopped. This module runs them one by one with the same result, and checks sizes
//! and time in between.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::{
    Encoding, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential,
    OffsetType, Offsets, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior,
};

use crate::error::{Context, Result, bail, ensure, failed};

/// The largest number of bytes of a text, before and after every normalizer. A million tokens of most languages have a
/// quarter of this.
const MAX_TEXT: usize = 16 << 20;
/// The largest number of pieces into which pre-tokenizers split a text.
const MAX_PIECES: usize = 4 << 20;
/// The time limit of one text, which is the same as that of a chat template. Below is the time that each byte adds on a
/// slow machine.
const PATIENCE: Duration = Duration::from_secs(20);
const PER_BYTE: Duration = Duration::from_micros(5);
/// The largest factor by which one normalizer may make a text longer. It does not include replacements and prepended
/// text.
const MOST_GROWTH: usize = 64;
/// The number of bytes that are processed at a time when the growth of a text is measured.
const CHUNK: usize = 1 << 16;
/// The largest number of bytes of a compiled part of a pattern.
const MAX_PATTERN: usize = 2 << 20;
/// The largest product of the bytes of a piece and the bytes of the longest token. A Unigram model takes time in
/// proportion to it.
const MAX_LATTICE: usize = 1 << 33;

/// The steps that turn a text into tokens.
pub(super) struct Steps {
    normalizers: Vec<Change>,
    pre_tokenizers: Vec<Cut>,
    /// The shortest added tokens. They may split a text into more pieces than are allowed.
    short: Vec<String>,
    /// The number of bytes of the longest token of a Unigram model, or 0 for other models.
    longest: usize,
}

/// A normalizer.
enum Change {
    /// Replaces each match of a pattern by a text.
    Replace(Regex, String),
    /// Puts a text before the input.
    Prepend(String),
    /// Another normalizer, which makes a text longer by a limited factor.
    Other(NormalizerWrapper),
}

/// A pre-tokenizer.
enum Cut {
    /// Splits at the matches of a pattern, or at everything else.
    Split { pattern: Regex, behavior: SplitDelimiterBehavior, invert: bool },
    /// Splits by a rule of the library.
    Other(PreTokenizerWrapper),
}

/// The time and memory that one text may still use.
struct Budget {
    time: Duration,
    deadline: Instant,
    /// The number of bytes that the normalizers have written.
    normalized: AtomicUsize,
    pieces: AtomicUsize,
    /// The reason why a normalizer failed, because the library drops it.
    failure: Mutex<Option<crate::error::Error>>,
}

impl Steps {
    /// Returns the steps of a tokenizer.
    ///
    /// # Errors
    /// A compiled pattern is too large.
    pub fn of(tokenizer: &tokenizers::Tokenizer) -> Result<Self> {
        let mut normalizers = Vec::new();
        let mut pre_tokenizers = Vec::new();
        if let Some(normalizer) = tokenizer.get_normalizer() {
            normalizer_steps(normalizer, &mut normalizers).context("normalizer")?;
        }
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer_steps(pre_tokenizer, &mut pre_tokenizers).context("pre_tokenizer")?;
        }
        let longest = match tokenizer.get_model() {
            ModelWrapper::Unigram(unigram) => unigram.iter().map(|(token, _)| token.len()).max(),
            _ => None,
        };
        let added = tokenizer.get_added_vocabulary().get_vocab().keys();
        let short = added.filter(|token| token.len() < MAX_TEXT / MAX_PIECES).cloned().collect();
        Ok(Self { normalizers, pre_tokenizers, short, longest: longest.unwrap_or(0) })
    }

    /// Returns the steps of a normalizer alone.
    ///
    /// # Errors
    /// A compiled pattern is too large.
    pub fn of_normalizer(normalizer: &NormalizerWrapper) -> Result<Self> {
        let mut normalizers = Vec::new();
        normalizer_steps(normalizer, &mut normalizers)?;
        Ok(Self { normalizers, pre_tokenizers: Vec::new(), short: Vec::new(), longest: 0 })
    }

    /// Returns the tokens of a text, without the tokens that a post-processor adds.
    ///
    /// # Errors
    /// The text, or the result of a step, is too large, or a step takes too long.
    pub fn encode(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Encoding> {
        check_size(text.len())?;
        if text.len() > MAX_PIECES {
            check_pieces(self.short.iter().map(|token| text.matches(token.as_str()).count()).sum())?;
        }
        let budget = Budget::new(text.len());
        let normalizer = Bounded { steps: self, budget: &budget };
        let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(Some(&normalizer), text);
        if let Some(failure) = budget.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(failure);
        }
        for step in &self.pre_tokenizers {
            self.pre_tokenize(step, &mut pieces, &budget)?;
        }
        self.tokenize(tokenizer.get_model(), &mut pieces, &budget)?;
        pieces.into_encoding(None, 0, OffsetType::None).map_err(|e| failed!("{e}"))
    }

    fn normalize(&self, text: &mut NormalizedString, budget: &Budget) -> Result<()> {
        for step in &self.normalizers {
            budget.check_time()?;
            match step {
                Change::Replace(regex, content) => {
                    let pattern = Timed { regex, budget, grows: Some(content.len()) };
                    text.replace(pattern, content).map_err(|e| failed!("{e}"))?;
                }
                Change::Prepend(content) => {
                    check_size(text.get().len() + content.len())?;
                    text.prepend(content);
                }
                Change::Other(normalizer) => {
                    check_growth(normalizer, text.get(), budget)?;
                    normalizer.normalize(text).map_err(|e| failed!("{e}"))?;
                }
            }
            check_size(text.get().len())?;
        }
        let size = text.get().len();
        check_size(budget.normalized.fetch_add(size, Relaxed) + size)
    }

    /// Returns the number of bytes of a token after the normalizers.
    ///
    /// # Errors
    /// The token is too large.
    pub fn normalized(&self, token: &str) -> Result<usize> {
        let mut text = NormalizedString::from(token);
        self.normalize(&mut text, &Budget::new(token.len()))?;
        Ok(text.get().len())
    }

    fn pre_tokenize(&self, cut: &Cut, pieces: &mut PreTokenizedString, budget: &Budget) -> Result<()> {
        budget.check_time()?;
        budget.pieces.store(0, Relaxed);
        let done = match cut {
            Cut::Split { pattern, behavior, invert } => {
                let pattern = || Timed { regex: pattern, budget, grows: None };
                match invert {
                    true => pieces.split(|_, text| text.split(Invert(pattern()), *behavior)),
                    false => pieces.split(|_, text| text.split(pattern(), *behavior)),
                }
            }
            Cut::Other(pre_tokenizer) => {
                check_size_of_pieces(pre_tokenizer, pieces)?;
                pre_tokenizer.pre_tokenize(pieces)
            }
        };
        done.map_err(|e| failed!("{e}"))?;
        check_pieces(splits(pieces).count())
    }

    fn tokenize(&self, model: &ModelWrapper, pieces: &mut PreTokenizedString, budget: &Budget) -> Result<()> {
        budget.check_time()?;
        let done = match model {
            // BPE processes all pieces in one call. The time depends on little else than their length.
            ModelWrapper::BPE(_) => model.tokenize_in_pretokenized(pieces, None),
            _ => pieces.tokenize(|piece| {
                budget.check_time()?;
                self.check_lattice(piece.get().len())?;
                model.tokenize(piece.get())
            }),
        };
        done.map_err(|e| failed!("{e}"))
    }

    fn check_lattice(&self, piece: usize) -> Result<()> {
        ensure!(
            self.longest.saturating_mul(piece) <= MAX_LATTICE,
            "a piece of {piece} bytes is too long for a Unigram model with a token of {} bytes",
            self.longest
        );
        Ok(())
    }
}

impl Budget {
    /// Returns the budget of a text with this number of bytes.
    fn new(bytes: usize) -> Self {
        let time = PATIENCE + PER_BYTE * bytes as u32;
        Self {
            time,
            deadline: Instant::now() + time,
            normalized: AtomicUsize::new(0),
            pieces: AtomicUsize::new(0),
            failure: Mutex::new(None),
        }
    }

    fn check_time(&self) -> Result<()> {
        ensure!(Instant::now() < self.deadline, "it takes more than {} s", self.time.as_secs());
        Ok(())
    }
}

/// The normalizers of a tokenizer, limited for one text.
struct Bounded<'a> {
    steps: &'a Steps,
    budget: &'a Budget,
}

impl Normalizer for Bounded<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        let mut failure = self.budget.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            *failure = self.steps.normalize(text, self.budget).err();
        }
        Ok(())
    }
}

/// A pattern that checks the time and the size of the result.
struct Timed<'a> {
    regex: &'a Regex,
    budget: &'a Budget,
    /// The number of bytes that replace each match, or `None` if the text is split there.
    grows: Option<usize>,
}

impl Pattern for Timed<'_> {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut found = Vec::new();
        let mut end = 0;
        let mut size = inside.len();
        for next in self.regex.find_iter(inside) {
            let next = next.map_err(|e| failed!("the pattern {:?} gives up: {e}", self.regex.as_str()))?;
            self.budget.check_time()?;
            size += self.grows.unwrap_or(0);
            check_size(size)?;
            if end != next.start() {
                found.push(((end, next.start()), false));
            }
            found.push((((next.start()), next.end()), true));
            end = next.end();
        }
        if end != inside.len() {
            found.push(((end, inside.len()), false));
        }
        if self.grows.is_none() {
            check_pieces(self.budget.pieces.fetch_add(found.len(), Relaxed) + found.len())?;
        }
        Ok(found)
    }
}

fn normalizer_steps(normalizer: &NormalizerWrapper, steps: &mut Vec<Change>) -> Result<()> {
    match normalizer {
        NormalizerWrapper::Sequence(sequence) => {
            return sequence.as_ref().iter().try_for_each(|one| normalizer_steps(one, steps));
        }
        NormalizerWrapper::Replace(replace) => {
            let pattern = pattern(&serde_json::to_value(replace)?["pattern"])?;
            steps.push(Change::Replace(pattern, replace.content.clone()));
        }
        NormalizerWrapper::Prepend(prepend) => steps.push(Change::Prepend(prepend.prepend.clone())),
        other => steps.push(Change::Other(other.clone())),
    }
    Ok(())
}

fn pre_tokenizer_steps(pre_tokenizer: &PreTokenizerWrapper, steps: &mut Vec<Cut>) -> Result<()> {
    match pre_tokenizer {
        PreTokenizerWrapper::Sequence(sequence) => {
            return sequence.as_ref().iter().try_for_each(|one| pre_tokenizer_steps(one, steps));
        }
        PreTokenizerWrapper::Split(split) => {
            let pattern = pattern(&serde_json::to_value(&split.pattern)?)?;
            steps.push(Cut::Split { pattern, behavior: split.behavior, invert: split.invert });
        }
        other => steps.push(Cut::Other(other.clone())),
    }
    Ok(())
}

/// Reads the pattern of a step: `{"String": text}` or `{"Regex": expression}`.
pub(super) fn pattern(json: &Value) -> Result<Regex> {
    let expression = match (json["String"].as_str(), json["Regex"].as_str()) {
        (Some(text), _) => fancy_regex::escape(text).into_owned(),
        (None, Some(expression)) => expression.to_string(),
        (None, None) => bail!("expected a pattern, got {json}"),
    };
    let compiled = RegexBuilder::new(&expression).delegate_size_limit(MAX_PATTERN).build();
    compiled.map_err(|e| failed!("the pattern {:?} cannot be used: {e}", shortened(&expression)))
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

fn check_size(bytes: usize) -> Result<()> {
    ensure!(bytes <= MAX_TEXT, "it comes to more than {MAX_TEXT} bytes in the tokenizer");
    Ok(())
}

fn check_pieces(pieces: usize) -> Result<()> {
    ensure!(pieces <= MAX_PIECES, "the tokenizer cuts it into more than {MAX_PIECES} pieces");
    Ok(())
}

/// Measures, part by part, how much longer a normalizer makes a large text.
fn check_growth(normalizer: &NormalizerWrapper, text: &str, budget: &Budget) -> Result<()> {
    if text.len() * MOST_GROWTH <= MAX_TEXT {
        return Ok(());
    }
    let mut size = 0;
    let mut rest = text;
    while !rest.is_empty() {
        budget.check_time()?;
        let (chunk, others) = rest.split_at(rest.floor_char_boundary(CHUNK));
        let mut chunk = NormalizedString::from(chunk);
        normalizer.normalize(&mut chunk).map_err(|e| failed!("{e}"))?;
        size += chunk.get().len();
        check_size(size)?;
        rest = others;
    }
    Ok(())
}

/// Refuses to write bytes as letters, or blanks as longer characters, in a text that has already been made longer.
fn check_size_of_pieces(pre_tokenizer: &PreTokenizerWrapper, pieces: &PreTokenizedString) -> Result<()> {
    let grows = |piece: &str| match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => {
            1 + piece.bytes().filter(|byte| !byte.is_ascii_graphic()).count()
        }
        PreTokenizerWrapper::Metaspace(_) => 4 + 3 * piece.matches(' ').count(),
        _ => 0,
    };
    let size: usize = splits(pieces).map(|piece| piece.len() + grows(piece)).sum();
    ensure!(size <= 2 * MAX_TEXT, "it comes to more than {} bytes in the tokenizer", 2 * MAX_TEXT);
    Ok(())
}

fn splits(pieces: &PreTokenizedString) -> impl Iterator<Item = &str> {
    pieces.get_splits(OffsetReferential::Normalized, OffsetType::None).into_iter().map(|(text, ..)| text)
}
