//! `chat`: a conversation at the terminal, or line by line through a pipe.
//!
//! Answers go to stdout, everything else to stderr. The engine keeps the KV cache of the conversation, so a turn
//! computes only what is new.

mod answering;
mod commands;
mod conversation;
mod files;
mod history;
mod lines;
mod paste;
mod set;
mod turn;

use crate::error::usage;
use anyhow::{Context, Result, bail};
use moe_engine::Session;
use moe_engine::chat::{AnswerForm, ChatFiles, ChatTemplate};
use moe_engine::engine::{DpEngine, EngineConfig, Request};
use moe_engine::terminal::{hint, note};
use moe_engine::tokenizer::Tokenizer;
use serde_json::Value;

use crate::Program;
use crate::cli::{AnswerArgs, ChatArgs, SamplingArgs};
use crate::error::report;
use crate::interrupt::Interrupt;
use crate::messages::KnownFields;
use crate::model::Model;
use crate::options;
use crate::output::check_writable;
use crate::preflight::{self, Asks};
use crate::session;

use commands::Input;
use conversation::Conversation;
use lines::{Lines, Typed};
use set::Values;
use turn::{Speed, Turn};

/// Runs the command.
pub fn run(program: &Program, args: &ChatArgs) -> Result<()> {
    let recording = args.routed_experts_out.as_deref();
    recording.map_or(Ok(()), |path| check_writable("--routed-experts-out", path))?;
    let model = Model::Checkpoint(args.answer.model.as_deref());
    let asks = Asks::of_chat(args);
    let mut session = session::open(program, model, &args.answer.run, false, &asks)?;
    let tokenizer = session.tokenizer()?;
    let files = options::chat_files(&args.answer.chat, &session)?;
    let template = options::chat_template(&args.answer.chat, &session)?
        .with_context(|| preflight::no_template(args.answer.model.as_deref()))?;
    // There is one conversation, and the blocks of its earlier turns are part of the newest prompt.
    let config = EngineConfig {
        max_num_seqs: 1,
        ..options::engine_config(&args.answer.engine, session.engine_defaults())
    };
    let engine = session.engine(Some(tokenizer.clone()), &config).map_err(|e| usage(format!("{e:#}")))?;
    let mut chat = Chat {
        engine,
        tokenizer,
        template,
        form: args.answer.chat.answer_form(files.as_ref(), true)?,
        knows: fields(files.as_ref()),
        defaults: defaults(&args.answer.sampling, &session)?,
        seed: args.answer.sampling.seed,
        values: Values::new(&args.answer.sampling),
        session: &session,
        args,
        conversation: Conversation::new(args.system.clone()),
        interrupt: Interrupt::of_conversation()?,
        answers: 0,
        failed: 0,
        speed: None,
    };
    let lines = Lines::open(!args.no_history)?;
    let terminal = lines.is_terminal();
    chat.talk(lines)?;
    if args.answer.engine.stats {
        note(format_args!("{}{}", chat.engine.stats(), crate::parallel::experts_report(&chat.engine)));
    }
    let failed = chat.failed;
    drop(chat);
    session.finish()?;
    match failed {
        // A user at a terminal has seen it.
        1.. if !terminal => bail!("{failed} messages have no answer; the errors above say why"),
        _ => Ok(()),
    }
}

/// The request with these values. Unlike a single continuation, an answer ends by itself.
fn defaults(sampling: &SamplingArgs, session: &Session) -> Result<Request> {
    let defaults = options::request_defaults(sampling, session, "")?;
    let request = Request { max_tokens: sampling.max_new_tokens, ..defaults };
    request.check_parameters(session.model.info().vocab_size)?;
    Ok(request)
}

/// The message fields that the template knows. For other templates their contents are written into the text.
fn fields(files: Option<&ChatFiles>) -> KnownFields {
    let knows = |name: &str| {
        files.is_some_and(|files| files.templates.values().any(|template| template.contains(name)))
    };
    // `thinking` alone is often a variable.
    let reasoning = ["reasoning_content", "message.thinking", "message['thinking']", "message[\"thinking\"]"];
    KnownFields { reasoning: reasoning.into_iter().any(knows), calls: knows("tool_calls") }
}

struct Chat<'a> {
    engine: DpEngine<'a>,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    /// The parts that are looked for in answers, and which of them the template takes as fields.
    form: AnswerForm,
    knows: KnownFields,
    defaults: Request,
    seed: u64,
    values: Values,
    session: &'a Session,
    args: &'a ChatArgs,
    conversation: Conversation,
    interrupt: Interrupt,
    /// Number of answers begun so far; each is sampled with its own seed.
    answers: u64,
    /// Number of messages without an answer.
    failed: u64,
    /// The speed of the last answer.
    speed: Option<Speed>,
}

impl Chat<'_> {
    /// Answers messages until the user leaves.
    fn talk(&mut self, mut lines: Lines) -> Result<()> {
        if lines.is_terminal() {
            hint("/help shows the commands; Ctrl-D leaves.");
        }
        let mut leaving = false;
        loop {
            let message = match lines.message()? {
                Typed::Message(message) => message,
                Typed::Interrupted if !leaving => {
                    note("Ctrl-C again or Ctrl-D leaves.");
                    leaving = true;
                    continue;
                }
                Typed::Interrupted | Typed::End => return Ok(()),
            };
            leaving = false;
            let turn = match Input::parse(&message) {
                Input::Command("quit", _) => return Ok(()),
                Input::Command("regenerate", _) => self.regenerate()?,
                Input::Command(name, rest) => {
                    self.command(name, rest).unwrap_or_else(|e| report(&e));
                    Turn::Answered
                }
                Input::Unknown(name) => {
                    note(commands::unknown(name));
                    Turn::Answered
                }
                Input::Say("") => Turn::Answered,
                Input::Say(text) => self.say(text)?,
            };
            if turn == Turn::Closed {
                return Ok(());
            }
        }
    }

    /// Answers a message.
    fn say(&mut self, text: &str) -> Result<Turn> {
        self.conversation.ask(text);
        let turn = self.respond()?;
        if turn == Turn::Failed {
            self.conversation.take_back();
        }
        Ok(turn)
    }

    /// Answers the last message again.
    fn regenerate(&mut self) -> Result<Turn> {
        let old = match self.conversation.is_answered() {
            None => {
                note("nothing is said that could be answered again");
                return Ok(Turn::Answered);
            }
            Some(true) => self.conversation.take_back(),
            Some(false) => None,
        };
        if self.defaults.sampling.temperature == 0.0 && old.is_some() {
            note("[temperature is 0, so the answer is the same; /set temperature 0.7 gives others]");
        }
        let turn = self.respond()?;
        if let (Turn::Failed, Some(old)) = (turn, old) {
            self.conversation.answer(old);
        }
        Ok(turn)
    }

    /// Runs the other commands.
    fn command(&mut self, name: &str, rest: &str) -> Result<()> {
        match name {
            "clear" => self.conversation.clear(),
            "system" => self.conversation.system = (!rest.is_empty()).then(|| rest.to_string()),
            "history" => self.conversation.messages().iter().for_each(show),
            "save" | "save!" => {
                let messages = self.conversation.messages();
                files::save(rest, &messages, name == "save!")?;
                note(format_args!("[{} messages are in {rest}]", messages.len()));
            }
            "load" => self.load(rest)?,
            "set" => self.set(rest)?,
            "stats" => note(self.stats()?),
            _ => note(commands::help()),
        }
        Ok(())
    }

    fn load(&mut self, path: &str) -> Result<()> {
        let messages = files::load(path)?;
        self.render(&messages, true).with_context(|| format!("the chat template refuses {path}"))?;
        self.conversation = Conversation::of_messages(messages);
        let open = match self.conversation.is_answered() {
            Some(false) => "; the last one has no answer yet, /regenerate gives it one",
            _ => "",
        };
        note(format_args!("[{} messages{open}]", self.conversation.messages().len()));
        Ok(())
    }

    fn set(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            note(set::list(&self.values.args()?, &self.defaults));
            return Ok(());
        }
        let values = self.values.with(text)?;
        let args = values.args()?;
        self.check(&args)?;
        self.defaults = defaults(&args, self.session)?;
        (self.values, self.seed) = (values, args.seed);
        Ok(())
    }
}

impl Chat<'_> {
    /// Checks values in the same way as the command line.
    fn check(&self, sampling: &SamplingArgs) -> Result<()> {
        let answer = AnswerArgs { sampling: sampling.clone(), ..self.args.answer.clone() };
        let generation = self.session.checkpoint.as_ref().and_then(|c| c.generation_config.as_ref());
        let info = self.session.model.info();
        Asks::of_answers(&answer).check(&self.tokenizer, generation, info.vocab_size, info.max_context_len)
    }
}

/// Prints a message for `/history`.
fn show(message: &Value) {
    let text = |key: &str| message[key].as_str().unwrap_or_default().to_string();
    let names = crate::messages::REASONING_NAMES;
    if let Some(name) = names.into_iter().find(|name| message[*name].is_string()) {
        note(format_args!("{} (reasoning): {}", text("role"), text(name)));
    }
    note(format_args!("{}: {}", text("role"), text("content")));
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let name = function["name"].as_str().unwrap_or_default();
        note(format_args!(
            "{} [tool call]: {name} {}",
            text("role"),
            function["arguments"].as_str().unwrap_or_default()
        ));
    }
}
