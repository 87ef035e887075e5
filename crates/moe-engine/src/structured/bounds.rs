//! Limits how deep the compilation of a grammar may recurse. The limit is checked before the compilation begins,
//! because a full stack ends the process.
//!
//! llguidance recurses once for each rule of a Lark grammar that another rule names. The number of rules and groups
//! therefore bounds the depth, in every order of references. The regex-syntax crate limits how deep regular expressions
//! nest. The module `schema` limits JSON schemas.

use llguidance::api::TopLevelGrammar;

/// The largest number of levels. The frames of a level take a few kilobytes, and [`super::compiler::STACK`] has room
/// for more levels than this.
const MAX_LEVELS: usize = 30_000;
/// The most character classes that may hold thousands of code points, at 150 kB each.
const MAX_WIDE_CLASSES: usize = 2_000;

/// Refuses a grammar that may nest too deep or grow too large.
pub(super) fn check(grammar: &TopLevelGrammar) -> Result<(), String> {
    for part in &grammar.grammars {
        if let Some(text) = part.lark_grammar.as_deref() {
            let levels = lark_levels(text);
            if levels > MAX_LEVELS {
                return Err(format!("it has {levels} rules and groups, and at most {MAX_LEVELS} are taken"));
            }
            let classes = wide_classes(text);
            if classes > MAX_WIDE_CLASSES {
                return Err(format!(
                    "it has {classes} character classes of many code points ([^..], \\w, \\p), and at most \
                     {MAX_WIDE_CLASSES} are taken"
                ));
            }
        }
    }
    Ok(())
}

/// Returns an upper bound of the rules and groups of a text. A grammar of one regular expression has one rule.
fn lark_levels(text: &str) -> usize {
    match text.strip_prefix("start: /") {
        Some(rest) if !rest.contains('\n') => 1,
        _ => text.bytes().filter(|byte| matches!(byte, b':' | b'(' | b'[')).count(),
    }
}

/// Counts the character classes of a text that may hold thousands of code points.
fn wide_classes(text: &str) -> usize {
    let wide = |pair: &&[u8]| matches!(pair, [b'[', b'^'] | [b'\\', b'w' | b'W' | b'D' | b'S' | b'p' | b'P']);
    text.as_bytes().windows(2).filter(wide).count()
}
