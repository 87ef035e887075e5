//! Converts flags and `generation_config.json` into the engine's settings.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use model_runtime::config::limits;
use model_runtime::{Config, SamplingParams};
use moe_engine::Session;
use moe_engine::chat::{self, ChatFiles, ChatTemplate};
use moe_engine::engine::{EngineConfig, Request, SchedulingPolicy};

use crate::cli::{self, EngineArgs, SamplingArgs, TemplateArgs};
use crate::error::usage;
use crate::{devices, flag_file};

/// The default number of tokens of `generate`.
const MAX_NEW_TOKENS: usize = 128;

/// The engine settings of the flags over the defaults of a device and a model.
pub fn engine_config(args: &EngineArgs, default: EngineConfig) -> EngineConfig {
    EngineConfig {
        max_num_seqs: args.max_num_seqs.unwrap_or(default.max_num_seqs),
        max_num_batched_tokens: args.max_num_batched_tokens.unwrap_or(default.max_num_batched_tokens),
        scheduling_policy: args.scheduling_policy.map_or(default.scheduling_policy, Into::into),
        max_model_len: args.max_model_len,
        block_size: args.block_size,
        kv_cache_memory: args.kv_cache_memory,
        gpu_memory: args
            .gpu_memory
            .map(|bytes| bytes as u64)
            .or_else(|| share_of_gpu(args.gpu_memory_utilization?)),
        enable_prefix_caching: args.enable_prefix_caching,
        prefix_state_memory: args.prefix_state_memory,
        enforce_eager: args.enforce_eager,
        count_experts: args.stats,
        expert_heat: args.expert_heat.clone(),
        force_balance: args.force_balance.then_some(0),
        ..default
    }
}

/// This share of the smallest visible GPU in bytes; none without a GPU, which is refused elsewhere.
fn share_of_gpu(share: f64) -> Option<u64> {
    devices::smallest_gpu().map(|total| (total as f64 * share) as u64)
}

impl From<cli::SchedulingPolicy> for SchedulingPolicy {
    fn from(policy: cli::SchedulingPolicy) -> Self {
        match policy {
            cli::SchedulingPolicy::Fcfs => Self::Fcfs,
            cli::SchedulingPolicy::LongestFirst => Self::LongestFirst,
        }
    }
}

/// A request without a prompt: the flags, else generation_config.json, else greedy. `name` identifies the request
/// within the run, and its seed is derived from it.
pub fn request_defaults(args: &SamplingArgs, session: &Session, name: &str) -> Result<Request> {
    let config = session.checkpoint.as_ref().and_then(|c| c.generation_config.as_ref());
    let mut request = request_of(args, config, name)?;
    request.sampling.validate(session.model.info().vocab_size).map_err(|e| usage(e.to_string()))?;
    request.eos_token_ids = session.eos_token_ids()?;
    Ok(request)
}

/// [`request_defaults`] before there is a model: nothing is checked against a model.
pub fn request_of(args: &SamplingArgs, config: Option<&Config>, name: &str) -> Result<Request> {
    let mut sampling = match config {
        Some(config) => SamplingParams::from_generation_config(config)?,
        None => SamplingParams::default(),
    };
    let set = |value: &mut f32, flag: Option<f32>| *value = flag.unwrap_or(*value);
    set(&mut sampling.temperature, args.temperature);
    set(&mut sampling.top_p, args.top_p);
    set(&mut sampling.min_p, args.min_p);
    set(&mut sampling.repetition_penalty, args.repetition_penalty);
    set(&mut sampling.presence_penalty, args.presence_penalty);
    set(&mut sampling.frequency_penalty, args.frequency_penalty);
    if let Some(k) = args.top_k {
        sampling.top_k = top_k(k).map_err(|e| usage(format!("--top-k {k}: {e}")))?;
    }
    sampling.logit_bias = args.logit_bias.clone();
    sampling.seed = model_runtime::sampling::request_seed(args.seed, name);
    Ok(Request {
        structured_output: args.structured.output()?.map(Arc::new),
        sampling,
        max_tokens: Some(args.max_new_tokens.unwrap_or(MAX_NEW_TOKENS)),
        min_tokens: args.min_tokens,
        ignore_eos: args.ignore_eos,
        stop_token_ids: args.stop_token_ids.clone(),
        stop: args.stops(),
        include_stop_str_in_output: args.include_stop_str_in_output,
        skip_special_tokens: args.skip_special_tokens,
        ..Request::new(Vec::new())
    })
}

/// A request without a prompt with the defaults of an API: the flags, else generation_config.json, else vLLM's
/// defaults, which are temperature 1 and no limit of tokens.
pub fn api_defaults(args: &SamplingArgs, session: &Session) -> Result<Request> {
    let mut request = request_defaults(args, session, "")?;
    let config = session.checkpoint.as_ref().and_then(|c| c.generation_config.as_ref());
    let says = |key| config.is_some_and(|config| config.has(key));
    if args.temperature.is_none() && !says("temperature") && !says("do_sample") {
        request.sampling.temperature = 1.0;
    }
    let configured = match config {
        Some(config) => config.opt_size(&["max_new_tokens"], limits::POSITIONS)?,
        None => None,
    };
    request.max_tokens = args.max_new_tokens.or(configured);
    Ok(request)
}

/// The chat settings of the flags, else of the checkpoint if it has a folder.
pub fn chat_files(args: &TemplateArgs, session: &Session) -> Result<Option<ChatFiles>> {
    chat_files_in(args, session.checkpoint.as_ref().and_then(|checkpoint| checkpoint.dir()))
}

fn chat_files_in(args: &TemplateArgs, dir: Option<&Path>) -> Result<Option<ChatFiles>> {
    match (&args.chat_template, dir) {
        (Some(file), dir) => {
            let text = flag_file::read_text(file).map_err(|e| wrong_template(file, e))?;
            ChatFiles::from_template(text, dir).map(Some).map_err(|e| wrong_template(file, e))
        }
        (None, Some(dir)) => Ok(Some(ChatFiles::from_dir(dir)?)),
        (None, None) => {
            let embedded = args.embedded.map(|text| ChatFiles::from_template(text.into(), None));
            Ok(embedded.transpose()?)
        }
    }
}

/// The chat template that the flags name, else the checkpoint's, if it has one.
pub fn chat_template(args: &TemplateArgs, session: &Session) -> Result<Option<ChatTemplate>> {
    chat_template_in(args, session.checkpoint.as_ref().and_then(|checkpoint| checkpoint.dir()))
}

/// The chat template that the flags name, else the one in a checkpoint's folder. A checkpoint may be untrusted, so its
/// template is rendered in a separate process.
pub fn chat_template_in(args: &TemplateArgs, dir: Option<&Path>) -> Result<Option<ChatTemplate>> {
    let program = chat::this_program().context("cannot find this program, which renders chat templates")?;
    let template = chat_files_in(args, dir)?.and_then(|files| ChatTemplate::isolated(files, program));
    if let Some(file) = &args.chat_template {
        template.iter().try_for_each(ChatTemplate::check).map_err(|e| wrong_template(file, e))?;
    }
    Ok(template)
}

fn wrong_template(file: &Path, error: impl std::fmt::Display) -> anyhow::Error {
    usage(format!("--chat-template {}: {error}", file.display()))
}

/// vLLM's top-k as the engine's: in vLLM 0 and -1 keep all tokens.
pub fn top_k(k: i64) -> Result<usize> {
    let k = if k == -1 { 0 } else { k };
    usize::try_from(k).ok().context("expected a number of tokens, or -1 for all")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_k_is_checked() {
        assert_eq!([-1, 0, 5].map(|k| top_k(k).unwrap()), [0, 0, 5]);
        assert!(top_k(-2).is_err());
    }
}
