//! `generate`: continues prompts. A single text is streamed to stdout.

mod texts;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use model_runtime::RoutedExperts;
use moe_engine::Session;
use moe_engine::chat::{AnswerForm, Begun, ChatRequest};
use moe_engine::engine::{EngineConfig, Request};
use moe_engine::structured::Reasoning;
use moe_engine::terminal::{hint, note};
use moe_engine::tokenizer::Tokenizer;
use serde_json::json;
use tracing::warn;

use crate::Program;
use crate::cli::{GenerateArgs, TemplateArgs};
use crate::error::usage;
use crate::model::Model;
use crate::preflight::{Asks, Known};
use crate::prompt_progress::PromptProgress;
use crate::session;
use crate::{options, output, prompt, routing};

use texts::Texts;

/// Runs the command.
pub fn run(program: &Program, args: &GenerateArgs) -> Result<()> {
    check_template_flags(args)?;
    let prompts = prompts(program, args)?;
    let recording = args.routed_experts_out.as_deref();
    recording.map_or(Ok(()), |path| output::check_writable("--routed-experts-out", path))?;
    let replay = args.replay_routed_experts.as_deref().map(routing::read).transpose()?.map(Arc::new);
    let check = |model: &Known| {
        replay.as_ref().map_or(Ok(()), |recording| routing::check(recording, model.config))?;
        check_prompts(args, &prompts, model)
    };
    let model = Model::Checkpoint(args.model.as_deref());
    let asks = Asks::of_generate(args).with(&check);
    let mut session = session::open(program, model, &args.run, args.check_weights, &asks)?;
    let tokenizer = (!args.skip_tokenizer_init).then(|| session.tokenizer()).transpose()?;
    let form = answer_form(args, &session)?;
    let answers = (tokenizer.as_ref(), form);
    let (requests, begun) = requests(args, &prompts, replay.as_ref(), &session, answers)?;
    let context = session.model.info().max_context_len;
    let config = engine_config(args, &requests, context, session.engine_defaults());
    let mut engine = session.engine(tokenizer.clone(), &config).map_err(|e| usage(format!("{e:#}")))?;
    warn_of_equal_texts(args, &requests);
    warn_of_the_context(args, &requests, engine.max_model_len());
    let lengths =
        requests.iter().map(|request| request.prompt.len()).collect::<Vec<_>>().into_iter().zip(begun);
    let prompt_tokens = requests.iter().map(|request| request.prompt.len().saturating_mul(request.n)).sum();
    let start = Instant::now();
    let ids = requests.into_iter().map(|request| Ok(engine.add(request)?)).collect::<Result<Vec<_>>>()?;
    let asked = ids.into_iter().zip(lengths).map(|(id, (tokens, begun))| (id, tokens, begun));
    let mut texts = Texts::new(args, tokenizer.as_ref(), form, start, asked);
    let mut progress = PromptProgress::start(prompt_tokens);
    while !engine.is_idle() && !texts.closed() {
        let outputs = engine.step()?;
        progress.step(&engine, !outputs.is_empty());
        for output in outputs {
            texts.add(output)?;
        }
    }
    texts.finish(&prompts)?;
    if args.engine.stats {
        note(format_args!("{}{}", engine.stats(), crate::parallel::experts_report(&engine)));
    }
    drop(engine);
    session.finish()?;
    texts.failure().map_or(Ok(()), Err)
}

/// Refuses flags of the chat template that would have no effect.
fn check_template_flags(args: &GenerateArgs) -> Result<()> {
    let TemplateArgs { chat_template, chat_template_kwargs, .. } = &args.template;
    let given = [
        ("--chat-template", chat_template.is_some()),
        ("--chat-template-kwargs", chat_template_kwargs.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given && !args.chat) {
        Some((flag, _)) => {
            Err(usage(format!("{flag} is for --chat, which puts the prompt into a chat template")))
        }
        None => Ok(()),
    }
}

/// The prompts, or the program's own prompt at a terminal.
fn prompts(program: &Program, args: &GenerateArgs) -> Result<Vec<String>> {
    let embedded = args.model.is_none().then(|| program.own_model()).transpose()?;
    let prompts = prompt::read(args)?;
    if prompts.len() > 1 && (args.routed_experts_out.is_some() || args.replay_routed_experts.is_some()) {
        return Err(usage(format!(
            "--routed-experts-out and --replay-routed-experts are for one prompt, and {} are given",
            prompts.len()
        )));
    }
    match (prompts.is_empty(), embedded) {
        (false, _) => Ok(prompts),
        (true, Some(embedded)) => {
            hint(format_args!(
                "No prompt is given, so this continues {:?}; --prompt TEXT says another.",
                embedded.prompt
            ));
            Ok(vec![embedded.prompt.to_string()])
        }
        (true, None) => Err(usage("no prompt is given: use --prompt, --prompt-file or a pipe")),
    }
}

/// The parts that are looked for in answers to questions; for continuations there are none.
fn answer_form(args: &GenerateArgs, session: &Session) -> Result<AnswerForm> {
    match args.chat {
        true => args.template.answer_form(options::chat_files(&args.template, session)?.as_ref(), true),
        false => Ok(AnswerForm::default()),
    }
}

/// Refuses a prompt that a model cannot run, before its weights are read: text without a tokenizer, ids outside of the
/// vocabulary, more tokens than the context holds.
fn check_prompts(args: &GenerateArgs, prompts: &[String], model: &Known) -> Result<()> {
    let longest = args.engine.max_model_len.unwrap_or(usize::MAX).min(model.context);
    let encode = encoder(args, model.dir, (model.tokenizer, AnswerForm::default()), longest)?;
    for (i, prompt) in prompts.iter().enumerate() {
        let of_several = |e: anyhow::Error| match prompts.len() {
            1 => e,
            count => usage(format!("prompt {} of {count}: {e:#}", i + 1)),
        };
        let mut request = options::request_of(&args.sampling, None, "")?;
        (request.prompt, _) = encode(prompt).map_err(of_several)?;
        request.sampling.logprobs = args.logprobs;
        let checked = request.check_prompt(model.vocab_size, longest);
        checked.map_err(|e| of_several(usage(e.to_string())))?;
        request.check_parameters(model.vocab_size).map_err(|e| usage(e.to_string()))?;
    }
    Ok(())
}

/// A request for each prompt, with its own seed, and the part of an answer in this form that the prompt has begun.
fn requests(
    args: &GenerateArgs,
    prompts: &[String],
    replay: Option<&Arc<RoutedExperts>>,
    session: &Session,
    (tokenizer, form): (Option<&Tokenizer>, AnswerForm),
) -> Result<(Vec<Request>, Vec<Begun>)> {
    let longest = args.engine.max_model_len.unwrap_or(usize::MAX).min(session.model.info().max_context_len);
    let dir = session.checkpoint.as_ref().and_then(|checkpoint| checkpoint.dir());
    let encode = encoder(args, dir, (tokenizer, form), longest)?;
    let request = |(i, prompt): (usize, &String)| {
        let (prompt, begun) = encode(prompt)?;
        let mut request = Request {
            prompt,
            n: args.n,
            capture_routing: args.routed_experts_out.is_some(),
            replay_routing: replay.cloned(),
            reasoning: Reasoning::before(form, begun),
            ..options::request_defaults(&args.sampling, session, &i.to_string())?
        };
        request.sampling.logprobs = args.logprobs;
        request.skip_special_tokens &= !tokenizer.is_some_and(|tokenizer| tokenizer.hides(&form.tags()));
        Ok((request, begun))
    };
    let both = prompts.iter().enumerate().map(request).collect::<Result<Vec<_>>>()?;
    Ok(both.into_iter().unzip())
}

/// Converts a prompt to token ids, and returns the part of the answer that it has begun.
type Encode<'a> = Box<dyn Fn(&str) -> Result<(Vec<u32>, Begun)> + 'a>;

/// The conversion of a prompt to token ids: the tokenizer, and with `--chat` the chat template before it. A text that
/// is certainly longer than `longest` tokens is refused. `dir` is the model's folder.
fn encoder<'a>(
    args: &'a GenerateArgs,
    dir: Option<&Path>,
    (tokenizer, form): (Option<&'a Tokenizer>, AnswerForm),
    longest: usize,
) -> Result<Encode<'a>> {
    let Some(tokenizer) = tokenizer else {
        return Ok(Box::new(|prompt| Ok((prompt::token_ids(prompt)?, Begun::Nothing))));
    };
    let check_length =
        move |text: &str| tokenizer.check_length(text, longest).map_err(|e| usage(e.to_string()));
    if !args.chat {
        return Ok(Box::new(move |prompt| {
            check_length(prompt)?;
            Ok((tokenizer.encode(prompt)?, Begun::Nothing))
        }));
    }
    let template = options::chat_template_in(&args.template, dir)?.context(
        "the model has no chat template: supply one with --chat-template FILE, or leave --chat out",
    )?;
    Ok(Box::new(move |prompt| {
        let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
        let text = template.render(&ChatRequest {
            messages: system.chain([json!({"role": "user", "content": prompt})]).collect(),
            add_generation_prompt: true,
            chat_template_kwargs: args.template.chat_template_kwargs.clone().unwrap_or_default(),
            ..ChatRequest::default()
        })?;
        check_length(&text)?;
        Ok((tokenizer.encode_rendered(&text)?, Begun::of(&text, form)))
    }))
}

/// The settings of the flags, with a KV cache that is just large enough for these requests.
fn engine_config(
    args: &GenerateArgs,
    requests: &[Request],
    context: usize,
    default: EngineConfig,
) -> EngineConfig {
    let config = options::engine_config(&args.engine, default);
    let length = |request: &Request| {
        request.prompt.len().saturating_add(request.max_tokens.map_or(context, |max| max.max(1)))
    };
    let longest = requests.iter().map(length).max().unwrap_or(0);
    let texts = args.n.max(1).saturating_mul(requests.len());
    EngineConfig {
        max_num_seqs: config.max_num_seqs.min(texts),
        // A single text shares its prefix with no other.
        prefix_state_memory: if texts > 1 { config.prefix_state_memory } else { Some(0) },
        max_model_len: config.max_model_len.or((longest < context).then_some(longest)),
        ..config
    }
}

/// Warns that several texts of a prompt will be equal if nothing is random.
fn warn_of_equal_texts(args: &GenerateArgs, requests: &[Request]) {
    if args.n > 1 && requests.iter().any(|request| request.sampling.is_greedy()) {
        warn!(
            "--num-sequences {}: the texts of a prompt are the same, because the temperature is 0; --temperature 0.7 makes \
             them differ",
            args.n
        );
    }
}

/// Warns about texts that the context will cut before their requested length.
fn warn_of_the_context(args: &GenerateArgs, requests: &[Request], max_model_len: usize) {
    let Some(asked) = args.sampling.max_new_tokens else { return };
    let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
    let left = max_model_len.saturating_sub(longest);
    if left > 0 && asked > left {
        warn!(
            "--max-new-tokens {asked}: after a prompt of {longest} tokens the context of {max_model_len} leaves \
             {left}, and the text ends there"
        );
    }
}
