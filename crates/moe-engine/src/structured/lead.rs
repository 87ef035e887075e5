//! Reasoning in front of a text that follows a grammar: free up to `</think>`, and the grammar after it.
//!
//! It is read token by token, as bytes: the tags may be tokens of their own or come in any pieces.

use llguidance::toktrie::{SimpleVob, TokEnv, TokTrie};

use super::output::Reasoning;
use crate::chat::{END_THINK, THINK};

/// Line ends after the closing tag that are no part of the text, as models write them.
const GAP: usize = 2;
/// White space before the opening tag.
const BLANKS: usize = 4;

/// How far a choice has come.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stage {
    /// White space and the beginning of the opening tag.
    Start(Vec<u8>),
    /// Reasoning that ends in so many bytes of the closing tag.
    Reasoning(usize),
    /// Behind the closing tag and so many line ends.
    Gap(usize),
    /// The text, from this token on.
    Text(usize),
}

/// What an opening can become.
enum Opening<'a> {
    /// Nothing else than reasoning or a text of the grammar.
    Partial,
    /// The tag is complete; this follows it.
    Whole(&'a [u8]),
    /// A text of the grammar.
    None,
}

impl Stage {
    pub fn new(reasoning: Option<Reasoning>) -> Self {
        match reasoning {
            None => Self::Text(0),
            Some(Reasoning::Possible) => Self::Start(Vec::new()),
            Some(Reasoning::Open) => Self::Reasoning(0),
        }
    }

    /// The stage after one more token, the one with number `at`.
    pub fn after(self, at: usize, token: &[u8]) -> Self {
        match self {
            // Special tokens open nothing.
            Self::Start(_) if text(token).is_empty() => Self::Text(0),
            Self::Start(mut seen) => {
                seen.extend(text(token));
                match opening(&seen) {
                    Opening::Partial => Self::Start(seen),
                    Opening::Whole(rest) => reasoning(0, rest),
                    Opening::None => Self::Text(0),
                }
            }
            Self::Reasoning(tail) => reasoning(tail, text(token)),
            Self::Gap(lines) if is_lines(token) && lines + token.len() <= GAP => {
                Self::Gap(lines + token.len())
            }
            Self::Gap(_) => Self::Text(at),
            Self::Text(begin) => Self::Text(begin),
        }
    }
}

/// The stage after more of the reasoning, which ended in `tail` bytes of the closing tag.
fn reasoning(mut tail: usize, more: &[u8]) -> Stage {
    let tag = END_THINK.as_bytes();
    for (i, &byte) in more.iter().enumerate() {
        tail = if byte == tag[tail] { tail + 1 } else { usize::from(byte == tag[0]) };
        if tail == tag.len() {
            let lines = more[i + 1..].iter().filter(|byte| **byte == b'\n').count();
            return Stage::Gap(lines.min(GAP));
        }
    }
    Stage::Reasoning(tail)
}

fn opening(seen: &[u8]) -> Opening<'_> {
    let tag = THINK.as_bytes();
    let rest = seen.trim_ascii_start();
    match rest.strip_prefix(tag) {
        Some(behind) => Opening::Whole(behind),
        None if tag.starts_with(rest) && seen.len() - rest.len() <= BLANKS => Opening::Partial,
        None => Opening::None,
    }
}

fn is_lines(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| *byte == b'\n')
}

/// The text of a token. Of special tokens only the tags are text.
fn text(token: &[u8]) -> &[u8] {
    match token.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]) {
        Some(content) if content == THINK.as_bytes() || content == END_THINK.as_bytes() => content,
        Some(_) => &[],
        None => token,
    }
}

/// What the tokens of a vocabulary do to the tags.
pub(super) struct Tags {
    tokens: TokEnv,
    /// All tokens.
    all: SimpleVob,
    /// Tokens that end the tag and go on with more than line ends, by how much of the tag was there before.
    beyond: Vec<Vec<u32>>,
    /// Tokens of nothing but line ends.
    lines: Vec<u32>,
}

impl Tags {
    pub fn new(tokens: TokEnv) -> Self {
        let trie = tokens.tok_trie();
        let ids = || 0..trie.vocab_size() as u32;
        let mut all = trie.alloc_token_set();
        ids().for_each(|id| all.allow_token(id));
        let lines = ids().filter(|&id| is_lines(trie.token(id))).collect();
        let tag = END_THINK.as_bytes();
        let closes = |id: &u32| trie.token(*id).contains(&b'>');
        let closing: Vec<u32> = ids().filter(closes).collect();
        let goes_beyond = |tail: usize, id: u32| {
            let written = [&tag[..tail], text(trie.token(id))].concat();
            let end = written.windows(tag.len()).position(|window| window == tag);
            end.is_some_and(|at| written[at + tag.len()..].iter().any(|byte| *byte != b'\n'))
        };
        let beyond = (0..tag.len())
            .map(|tail| closing.iter().copied().filter(|&id| goes_beyond(tail, id)).collect())
            .collect();
        Self { all, beyond, lines, tokens }
    }

    /// The bytes of a token; special ones are marked.
    pub fn token(&self, id: u32) -> &[u8] {
        self.tokens.tok_trie().token(id)
    }

    /// The tokens that reasoning may go on with: all but `ends`, and those that would write into the text.
    pub fn of_reasoning(&self, tail: usize, ends: &[u32]) -> SimpleVob {
        let mut mask = self.all.clone();
        let known = ends.iter().filter(|id| (**id as usize) < mask.len()).copied().collect::<Vec<_>>();
        known.iter().chain(&self.beyond[tail]).for_each(|&id| mask.disallow_token(id));
        mask
    }

    /// Adds the tokens that go on with an opening tag.
    pub fn allow_opening(&self, seen: &[u8], mask: &mut SimpleVob) {
        let opens = |id: &u32| {
            let token = text(self.token(*id));
            let first = token
                .first()
                .is_some_and(|byte| byte.is_ascii_whitespace() || THINK.as_bytes().contains(byte));
            first
                && match opening(&[seen, token].concat()) {
                    Opening::Partial => true,
                    Opening::Whole(rest) => rest.iter().all(|byte| *byte == b'\n'),
                    Opening::None => false,
                }
        };
        self.allow(mask, (0..self.all.len() as u32).filter(opens));
    }

    /// Adds the line ends that may follow the closing tag and `lines` others.
    pub fn allow_gap(&self, lines: usize, mask: &mut SimpleVob) {
        let fits = |id: &u32| lines + self.token(*id).len() <= GAP;
        self.allow(mask, self.lines.iter().copied().filter(fits));
    }

    fn allow(&self, mask: &mut SimpleVob, ids: impl Iterator<Item = u32>) {
        if mask.len() < self.all.len() {
            mask.resize(self.all.len());
        }
        ids.for_each(|id| mask.allow_token(id));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Constraint, Grammars, StructuredOutput};
    use super::*;
    use crate::tokenizer::Tokenizer;

    /// Bytes, and tokens of several with the tags in them.
    fn tokenizer() -> Tokenizer {
        let bytes = Tokenizer::bytes().unwrap();
        let mut json: serde_json::Value =
            serde_json::from_str(&bytes.library.to_string(false).unwrap()).unwrap();
        let added = ["</think>", "<think>", "k>{", ">ab", "\n\n", "\n\n\n"];
        json["added_tokens"] = (added.iter().zip(256..))
            .map(|(text, id)| {
                serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": false})
            })
            .collect();
        Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
    }

    struct Choice {
        tokenizer: Tokenizer,
        constraint: Constraint,
        tokens: Vec<u32>,
    }

    impl Choice {
        fn new(reasoning: Reasoning, regex: &str) -> Self {
            let tokenizer = tokenizer();
            let grammar = Grammars::new(tokenizer.clone()).compile(&StructuredOutput::Regex(regex.into()));
            let constraint = Constraint::behind(Some(reasoning), grammar.unwrap());
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

        /// Writes text byte by byte.
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
            let mut choice = Choice::new(Reasoning::Open, "yes|no");
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
        let mut choice = Choice::new(Reasoning::Open, "ab|x");
        assert!(choice.allows("k>{") && choice.allows(">ab"), "no tag has begun");
        choice.write("</thin");
        assert!(!choice.allows("k>{") && choice.allows("k") && choice.allows(">ab"));
        choice.write("k");
        assert!(!choice.allows(">ab") && choice.allows(">") && choice.allows("k>{"));
    }

    #[test]
    fn the_model_may_open_reasoning_itself() {
        let mut choice = Choice::new(Reasoning::Possible, "[a-z]+!|<b>");
        assert!(choice.allows("<think>") && choice.allows("<") && choice.allows("a") && choice.allows("\n"));
        assert!(!choice.allows("A") && !choice.allows("</think>") && !choice.allows("$"));
        let mut text = Choice::new(Reasoning::Possible, "[a-z]+!|<b>");
        assert!(text.write("ab").allows("!") && !text.allows("<"));
        assert!(text.write("!").is_complete());
        // Both begin alike.
        let mut tag = Choice::new(Reasoning::Possible, "[a-z]+!|<b>");
        assert!(tag.write("<").allows("t") && tag.allows("b") && !tag.allows("c"));
        assert!(tag.write("b>").is_complete());
        for open in [&["<think>"][..], &["\n", "<", "t", "h", "i", "n", "k", ">"]] {
            let mut choice = Choice::new(Reasoning::Possible, "[a-z]+!|<b>");
            for token in open {
                choice.token(token);
            }
            choice.write("\nAny 5 ").token("</think>").token("\n\n");
            assert!(choice.allows("<") && !choice.allows("A"));
            assert!(choice.write("ok!").is_complete());
        }
    }

    /// A sequence that is computed again shows all its tokens at once.
    #[test]
    fn tokens_may_come_in_any_portions() {
        let mut one = Choice::new(Reasoning::Possible, "yes|no");
        one.token("<think>").write("Hm").token("</think>").write("\nye");
        let mut all = Choice::new(Reasoning::Possible, "yes|no");
        all.tokens = one.tokens.clone();
        assert!(all.allows("s") && !all.allows("e"));
        assert!(all.write("s").is_complete());
    }
}
