//! A chat template and, after a NUL, the conversation that it renders.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_engine::chat::{ChatRequest, ChatTemplate};
use moe_fuzz::split;

fuzz_target!(|bytes: &[u8]| {
    let (template, chat) = split(bytes);
    let Ok(source) = std::str::from_utf8(template) else { return };
    let config = serde_json::json!({"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
    let template = match ChatTemplate::from_tokenizer_config(config.to_string().as_bytes()) {
        Ok(Some(template)) => template,
        Ok(None) => return,
        Err(e) => return drop(e.to_string()),
    };
    let chat: ChatRequest = match serde_json::from_slice(chat) {
        Ok(chat) => chat,
        Err(_) => ChatRequest {
            messages: vec![serde_json::json!({"role": "user", "content": " Hi\n"})],
            add_generation_prompt: true,
            ..ChatRequest::default()
        },
    };
    let _ = template.render(&chat).map_err(|e| e.to_string());
});
