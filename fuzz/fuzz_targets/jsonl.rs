//! A line of a batch input: refused with a message, or requests for the engine.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use model_families::EMBEDDED;
use moe_cli::batch::check_line;
use moe_engine::chat::ChatTemplate;
use moe_engine::tokenizer::Tokenizer;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::from_bytes(EMBEDDED.tokenizer).expect("its tokenizer")
});

static TEMPLATE: LazyLock<Option<ChatTemplate>> = LazyLock::new(|| {
    let config = r#"{"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"}"#;
    ChatTemplate::from_tokenizer_config(config.as_bytes()).expect("a template")
});

fuzz_target!(|line: &[u8]| {
    match check_line(line, &TOKENIZER, TEMPLATE.as_ref(), 512) {
        Ok(prompts) => assert!(prompts > 0),
        Err(message) => assert!(!message.is_empty()),
    }
});
