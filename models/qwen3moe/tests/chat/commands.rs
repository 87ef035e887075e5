//! The commands of a conversation.

use std::fs;

use serde_json::{Value, json};

use super::{SHORT, continued, talk, user};

/// Answers that are sampled.
const SAMPLED: [&str; 5] = ["--max-new-tokens", "8", "--temperature", "1.2", "--ignore-eos"];

fn answers(output: &std::process::Output) -> Vec<String> {
    // No short answer of this model has a line end; an unexpected one would show in the number of lines.
    String::from_utf8(output.stdout.clone()).unwrap().split_terminator('\n').map(String::from).collect()
}

#[test]
fn an_answer_is_given_again_with_another_seed() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let a = file("a.json");
    let b = file("b.json");
    let c = file("c.json");
    let input = format!("Hello\n/save {a}\n/regenerate\n/save {b}\n/clear\n/regenerate\n/save {c}\n");
    let (output, stderr) = talk(&SAMPLED, &input);
    assert!(output.status.success(), "{stderr}");
    let read = |path: &str| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let first = read(&a);
    let second = read(&b);
    assert_eq!((first.as_array().unwrap().len(), second.as_array().unwrap().len()), (2, 2));
    assert_eq!(first[0], second[0]);
    assert_ne!(first[1]["content"], second[1]["content"], "the seed has moved on");
    assert!(stderr.contains("nothing is said that could be answered again"), "{stderr}");
    assert_eq!(read(&c), json!([]));
}

#[test]
fn a_conversation_is_saved_and_goes_on_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk.json");
    let file = path.to_str().unwrap();
    let (whole, _) = talk(&SHORT, "/system Be kind.\nHello\nAgain\n");
    let (output, stderr) =
        talk(&SHORT, &format!("/system Be kind.\nHello\n/save {file}\n/save {file}\n/save! {file}\n"));
    assert!(output.status.success() && stderr.contains("is there already"), "{stderr}");
    assert_eq!(stderr.matches("3 messages are in").count(), 2, "{stderr}");
    let saved: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(
        (&saved[0]["role"], &saved[1]),
        (&json!("system"), &json!({"role": "user", "content": "Hello"}))
    );
    let (on, stderr) = talk(&SHORT, &format!("/load {file}\nAgain\n"));
    assert!(on.status.success() && stderr.contains("[3 messages]"), "{stderr}");
    let first = output.stdout;
    let second = on.stdout;
    assert_eq!([first, second].concat(), whole.stdout, "as if it had never stopped");
    // A question without an answer gets one.
    fs::write(&path, json!({"messages": [{"role": "user", "content": "Hello"}]}).to_string()).unwrap();
    let (output, stderr) = talk(&SHORT, &format!("/load {file}\n/regenerate\n/load /no/such/file\n/load\n"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), continued(&user("Hello")) + "\n");
    assert!(stderr.contains("/no/such/file") && stderr.contains("needs the name"), "{stderr}");
}

#[test]
fn values_are_set_between_answers() {
    let input = "Hello\n/clear\n/set max-new-tokens 3\n/set temprature 1\n/set temperature hot\n/set top-p 7\n/set\nHello\n\
                 /clear\n/set max_new_tokens default\nHello\n";
    let (output, stderr) = talk(&SHORT, input);
    assert!(output.status.success(), "{stderr}");
    let answer = continued(&user("Hello"));
    let text = String::from_utf8(output.stdout).unwrap();
    let short =
        text.strip_prefix(&format!("{answer}\n")).unwrap().strip_suffix(&format!("\n{answer}\n")).unwrap();
    assert!(answer.starts_with(short) && short.len() < answer.len(), "{short:?} of {answer:?}");
    for words in
        ["did you mean temperature?", "'hot'", "top_p", "max-new-tokens               3\n", "seed     "]
    {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
}

#[test]
fn the_conversation_is_counted_and_misspelt_commands_are_named() {
    let (output, stderr) = talk(&SHORT, "/stats\nHello\n/stats\n/regenrate\n/set temperature 0.5\n");
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("[0 messages, 0 tokens; 512 of the context of 512 are left]"), "{stderr}");
    let lines: Vec<_> = stderr.lines().skip_while(|line| !line.starts_with("[2 messages, ")).collect();
    let last = lines.get(1).unwrap_or_else(|| panic!("{stderr}"));
    assert!(last.starts_with("[last answer: ") && last.contains("; 6 new tokens, "), "{last}");
    assert!(stderr.contains("there is no /regenrate. Did you mean /regenerate?"), "{stderr}");
}

#[test]
fn megabytes_are_refused_and_the_conversation_goes_on() {
    let input = format!("{}\nHello\n", "word ".repeat(4 << 18));
    let (output, stderr) = talk(&SHORT, &input);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(" bytes is too long: the context of 512 tokens"), "{stderr}");
    assert_eq!(answers(&output).join("\n"), continued(&user("Hello")).trim_end_matches('\n'));
}
