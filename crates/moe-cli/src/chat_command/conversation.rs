//! The messages so far, and how they are cut to fit into the context.

use anyhow::{Result, bail, ensure};
use moe_engine::tokenizer::TooLong;
use serde_json::{Value, json};

/// A conversation: an optional system message, then messages in the form of OpenAI's API. The last message may have no
/// answer yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The system message.
    pub system: Option<String>,
    said: Vec<Value>,
}

/// Token ids of messages, or that their bytes alone show that they are too many.
pub type Encoded = Result<Vec<u32>, TooLong>;

impl Conversation {
    /// A conversation without messages.
    pub fn new(system: Option<String>) -> Self {
        Self { system, said: Vec::new() }
    }

    /// A conversation from a file. A system message at its beginning becomes the system message.
    pub fn of_messages(mut messages: Vec<Value>) -> Self {
        let first = messages.first().filter(|first| first["role"] == "system");
        let system = first.and_then(|first| first["content"].as_str()).map(str::to_string);
        let said = messages.split_off(usize::from(system.is_some()));
        Self { system, said }
    }

    /// Adds a message of the user.
    pub fn ask(&mut self, text: &str) {
        self.said.push(json!({"role": "user", "content": text}));
    }

    /// Adds an answer of the model.
    pub fn answer(&mut self, message: Value) {
        self.said.push(message);
    }

    /// Removes the last message: a message of the user that cannot be answered, or an answer.
    pub fn take_back(&mut self) -> Option<Value> {
        self.said.pop()
    }

    /// Whether the last message is an answer; `None` if there is no message.
    pub fn is_answered(&self) -> Option<bool> {
        self.said.last().map(|last| last["role"] == "assistant")
    }

    /// Removes all messages but the system message.
    pub fn clear(&mut self) {
        self.said.clear();
    }

    /// All messages.
    pub fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.said.iter().cloned()).collect()
    }

    /// The prompt of the conversation, and how many of the oldest turns were dropped so that `room` tokens are left for
    /// the answer. The newest turn alone may use all tokens but one.
    ///
    /// # Errors
    /// The newest message is too long, or it cannot be rendered.
    pub fn fit(
        &mut self,
        max_model_len: usize,
        room: usize,
        encode: impl Fn(Vec<Value>) -> Result<Encoded>,
    ) -> Result<(Vec<u32>, usize)> {
        let mut dropped = 0;
        loop {
            let encoded = encode(self.messages())?;
            if let Ok(prompt) = &encoded
                && prompt.len() + room <= max_model_len
            {
                return Ok((prompt.clone(), dropped));
            }
            // A turn begins with a message of the user; the first message may have any role.
            let next = self.said.iter().skip(1).position(|message| message["role"] == "user");
            match (next, encoded) {
                (Some(next), _) => drop(self.said.drain(..=next)),
                (None, Err(too_long)) => bail!(too_long),
                (None, Ok(prompt)) => {
                    let len = prompt.len();
                    let most = max_model_len.saturating_sub(1);
                    ensure!(
                        len <= most,
                        "the message is too long: {len} tokens, at most {most} fit the context"
                    );
                    return Ok((prompt, dropped));
                }
            }
            dropped += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token for each byte of each message, of which no more than 100 are tokenized.
    fn encode(messages: Vec<Value>) -> Result<Encoded> {
        let text: String = messages.iter().map(|m| m["content"].as_str().unwrap()).collect();
        let bytes = text.len();
        let too_long = TooLong { bytes, context: 100, longest: 1, bound: 100 };
        Ok(if bytes > 100 { Err(too_long) } else { Ok(text.bytes().map(u32::from).collect()) })
    }

    fn talk(turns: &[(&str, &str)], last: &str) -> Conversation {
        let mut conversation = Conversation::new(Some("S".into()));
        for (user, assistant) in turns {
            conversation.ask(user);
            conversation.answer(json!({"role": "assistant", "content": assistant}));
        }
        conversation.ask(last);
        conversation
    }

    #[test]
    fn messages_alternate_and_can_be_taken_over() {
        let conversation = talk(&[("a", "b"), ("c", "d")], "e");
        let roles: Vec<Value> = conversation.messages().iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user", "assistant", "user"]);
        assert_eq!(Conversation::of_messages(conversation.messages()), conversation);
        let mut without = Conversation::of_messages(conversation.messages()[1..].to_vec());
        assert_eq!((without.system.as_deref(), without.is_answered()), (None, Some(false)));
        without.take_back();
        assert_eq!((without.is_answered(), Conversation::default().is_answered()), (Some(true), None));
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
        // The newest message stays, even if it leaves less room.
        assert_eq!(fit(4, 3).unwrap(), ("See".into(), 1));
        let error = fit(3, 1).unwrap_err().to_string();
        assert_eq!(error, "the message is too long: 3 tokens, at most 2 fit the context");
    }

    #[test]
    fn turns_are_whole_and_megabytes_are_not_tokenized() {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let huge = "x".repeat(101);
        let mut conversation = Conversation::of_messages(vec![
            message("user", &huge),
            message("assistant", ""),
            message("tool", "t"),
            message("assistant", "a"),
            message("user", "u"),
        ]);
        assert_eq!(conversation.fit(100, 10, encode).unwrap(), (vec![b'u'.into()], 1));
        conversation.ask(&huge);
        let error = conversation.fit(100, 10, encode).unwrap_err().to_string();
        assert!(error.contains("101 bytes"), "{error}");
    }
}
