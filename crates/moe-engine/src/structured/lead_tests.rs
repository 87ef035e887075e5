//! Tests of reasoning before a text, token by token.

use super::output::Reasoning;
use super::{Constraint, Grammars, StructuredOutput};
use crate::chat::ReasoningParser;
use crate::tokenizer::Tokenizer;

/// Returns a tokenizer of all bytes and of some longer tokens that contain parts of the tags.
fn tokenizer() -> Tokenizer {
    with_tokens(&["</think>", "<think>", "k>{", ">ab", "\n\n", "\n\n\n"], false)
}

fn with_tokens(added: &[&str], special: bool) -> Tokenizer {
    let bytes = Tokenizer::bytes().unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&bytes.library.to_string(false).unwrap()).unwrap();
    json["added_tokens"] = (added.iter().zip(256..))
        .map(|(text, id)| {
            serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        })
        .collect();
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

const OPEN: bool = true;
const POSSIBLE: bool = false;

struct Choice {
    tokenizer: Tokenizer,
    constraint: Constraint,
    tokens: Vec<u32>,
}

impl Choice {
    fn new(open: bool, regex: &str) -> Self {
        Self::of("qwen3", tokenizer(), open, regex)
    }

    fn of(parser: &str, tokenizer: Tokenizer, open: bool, regex: &str) -> Self {
        let reasoning = Reasoning { parser: ReasoningParser::named(parser).unwrap(), open };
        let grammar = Grammars::new(tokenizer.clone()).compile(&StructuredOutput::Regex(regex.into()));
        let constraint = Constraint::after_reasoning(Some(reasoning), grammar.unwrap());
        Self { tokenizer, constraint, tokens: Vec::new() }
    }

    fn id(&self, text: &str) -> u32 {
        match self.tokenizer.token_to_id(text) {
            Some(id) => id,
            None => self.tokenizer.encode(text).unwrap()[0],
        }
    }

    fn allows(&mut self, text: &str) -> bool {
        let id = self.id(text);
        let end = self.id("$");
        let Some(mask) = self.constraint.mask(&self.tokens, &[end], &[end]).unwrap() else { return true };
        mask.words().get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Writes a text byte by byte.
    fn write(&mut self, text: &str) -> &mut Self {
        for c in text.chars() {
            self.token(&c.to_string());
        }
        self
    }

    fn token(&mut self, text: &str) -> &mut Self {
        assert!(self.allows(text), "{text:?} after {:?}", self.tokenizer.decode(&self.tokens));
        self.tokens.push(self.id(text));
        self
    }

    fn is_complete(&mut self) -> bool {
        self.constraint.is_complete(&self.tokens).unwrap()
    }
}

#[test]
fn reasoning_is_free_up_to_its_end() {
    for close in [&["</think>"][..], &["<", "/", "t", "h", "i", "n", "k", ">"]] {
        let mut choice = Choice::new(OPEN, "yes|no");
        assert!(!choice.allows("$"), "the end of the text is not free");
        choice.write("yes, {\"a\"} </thin> <</thi");
        assert!(!choice.is_complete());
        for token in close {
            choice.token(token);
        }
        assert!(choice.allows("\n") && choice.allows("\n\n") && !choice.allows("\n\n\n"));
        assert!(choice.allows("y") && !choice.allows("x") && !choice.allows("$"));
        choice.write("\n\n");
        assert!(!choice.allows("\n"));
        assert!(choice.write("yes").is_complete());
    }
}

#[test]
fn a_token_that_goes_on_after_the_tag_is_excluded() {
    let mut choice = Choice::new(OPEN, "ab|x");
    assert!(choice.allows("k>{") && choice.allows(">ab"), "no tag has begun");
    choice.write("</thin");
    assert!(!choice.allows("k>{") && choice.allows("k") && choice.allows(">ab"));
    choice.write("k");
    assert!(!choice.allows(">ab") && choice.allows(">") && choice.allows("k>{"));
}

#[test]
fn the_model_may_open_reasoning_itself() {
    let mut choice = Choice::new(POSSIBLE, "[a-z]+!|<b>");
    assert!(choice.allows("<think>") && choice.allows("<") && choice.allows("a") && choice.allows("\n"));
    assert!(!choice.allows("A") && !choice.allows("</think>") && !choice.allows("$"));
    let mut text = Choice::new(POSSIBLE, "[a-z]+!|<b>");
    assert!(text.write("ab").allows("!") && !text.allows("<"));
    assert!(text.write("!").is_complete());
    // The tag and the text begin with the same byte.
    let mut tag = Choice::new(POSSIBLE, "[a-z]+!|<b>");
    assert!(tag.write("<").allows("t") && tag.allows("b") && !tag.allows("c"));
    assert!(tag.write("b>").is_complete());
    for open in [&["<think>"][..], &["\n", "<", "t", "h", "i", "n", "k", ">"]] {
        let mut choice = Choice::new(POSSIBLE, "[a-z]+!|<b>");
        for token in open {
            choice.token(token);
        }
        choice.write("\nAny 5 ").token("</think>").token("\n\n");
        assert!(choice.allows("<") && !choice.allows("A"));
        assert!(choice.write("ok!").is_complete());
    }
}

/// A sequence that is computed again passes all its tokens at once.
#[test]
fn tokens_may_come_in_any_portions() {
    let mut one = Choice::new(POSSIBLE, "yes|no");
    one.token("<think>").write("Hm").token("</think>").write("\nye");
    let mut all = Choice::new(POSSIBLE, "yes|no");
    all.tokens = one.tokens.clone();
    assert!(all.allows("s") && !all.allows("e"));
    assert!(all.write("s").is_complete());
}

/// The tags of channels are special tokens, and the header of the text comes before the text.
#[test]
fn the_text_comes_in_the_channel_of_the_text() {
    let tags = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"];
    let mut choice = Choice::of("openai_gptoss", with_tokens(&tags, true), OPEN, "yes|no");
    choice.token("<|channel|>").write("analysis").token("<|message|>").write("Hm, final").token("<|end|>");
    choice.token("<|start|>").write("assistant").token("<|channel|>");
    assert!(choice.write("fina").allows("x") && !choice.is_complete());
    choice.write("l");
    assert!(choice.allows("<|message|>") && !choice.allows("y") && !choice.allows(" "));
    choice.token("<|message|>");
    assert!(
        choice.allows("y") && !choice.allows("x") && !choice.allows("<|message|>") && !choice.allows("\n")
    );
    assert!(choice.write("yes").is_complete());
    // This tag contains its own beginning again.
    let mut twice = Choice::of("openai_gptoss", with_tokens(&tags, true), OPEN, "yes|no");
    twice.token("<|channel|>").write("fin").token("<|channel|>").write("final").token("<|message|>");
    assert!(twice.write("no").is_complete());
}

/// The reasoning ends at the tags of its own form only.
#[test]
fn every_form_of_tags_ends_in_its_own() {
    for parser in crate::chat::REASONING_PARSERS.iter().filter(|parser| !parser.channels) {
        let mut choice = Choice::of(parser.name, tokenizer(), OPEN, "yes|no");
        choice.write("Hm, yes").write(parser.close).write("\n\nyes");
        assert!(choice.is_complete(), "{}", parser.name);
    }
}
