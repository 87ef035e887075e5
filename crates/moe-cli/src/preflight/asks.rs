//! The requirements of a command on a model, other than that it can be loaded.

use std::path::Path;

use anyhow::{Context, Result};
use model_runtime::Config;
use moe_engine::engine::EngineConfig;
use moe_engine::tokenizer::Tokenizer;

use super::known::Known;
use crate::cli::{AnswerArgs, BatchArgs, ChatArgs, Command, EngineArgs, GenerateArgs};
use crate::cli::{SamplingArgs, TemplateArgs};
use crate::error::usage;
use crate::options;

/// The requirements of a command on a model, other than that it can be loaded. By default there are none.
#[derive(Default)]
pub struct Asks<'a> {
    text: Option<Text<'a>>,
    further: Option<Further<'a>>,
    /// Whether the command goes on when a replica of the model is lost.
    survives_lost_replicas: bool,
    /// The bytes of each GPU that may be used, for a command without flags of the engine.
    gpu_memory: Option<u64>,
}

/// An additional check of a command.
pub type Further<'a> = &'a dyn Fn(&Known) -> Result<()>;

/// How a command generates text.
struct Text<'a> {
    sampling: &'a SamplingArgs,
    engine: &'a EngineArgs,
    n: usize,
    /// The largest number of sequences that run at the same time.
    sequences: usize,
    /// Whether the command itself limits the length.
    is_limited: bool,
    template: Option<&'a TemplateArgs>,
    /// Whether the command needs a chat template.
    needs_template: bool,
    /// Whether it needs a tokenizer.
    tokenizes: bool,
}

impl<'a> Asks<'a> {
    /// Returns the requirements of a command.
    pub fn of(command: &'a Command) -> Self {
        match command {
            Command::Generate(args) => Self::of_generate(args),
            Command::Chat(args) => Self::of_chat(args),
            Command::Batch(args) => Self::of_batch(args),
            _ => Self::default(),
        }
    }

    /// Adds a further check of the command against the model.
    pub fn with(self, further: Further<'a>) -> Self {
        Self { further: Some(further), ..self }
    }

    /// Returns the requirements of `generate`.
    pub fn of_generate(args: &'a GenerateArgs) -> Self {
        let sampling = &args.sampling;
        let engine = &args.engine;
        let template = args.chat.then_some(&args.template);
        let tokenizes = !args.skip_tokenizer_init;
        let n = args.n;
        let sequences = args.n.max(1);
        let is_limited = true;
        let needs_template = args.chat;
        let text = Text { sampling, engine, n, sequences, is_limited, template, needs_template, tokenizes };
        Self { text: Some(text), ..Self::default() }
    }

    /// Returns the requirements of `chat`.
    pub fn of_chat(args: &'a ChatArgs) -> Self {
        let text = Text { sequences: 1, ..Self::of_answer(&args.answer, true, true) };
        Self { text: Some(text), ..Self::default() }
    }

    /// Returns the requirements of `bench` with a file of requests, which may use this number of bytes on each GPU.
    pub fn within(gpu_memory: Option<usize>) -> Self {
        Self { gpu_memory: gpu_memory.map(|bytes| bytes as u64), ..Self::default() }
    }

    /// Returns the requirements of `batch`. A chat template is not among them, because some requests need none.
    pub fn of_batch(args: &'a BatchArgs) -> Self {
        let text = Self::of_answer(&args.answer, args.chat, !args.skip_tokenizer_init);
        Self { text: Some(text), survives_lost_replicas: true, ..Self::default() }
    }

    /// Returns the requirements of commands that answer conversations.
    pub fn of_answers(args: &'a AnswerArgs) -> Self {
        Self { text: Some(Self::of_answer(args, true, true)), ..Self::default() }
    }

    /// Checks everything except the chat template, for a model that is loaded.
    pub fn check(
        &self,
        tokenizer: &Tokenizer,
        generation: Option<&Config>,
        vocab_size: usize,
        context: usize,
    ) -> Result<()> {
        self.check_flags()?;
        self.check_structured_output(Some(tokenizer))?;
        self.check_values(generation, vocab_size, context)
    }

    fn of_answer(args: &'a AnswerArgs, needs_template: bool, tokenizes: bool) -> Text<'a> {
        let sampling = &args.sampling;
        let engine = &args.engine;
        let template = Some(&args.chat);
        let n = 1;
        let sequences = usize::MAX;
        let is_limited = false;
        Text { sampling, engine, n, sequences, is_limited, template, needs_template, tokenizes }
    }

    /// Whether the command goes on when a replica of the model is lost.
    pub fn survives_lost_replicas(&self) -> bool {
        self.survives_lost_replicas
    }

    /// The flags of the engine, if the command has them.
    pub(super) fn engine(&self) -> Option<&EngineArgs> {
        self.text.as_ref().map(|text| text.engine)
    }

    /// Whether a tokenizer is needed.
    pub(super) fn tokenizes(&self) -> bool {
        self.text.as_ref().is_some_and(|text| text.tokenizes)
    }

    /// Checks the flags alone, without a model.
    pub(super) fn check_flags(&self) -> Result<()> {
        let Some(Text { sampling, tokenizes, .. }) = &self.text else { return Ok(()) };
        if !tokenizes && !sampling.stop.is_empty() {
            return Err(usage("--stop looks for text, and with --skip-tokenizer-init there is none"));
        }
        if !tokenizes && sampling.structured.output()?.is_some() {
            let flag = sampling.structured.flag();
            return Err(usage(format!("{flag} makes text, and with --skip-tokenizer-init there is none")));
        }
        if sampling.max_new_tokens == Some(0) {
            return Err(usage("--max-new-tokens 0: expected at least 1"));
        }
        if sampling.stop.iter().any(String::is_empty) {
            return Err(usage("--stop \"\": expected a text that is not empty"));
        }
        self.check_structured_output(None)?;
        self.check_values(None, usize::MAX, usize::MAX)
    }

    /// Checks the structured output for a model with this tokenizer, or without one for any model.
    pub(super) fn check_structured_output(&self, tokenizer: Option<&Tokenizer>) -> Result<()> {
        let Some(Text { sampling: SamplingArgs { structured, .. }, .. }) = &self.text else { return Ok(()) };
        let checked = structured.output()?.map_or(Ok(()), |output| output.check(tokenizer));
        checked.map_err(|e| usage(format!("{}: {e}", structured.flag())))
    }

    /// Runs the additional check of the command.
    pub(super) fn check_further(&self, model: &Known) -> Result<()> {
        self.further.map_or(Ok(()), |further| further(model))
    }

    /// Checks the sampling values from the flags and generation_config.json for a model with this vocabulary and
    /// context.
    pub(super) fn check_values(
        &self,
        generation: Option<&Config>,
        vocab_size: usize,
        context: usize,
    ) -> Result<()> {
        let Some(text) = &self.text else { return Ok(()) };
        let mut request = options::request_of(text.sampling, generation, "")?;
        request.n = text.n;
        if !text.is_limited {
            request.max_tokens = text.sampling.max_new_tokens;
        }
        request.check_parameters(vocab_size).map_err(|e| usage(e.to_string()))?;
        let settings = options::engine_config(text.engine, EngineConfig::default());
        settings.check(context).map(drop).map_err(|e| usage(e.to_string()))
    }

    /// Returns the settings of the engine over a device's defaults, as far as they are known before the requests. The
    /// KV cache of `generate` has room for its texts only, or at least for their new tokens, and that of `chat` for one
    /// conversation.
    pub(super) fn engine_config(&self, default: EngineConfig, context: usize) -> EngineConfig {
        let Some(text) = &self.text else {
            return EngineConfig { gpu_memory: self.gpu_memory, ..default };
        };
        let config = options::engine_config(text.engine, default);
        let new = text.sampling.max_new_tokens.filter(|new| text.is_limited && *new < context);
        EngineConfig {
            max_num_seqs: config.max_num_seqs.min(text.sequences),
            max_model_len: config.max_model_len.or(new),
            ..config
        }
    }

    /// Checks the chat template of the flags or of a checkpoint's folder. `model` is the name of the checkpoint in
    /// errors.
    pub(super) fn check_template(&self, dir: Option<&Path>, model: Option<&str>) -> Result<()> {
        let Some(Text { template: Some(args), needs_template, .. }) = &self.text else { return Ok(()) };
        match options::chat_template_in(args, dir)? {
            Some(template) if *needs_template => template.check().context("the chat template"),
            None if *needs_template => Err(anyhow::anyhow!(no_template(model))),
            _ => Ok(()),
        }
    }
}

/// The message for a model without a chat template, if one is needed.
pub fn no_template(model: Option<&str>) -> String {
    let name = model.unwrap_or("the embedded checkpoint");
    format!(
        "{name} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json): supply \
         one with --chat-template FILE, or use generate"
    )
}
