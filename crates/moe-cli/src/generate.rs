//! `generate`: continue one prompt and stream the text to stdout.

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::{Result, bail};
use model_runtime::Exec;
use model_runtime::sampling::{TokenLogprob, TokenLogprobs};
use moe_engine::engine::{EngineConfig, FinishReason, Output, Request};
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{ModelFamily, usage};
use serde_json::json;

use crate::cli::GenerateArgs;
use crate::preflight::Asks;
use crate::session::{self, Model, no_model};
use crate::{options, output, prompt, routing};

/// Runs the command.
pub fn run<F: ModelFamily>(args: &GenerateArgs) -> Result<()> {
    let embedded = F::embedded().filter(|_| args.model.is_none());
    if args.model.is_none() && embedded.is_none() {
        return Err(no_model());
    }
    let prompt = match (prompt::read(args)?, embedded) {
        (Some(text), _) => text,
        (None, Some(embedded)) => embedded.prompt.to_string(),
        (None, None) => return Err(usage("no prompt is given: use --prompt, --prompt-file or -")),
    };
    let replay = args.replay_routed_experts.as_deref().map(routing::read).transpose()?;
    let (model, asks) = (Model::Checkpoint(args.model.as_deref()), Asks::of_generate(args));
    let mut session = session::open::<F>(model, &args.run, args.check_weights, &asks)?;
    let tokenizer = session.tokenizer()?;
    let mut request = Request {
        prompt: tokenizer.encode(&prompt)?,
        n: args.n,
        capture_routing: args.routed_experts_out.is_some(),
        replay_routing: replay.map(Arc::new),
        ..options::request_defaults(&args.sampling, &session, "0")?
    };
    request.sampling.logprobs = args.logprobs;
    let config = engine_config(args, &request, session.model.info().max_context_len, &session.ex);
    let mut engine = session.engine(Some(tokenizer.clone()), &config).map_err(|e| usage(format!("{e:#}")))?;
    let mut printer = Printer::new(args, &tokenizer);
    engine.add(request)?;
    while !engine.is_idle() && !printer.closed {
        for output in engine.step()? {
            printer.output(output)?;
        }
    }
    printer.finish()?;
    if args.engine.stats {
        eprint!("{}", engine.stats());
    }
    drop(engine);
    session.finish()
}

/// The settings of the flags, with a KV cache for this request and no more.
fn engine_config(args: &GenerateArgs, request: &Request, context: usize, ex: &Exec) -> EngineConfig {
    let config = options::engine_config(&args.engine, ex);
    let longest = request.prompt.len().saturating_add(request.max_tokens.map_or(context, |max| max.max(1)));
    EngineConfig {
        max_num_seqs: config.max_num_seqs.min(args.n.max(1)),
        max_model_len: config.max_model_len.or((longest < context).then_some(longest)),
        ..config
    }
}

/// Streams the text of the first choice; those of further ones follow whole.
struct Printer<'a> {
    args: &'a GenerateArgs,
    tokenizer: &'a Tokenizer,
    texts: Vec<String>,
    /// Whoever reads stdout has seen enough.
    closed: bool,
}

impl<'a> Printer<'a> {
    fn new(args: &'a GenerateArgs, tokenizer: &'a Tokenizer) -> Self {
        let texts = vec![String::new(); args.n.max(1)];
        Self { args, tokenizer, texts, closed: false }
    }

    fn output(&mut self, output: Output) -> Result<()> {
        if let Some(logprobs) = &output.logprobs {
            eprintln!("{}", self.logprobs(output.choice, logprobs)?);
        }
        if let (Some(path), Some(routed), 0) =
            (&self.args.routed_experts_out, &output.routed_experts, output.choice)
        {
            routing::write(path, routed)?;
        }
        if output.choice == 0 {
            self.print(&output.text)?;
        } else if let Some(text) = self.texts.get_mut(output.choice) {
            *text += &output.text;
        }
        match output.finish {
            Some(FinishReason::Failed(message)) => bail!(message),
            _ => Ok(()),
        }
    }

    fn finish(&mut self) -> Result<()> {
        for text in std::mem::take(&mut self.texts).iter().skip(1) {
            self.print(&format!("\n\n{text}"))?;
        }
        if std::io::stdout().is_terminal() {
            self.print("\n")?;
        }
        Ok(())
    }

    fn print(&mut self, text: &str) -> Result<()> {
        self.closed |= !output::print(text)?;
        Ok(())
    }

    fn logprobs(&self, choice: usize, logprobs: &TokenLogprobs) -> Result<serde_json::Value> {
        let one = |t: &TokenLogprob| -> Result<_> {
            let text = self.tokenizer.decode_with(&[t.token_id], false)?;
            Ok(json!({"token_id": t.token_id, "token": text, "logprob": t.logprob, "rank": t.rank}))
        };
        let mut line = one(&logprobs.chosen)?;
        line["choice"] = choice.into();
        line["top_logprobs"] = logprobs.top.iter().map(one).collect::<Result<_>>()?;
        Ok(line)
    }
}
