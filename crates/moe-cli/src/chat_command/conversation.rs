//! What was said so far, and how it is made to fit into the context.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// A conversation: an optional system message, then turns of a user's message and its answer.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// What the model is told beforehand.
    pub system: Option<String>,
    /// Messages of user and assistant in turns; the last answer may be missing.
    said: Vec<Value>,
}

fn message(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

impl Conversation {
    /// A conversation in which nothing is said yet.
    pub fn new(system: Option<String>) -> Self {
        Self { system, said: Vec::new() }
    }

    /// The user says something.
    pub fn ask(&mut self, text: &str) {
        self.said.push(message("user", text));
    }

    /// The model has answered.
    pub fn answer(&mut self, text: &str) {
        self.said.push(message("assistant", text));
    }

    /// Takes back what the user said last, because it cannot be answered.
    pub fn take_back(&mut self) {
        self.said.pop();
    }

    /// Forgets everything but the system message.
    pub fn reset(&mut self) {
        self.said.clear();
    }

    /// The messages as chat templates take them.
    pub fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.said.iter().cloned()).collect()
    }

    /// The prompt of the conversation, and how many of the oldest turns were dropped so that `room` tokens are
    /// left for the answer; the newest turn alone may take all but one.
    ///
    /// # Errors
    /// The newest message is too long, or it cannot be rendered.
    pub fn fit(
        &mut self,
        max_model_len: usize,
        room: usize,
        encode: impl Fn(Vec<Value>) -> Result<Vec<u32>>,
    ) -> Result<(Vec<u32>, usize)> {
        let mut dropped = 0;
        loop {
            let prompt = encode(self.messages())?;
            if prompt.len() + room <= max_model_len {
                return Ok((prompt, dropped));
            }
            if self.said.len() <= 1 {
                let (len, most) = (prompt.len(), max_model_len.saturating_sub(1));
                ensure!(len <= most, "the message is too long: {len} tokens, at most {most} fit the context");
                return Ok((prompt, dropped));
            }
            self.said.drain(..2);
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
            conversation.ask(user);
            conversation.answer(assistant);
        }
        conversation.ask(last);
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
        let mut conversation = talk(&[("aa", "bb"), ("cc", "dd")], "ee");
        let mut fit = |max_model_len, room| {
            let (prompt, dropped) = conversation.fit(max_model_len, room, encode)?;
            anyhow::Ok((String::from_utf8(prompt.iter().map(|&b| b as u8).collect())?, dropped))
        };
        assert_eq!(fit(21, 10).unwrap(), ("Saabbccddee".into(), 0));
        assert_eq!(fit(20, 10).unwrap(), ("Sccddee".into(), 1));
        // The newest message stays, even where it leaves less room.
        assert_eq!(fit(4, 3).unwrap(), ("See".into(), 1));
        let error = fit(3, 1).unwrap_err().to_string();
        assert_eq!(error, "the message is too long: 3 tokens, at most 2 fit the context");
    }
}
