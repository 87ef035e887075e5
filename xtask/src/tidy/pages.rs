//! Pages of Markdown use no refused words (`words.rs`).

use std::fs;
use std::path::Path;

use super::prose::prose;
use super::words::banned;

/// Checks the pages of the workspace.
pub fn check(root: &Path, files: &[String], faults: &mut Vec<String>) {
    for file in files.iter().filter(|file| file.ends_with(".md")) {
        faults.extend(page_faults(file, &fs::read_to_string(root.join(file)).unwrap_or_default()));
    }
}

fn page_faults(file: &str, page: &str) -> Vec<String> {
    let prose = prose(page);
    let found = banned(prose.lines().enumerate().map(|(at, line)| (at + 1, line)));
    let fault = |line, banned, instead| format!("{file}:{line}: says \"{banned}\"; {instead}");
    found.into_iter().map(|(line, word)| fault(line, word.banned, word.instead)).collect()
}

#[cfg(test)]
mod tests {
    use super::page_faults;

    #[test]
    fn words_of_a_page_are_found_with_their_lines() {
        let faults = page_faults("a.md", "# A\n(Whoever) reads **those\nof** others\n");
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("a.md:2: says \"whoever\"; name the caller"), "{faults:?}");
        assert!(faults[1].starts_with("a.md:2: says \"those of\""), "{faults:?}");
    }

    #[test]
    fn other_words_and_code_are_no_faults() {
        let page =
            "Besides, families; outdoors, next-door `beside`, those, of, so manyfold\n```\nlies\n```\n";
        assert!(page_faults("a.md", page).is_empty());
    }
}
