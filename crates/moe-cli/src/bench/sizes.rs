//! The numbers of tokens in the rows of a table.

use anyhow::Result;
use moe_engine::engine::EngineConfig;

use crate::cli::BenchArgs;
use crate::error::usage;

/// New tokens after the prompt of `--long-context`.
pub const LONG_OUTPUT: usize = 128;

/// The tokens of the rows: the flags, else the defaults, cut to the model's context.
pub struct Sizes {
    /// Prompt of the decode rows.
    pub prompt: usize,
    /// New tokens of the decode rows.
    pub output: usize,
    /// Prompts of the prefill rows.
    pub lengths: Vec<usize>,
}

impl Sizes {
    /// The sizes for a model of this context.
    pub fn new(args: &BenchArgs, context: usize) -> Self {
        let fitting = |default: usize, most: usize, least: usize| default.min(most).max(least);
        Self {
            prompt: args.prompt.unwrap_or(fitting(128, context / 4, 1)),
            output: args.output.unwrap_or(fitting(256, context / 2, 2)),
            lengths: args
                .lengths
                .clone()
                .unwrap_or_else(|| vec![fitting(2048, context.saturating_sub(1), 1)]),
        }
    }
}

/// Refuses rows that do not fit a model's context, before anything is read or allocated for them.
pub fn check_sizes(args: &BenchArgs, sizes: &Sizes, context: usize) -> Result<()> {
    let fits = |prompt: usize, output: usize| prompt.checked_add(output).is_some_and(|n| n <= context);
    let most = EngineConfig::MAX_NUM_SEQS;
    let default = EngineConfig::default();
    let max_num_batched_tokens = args.max_num_batched_tokens.unwrap_or(default.max_num_batched_tokens);
    let settings = EngineConfig { max_num_batched_tokens, ..default };
    settings.check(context).map_err(|e| usage(e.to_string()))?;
    if let Some(batch) = args.batches.iter().find(|b| !(1..=most).contains(*b)) {
        return Err(usage(format!("--batches {batch}: expected 1 to {most}")));
    }
    if !args.batches.is_empty() && !fits(sizes.prompt, sizes.output) {
        return Err(usage(format!(
            "--prompt {} and --output {} do not fit the model's context of {context}",
            sizes.prompt, sizes.output
        )));
    }
    if let Some(length) = sizes.lengths.iter().find(|l| **l == 0 || !fits(**l, 1)) {
        return Err(usage(format!(
            "--lengths {length}: expected 1 to {}: a token is generated after the prompt, and the model's context is {context}",
            context - 1
        )));
    }
    if args.long_context > 0 && !fits(args.long_context, LONG_OUTPUT) {
        return Err(usage(format!(
            "--long-context {}: {LONG_OUTPUT} more tokens must fit {context}",
            args.long_context
        )));
    }
    Ok(())
}
