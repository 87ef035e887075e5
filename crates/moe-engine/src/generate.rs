//! `generate`: continue one prompt and stream the text to stdout.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use model_runtime::{
    FinishReason, GenerateOptions, GenerateRequest, KvCache, ModelInfo, SamplingParams, TokenEvent,
    check_prompt, generate,
};

use crate::cli::{GenerateArgs, SamplingArgs};
use crate::family::ModelFamily;
use crate::session::Session;
use crate::tokenizer::{TextStream, Tokenizer};
use crate::{prompt, usage};

/// Runs the command.
pub fn run<F: ModelFamily>(args: &GenerateArgs) -> Result<()> {
    let embedded = F::embedded().filter(|_| args.model.is_none());
    let prompt = match (prompt::read(args)?, embedded) {
        (Some(text), _) => text,
        (None, Some(embedded)) => embedded.prompt.to_string(),
        (None, None) => return Err(usage("no prompt is given: use --prompt, --prompt-file or -")),
    };
    let mut session = Session::open::<F>(args.model.as_deref(), &args.run, args.check_weights)?;
    let tokenizer = session.tokenizer()?;
    let ids = tokenizer.encode(&prompt)?;
    let max_model_len = max_model_len(args, session.model.info())?;
    check_prompt(&ids, session.model.info().vocab_size, max_model_len)?;
    let request = GenerateRequest {
        prompt: ids,
        sampling: sampling(&args.sampling, &session)?,
        max_new_tokens: args.sampling.max_new_tokens,
        stop_ids: stop_ids(&args.sampling, &session)?,
    };
    if args.block_size == 0 {
        return Err(usage("--block-size 0: a KV block needs at least one position"));
    }
    let longest = (request.prompt.len().saturating_add(request.max_new_tokens)).min(max_model_len);
    let mut kv = KvCache::new(session.model.info().kv, longest.div_ceil(args.block_size), args.block_size)?;
    let options = GenerateOptions { max_model_len: Some(max_model_len), ..GenerateOptions::default() };

    let mut printer = Printer::new(&tokenizer);
    let requests = [request];
    let model = session.model.as_ref();
    generate(model, &requests, &options, &mut kv, &mut session.ex, |event| printer.token(event))?;
    printer.finish()?;
    if args.stats {
        eprintln!("{}", printer.stats(requests[0].prompt.len()));
    }
    Ok(())
}

/// Streams the text of one request.
struct Printer<'a> {
    tokenizer: &'a Tokenizer,
    text: TextStream,
    out: std::io::Stdout,
    failure: Option<anyhow::Error>,
    start: Instant,
    first: Option<Duration>,
    last: Duration,
    tokens: usize,
}

impl<'a> Printer<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            text: TextStream::new(),
            out: std::io::stdout(),
            failure: None,
            start: Instant::now(),
            first: None,
            last: Duration::ZERO,
            tokens: 0,
        }
    }

    fn token(&mut self, event: TokenEvent) -> ControlFlow<()> {
        self.last = self.start.elapsed();
        self.first.get_or_insert(self.last);
        self.tokens += 1;
        // The stop token ends the text and is not part of it.
        if event.finish_reason == Some(FinishReason::Stop) {
            return ControlFlow::Continue(());
        }
        let piece = self.text.push(self.tokenizer, event.token_id);
        match piece.and_then(|piece| self.print(&piece)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                self.failure = Some(e);
                ControlFlow::Break(())
            }
        }
    }

    fn print(&mut self, text: &str) -> Result<()> {
        let mut out = self.out.lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to stdout")
    }

    fn finish(&mut self) -> Result<()> {
        if let Some(e) = self.failure.take() {
            // A reader that has seen enough (head) is no failure of ours.
            let closed = e.downcast_ref::<std::io::Error>().map(|e| e.kind());
            return if closed == Some(std::io::ErrorKind::BrokenPipe) { Ok(()) } else { Err(e) };
        }
        let rest = self.text.finish(self.tokenizer)?;
        self.print(&rest)?;
        if self.out.is_terminal() {
            self.print("\n")?;
        }
        Ok(())
    }

    fn stats(&self, prompt: usize) -> String {
        let first = self.first.unwrap_or_default().as_secs_f64();
        let decode = (self.last.as_secs_f64() - first).max(f64::MIN_POSITIVE);
        format!(
            "{prompt} prompt tokens, first token after {:.1} ms; {} new tokens, {:.1} tok/s",
            first * 1e3,
            self.tokens,
            self.tokens.saturating_sub(1) as f64 / decode
        )
    }
}

/// The longest sequence: what the flag says, within what the model's positions cover.
fn max_model_len(args: &GenerateArgs, info: &ModelInfo) -> Result<usize> {
    match args.max_model_len {
        Some(len) if len == 0 || len > info.max_context_len => Err(usage(format!(
            "--max-model-len {len}: expected 1 to {}, the context of the model",
            info.max_context_len
        ))),
        Some(len) => Ok(len),
        None => Ok(info.max_context_len),
    }
}

/// The flags over generation_config.json over greedy.
fn sampling(args: &SamplingArgs, session: &Session) -> Result<SamplingParams> {
    let config = session.checkpoint.as_ref().and_then(|c| c.generation_config.as_ref());
    let mut params = match config {
        Some(config) => SamplingParams::from_generation_config(config)?,
        None => SamplingParams::default(),
    };
    params.temperature = args.temperature.unwrap_or(params.temperature);
    params.top_p = args.top_p.unwrap_or(params.top_p);
    params.min_p = args.min_p.unwrap_or(params.min_p);
    if let Some(k) = args.top_k {
        params.top_k = match k {
            -1 => 0,
            k => usize::try_from(k)
                .map_err(|_| usage(format!("--top-k {k}: expected a number of tokens, or -1 for all")))?,
        };
    }
    params.seed = model_runtime::sampling::request_seed(args.seed, "0");
    params.validate(session.model.info().vocab_size).map_err(|e| usage(e.to_string()))?;
    Ok(params)
}

fn stop_ids(args: &SamplingArgs, session: &Session) -> Result<Vec<u32>> {
    match &session.checkpoint {
        Some(checkpoint) if !args.ignore_eos => Ok(checkpoint.eos_token_ids()?),
        _ => Ok(Vec::new()),
    }
}
