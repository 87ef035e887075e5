//! `cargo xtask tidy`: no message of a library names a flag of a command line.
//!
//! Libraries name settings as their structs do, in backticks. The programs have tables that turn these names into flags
//! (`crates/moe-cli/src/setting_names.rs`, `crates/moe-quantize/src/main.rs`).

/// Programs, and flags of other programs that a message may name.
const PROGRAMS: [&str; 2] = ["crates/moe-cli/", "crates/moe-quantize/src/main.rs"];
const OF_OTHERS: [&str; 1] = ["--ntasks"];

/// The first line of product code of a library that names a flag in a string.
pub fn fault(file: &str, text: &str) -> Option<String> {
    let is_library = (file.starts_with("crates/") && file.split('/').nth(2) == Some("src"))
        || file.starts_with("models/families/src/");
    let is_test = file.ends_with("tests.rs") || file.contains("/tests/");
    if !is_library
        || !file.ends_with(".rs")
        || is_test
        || PROGRAMS.iter().any(|program| file.starts_with(program))
    {
        return None;
    }
    let product = text.lines().take_while(|line| line.trim() != "#[cfg(test)]");
    let (line, flag) = product.enumerate().find_map(|(at, line)| Some((at + 1, flag(line)?)))?;
    Some(format!(
        "{file}:{line}: names the flag {flag}; name the setting as its struct does, in backticks, and give its flag in \
         crates/moe-cli/src/setting_names.rs"
    ))
}

/// A flag in a line of code that is no comment: two hyphens and a letter.
fn flag(line: &str) -> Option<&str> {
    if line.trim_start().starts_with("//") {
        return None;
    }
    let starts = line.match_indices("--").map(|(at, _)| at);
    let flags = starts.filter_map(|at| {
        let before = line[..at].chars().next_back();
        let is_start = before.is_none_or(|c| c.is_whitespace() || "\"`(".contains(c));
        let name = line[at + 2..].find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
        let end = name.map_or(line.len(), |len| at + 2 + len);
        (is_start && end > at + 3).then(|| &line[at..end])
    });
    flags.into_iter().find(|flag| !OF_OTHERS.contains(flag))
}

#[cfg(test)]
mod tests {
    use super::fault;

    #[test]
    fn a_library_names_no_flag() {
        let code = "//! `--fine`\nbail!(\"--max-num-seqs 0: expected at least 1\")\n";
        let found = fault("crates/a/src/b.rs", code).unwrap();
        assert!(found.starts_with("crates/a/src/b.rs:2: names the flag --max-num-seqs;"), "{found}");
        for library in ["models/families/src/b.rs", "crates/moe-quantize/src/plan.rs"] {
            assert!(fault(library, code).is_some(), "{library}");
        }
        for file in [
            "crates/moe-cli/src/b.rs",
            "crates/moe-quantize/src/main.rs",
            "crates/a/tests/b.rs",
            "models/moe/src/main.rs",
            "crates/a/src/b.txt",
        ] {
            assert_eq!(fault(file, code), None, "{file}");
        }
        for allowed in [
            "x -= -1; // --y\n",
            "let rows = a--b;\n",
            "\"(--ntasks=1)\"\n",
            "\"set `max_num_seqs`\"\n#[cfg(test)]\nmod tests { const A: &str = \"--tp\"; }\n",
        ] {
            assert_eq!(fault("crates/a/src/b.rs", allowed), None, "{allowed}");
        }
    }
}
