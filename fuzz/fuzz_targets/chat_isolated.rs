//! A chat template and, after a NUL, what the user says, rendered by a process of its own: this
//! program again. Whatever the template asks for, there is an answer, and an honest template that
//! the same process may render next is not disturbed. The fuzzer sees no coverage of that process.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_engine::chat::{self, ChatFiles, ChatRequest, ChatTemplate, RENDER_COMMAND};
use moe_fuzz::split;

fn serve_if_asked() {
    if std::env::args().nth(1).is_some_and(|argument| argument == RENDER_COMMAND) {
        std::process::exit(i32::from(chat::serve().is_err()));
    }
}

fuzz_target!(init: serve_if_asked(), |bytes: &[u8]| {
    let (template, said) = split(bytes);
    let Ok(source) = std::str::from_utf8(template) else { return };
    let config = serde_json::json!({"chat_template": [
        {"name": "tool_use", "template": source},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]});
    let files = ChatFiles::from_tokenizer_config(config.to_string().as_bytes()).expect("templates");
    let program = chat::this_program().expect("this program");
    let template = ChatTemplate::isolated(files, program).expect("two templates");
    let said = String::from_utf8_lossy(said).into_owned();
    let plain = ChatRequest {
        messages: vec![serde_json::json!({"role": "user", "content": said})],
        ..ChatRequest::default()
    };
    let with_tools = ChatRequest { tools: Some(Vec::new()), ..plain.clone() };
    let _ = template.render(&with_tools).map_err(|e| e.to_string());
    // Unless the template cannot even be compiled, which takes the process down each time.
    if let Ok(prompt) = template.render(&plain) {
        assert_eq!(prompt, said);
    }
});
