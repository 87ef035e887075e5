//! What a prompt has begun of the answer: some templates open the reasoning, or open and close it, and the last message of
//! a conversation may be left open in the middle of it.

pub(crate) const THINK: &str = "<think>";
pub(crate) const END_THINK: &str = "</think>";

/// What a prompt has begun of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Begun {
    /// Nothing: the model may reason, and opens it itself.
    #[default]
    Nothing,
    /// Reasoning: it ends with `<think>`.
    Reasoning,
    /// More of it than its tag.
    MoreReasoning,
    /// The text: reasoning is over, or was left out.
    Text,
}

impl Begun {
    /// What the prompt of an answer of its own has begun.
    pub fn of(prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        match (prompt.ends_with(THINK), prompt.ends_with(END_THINK)) {
            (true, _) => Self::Reasoning,
            (_, true) => Self::Text,
            _ => Self::Nothing,
        }
    }

    /// What a prompt has begun that ends with `content`, the beginning of the message that the answer continues.
    pub fn of_continued(prompt: &str, content: &str) -> Self {
        let prompt = prompt.trim_end();
        let message = prompt.rfind(content.trim()).unwrap_or(prompt.len());
        // What the template wrote in front of the message belongs to it.
        let opened = prompt
            .rfind(THINK)
            .filter(|at| prompt[(at + THINK.len()).min(message)..message].trim().is_empty());
        match opened {
            Some(at) if prompt[at..].contains(END_THINK) => Self::Text,
            Some(at) if at + THINK.len() == prompt.len() => Self::Reasoning,
            Some(_) => Self::MoreReasoning,
            None => Self::Text,
        }
    }

    /// Whether the answer goes on with reasoning.
    pub fn reasons(self) -> bool {
        matches!(self, Self::Reasoning | Self::MoreReasoning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_prompt_tells_what_it_has_begun() {
        assert_eq!(Begun::of("<|im_start|>assistant\n<think>\n"), Begun::Reasoning);
        assert_eq!(Begun::of("<|im_start|>assistant\n<think>\n\n</think>\n\n"), Begun::Text);
        assert_eq!(
            Begun::of("<|im_start|>user\n<think>?<|im_end|>\n<|im_start|>assistant\n"),
            Begun::Nothing
        );
    }

    #[test]
    fn a_message_may_be_left_open_within_its_reasoning() {
        let of = |before: &str, content: &str| Begun::of_continued(&format!("{before}{content}"), content);
        let start = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(of(start, "<think>\nHm, let"), Begun::MoreReasoning);
        assert_eq!(of(start, "<think>\n"), Begun::Reasoning);
        assert_eq!(of(start, "<think>\nHm.\n</think>\n\nThe"), Begun::Text);
        assert_eq!(of(start, "The answer"), Begun::Text);
        // Qwen3's template writes an empty reasoning in front of any text.
        let closed = format!("{start}<think>\n\n</think>\n\n");
        assert_eq!(of(&closed, "<think>\nHm, let"), Begun::MoreReasoning);
        assert_eq!(of(&closed, "The answer"), Begun::Text);
        assert_eq!(of(&format!("{start}<think>\n"), "Hm, let"), Begun::MoreReasoning);
    }
}
