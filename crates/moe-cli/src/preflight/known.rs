//! The properties of a model against which a command checks its own flags and files.

use std::path::Path;

use model_runtime::Config;
use moe_engine::tokenizer::Tokenizer;

/// The properties of a model that are known before its weights are read.
pub struct Known<'a> {
    /// Its config.json.
    pub config: &'a Config,
    /// Its folder; `None` if it is embedded in the program or random.
    pub dir: Option<&'a Path>,
    /// Its tokenizer, if the command makes text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Number of token ids; `usize::MAX` if only the family knows it.
    pub vocab_size: usize,
    /// The longest sequence; `usize::MAX` if only the family knows it.
    pub context: usize,
}
