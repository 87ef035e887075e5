//! The compiler of JSON schemas of moe-engine, compiled alone, and walks through its grammars.
//!
//! A walk takes random tokens of a small vocabulary that the mask allows, as a sampler does, until the text is
//! complete.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

#[path = "../../../crates/moe-engine/src/structured"]
mod structured {
    // This module translates guided regular expressions, which are not tested here.
    #[allow(dead_code)]
    mod perl;
    // The parts for tool calls are not tested here either.
    #[allow(dead_code)]
    mod schema;

    pub fn compile(text: &str) -> Result<llguidance::api::GrammarInit, String> {
        schema::compile(text)
    }
}

/// Random numbers that a seed decides.
pub struct Random(u64);

impl Random {
    /// Numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `end`, which is above 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }

    /// Whether one of `n` things happens.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of some things.
    pub fn of<'t, T>(&mut self, things: &'t [T]) -> &'t T {
        &things[self.below(things.len())]
    }
}

/// Every byte, and some tokens of several.
pub struct Vocabulary {
    factory: ParserFactory,
    words: Vec<Vec<u8>>,
}

impl Vocabulary {
    /// A small one.
    ///
    /// # Errors
    /// llguidance does not take it.
    pub fn new() -> Result<Self> {
        let several = [
            "{\"", "\":", "\":\"", " \"", "true", "false", "null", "], ", "\"}", "12", "00", ".5", "-1", "ab",
        ];
        let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        words.extend(several.map(|word| word.as_bytes().to_vec()));
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], &b"end"[..]].concat());
        let info = TokRxInfo {
            vocab_size: u32::try_from(words.len())?,
            tok_eos: u32::try_from(words.len() - 1)?,
            tok_bos: None,
            tok_pad: None,
            tok_unk: None,
            tok_end_of_turn: None,
        };
        let tokens = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        let mut factory = ParserFactory::new_simple(&(tokens as _))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory, words })
    }

    /// A matcher at the beginning of a text of a schema.
    ///
    /// # Errors
    /// The schema is refused.
    pub fn matcher(&self, schema: &str) -> Result<Matcher> {
        let grammar = structured::compile(schema).map_err(|e| anyhow!(e))?;
        Ok(Matcher::new(Ok(self.factory.create_parser_from_init_default(grammar)?)))
    }

    /// A random text; `None` if it is not complete after `most` tokens.
    ///
    /// # Errors
    /// No token may follow, and the text is not complete.
    pub fn walk(&self, matcher: &Matcher, random: &mut Random, most: usize) -> Result<Option<String>> {
        let mut matcher = matcher.deep_clone();
        let mut text: Vec<u8> = Vec::new();
        for step in 0.. {
            if matcher.is_stopped() {
                break;
            }
            let may_end = matcher.is_accepting()?;
            let allowed: Vec<u32> = match matcher.compute_mask() {
                Ok(mask) => {
                    (0..self.words.len() as u32 - 1).filter(|&token| mask.is_allowed(token)).collect()
                }
                Err(_) if may_end => break,
                Err(e) => bail!("{e} after {:?}", String::from_utf8_lossy(&text)),
            };
            if may_end && (allowed.is_empty() || random.one_in(4)) {
                break;
            }
            if step == most {
                return Ok(None);
            }
            // What closes is more likely as the text grows: else few texts would end.
            let closes = |token: &&u32| matches!(&self.words[**token as usize][..], b"\"" | b"}" | b"]");
            let closing: Vec<u32> = allowed.iter().filter(closes).copied().collect();
            let closes = !closing.is_empty() && random.below(100) < 10 + step;
            let tokens = if closes { &closing } else { &allowed };
            if tokens.is_empty() {
                bail!("no token may follow {:?}", String::from_utf8_lossy(&text));
            }
            let token = *random.of(tokens);
            text.extend(&self.words[token as usize]);
            matcher.consume_token(token)?;
        }
        Ok(Some(String::from_utf8(text)?))
    }

    /// Whether a matcher takes a text, byte by byte.
    pub fn takes(matcher: &Matcher, text: &str) -> bool {
        let mut matcher = matcher.deep_clone();
        text.bytes().all(|byte| !matcher.is_stopped() && matcher.consume_token(byte.into()).is_ok())
            && (matcher.is_stopped() || matcher.is_accepting().unwrap_or(false))
    }
}
