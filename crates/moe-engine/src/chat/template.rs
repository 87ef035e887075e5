//! [`ChatTemplate`]: a checkpoint's templates, compiled once, rendered for each conversation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::Environment;
use minijinja::value::{Serde, Value as Object};
use serde_json::{Map, Value};

use super::checkpoint::ChatFiles;
use super::engine::{self, Clock};
use super::error::ChatError;
use super::worker::Worker;
use super::{ChatRequest, continuation};

/// Names that a request's further variables cannot take.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// The chat templates of a checkpoint with its special tokens. Clones share them.
#[derive(Clone)]
pub struct ChatTemplate(Arc<Renderer>);

enum Renderer {
    Here(Box<Templates>),
    Elsewhere(Box<Worker>),
}

struct Templates {
    environment: Environment<'static>,
    /// Every template by name, with its error if it does not compile. The error is reported only if the template is
    /// used.
    names: BTreeMap<String, Result<(), ChatError>>,
    special_tokens: Map<String, Value>,
}

impl ChatTemplate {
    /// Reads the templates of a checkpoint folder. Returns `None` if it has none.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, ChatError> {
        Self::new(ChatFiles::from_dir(dir)?, engine::local_time)
    }

    /// Reads the templates in the contents of a `tokenizer_config.json`. Returns `None` if it has none.
    pub fn from_tokenizer_config(json: &[u8]) -> Result<Option<Self>, ChatError> {
        Self::new(ChatFiles::from_tokenizer_config(json)?, engine::local_time)
    }

    /// Makes templates that another process renders, so that a template that takes too much fails only its own
    /// conversation. The process ends when its stack is full, after 20 seconds, and on Linux also when it uses more
    /// than 1 GiB of memory; other systems do not limit the memory. See [`super::serve`]. The process runs `program`
    /// with the argument [`super::RENDER_COMMAND`]. It starts when it is first needed. [`super::this_program`] returns
    /// the path of a program of this library. Returns `None` if there are no templates. [`Self::check`] and
    /// [`Self::render`] report errors of the templates.
    pub fn isolated(files: ChatFiles, program: PathBuf) -> Option<Self> {
        let some = !files.templates.is_empty();
        some.then(|| Self(Arc::new(Renderer::Elsewhere(Box::new(Worker::new(program, &files))))))
    }

    /// Checks that the template for conversations without tools compiles.
    pub fn check(&self) -> Result<(), ChatError> {
        match &*self.0 {
            Renderer::Here(templates) => templates.select(false).map(drop),
            Renderer::Elsewhere(worker) => worker.render(None).map(drop),
        }
    }

    pub(super) fn new(files: ChatFiles, clock: Clock) -> Result<Option<Self>, ChatError> {
        if files.templates.is_empty() {
            return Ok(None);
        }
        let mut environment = engine::environment(clock)?;
        let names = files.templates.into_iter().map(|(name, source)| {
            let compiled = engine::add(&mut environment, &name, &source);
            (name, compiled)
        });
        let names = names.collect();
        let templates = Templates { environment, names, special_tokens: files.special_tokens };
        Ok(Some(Self(Arc::new(Renderer::Here(Box::new(templates))))))
    }

    /// Returns the prompt of a conversation, as `apply_chat_template(tokenize=False)` does. The prompt already contains
    /// its special tokens, so tokenize it with [`crate::tokenizer::Tokenizer::encode_rendered`].
    /// If the request has tools, the template `tool_use` is used, if it exists. Otherwise `default` is used.
    ///
    /// # Errors
    /// A malformed request, a conversation that the template refuses, a template that does not compile or exceeds the
    /// limits.
    pub fn render(&self, chat: &ChatRequest) -> Result<String, ChatError> {
        check(chat)?;
        match &*self.0 {
            Renderer::Here(templates) => templates.render(chat),
            Renderer::Elsewhere(worker) => worker.render(Some(chat)),
        }
    }
}

impl Templates {
    fn render(&self, chat: &ChatRequest) -> Result<String, ChatError> {
        let name = self.select(chat.tools.is_some())?;
        if !chat.continue_final_message {
            return self.render_messages(name, chat, &chat.messages);
        }
        let mut messages = chat.messages.clone();
        let text = continuation::mark(&mut messages)?;
        continuation::cut(&self.render_messages(name, chat, &messages)?, &text)
    }

    fn render_messages(
        &self,
        name: &str,
        chat: &ChatRequest,
        messages: &[Value],
    ) -> Result<String, ChatError> {
        engine::render(&self.environment, name, || {
            let tokens = self.special_tokens.iter().chain(&chat.chat_template_kwargs);
            let variables = tokens.map(|(name, value)| (name.as_str(), Object::from(Serde(value))));
            Object::from_pairs(variables.chain([
                ("messages", Object::from(Serde(messages))),
                ("tools", Object::from(Serde(&chat.tools))),
                ("documents", Object::from(Serde(&chat.documents))),
                ("add_generation_prompt", Object::from(chat.add_generation_prompt)),
            ]))
        })
    }

    fn select(&self, with_tools: bool) -> Result<&str, ChatError> {
        let named = |name| self.names.get_key_value(name);
        let chosen = named("tool_use").filter(|_| with_tools).or_else(|| named("default"));
        match chosen {
            Some((name, Ok(()))) => Ok(name),
            Some((_, Err(e))) => Err(e.clone()),
            None => Err(ChatError::NoDefault { available: self.names.keys().cloned().collect() }),
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &*self.0 {
            Renderer::Here(templates) => f.debug_tuple("ChatTemplate").field(&templates.names).finish(),
            Renderer::Elsewhere(_) => f.write_str("ChatTemplate(isolated)"),
        }
    }
}

fn check(chat: &ChatRequest) -> Result<(), ChatError> {
    let refuse = |message: String| Err(ChatError::Request(message));
    if chat.messages.is_empty() {
        return refuse("the conversation is empty: give at least one message".to_string());
    }
    if chat.continue_final_message && chat.add_generation_prompt {
        return refuse("continue_final_message and add_generation_prompt exclude each other".to_string());
    }
    let lists = [
        ("messages", Some(&chat.messages)),
        ("tools", chat.tools.as_ref()),
        ("documents", chat.documents.as_ref()),
    ];
    for (name, list) in lists {
        if let Some(index) = list.into_iter().flatten().position(|entry| !entry.is_object()) {
            return refuse(format!("{name}[{index}] is not a JSON object"));
        }
    }
    match RESERVED.iter().find(|name| chat.chat_template_kwargs.contains_key(**name)) {
        Some(name) => refuse(format!(
            "chat_template_kwargs cannot set `{name}`: it has a place of its own in the request"
        )),
        None => Ok(()),
    }
}
