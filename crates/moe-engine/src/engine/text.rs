//! The text of a choice: converts tokens into final pieces of text, and handles stop strings.

use crate::error::Result;

use crate::tokenizer::{TextStream, Tokenizer};

/// The text of a choice while it grows.
///
/// A text that may be the beginning of a stop string is held back until it is known that it is none.
pub(super) struct TextOutput {
    stream: TextStream,
    stop: Vec<String>,
    include_stop: bool,
    held: String,
}

impl TextOutput {
    pub fn new(stop: &[String], include_stop: bool, skip_special_tokens: bool) -> Self {
        let stream = TextStream::new().with_special_tokens(!skip_special_tokens);
        Self { stream, stop: stop.to_vec(), include_stop, held: String::new() }
    }

    /// Adds a token. Returns the text that has become final, and the stop string that ends it. `may_stop` is false
    /// while stop strings are still ignored.
    pub fn push(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
        may_stop: bool,
    ) -> Result<(String, Option<String>)> {
        self.held += &self.stream.push(tokenizer, id)?;
        if may_stop && let Some(stop) = self.cut_at_stop() {
            return Ok((std::mem::take(&mut self.held), Some(stop)));
        }
        let keep = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Ok((std::mem::replace(&mut self.held, rest), None))
    }

    /// The rest of the text.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.held += &self.stream.finish(tokenizer)?;
        Ok(std::mem::take(&mut self.held))
    }

    /// Cuts the held text at the first stop string, in their order, that it contains.
    fn cut_at_stop(&mut self) -> Option<String> {
        let (at, stop) = self.stop.iter().find_map(|stop| Some((self.held.find(stop.as_str())?, stop)))?;
        self.held.truncate(if self.include_stop { at + stop.len() } else { at });
        Some(stop.clone())
    }
}

/// Number of bytes at the end of `text` that are the beginning of `stop` (less than all of it).
fn overlap(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    let ends_with = |n: &usize| text.as_bytes().ends_with(&stop.as_bytes()[..*n]);
    // Both are UTF-8, so a match that begins at a character of `stop` begins at one of `text`.
    (1..=longest).rev().find(ends_with).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(text: &str, stop: &[&str], include: bool) -> (String, Option<String>, usize) {
        let tokenizer = Tokenizer::bytes().unwrap();
        let stop: Vec<String> = stop.iter().map(|s| s.to_string()).collect();
        let mut output = TextOutput::new(&stop, include, true);
        let mut all = String::new();
        for (i, id) in tokenizer.encode(text).unwrap().into_iter().enumerate() {
            let (piece, stopped) = output.push(&tokenizer, id, true).unwrap();
            all += &piece;
            if stopped.is_some() {
                return (all, stopped, i + 1);
            }
        }
        let rest = output.finish(&tokenizer).unwrap();
        (all + &rest, None, text.len())
    }

    #[test]
    fn a_stop_string_ends_the_text() {
        assert_eq!(pieces("abcEND more", &["END"], false), ("abc".into(), Some("END".into()), 6));
        assert_eq!(pieces("abcEND more", &["END"], true), ("abcEND".into(), Some("END".into()), 6));
        assert_eq!(pieces("aEaENaEND", &["END", "never"], false).0, "aEaENa");
        assert_eq!(pieces("aEN", &["END"], false), ("aEN".into(), None, 3));
        assert_eq!(pieces("é€x", &["€"], false), ("é".into(), Some("€".into()), 5));
    }

    #[test]
    fn text_is_held_only_while_it_may_stop() {
        let tokenizer = Tokenizer::bytes().unwrap();
        let stop = ["ab".to_string()];
        let mut output = TextOutput::new(&stop, false, true);
        let ids = tokenizer.encode("xaac").unwrap();
        let mut push = |id| output.push(&tokenizer, id, true).unwrap().0;
        assert_eq!([push(ids[0]), push(ids[1]), push(ids[2]), push(ids[3])], ["x", "", "a", "ac"]);
    }

    proptest! {
        #[test]
        fn it_is_the_text_before_the_first_stop(text in "[abc]{0,20}", stop in prop::collection::vec("[abc]{1,4}", 0..3)) {
            let refs: Vec<&str> = stop.iter().map(String::as_str).collect();
            let (got, stopped, _) = pieces(&text, &refs, false);
            // The definition: grow the text by one character; the first stop string in it cuts it.
            let mut want = (text.clone(), None);
            for end in 0..=text.len() {
                let hit = stop.iter().find_map(|s| text[..end].find(s.as_str()).map(|at| (at, s.clone())));
                if let Some((at, s)) = hit {
                    want = (text[..at].to_string(), Some(s));
                    break;
                }
            }
            prop_assert_eq!((got, stopped), want);
        }
    }
}
