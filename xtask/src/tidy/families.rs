//! Only the crate with the table of families may name a model family. The names are read from the sources of that
//! crate, because this crate must not link candle.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

/// The sources of the crate with the families.
const HOME: &str = "models/families/src/";
/// The code that may not name any family.
const ELSEWHERE: [&str; 2] = ["crates/", "xtask/"];
/// Public tables: of routings and of sparse blocks by `model_type`, of the forms of answers by vLLM's names, and of
/// families by their names in GGUF files.
const TABLES: [&str; 4] = [
    "crates/moe-router/src/hf/",
    "crates/moe-layer/src/checkpoint/",
    "crates/moe-engine/src/chat/parsers.rs",
    "crates/model-runtime/src/checkpoint/gguf/architecture.rs",
];

/// Checks the files of the workspace.
///
/// # Errors
/// No family in the sources.
pub fn check(root: &Path, files: &[String], faults: &mut Vec<String>) -> Result<()> {
    let read = |file: &String| fs::read_to_string(root.join(file)).unwrap_or_default();
    let home = files.iter().filter(|file| file.starts_with(HOME));
    let names: Vec<String> = home.flat_map(|file| names(&read(file))).collect();
    ensure!(!names.is_empty(), "no family in {HOME}: expected rows with `model_type: \"..\"`");
    for file in files.iter().filter(|file| is_product(file)) {
        faults.extend(fault(file, &read(file), &names));
    }
    Ok(())
}

/// Code of the product, without tests.
fn is_product(file: &str) -> bool {
    let is_code = file.ends_with(".rs") && file.contains("/src/") && !file.ends_with("tests.rs");
    is_code
        && ELSEWHERE.iter().any(|folder| file.starts_with(folder))
        && !TABLES.iter().any(|table| file.starts_with(table))
}

/// The names of the families whose rows are in this text: their `model_type` and the class without its ending.
fn names(text: &str) -> Vec<String> {
    let value = |line: &str, key: &str| {
        let quoted = line.trim().strip_prefix(key)?.trim().strip_prefix('"')?.strip_suffix("\",")?;
        Some(quoted.trim_end_matches("ForCausalLM").to_string())
    };
    let keys = ["model_type:", "architecture:"];
    text.lines().flat_map(|line| keys.into_iter().filter_map(move |key| value(line, key))).collect()
}

/// The first line of code that names a family.
fn fault(file: &str, text: &str, names: &[String]) -> Option<String> {
    let is_code = |line: &str| !line.trim_start().starts_with("//");
    let code = text.lines().enumerate().take_while(|(_, line)| *line != "#[cfg(test)]");
    let named = |line: &str| names.iter().find(|name| line.contains(name.as_str()));
    let found = code.filter(|(_, line)| is_code(line)).find_map(|(at, line)| Some((at, named(line)?)));
    found.map(|(at, name)| {
        format!("{file}:{}: names the family {name}; ask the table of families ({HOME}lib.rs)", at + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::{fault, is_product, names};

    #[test]
    fn rows_have_names() {
        let text =
            "const F: X = X {\n    model_type: \"a_moe\",\n    architecture: \"AMoeForCausalLM\",\n};\n";
        assert_eq!(names(text), ["a_moe", "AMoe"]);
        assert!(names("let model_type = 1;\n/// The `model_type: \"x\"`.\n").is_empty());
    }

    #[test]
    fn code_that_names_a_family_is_a_fault() {
        let names = ["a_moe".to_string(), "AMoe".to_string()];
        let told = fault("crates/x/src/y.rs", "//! a_moe\nlet x = \"a_moe\";\n", &names).unwrap();
        assert!(told.contains("crates/x/src/y.rs:2: names the family a_moe"), "{told}");
        assert!(fault("f", "use x::AMoeConfig;\n", &names).is_some());
        assert_eq!(
            fault("f", "/// As a_moe.\nlet x = 1;\n#[cfg(test)]\nmod t { \"a_moe\" }\n", &names),
            None
        );
    }

    #[test]
    fn tests_fixtures_and_routings_may_name_them() {
        for file in ["crates/x/src/lib.rs", "xtask/src/parity.rs", "crates/x/src/a/b.rs"] {
            assert!(is_product(file), "{file}");
        }
        for file in [
            "crates/x/tests/it.rs",
            "crates/x/src/tests.rs",
            "crates/moe-router/src/hf/mod.rs",
            "tests/src/lib.rs",
        ] {
            assert!(!is_product(file), "{file}");
        }
    }
}
