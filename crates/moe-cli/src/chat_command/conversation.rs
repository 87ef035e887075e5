//! What was said so far, and how it is made to fit into the context.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// A conversation: an optional system message, then turns that begin with the user's message.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// What the model is told beforehand.
    pub system: Option<String>,
    turns: Vec<Turn>,
}

#[derive(Clone, Debug)]
struct Turn {
    user: String,
    /// `None` while it is being generated.
    assistant: Option<String>,
}

/// A prompt and what had to go for it.
#[derive(Debug, PartialEq)]
pub struct Fitted {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Turns that were dropped.
    pub dropped: usize,
}

impl Conversation {
    /// A conversation in which nothing is said yet.
    pub fn new(system: Option<String>) -> Self {
        Self { system, turns: Vec::new() }
    }

    /// The user says something.
    pub fn ask(&mut self, text: String) {
        self.turns.push(Turn { user: text, assistant: None });
    }

    /// The model has answered.
    pub fn answer(&mut self, text: String) {
        if let Some(turn) = self.turns.last_mut() {
            turn.assistant = Some(text);
        }
    }

    /// Takes back what the user said last, because it cannot be answered.
    pub fn take_back(&mut self) {
        self.turns.pop();
    }

    /// Forgets everything but the system message.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// The messages as chat templates take them.
    pub fn messages(&self) -> Vec<Value> {
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let system = self.system.iter().map(|text| message("system", text));
        let turns = self.turns.iter().flat_map(|turn| {
            let user = message("user", &turn.user);
            std::iter::once(user).chain(turn.assistant.iter().map(|text| message("assistant", text)))
        });
        system.chain(turns).collect()
    }

    /// The prompt of the conversation. Drops the oldest turns until `room` tokens are left for the
    /// answer; the newest turn alone may take all but one.
    ///
    /// # Errors
    /// The newest message is too long, or it cannot be rendered.
    pub fn fit(
        &mut self,
        max_model_len: usize,
        room: usize,
        encode: impl Fn(Vec<Value>) -> Result<Vec<u32>>,
    ) -> Result<Fitted> {
        let mut dropped = 0;
        loop {
            let prompt = encode(self.messages())?;
            if prompt.len() + room <= max_model_len {
                return Ok(Fitted { prompt, dropped });
            }
            if self.turns.len() <= 1 {
                let (len, most) = (prompt.len(), max_model_len.saturating_sub(1));
                ensure!(len <= most, "the message is too long: {len} tokens, at most {most} fit the context");
                return Ok(Fitted { prompt, dropped });
            }
            self.turns.remove(0);
            dropped += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token for each byte of each message.
    fn encode(messages: Vec<Value>) -> Result<Vec<u32>> {
        Ok(messages.iter().flat_map(|m| m["content"].as_str().unwrap().bytes().map(u32::from)).collect())
    }

    fn talk(turns: &[(&str, &str)], last: &str) -> Conversation {
        let mut conversation = Conversation::new(Some("S".into()));
        for (user, assistant) in turns {
            conversation.ask(user.to_string());
            conversation.answer(assistant.to_string());
        }
        conversation.ask(last.into());
        conversation
    }

    #[test]
    fn messages_alternate() {
        let roles: Vec<Value> =
            talk(&[("a", "b"), ("c", "d")], "e").messages().iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user", "assistant", "user"]);
    }

    #[test]
    fn the_oldest_turns_go_first() {
        let text =
            |fitted: &Fitted| String::from_utf8(fitted.prompt.iter().map(|&b| b as u8).collect()).unwrap();
        let mut conversation = talk(&[("aa", "bb"), ("cc", "dd")], "ee");
        let fitted = conversation.fit(21, 10, encode).unwrap();
        assert_eq!((text(&fitted).as_str(), fitted.dropped), ("Saabbccddee", 0));
        let fitted = conversation.fit(20, 10, encode).unwrap();
        assert_eq!((text(&fitted).as_str(), fitted.dropped), ("Sccddee", 1));
        // The newest message stays, even where it leaves less room.
        let fitted = conversation.fit(4, 3, encode).unwrap();
        assert_eq!((text(&fitted).as_str(), fitted.dropped), ("See", 1));
        let error = conversation.fit(3, 1, encode).unwrap_err().to_string();
        assert_eq!(error, "the message is too long: 3 tokens, at most 2 fit the context");
    }
}
