//! A `tokenizer.json`: refused with a message, or a tokenizer that turns text into ids and back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_engine::tokenizer::Tokenizer;

// The library of the tokenizer panics over some files, which `Tokenizer` turns into errors. libFuzzer's hook would end
// the process at the panic; a panic that `Tokenizer` lets through still ends it.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |bytes: &[u8]| {
    match Tokenizer::from_bytes(bytes) {
        Ok(tokenizer) => {
            for text in ["", "a", "Hello, wörld \u{1F600} 12", "<|im_start|>a</think>"] {
                if let Ok(ids) = tokenizer.encode(text) {
                    let _ = tokenizer.decode_with(&ids, false).map_err(|e| e.to_string());
                }
            }
        }
        Err(e) => assert!(!format!("{e:#}").is_empty()),
    }
});
