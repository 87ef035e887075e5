//! Comments and docstrings of all sources: no refused words (`words.rs`), and no lines that are wider than `MAX_WIDTH`.

use std::fs;
use std::path::Path;

use super::words::banned;

/// The largest number of characters in a line with a comment.
pub const MAX_WIDTH: usize = 120;

/// Folders and files whose comments break these rules today. No other may be added.
const NOT_YET: &[&str] = &[
    "crates/moe-kernels/src/cpu/quant/",
    "crates/moe-kernels/src/quant.rs",
    "crates/moe-kernels/src/quant/matrix.rs",
    "crates/moe-kernels/src/quant/packed.rs",
    "crates/moe-kernels/src/quant/packing.rs",
    "crates/moe-kernels/src/quant/scale_lines.rs",
    "crates/moe-kernels/src/scheme.rs",
];

/// Checks the comments and docstrings of all sources.
pub fn check(root: &Path, files: &[String], faults: &mut Vec<String>) {
    for file in files.iter().filter(|file| !NOT_YET.iter().any(|part| file.starts_with(part))) {
        let Some(language) = Language::of(file) else { continue };
        // git still lists a file that was deleted but not committed.
        let Ok(text) = fs::read_to_string(root.join(file)) else { continue };
        faults.extend(file_faults(file, &text, language));
    }
}

fn file_faults(file: &str, text: &str, language: Language) -> Vec<String> {
    let comments = language.comments(text);
    let widths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
    let wide = comments.iter().filter(|(line, _)| widths[line - 1] > MAX_WIDTH).map(|(line, _)| {
        format!("{file}:{line}: a comment ends at character {}, at most {MAX_WIDTH}", widths[line - 1])
    });
    let banned = banned(comments.iter().copied()).into_iter().map(|(line, word)| {
        format!("{file}:{line}: a comment has the word \"{}\"; {}", word.banned, word.instead)
    });
    wide.chain(banned).collect()
}

#[derive(Clone, Copy)]
enum Language {
    /// Comments after `//`: Rust and CUDA C++.
    Slashes,
    /// Comments after `#`, and docstrings.
    Python,
    /// Comments after `#`.
    Shell,
}

impl Language {
    fn of(file: &str) -> Option<Self> {
        match Path::new(file).extension()?.to_str()? {
            "rs" | "cu" | "cuh" => Some(Self::Slashes),
            "py" => Some(Self::Python),
            "sh" => Some(Self::Shell),
            _ => None,
        }
    }

    /// The lines with a comment, counted from 1, and the text after its marker.
    fn comments(self, text: &str) -> Vec<(usize, &str)> {
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
        match self {
            Self::Slashes => lines.filter_map(|(at, line)| Some((at, after(line, "//")?))).collect(),
            Self::Shell => lines.filter_map(|(at, line)| Some((at, after(line, "#")?))).collect(),
            Self::Python => python(lines),
        }
    }
}

/// The comment of a line: what follows a marker that is no part of a string.
fn after<'a>(line: &'a str, marker: &str) -> Option<&'a str> {
    let begins = |at: &usize| {
        let before = &line[..*at];
        before.chars().all(char::is_whitespace)
            || (before.ends_with([' ', '\t']) && before.matches('"').count().is_multiple_of(2))
    };
    let at = line.match_indices(marker).map(|(at, _)| at).find(begins)?;
    Some(line[at..].trim_start_matches(['/', '!', '#']))
}

fn python<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<(usize, &'a str)> {
    const QUOTES: &str = "\"\"\"";
    let mut comments = Vec::new();
    // Whether a string in three quotes goes on from the line before, and whether it is a docstring.
    let mut string = None;
    for (at, line) in lines {
        let is_docstring = string.unwrap_or(line.trim_start().starts_with(QUOTES));
        if is_docstring {
            comments.push((at, line));
        } else if string.is_none() {
            comments.extend(after(line, "#").map(|comment| (at, comment)));
        }
        if line.matches(QUOTES).count() % 2 == 1 {
            string = if string.is_none() { Some(is_docstring) } else { None };
        }
    }
    comments
}

#[cfg(test)]
mod tests {
    use super::{Language, MAX_WIDTH, file_faults};

    #[test]
    fn comments_end_at_code_and_strings() {
        let rust =
            "//! One.\nlet x = 1; // Two.\nlet y = \"a // b\";\nlet u = \"http://c\";\n    /// Three.\n";
        assert_eq!(Language::Slashes.comments(rust), [(1, " One."), (2, " Two."), (5, " Three.")]);
        let shell = "#!/bin/sh\necho $# # Two.\necho \"a # b\"\n";
        assert_eq!(Language::Shell.comments(shell), [(1, "bin/sh"), (2, " Two.")]);
    }

    #[test]
    fn docstrings_are_comments_and_other_strings_are_not() {
        let python =
            "\"\"\"One\ntwo.\"\"\"\nX = \"\"\"\n# a\n\"\"\"\n# Three.\ndef f():\n    \"\"\"Four.\"\"\"\n";
        let lines: Vec<usize> = Language::Python.comments(python).iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [1, 2, 6, 8]);
    }

    #[test]
    fn faults_name_the_line_and_what_to_write() {
        let text = format!("// A door.\nlet door = 1;\n// {}\n", "x".repeat(MAX_WIDTH));
        let faults = file_faults("a.rs", &text, Language::Slashes);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert_eq!(faults[0], "a.rs:3: a comment ends at character 123, at most 120");
        assert!(
            faults[1].starts_with("a.rs:1: a comment has the word \"door\"; name the function"),
            "{faults:?}"
        );
        assert!(
            file_faults("a.rs", &format!("let x = \"{}\";\n", "x".repeat(200)), Language::Slashes).is_empty()
        );
    }
}
