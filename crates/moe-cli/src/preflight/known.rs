//! What a command can check its own flags and files against.

use std::path::Path;

use model_runtime::Config;
use moe_engine::tokenizer::Tokenizer;

/// What is known of a model before its weights are read.
pub struct Known<'a> {
    /// Its config.json.
    pub config: &'a Config,
    /// Its folder; `None`: it is in the program, or random.
    pub dir: Option<&'a Path>,
    /// Its tokenizer, if the command makes text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Number of token ids; `usize::MAX` where only the family knows.
    pub vocab_size: usize,
    /// The longest sequence; `usize::MAX` where only the family knows.
    pub context: usize,
}
