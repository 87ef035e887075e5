//! A turn of the conversation: the request, the answer while it arrives, and the result.

use std::time::Instant;

use anyhow::Result;
use model_runtime::sampling::request_seed;
use moe_engine::chat::{AnswerForm, Begun, ChatRequest};
use moe_engine::engine::{FinishReason, Request, RequestId};
use moe_engine::structured::Reasoning;
use moe_engine::terminal::{note, note_error};
use serde_json::Value;

use super::Chat;
use super::conversation::Encoded;
use super::turn::{Speed, Turn};
use crate::error::report;
use crate::messages::{self, KnownFields};
use crate::output::print;
use crate::prompt_progress::PromptProgress;
use crate::routing;
use crate::show::{Look, Shown};

impl Chat<'_> {
    /// Answers the last message.
    pub fn respond(&mut self) -> Result<Turn> {
        let added = self.request().and_then(|(request, begun)| {
            let progress = PromptProgress::start(request.prompt.len());
            Ok((self.engine.add(request)?, begun, progress))
        });
        match added {
            Ok((id, begun, progress)) => self.read_answer(id, begun, progress),
            Err(e) => {
                self.failed += 1;
                report(&e);
                Ok(Turn::Failed)
            }
        }
    }

    /// Shows an answer while it arrives, and stores it.
    fn read_answer(&mut self, id: RequestId, begun: Begun, mut progress: PromptProgress) -> Result<Turn> {
        // A Ctrl-C before the answer has begun must not stop it.
        self.interrupt.take();
        let mut shown = Shown::new(self.form, begun, Look::of_stdout());
        let start = Instant::now();
        let mut speed = Speed::default();
        let mut open = true;
        let mut failed = false;
        while !self.engine.is_idle() {
            if self.interrupt.take() {
                self.engine.cancel(id)?;
            }
            let outputs = self.engine.step()?;
            progress.step(&self.engine, !outputs.is_empty());
            for output in outputs {
                if output.token_id.is_some() {
                    speed.tokens += 1;
                    match speed.tokens {
                        1 => speed.first = start.elapsed(),
                        _ => speed.rest = start.elapsed() - speed.first,
                    }
                }
                open = open && print(&shown.push(&output.text))?;
                if let Some(finish) = output.finish {
                    open = open && print(&shown.finish())?;
                    self.notice(&finish, speed.tokens);
                    failed = matches!(finish, FinishReason::Failed(_));
                }
                if let (Some(path), Some(routed)) = (&self.args.routed_experts_out, &output.routed_experts) {
                    routing::write(path, routed)?;
                }
            }
            if !open {
                return Ok(Turn::Closed);
            }
        }
        let answer = shown.into_answer();
        if failed {
            self.failed += 1;
        } else {
            let name = |i: usize| format!("call_{}_{i}", self.answers);
            self.conversation.answer(messages::of_answer("assistant", &answer, self.form, name));
            self.speed = Some(speed);
        }
        match print("\n")? {
            false => Ok(Turn::Closed),
            true => Ok(if failed { Turn::Failed } else { Turn::Answered }),
        }
    }

    /// Says why an answer ended, if it did not end by itself.
    fn notice(&self, finish: &FinishReason, new_tokens: usize) {
        match finish {
            FinishReason::Stop(_) => {}
            FinishReason::Length => match self.defaults.max_tokens {
                Some(max) if new_tokens >= max => note(format_args!("\n[cut: --max-new-tokens {max}]")),
                _ => {
                    let context = self.engine.max_model_len();
                    note(format_args!("\n[cut: the context of {context} tokens is full]"));
                }
            },
            FinishReason::Failed(message) => {
                note("\n");
                note_error(message);
            }
            // It was cancelled, its time was over, or a reason that is not known here.
            _ => note("\n[stopped]"),
        }
    }

    /// The request of the conversation, cut to fit, and the part of the answer that its prompt has begun.
    fn request(&mut self) -> Result<(Request, Begun)> {
        let max_model_len = self.engine.max_model_len();
        // This leaves enough room for a useful answer.
        let room = (max_model_len / 4).max(1);
        let room = self.defaults.max_tokens.map_or(room, |max| max.min(room));
        let mut conversation = self.conversation.clone();
        let begun = std::cell::Cell::new(Begun::Nothing);
        let encode = |messages: Vec<Value>| {
            let text = self.render(&messages, true)?;
            begun.set(Begun::of(&text, self.form));
            self.encode(&text)
        };
        let (prompt, dropped) = conversation.fit(max_model_len, room, encode)?;
        self.conversation = conversation;
        if dropped > 0 {
            note(format_args!(
                "[the context of {max_model_len} tokens is full: the oldest {dropped} turns are forgotten]"
            ));
        }
        let left = max_model_len - prompt.len();
        let max_tokens = self.defaults.max_tokens.map(|max| max.min(left));
        let capture_routing = self.args.routed_experts_out.is_some();
        let begun = begun.get();
        let reasoning = Reasoning::before(self.form, begun);
        let mut request = Request { prompt, max_tokens, capture_routing, reasoning, ..self.defaults.clone() };
        request.skip_special_tokens &= !self.tokenizer.hides(&self.form.tags());
        request.sampling.seed = request_seed(self.seed, &self.answers.to_string());
        self.answers += 1;
        Ok((request, begun))
    }

    /// The text that the template makes of messages.
    pub fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String> {
        let plain = |message: &Value| plain(message, self.knows, self.form);
        let args = &self.args.answer.chat;
        Ok(self.template.render(&ChatRequest {
            messages: messages.iter().map(plain).collect::<Result<_>>()?,
            add_generation_prompt,
            chat_template_kwargs: args.chat_template_kwargs.clone().unwrap_or_default(),
            ..ChatRequest::default()
        })?)
    }

    /// The tokens of a rendered text, unless they are certainly too many.
    fn encode(&self, text: &str) -> Result<Encoded> {
        match self.tokenizer.check_length(text, self.engine.max_model_len()) {
            Ok(()) => Ok(Ok(self.tokenizer.encode_rendered(text)?)),
            Err(too_long) => Ok(Err(too_long)),
        }
    }

    /// Tokens of the conversation, the context, and the speed of the last answer.
    pub fn stats(&self) -> Result<String> {
        let messages = self.conversation.messages();
        let context = self.engine.max_model_len();
        let tokens = match messages.is_empty() {
            true => 0,
            false => match self.encode(&self.render(&messages, false)?)? {
                Ok(tokens) => tokens.len(),
                Err(too_long) => return Ok(too_long.to_string()),
            },
        };
        let left = context.saturating_sub(tokens);
        let last = self.speed.map_or_else(String::new, |speed| {
            let rate = speed.tokens.saturating_sub(1) as f64 / speed.rest.as_secs_f64().max(1e-9);
            let first = speed.first.as_secs_f64();
            let tokens = speed.tokens;
            format!("\n[last answer: first token after {first:.3} s; {tokens} new tokens, {rate:.1} tok/s]")
        });
        let count = messages.len();
        Ok(format!("[{count} messages, {tokens} tokens; {left} of the context of {context} are left]{last}"))
    }
}

/// A message in the form that the template takes.
fn plain(message: &Value, knows: KnownFields, form: AnswerForm) -> Result<Value> {
    let mut message = message.as_object().cloned().unwrap_or_default();
    messages::for_template(&mut message).map_err(anyhow::Error::msg)?;
    messages::write_back(&mut message, knows, form);
    Ok(Value::Object(message))
}
