//! What a structured output must follow, compiled as for a request: refused with a message, or a grammar. The first
//! byte says whether the rest is a JSON schema, a regular expression, a list of choices (lines) or a Lark grammar.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use moe_engine::structured::StructuredOutput;
use moe_engine::tokenizer::Tokenizer;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::bytes().expect("the tokenizer of bytes"));

// A panic of the library that compiles grammars is an error of the request. libFuzzer's hook would end the process at
// the panic; a panic that is not caught still ends it.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |bytes: &[u8]| {
    let Some((kind, text)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let output = match kind % 4 {
        0 => StructuredOutput::JsonSchema(text.into()),
        1 => StructuredOutput::Regex(text.into()),
        2 => StructuredOutput::Choice(text.lines().map(str::to_string).collect()),
        _ => StructuredOutput::Grammar(text.into()),
    };
    if let Err(e) = output.check(Some(&TOKENIZER)) {
        assert!(!e.reason.is_empty(), "{e}");
    }
});
