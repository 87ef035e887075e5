//! How tokens are chosen: the flags that `generate`, `chat` and `batch` share.

use clap::Args;

/// vLLM's sampling parameters. What is left out comes from generation_config.json.
#[derive(Args, Debug, Clone, Default)]
pub struct SamplingArgs {
    /// Tokens to generate at most (default: 128; chat: no limit; batch: generation_config.json, else 16 for
    /// /v1/completions and no limit for chat).
    #[arg(long, help_heading = "Sampling")]
    pub max_new_tokens: Option<usize>,
    /// 0 is greedy (default: generation_config.json, else 0; batch: else 1).
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
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
    #[arg(long, value_delimiter = ',', value_parser = crate::options::parse_bias,
        allow_hyphen_values = true, value_name = "ID=BIAS", help_heading = "Sampling")]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed; requests without a seed of their own derive theirs from it.
    #[arg(long, default_value_t = 0, help_heading = "Sampling")]
    pub seed: u64,
    /// Text that ends the output; repeatable.
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    pub stop: Vec<String>,
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
}
