//! The texts of `generate` while they grow, and how they are shown: streamed, one after the other, or as JSON.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use model_runtime::sampling::{TokenLogprob, TokenLogprobs};
use moe_engine::chat::{Answer, AnswerForm, Begun, Schemas};
use moe_engine::engine::{FinishReason, Output, RequestId};
use moe_engine::terminal::{hint, note, visible_json};
use moe_engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::cli::GenerateArgs;
use crate::output::{finish_reason, print, print_foreign, write_json_lines};
use crate::show::{Look, Shown};
use crate::token_names::TokenNames;
use crate::{messages, routing};

/// All texts of the command.
pub struct Texts<'a> {
    args: &'a GenerateArgs,
    tokenizer: Option<&'a Tokenizer>,
    form: AnswerForm,
    /// How a single text is shown while it arrives.
    shown: Shown,
    prompts: Vec<Prompt>,
    start: Instant,
    first_token: Option<Duration>,
    /// Whether the reader of stdout has closed it.
    closed: bool,
}

struct Prompt {
    request: RequestId,
    tokens: usize,
    /// The part of the answer that the prompt has begun.
    begun: Begun,
    texts: Vec<Text>,
}

#[derive(Clone, Default)]
struct Text {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<Value>,
    finish: Option<FinishReason>,
}

impl<'a> Texts<'a> {
    /// No text yet. The engine got the requests at `start`; the arguments are the prompts' lengths and the parts of the
    /// answers that they have begun.
    pub fn new(
        args: &'a GenerateArgs,
        tokenizer: Option<&'a Tokenizer>,
        form: AnswerForm,
        start: Instant,
        requests: impl Iterator<Item = (RequestId, usize, Begun)>,
    ) -> Self {
        let texts = vec![Text::default(); args.n.max(1)];
        let prompt = |(request, tokens, begun)| Prompt { request, tokens, begun, texts: texts.clone() };
        let prompts: Vec<_> = requests.map(prompt).collect();
        let begun = prompts.first().map(|prompt| prompt.begun).unwrap_or_default();
        let shown = Shown::new(form, begun, Look::of_stdout());
        Self { args, tokenizer, form, shown, prompts, start, first_token: None, closed: false }
    }

    /// Whether stdout is closed.
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// Adds a token, and shows it if there is only one text.
    pub fn add(&mut self, output: Output) -> Result<()> {
        if output.token_id.is_some() {
            self.first_token.get_or_insert_with(|| self.start.elapsed());
        }
        let logprobs = output.logprobs.as_ref().map(|l| self.logprobs(output.choice, l));
        if let (Some(line), false) = (&logprobs, self.args.json.is_some()) {
            note(visible_json(&line.to_string()));
        }
        if self.streams() {
            let text = match (self.tokenizer, output.token_id) {
                (None, Some(id)) => format!("{id} "),
                _ => self.shown.push(&output.text),
            };
            let rest = output.finish.as_ref().map(|_| self.shown.finish()).unwrap_or_default();
            self.print(&(text + &rest))?;
        }
        let prompt = self.prompts.iter_mut().find(|prompt| prompt.request == output.request);
        if let Some(text) = prompt.and_then(|prompt| prompt.texts.get_mut(output.choice)) {
            text.text += &output.text;
            text.token_ids.extend(output.token_id);
            text.logprobs.extend(logprobs);
            text.finish = output.finish.clone();
        }
        if let (Some(path), Some(routed), 0) =
            (&self.args.routed_experts_out, &output.routed_experts, output.choice)
        {
            routing::write(path, routed)?;
        }
        Ok(())
    }

    /// The error if some texts failed. The other texts are shown anyway.
    pub fn failure(&self) -> Option<anyhow::Error> {
        let texts = || {
            self.prompts.iter().enumerate().flat_map(|(p, prompt)| prompt.texts.iter().map(move |t| (p, t)))
        };
        let failed: Vec<_> = texts()
            .filter_map(|(p, text)| match &text.finish {
                Some(FinishReason::Failed(message)) => Some((p, message)),
                _ => None,
            })
            .collect();
        let &(first, message) = failed.first()?;
        let all = texts().count();
        Some(match (failed.len(), all) {
            (_, 1) => anyhow!("{message}"),
            (1, _) => anyhow!("the text of prompt {}: {message}; the other texts are complete", first + 1),
            (count, _) => {
                let mut prompts: Vec<_> = failed.iter().map(|(p, _)| (p + 1).to_string()).collect();
                prompts.dedup();
                let prompts = prompts.join(", ");
                anyhow!("{count} of {all} texts failed, of the prompts {prompts}; the first: {message}")
            }
        })
    }

    /// Shows everything that was not shown yet and, at a terminal, a summary.
    pub fn finish(&mut self, prompts: &[String]) -> Result<()> {
        if let Some(file) = &self.args.json {
            let line = |(prompt, text): (&Prompt, &String)| format!("{}\n", self.json(prompt, text));
            let lines: String = self.prompts.iter().zip(prompts).map(line).collect();
            self.closed |= !write_json_lines(file.as_deref(), &lines)?;
        } else if !self.streams() {
            for text in self.titled() {
                self.closed |= !print_foreign(&text)?;
            }
        } else if std::io::stdout().is_terminal() {
            self.print("\n")?;
        }
        if std::io::stderr().is_terminal() {
            hint(self.summary(self.start.elapsed()));
        }
        Ok(())
    }

    fn streams(&self) -> bool {
        self.args.json.is_none() && self.args.n <= 1 && self.prompts.len() == 1
    }

    /// Each text, with a title line above it.
    fn titled(&self) -> Vec<String> {
        let prompts = self.prompts.len();
        let n = self.args.n;
        let title = |p: usize, t: usize| match (prompts, n) {
            (1, _) => format!("text {} of {n}", t + 1),
            (_, 0 | 1) => format!("prompt {} of {prompts}", p + 1),
            _ => format!("prompt {} of {prompts}, text {} of {n}", p + 1, t + 1),
        };
        let of_prompt = |(p, prompt): (usize, &Prompt)| {
            let texts = prompt.texts.iter().enumerate();
            let text = |text: &Text| match self.tokenizer {
                Some(_) => text.text.clone(),
                None => text.token_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
            };
            texts.map(|(t, of)| format!("=== {}\n{}\n", title(p, t), text(of))).collect::<Vec<_>>()
        };
        self.prompts.iter().enumerate().flat_map(of_prompt).collect()
    }

    fn print(&mut self, text: &str) -> Result<()> {
        self.closed |= !print(text)?;
        Ok(())
    }

    /// Tokens, times and ends in one line.
    fn summary(&self, elapsed: Duration) -> String {
        let prompt_tokens: usize = self.prompts.iter().map(|prompt| prompt.tokens).sum();
        let texts = || self.prompts.iter().flat_map(|prompt| &prompt.texts);
        let new: usize = texts().map(|text| text.token_ids.len()).sum();
        let first = self.first_token.unwrap_or(elapsed);
        // The time of the first token belongs to the prompt.
        let rate = new.saturating_sub(texts().count()) as f64 / (elapsed - first).as_secs_f64().max(1e-9);
        let mut ends: Vec<_> = texts().map(|text| finish_reason(text.finish.as_ref()).0).collect();
        ends.sort_unstable();
        ends.dedup();
        format!(
            "[{prompt_tokens} prompt tokens, first token after {:.3} s; {new} new tokens, {rate:.1} tok/s; finish reason: {}]",
            first.as_secs_f64(),
            ends.join(", ")
        )
    }

    fn logprobs(&self, choice: usize, logprobs: &TokenLogprobs) -> Value {
        let names = TokenNames::new(self.tokenizer);
        let one = |t: &TokenLogprob| {
            let text = self.tokenizer.map(|_| names.name(t.token_id));
            json!({"token_id": t.token_id, "token": text, "logprob": t.logprob, "rank": t.rank})
        };
        let mut line = one(&logprobs.chosen);
        line["choice"] = choice.into();
        line["top_logprobs"] = logprobs.top.iter().map(one).collect();
        line
    }

    /// A prompt's texts in the form of OpenAI's completions; answers to questions also in the form of chat messages.
    fn json(&self, prompt: &Prompt, text: &str) -> Value {
        let message = |index: usize, text: &str| {
            let answer = Answer::of(text, self.form, prompt.begun, Schemas::default());
            messages::of_answer("assistant", &answer, self.form, |i| format!("call_{index}_{i}"))
        };
        let choice = |(index, text): (usize, &Text)| {
            let (finish_reason, stop_reason) = finish_reason(text.finish.as_ref());
            let mut choice = json!({
                "index": index,
                "text": text.text,
                "token_ids": text.token_ids,
                "logprobs": self.args.logprobs.map(|_| &text.logprobs),
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
            });
            if self.args.chat {
                choice["message"] = message(index, &text.text);
            }
            choice
        };
        let new: usize = prompt.texts.iter().map(|text| text.token_ids.len()).sum();
        json!({
            "prompt": text,
            "choices": prompt.texts.iter().enumerate().map(choice).collect::<Vec<_>>(),
            "usage": {
                "prompt_tokens": prompt.tokens,
                "completion_tokens": new,
                "total_tokens": prompt.tokens + new,
            },
        })
    }
}
