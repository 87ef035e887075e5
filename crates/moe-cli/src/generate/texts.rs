//! The texts of `generate` as they grow, and how they are shown: streamed, one after the other, or as JSON.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use model_runtime::sampling::{TokenLogprob, TokenLogprobs};
use moe_engine::engine::{FinishReason, Output, RequestId};
use moe_engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::cli::GenerateArgs;
use crate::output::{finish_reason, print};
use crate::routing;

/// All texts of the command.
pub struct Texts<'a> {
    args: &'a GenerateArgs,
    tokenizer: &'a Tokenizer,
    prompts: Vec<Prompt>,
    start: Instant,
    first_token: Option<Duration>,
    /// The reader of stdout has seen enough.
    closed: bool,
}

struct Prompt {
    request: RequestId,
    tokens: usize,
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
    /// No text yet, of requests with prompts of so many tokens that the engine got at `start`.
    pub fn new(
        args: &'a GenerateArgs,
        tokenizer: &'a Tokenizer,
        start: Instant,
        requests: impl Iterator<Item = (RequestId, usize)>,
    ) -> Self {
        let texts = vec![Text::default(); args.n.max(1)];
        let prompt = |(request, tokens)| Prompt { request, tokens, texts: texts.clone() };
        let prompts = requests.map(prompt).collect();
        Self { args, tokenizer, prompts, start, first_token: None, closed: false }
    }

    /// Whether nobody reads any more.
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// Adds a token, and shows it where there is one text alone.
    pub fn add(&mut self, output: Output) -> Result<()> {
        if output.token_id.is_some() {
            self.first_token.get_or_insert_with(|| self.start.elapsed());
        }
        if let (Some(path), Some(routed), 0) =
            (&self.args.routed_experts_out, &output.routed_experts, output.choice)
        {
            routing::write(path, routed)?;
        }
        let logprobs = output.logprobs.as_ref().map(|l| self.logprobs(output.choice, l)).transpose()?;
        if let (Some(line), false) = (&logprobs, self.args.json) {
            eprintln!("{line}");
        }
        if self.streams() {
            self.print(&output.text)?;
        }
        let prompt = self.prompts.iter_mut().find(|prompt| prompt.request == output.request);
        if let Some(text) = prompt.and_then(|prompt| prompt.texts.get_mut(output.choice)) {
            text.text += &output.text;
            text.token_ids.extend(output.token_id);
            text.logprobs.extend(logprobs);
            text.finish = output.finish.clone();
        }
        match output.finish {
            Some(FinishReason::Failed(message)) => bail!(message),
            _ => Ok(()),
        }
    }

    /// Shows what has not been shown, and at a terminal how it went.
    pub fn finish(&mut self, prompts: &[String]) -> Result<()> {
        if self.args.json {
            for (prompt, text) in self.prompts.iter().zip(prompts) {
                self.closed |= !print(&format!("{}\n", prompt.json(text, self.args.logprobs.is_some())))?;
            }
        } else if !self.streams() {
            for text in self.titled() {
                self.print(&text)?;
            }
        } else if std::io::stdout().is_terminal() {
            self.print("\n")?;
        }
        if std::io::stderr().is_terminal() {
            eprintln!("{}", self.summary(self.start.elapsed()));
        }
        Ok(())
    }

    fn streams(&self) -> bool {
        !self.args.json && self.args.n <= 1 && self.prompts.len() == 1
    }

    /// Each text below a line that says which one it is.
    fn titled(&self) -> Vec<String> {
        let (prompts, n) = (self.prompts.len(), self.args.n);
        let title = |p: usize, t: usize| match (prompts, n) {
            (1, _) => format!("text {} of {n}", t + 1),
            (_, 0 | 1) => format!("prompt {} of {prompts}", p + 1),
            _ => format!("prompt {} of {prompts}, text {} of {n}", p + 1, t + 1),
        };
        let of_prompt = |(p, prompt): (usize, &Prompt)| {
            let texts = prompt.texts.iter().enumerate();
            texts.map(|(t, text)| format!("=== {}\n{}\n", title(p, t), text.text)).collect::<Vec<_>>()
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
        // The first token belongs to the prompt's time.
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

    fn logprobs(&self, choice: usize, logprobs: &TokenLogprobs) -> Result<Value> {
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

impl Prompt {
    /// The prompt's texts in the words of OpenAI's completions.
    fn json(&self, prompt: &str, logprobs: bool) -> Value {
        let choice = |(index, text): (usize, &Text)| {
            let (finish_reason, stop_reason) = finish_reason(text.finish.as_ref());
            json!({
                "index": index,
                "text": text.text,
                "token_ids": text.token_ids,
                "logprobs": logprobs.then_some(&text.logprobs),
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
            })
        };
        let new: usize = self.texts.iter().map(|text| text.token_ids.len()).sum();
        json!({
            "prompt": prompt,
            "choices": self.texts.iter().enumerate().map(choice).collect::<Vec<_>>(),
            "usage": {
                "prompt_tokens": self.tokens,
                "completion_tokens": new,
                "total_tokens": self.tokens + new,
            },
        })
    }
}
