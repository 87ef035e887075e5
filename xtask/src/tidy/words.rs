//! Words that make a reader read a sentence twice. They are refused in pages and in comments, because they hide what
//! the sentence is about: `beside` a file can mean in its folder or in its name. Text between backquotes is code and
//! may say anything.

/// A word, or several in a row, with what to write in its place.
pub struct Word {
    pub banned: &'static str,
    pub instead: &'static str,
}

pub const WORDS: &[Word] = &[
    Word { banned: "door", instead: "name the function or the check" },
    Word { banned: "doors", instead: "name the functions or the checks" },
    Word { banned: "whoever", instead: "name the caller, the thread or the rank" },
    Word { banned: "those of", instead: "repeat the noun" },
    Word { banned: "so many", instead: "write the number, or `that many`" },
    Word { banned: "lie", instead: "write `are`, `are stored` or `follow`" },
    Word { banned: "lies", instead: "write `is`, `is stored` or `follows`" },
    Word { banned: "beside", instead: "write `next to`, `in addition to` or `in the same folder as`" },
    Word { banned: "behind", instead: "write `after`" },
];

/// The banned words in lines of prose, each line with its number; a sentence may go on in the next line.
pub fn banned<'a>(lines: impl IntoIterator<Item = (usize, &'a str)>) -> Vec<(usize, &'static Word)> {
    let spoken = spoken(lines);
    let starts_with = |at: usize, word: &Word| {
        word.banned
            .split(' ')
            .enumerate()
            .all(|(next, part)| spoken.get(at + next).is_some_and(|s| s.word == part))
    };
    let at = |at: usize| WORDS.iter().find(|word| starts_with(at, word)).map(|word| (spoken[at].line, word));
    (0..spoken.len()).filter_map(at).collect()
}

/// A word of prose in lower case. A character that ends a phrase, such as a comma, is an empty word.
struct Spoken {
    line: usize,
    word: String,
}

fn spoken<'a>(lines: impl IntoIterator<Item = (usize, &'a str)>) -> Vec<Spoken> {
    let mut spoken: Vec<Spoken> = Vec::new();
    let mut in_code = false;
    let mut next = 0;
    for (line, text) in lines {
        // A backquote without a partner ends with its paragraph.
        in_code &= line == next && !text.trim().is_empty();
        next = line + 1;
        let mut goes_on = false;
        for c in text.chars() {
            in_code ^= c == '`';
            let in_word = !in_code && (c.is_alphanumeric() || c == '_' || (goes_on && c == '-'));
            match spoken.last_mut().filter(|_| goes_on && in_word) {
                Some(last) => last.word.extend(c.to_lowercase()),
                None if in_word => spoken.push(Spoken { line, word: c.to_lowercase().collect() }),
                None if c.is_whitespace() => {}
                None => spoken.push(Spoken { line, word: String::new() }),
            }
            goes_on = in_word;
        }
    }
    spoken
}

#[cfg(test)]
mod tests {
    use super::banned;

    fn words(lines: &[&str]) -> Vec<(usize, &'static str)> {
        banned(lines.iter().copied().enumerate())
            .into_iter()
            .map(|(line, word)| (line, word.banned))
            .collect()
    }

    #[test]
    fn banned_words_are_found_in_any_case_and_across_lines() {
        assert_eq!(words(&["Behind it, one lies."]), [(0, "behind"), (0, "lies")]);
        assert_eq!(words(&["rows and those", "of the rank"]), [(0, "those of")]);
        assert_eq!(words(&["so many"]), [(0, "so many")]);
    }

    #[test]
    fn other_words_and_code_are_no_faults() {
        assert_eq!(words(&["indoor behinds belief_lies", "`door` and `those of", "it` beside_x"]), []);
        assert_eq!(words(&["of those, of which; so. Many", "next-door lies-in"]), []);
    }

    #[test]
    fn a_single_backquote_hides_one_paragraph() {
        assert_eq!(words(&["a ` door", "door", "", "door"]), [(3, "door")]);
    }
}
