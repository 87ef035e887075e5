//! What a command asks of a model besides its weights.

use std::path::Path;

use anyhow::{Context, Result};
use model_runtime::Config;
use moe_engine::engine::EngineConfig;
use moe_engine::tokenizer::Tokenizer;
use moe_engine::usage;

use crate::bench::Workload;
use crate::cli::{AnswerArgs, BatchArgs, ChatArgs, Command, EngineArgs, GenerateArgs};
use crate::cli::{SamplingArgs, TemplateArgs};
use crate::options;

/// What a command asks of a model besides its weights; by default nothing.
#[derive(Default)]
pub struct Asks<'a> {
    text: Option<Text<'a>>,
    workload: Option<&'a Workload>,
}

/// Text, and how it is made.
struct Text<'a> {
    sampling: &'a SamplingArgs,
    engine: &'a EngineArgs,
    n: usize,
    /// Whether the command itself limits the length.
    is_limited: bool,
    template: Option<&'a TemplateArgs>,
    /// Whether the command is nothing without a chat template.
    needs_template: bool,
    /// Whether it needs a tokenizer.
    tokenizes: bool,
}

impl<'a> Asks<'a> {
    /// What a command asks.
    pub fn of(command: &'a Command) -> Self {
        match command {
            Command::Generate(args) => Self::of_generate(args),
            Command::Chat(args) => Self::of_chat(args),
            Command::Batch(args) => Self::of_batch(args),
            _ => Self::default(),
        }
    }

    /// What `generate` asks.
    pub fn of_generate(args: &'a GenerateArgs) -> Self {
        let (sampling, engine) = (&args.sampling, &args.engine);
        let template = args.chat.then_some(&args.template);
        let tokenizes = !args.skip_tokenizer_init;
        let needs_template = args.chat;
        let text =
            Text { sampling, engine, n: args.n, is_limited: true, template, needs_template, tokenizes };
        Self { text: Some(text), workload: None }
    }

    /// What `chat` asks.
    pub fn of_chat(args: &'a ChatArgs) -> Self {
        Self::of_answer(&args.answer, true, true)
    }

    /// What `bench` asks for the requests of a file.
    pub fn of_workload(workload: &'a Workload) -> Self {
        Self { text: None, workload: Some(workload) }
    }

    /// What `batch` asks: some requests need no chat template.
    pub fn of_batch(args: &'a BatchArgs) -> Self {
        Self::of_answer(&args.answer, args.chat, !args.skip_tokenizer_init)
    }

    fn of_answer(args: &'a AnswerArgs, needs_template: bool, tokenizes: bool) -> Self {
        let (sampling, engine, template) = (&args.sampling, &args.engine, Some(&args.chat));
        let (n, is_limited) = (1, false);
        let text = Text { sampling, engine, n, is_limited, template, needs_template, tokenizes };
        Self { text: Some(text), workload: None }
    }

    /// Whether there must be a tokenizer.
    pub(super) fn tokenizes(&self) -> bool {
        self.text.as_ref().is_some_and(|text| text.tokenizes)
    }

    /// Checks the flags alone.
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

    /// Checks what the text must be, for a model with this tokenizer or for any.
    pub(super) fn check_structured_output(&self, tokenizer: Option<&Tokenizer>) -> Result<()> {
        let Some(Text { sampling: SamplingArgs { structured, .. }, .. }) = &self.text else { return Ok(()) };
        let checked = structured.output()?.map_or(Ok(()), |output| output.check(tokenizer));
        checked.map_err(|e| usage(format!("{}: {e}", structured.flag())))
    }

    /// Checks the values that flags and generation_config.json come to, and the requests of a workload, for a model
    /// of this vocabulary and context.
    pub(super) fn check_values(
        &self,
        generation: Option<&Config>,
        vocab_size: usize,
        context: usize,
    ) -> Result<()> {
        self.workload.map_or(Ok(()), |workload| workload.check(vocab_size, context))?;
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

    /// Checks the chat template of the flags or of a checkpoint's folder; `model` names the checkpoint.
    pub(super) fn check_template(&self, dir: Option<&Path>, model: Option<&str>) -> Result<()> {
        let Some(Text { template: Some(args), needs_template, .. }) = &self.text else { return Ok(()) };
        match options::chat_template_in(args, dir)? {
            Some(template) if *needs_template => template.check().context("the chat template"),
            None if *needs_template => Err(anyhow::anyhow!(no_template(model))),
            _ => Ok(()),
        }
    }
}

/// The message for a model without a chat template where one is needed.
pub fn no_template(model: Option<&str>) -> String {
    let name = model.unwrap_or("the embedded checkpoint");
    format!(
        "{name} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json): supply \
         one with --chat-template FILE, or use generate"
    )
}
