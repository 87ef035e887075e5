//! How tokens are chosen: the flags that `generate`, `chat` and `batch` share.

use std::hash::{BuildHasher, RandomState};

use anyhow::{Context, Result};
use clap::Args;

use super::structured::StructuredArgs;

/// vLLM's sampling parameters. What is left out comes from generation_config.json.
#[derive(Args, Debug, Clone, Default)]
pub struct SamplingArgs {
    /// Tokens to generate at most (default: 128; chat: no limit; batch: generation_config.json, else 16 for
    /// /v1/completions and no limit for chat).
    #[arg(
        long,
        visible_alias = "max-tokens",
        alias = "n-predict",
        value_name = "N",
        help_heading = "Sampling"
    )]
    pub max_new_tokens: Option<usize>,
    /// 0 is greedy (default: generation_config.json, else 0; batch: else 1).
    #[arg(long, visible_alias = "temp", allow_negative_numbers = true, help_heading = "Sampling")]
    pub temperature: Option<f32>,
    /// Keep the k likeliest tokens; 0 or -1 keeps all.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_k: Option<i64>,
    /// Keep the likeliest tokens whose probabilities add up to this.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub min_p: Option<f32>,
    /// Above 1: makes tokens of the prompt and the output less likely.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub repetition_penalty: Option<f32>,
    /// Above 0: makes tokens of the output less likely.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub presence_penalty: Option<f32>,
    /// Above 0: makes tokens of the output less likely, each time more.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of tokens: ID=BIAS,...
    #[arg(long, value_delimiter = ',', value_parser = crate::values::parse_bias,
        allow_hyphen_values = true, value_name = "ID=BIAS", help_heading = "Sampling")]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed; requests without a seed of their own derive theirs from it. -1 takes another one each time.
    #[arg(long, default_value = "0", value_parser = parse_seed, allow_negative_numbers = true,
        help_heading = "Sampling")]
    pub seed: u64,
    /// Text that ends the output; repeatable. \n, \r, \t, \', \", \\ and \xHH are the characters they name.
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    pub stop: Vec<String>,
    /// Take backslashes in --stop as they are.
    #[arg(long, help_heading = "Sampling")]
    pub no_escape: bool,
    /// Token ids that end the output.
    #[arg(long, value_delimiter = ',', value_name = "ID", help_heading = "Sampling")]
    pub stop_token_ids: Vec<u32>,
    /// Keep the stop text in the output.
    #[arg(long, help_heading = "Sampling")]
    pub include_stop_str_in_output: bool,
    /// Do not stop at the end-of-sequence token.
    #[arg(long, help_heading = "Sampling")]
    pub ignore_eos: bool,
    /// Tokens to generate at least.
    #[arg(long, default_value_t = 0, help_heading = "Sampling")]
    pub min_tokens: usize,
    /// Leave special tokens out of the text.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true", value_name = "BOOL", help_heading = "Sampling")]
    pub skip_special_tokens: bool,
    /// What the text must be.
    #[command(flatten)]
    pub structured: StructuredArgs,
}

impl SamplingArgs {
    /// The texts that end the output.
    pub fn stops(&self) -> Vec<String> {
        match self.no_escape {
            true => self.stop.clone(),
            false => self.stop.iter().map(|text| unescape(text)).collect(),
        }
    }
}

/// A seed; -1 stands for one that nobody chose, as in llama.cpp.
fn parse_seed(text: &str) -> Result<u64> {
    if text == "-1" {
        return Ok(RandomState::new().hash_one(std::process::id()));
    }
    text.parse()
        .ok()
        .with_context(|| format!("expected a number from 0 to {}, or -1, got {text:?}", u64::MAX))
}

/// A text with llama.cpp's escape sequences replaced; a backslash before anything else stays.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out += &rest[..at];
        let (escaped, len) = escape(&rest[at + 1..]).unwrap_or(('\\', 0));
        out.push(escaped);
        rest = &rest[at + 1 + len..];
    }
    out + rest
}

/// The character that the text after a backslash names, and the number of bytes of its name.
fn escape(text: &str) -> Option<(char, usize)> {
    Some(match text.chars().next()? {
        'n' => ('\n', 1),
        'r' => ('\r', 1),
        't' => ('\t', 1),
        c @ ('\'' | '"' | '\\') => (c, 1),
        // A byte above 127 alone is no character.
        'x' => (u8::from_str_radix(text.get(1..3)?, 16).ok().filter(u8::is_ascii)?.into(), 3),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_llama_cpps() {
        assert_eq!(unescape(r"\n\n"), "\n\n");
        assert_eq!(unescape(r#"a\tb\\n\"\'\x41"#), "a\tb\\n\"'A");
        assert_eq!(unescape(r"\d \xZZ \xff \x4 \"), r"\d \xZZ \xff \x4 \", "what is no escape stays");
        assert_eq!(unescape("häß"), "häß");
    }

    #[test]
    fn seeds_may_be_left_to_the_program() {
        assert_eq!(parse_seed("7").unwrap(), 7);
        assert_ne!(parse_seed("-1").unwrap(), parse_seed("-1").unwrap());
        assert!(parse_seed("-2").is_err() && parse_seed("x").is_err());
    }
}
