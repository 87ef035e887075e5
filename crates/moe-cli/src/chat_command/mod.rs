//! `chat`: a conversation at the terminal, or line by line through a pipe.
//!
//! Answers go to stdout, everything else to stderr. The engine keeps the KV cache of what was said,
//! so a turn computes only what is new.

mod conversation;
mod lines;

use anyhow::{Context, Result, bail};
use model_runtime::sampling::request_seed;
use moe_engine::chat::{ChatRequest, ChatTemplate};
use moe_engine::engine::{DpEngine, EngineConfig, FinishReason, Request};
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{ModelFamily, usage};
use serde_json::Value;

use crate::cli::ChatArgs;
use crate::error::describe;
use crate::interrupt::Interrupt;
use crate::options;
use crate::output::print;
use crate::preflight::{self, Asks};
use crate::session::{self, Model};

use conversation::Conversation;
use lines::{Lines, Typed};

const HELP: &str = "\
/reset         forget the conversation
/system TEXT   tell the model something beforehand; without TEXT: nothing
/history       show the conversation
/quit          leave, as Ctrl-D does
//TEXT         a message that begins with /
A backslash at the end of a line continues it. Ctrl-C stops an answer.";

/// Runs the command.
pub fn run<F: ModelFamily>(args: &ChatArgs) -> Result<()> {
    let (model, asks) = (Model::Checkpoint(args.answer.model.as_deref()), Asks::of_chat(args));
    let mut session = session::open::<F>(model, &args.answer.run, false, &asks)?;
    let tokenizer = session.tokenizer()?;
    let template = options::chat_template(&args.answer.chat, &session)?
        .with_context(|| preflight::no_template(args.answer.model.as_deref()))?;
    // One conversation; the blocks of its earlier turns are part of the newest prompt.
    let config = EngineConfig { max_num_seqs: 1, ..options::engine_config(&args.answer.engine, &session.ex) };
    let engine = session.engine(Some(tokenizer.clone()), &config).map_err(|e| usage(format!("{e:#}")))?;
    let defaults = options::request_defaults(&args.answer.sampling, &session, "")?;
    let mut chat = Chat {
        engine,
        tokenizer,
        template,
        // Unlike a single continuation, an answer ends by itself.
        defaults: Request { max_tokens: args.answer.sampling.max_new_tokens, ..defaults },
        args,
        conversation: Conversation::new(args.system.clone()),
        interrupt: Interrupt::install()?,
        answers: 0,
        failed: 0,
    };
    let lines = Lines::open()?;
    let terminal = lines.is_terminal();
    chat.talk(lines)?;
    if args.answer.engine.stats {
        eprint!("{}", chat.engine.stats());
    }
    let failed = chat.failed;
    drop(chat);
    session.finish()?;
    match failed {
        // A person has seen it.
        1.. if !terminal => bail!("{failed} messages have no answer; the errors above say why"),
        _ => Ok(()),
    }
}

struct Chat<'a> {
    engine: DpEngine<'a>,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    defaults: Request,
    args: &'a ChatArgs,
    conversation: Conversation,
    interrupt: Interrupt,
    /// Each is sampled with a seed of its own.
    answers: u64,
    /// Messages that got no answer.
    failed: u64,
}

/// What a line asks for.
#[derive(Debug, PartialEq)]
enum Input<'a> {
    Say(&'a str),
    /// A command, and what follows its name.
    Command(&'a str, &'a str),
}

impl<'a> Input<'a> {
    fn parse(text: &'a str) -> Self {
        match text.trim().strip_prefix('/') {
            None => Self::Say(text.trim()),
            Some(text) if text.starts_with('/') => Self::Say(text),
            Some(command) => {
                let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
                Self::Command(name, rest.trim())
            }
        }
    }
}

impl Chat<'_> {
    /// Answers until the user leaves.
    fn talk(&mut self, mut lines: Lines) -> Result<()> {
        if lines.is_terminal() {
            eprintln!("/help shows the commands; Ctrl-D leaves.");
        }
        let mut leaving = false;
        loop {
            let message = match lines.message()? {
                Typed::Message(message) => message,
                Typed::Interrupted if !leaving => {
                    eprintln!("Ctrl-C again or Ctrl-D leaves.");
                    leaving = true;
                    continue;
                }
                Typed::Interrupted | Typed::End => return Ok(()),
            };
            leaving = false;
            match Input::parse(&message) {
                Input::Command("quit" | "exit", _) => return Ok(()),
                Input::Command("help", _) => eprintln!("{HELP}"),
                Input::Command("reset", _) => self.conversation.reset(),
                Input::Command("system", text) => {
                    self.conversation.system = (!text.is_empty()).then(|| text.to_string())
                }
                Input::Command("history", _) => {
                    for message in self.conversation.messages() {
                        let text = |key: &str| message[key].as_str().unwrap_or_default().to_string();
                        eprintln!("{}: {}", text("role"), text("content"));
                    }
                }
                Input::Command(name, _) => eprintln!("there is no /{name}; /help shows the commands"),
                Input::Say("") => {}
                Input::Say(text) => {
                    if !self.turn(text)? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Answers a message; false if nobody reads the answers any more.
    fn turn(&mut self, text: &str) -> Result<bool> {
        self.conversation.ask(text);
        let id = match self.request().and_then(|request| Ok(self.engine.add(request)?)) {
            Ok(id) => id,
            Err(e) => {
                self.conversation.take_back();
                self.failed += 1;
                eprintln!("error: {}", describe(&e));
                return Ok(true);
            }
        };
        // Ctrl-C before there is an answer does not concern it.
        self.interrupt.take();
        let (mut answer, mut open, mut failed) = (String::new(), true, false);
        while !self.engine.is_idle() {
            if self.interrupt.take() {
                self.engine.cancel(id)?;
            }
            for output in self.engine.step()? {
                answer += &output.text;
                open = open && print(&output.text)?;
                if let Some(finish) = output.finish {
                    self.notice(&finish);
                    failed = matches!(finish, FinishReason::Failed(_));
                }
            }
            if !open {
                return Ok(false);
            }
        }
        match failed {
            true => {
                self.conversation.take_back();
                self.failed += 1;
            }
            false => self.conversation.answer(&answer),
        }
        print("\n")
    }

    /// Says why an answer ended, where it did not end by itself.
    fn notice(&self, finish: &FinishReason) {
        match finish {
            FinishReason::Stop(_) => {}
            FinishReason::Length if self.defaults.max_tokens.is_some() => {
                eprintln!("\n[cut: --max-new-tokens or the end of the context]");
            }
            FinishReason::Length => eprintln!("\n[cut: the end of the context]"),
            FinishReason::Cancelled | FinishReason::TimedOut => eprintln!("\n[stopped]"),
            FinishReason::Failed(message) => eprintln!("\nerror: {message}"),
        }
    }

    /// The request of the conversation, made to fit.
    fn request(&mut self) -> Result<Request> {
        let max_model_len = self.engine.max_model_len();
        // Enough for an answer that is worth reading.
        let room = (max_model_len / 4).max(1);
        let room = self.defaults.max_tokens.map_or(room, |max| max.min(room));
        let (template, tokenizer, args) = (&self.template, &self.tokenizer, &self.args.answer.chat);
        let encode = |messages: Vec<Value>| {
            let text = template.render(&ChatRequest {
                messages,
                add_generation_prompt: true,
                chat_template_kwargs: args.chat_template_kwargs.clone().unwrap_or_default(),
                ..ChatRequest::default()
            })?;
            tokenizer.encode_rendered(&text)
        };
        let (prompt, dropped) = self.conversation.fit(max_model_len, room, encode)?;
        if dropped > 0 {
            eprintln!(
                "[the context of {max_model_len} tokens is full: the oldest {dropped} turns are forgotten]"
            );
        }
        let left = max_model_len - prompt.len();
        let max_tokens = self.defaults.max_tokens.map(|max| max.min(left));
        let mut request = Request { prompt, max_tokens, ..self.defaults.clone() };
        request.sampling.seed = request_seed(self.args.answer.sampling.seed, &self.answers.to_string());
        self.answers += 1;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages_are_told_apart() {
        assert_eq!(Input::parse(" hello "), Input::Say("hello"));
        assert_eq!(Input::parse("/system be  kind\n"), Input::Command("system", "be  kind"));
        assert_eq!(Input::parse("/system"), Input::Command("system", ""));
        assert_eq!(Input::parse("//etc/passwd"), Input::Say("/etc/passwd"));
        assert_eq!(Input::parse("/resett"), Input::Command("resett", ""));
        assert_eq!([Input::parse(" \n"), Input::parse("/")], [Input::Say(""), Input::Command("", "")]);
    }
}
