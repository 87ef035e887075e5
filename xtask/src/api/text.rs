//! Tokens as text, on one line. It depends on nothing but the tokens, so it is the same after every formatting.

use quote::ToTokens;

/// The blanks of tokens that a person would not write; later rows see what the rows before have left.
const BLANKS: &[(&str, &str)] = &[
    (" ::", "::"),
    (":: ", "::"),
    (" <", "<"),
    ("< ", "<"),
    (" >", ">"),
    (" ,", ","),
    (",>", ">"),
    (",)", ")"),
    (" :", ":"),
    (" ;", ";"),
    ("& ", "&"),
    ("* ", "*"),
    ("? ", "?"),
    ("! ", "!"),
    (" (", "("),
    (" [", "["),
    (" !", "!"),
    (",(", ", ("),
    ("->(", "-> ("),
    ("->[", "-> ["),
    (":(", ": ("),
    (":[", ": ["),
    (",[", ", ["),
    ("=(", "= ("),
    ("=[", "= ["),
    ("+(", "+ ("),
    ("mut[", "mut ["),
    ("mut(", "mut ("),
];

/// The text of some tokens.
pub fn text(tokens: &impl ToTokens) -> String {
    let text = tokens.to_token_stream().to_string();
    BLANKS.iter().fold(text, |text, (from, to)| text.replace(from, to)).trim_end_matches(',').to_string()
}
