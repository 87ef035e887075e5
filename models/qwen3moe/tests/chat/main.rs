//! `chat` through pipes: answers on stdout, everything else on stderr.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

mod answers;
mod commands;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/text")
}

fn start(flags: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
    command.arg("chat").args(["--model", fixture().to_str().unwrap()]).args(flags);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).env("RUST_BACKTRACE", "0");
    command.spawn().unwrap()
}

fn talk(flags: &[&str], input: &str) -> (Output, String) {
    let mut chat = start(flags);
    // A program that ends early closes its input.
    let _ = chat.stdin.take().unwrap().write_all(input.as_bytes());
    let output = chat.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    (output, stderr)
}

/// Short answers, the same each time.
const SHORT: [&str; 5] = ["--max-new-tokens", "6", "--temperature", "0", "--ignore-eos"];

/// The model's continuation of a rendered conversation.
fn continued(prompt: &str) -> String {
    let model = fixture();
    let output = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"))
        .args(["--model", model.to_str().unwrap(), "--prompt", prompt])
        .args(SHORT)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn user(text: &str) -> String {
    format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
}

#[test]
fn turns_continue_the_conversation() {
    let first = continued(&user("Hello"));
    let second = continued(&format!("{}{first}<|im_end|>\n{}", user("Hello"), user("Again")));
    let (output, stderr) = talk(&[&SHORT[..], &["--stats"]].concat(), "Hello\nAgain\n/reset\nHello\n");
    assert!(output.status.success(), "{stderr}");
    let want = format!("{first}\n{second}\n{first}\n");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), want);
    let cached = stderr.split("prompt tokens (").nth(1).and_then(|rest| rest.split(' ').next());
    assert_ne!(cached, Some("0"), "a turn computes only what is new: {stderr}");
}

#[test]
fn the_experts_of_the_whole_conversation_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let size = |input: &str| {
        let file = folder.path().join("routing.safetensors");
        let (output, stderr) =
            talk(&[&SHORT[..], &["--routed-experts-out", file.to_str().unwrap()]].concat(), input);
        assert!(output.status.success(), "{stderr}");
        (output.stdout, std::fs::metadata(file).unwrap().len())
    };
    let one = size("Hello\n");
    let two = size("Hello\nAgain\n");
    assert!(two.0.starts_with(&one.0) && two.1 > one.1, "{} and {} bytes", one.1, two.1);
}

#[test]
fn commands_are_not_messages() {
    let (output, stderr) =
        talk(&SHORT, "/help\n/nonsense\n/system Be kind.\nHello\\\nthere\n/history\n/quit\nunheard\n");
    assert!(output.status.success(), "{stderr}");
    let system = "<|im_start|>system\nBe kind.<|im_end|>\n";
    let answer = continued(&format!("{system}{}", user("Hello\nthere")));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{answer}\n"));
    for word in ["/reset", "no /nonsense", "system: Be kind.", "user: Hello\nthere", "assistant: "] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
}

#[test]
fn a_full_context_drops_the_oldest_turns() {
    let long = "word ".repeat(40);
    let flags = [&SHORT[..], &["--max-model-len", "256"]].concat();
    let (output, stderr) = talk(&flags, &format!("{long}\n{long}\n{long}\n{}\n", "word ".repeat(600)));
    assert_eq!(output.status.code(), Some(1), "a message without an answer: {stderr}");
    assert!(stderr.contains("1 messages have no answer"), "{stderr}");
    assert!(stderr.contains("the context of 256 tokens is full"), "{stderr}");
    assert!(stderr.contains("the message is too long"), "{stderr}");
}

#[test]
fn a_model_without_a_template_is_named() {
    let chat = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
        let output = command.arg("chat").args(flags).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let bare = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(fixture().join(file), bare.path().join(file)).unwrap();
    }
    let (code, stderr) = chat(&["--model", bare.path().to_str().unwrap()]);
    assert!(
        code == Some(1) && stderr.contains("no chat template") && stderr.contains("--chat-template"),
        "{stderr}"
    );
    let (code, stderr) = chat(&[]);
    assert_eq!(code, Some(0), "the embedded model brings the template of a play: {stderr}");
    let template = tempfile::NamedTempFile::new().unwrap();
    let path = template.path().to_str().unwrap();
    std::fs::write(path, "{{ messages[0].content }}").unwrap();
    assert_eq!(chat(&["--chat-template", path]).0, Some(0));
    std::fs::write(path, "{{ messages[").unwrap();
    let (code, stderr) = chat(&["--chat-template", path]);
    assert!(code == Some(2) && stderr.contains("--chat-template") && stderr.contains("line 1"), "{stderr}");
    let (code, stderr) = chat(&["--chat-template", "/no/such/file"]);
    assert!(code == Some(2) && stderr.contains("/no/such/file"), "{stderr}");
}

/// Ctrl-C stops the answer and does not end the program.
#[cfg(unix)]
#[test]
fn an_interrupted_answer_is_not_the_end() {
    let flags = ["--temperature", "0", "--ignore-eos"];
    let whole = String::from_utf8(talk(&flags, "Hello\n").0.stdout).unwrap();
    let mut chat = start(&flags);
    let mut stdin = chat.stdin.take().unwrap();
    let mut stdout = BufReader::new(chat.stdout.take().unwrap());
    stdin.write_all(b"Hello\n").unwrap();
    // The answer has begun, and would continue until the context ends.
    assert!(!stdout.fill_buf().unwrap().is_empty());
    assert!(Command::new("kill").args(["-INT", &chat.id().to_string()]).status().unwrap().success());
    stdin.write_all(b"/reset\nHello\n").unwrap();
    drop(stdin);
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut stdout, &mut rest).unwrap();
    assert!(chat.wait().unwrap().success(), "the program goes on to the end of its input");
    let text = String::from_utf8(rest).unwrap();
    assert!(text.ends_with(&whole) && text.len() > whole.len(), "then answers the next message: {text}");
}

/// The bundled model was trained on plays: its answers end where another character speaks.
#[test]
fn the_bundled_model_talks_without_flags() {
    let folder = tempfile::tempdir().unwrap();
    let play = "{% for m in messages %}{{ 'First Citizen' if m.role == 'user' else 'MENENIUS' }}:\n{{ m.content }}\n\n\
                {% endfor %}{% if add_generation_prompt %}MENENIUS:\n{% endif %}\n";
    std::fs::write(folder.path().join("play.jinja"), play).unwrap();
    let said = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
        command.current_dir(folder.path()).args(["chat", "--seed", "1"]).args(flags);
        let mut chat =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        chat.stdin
            .take()
            .unwrap()
            .write_all(b"What news from the senate?\nAnd what say the people?\n")
            .unwrap();
        let output = chat.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let talk = said(&[]);
    assert!(talk.lines().count() >= 2 && !talk.contains("\n\n"), "{talk}");
    assert_eq!(talk, said(&["--chat-template", "play.jinja", "--stop", "\\n\\n"]));
}

#[test]
fn the_limit_that_cut_an_answer_is_named() {
    let (_, stderr) = talk(&SHORT, "Hello\n");
    assert!(stderr.contains("[cut: --max-new-tokens 6]"), "{stderr}");
    let (_, stderr) = talk(&["--temperature", "0", "--ignore-eos", "--max-model-len", "64"], "Hello\n");
    assert!(stderr.contains("[cut: the context of 64 tokens is full]"), "{stderr}");
    let far = ["--temperature", "0", "--ignore-eos", "--max-model-len", "64", "--max-new-tokens", "500"];
    let (_, stderr) = talk(&far, "Hello\n");
    assert!(
        stderr.contains("[cut: the context of 64 tokens is full]"),
        "the other limit was not met: {stderr}"
    );
}

#[test]
fn set_refuses_what_the_command_line_refuses() {
    let refused = "/set max-new-tokens 0\n/set stop default\n/set json-schema {\n/set guided-regex a(\n/set temperature -1\n";
    let (output, stderr) = talk(&SHORT, &format!("{refused}/set\n"));
    assert!(output.status.success(), "{stderr}");
    for words in [
        "--max-new-tokens 0: expected at least 1",
        "JSON schema cannot be used",
        "unclosed group",
        "temperature",
    ] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    let listed = stderr.lines().find(|line| line.starts_with("max-new-tokens ")).unwrap();
    assert!(listed.ends_with(" 6"), "what was refused changes nothing: {listed}");
}

/// Unlike Ctrl-C, which stops an answer, SIGTERM ends the program.
#[cfg(unix)]
#[test]
fn a_terminated_chat_ends() {
    let mut chat = start(&SHORT);
    let mut stdin = chat.stdin.take().unwrap();
    stdin.write_all(b"Hello\n").unwrap();
    let mut stdout = BufReader::new(chat.stdout.take().unwrap());
    assert!(!stdout.fill_buf().unwrap().is_empty());
    assert!(Command::new("kill").args(["-TERM", &chat.id().to_string()]).status().unwrap().success());
    assert_eq!(chat.wait().unwrap().code(), Some(130), "while it waits for a line");
}
