//! What a later run does with the records of earlier ones.

use std::fs;
use std::process::Output;

use serde_json::{Value, json};

use super::{Folder, by_name, completion, fixture, records, stderr};

/// One line that is answered, and one that is too long for a small context.
fn short_and_long() -> Folder {
    Folder::new(&[
        completion("short", json!({"prompt": "x", "max_tokens": 2, "temperature": 0})),
        completion("long", json!({"prompt": "word ".repeat(40), "max_tokens": 2, "temperature": 0})),
    ])
}

const SMALL: [&str; 2] = ["--max-model-len", "32"];

fn status(folder: &Folder, id: &str) -> Value {
    by_name(&folder.records())[id][0].clone()
}

fn succeeds(output: &Output, words: &[&str]) {
    assert!(output.status.success(), "{}", stderr(output));
    says(output, words);
}

fn says(output: &Output, words: &[&str]) {
    for word in words {
        assert!(stderr(output).contains(word), "expected {word:?} in {}", stderr(output));
    }
}

#[test]
fn errors_are_answered_again_on_request() {
    let folder = short_and_long();
    succeeds(&folder.run(&SMALL), &["2 requests", "1 with errors"]);
    let first = folder.records();
    assert_eq!((status(&folder, "short"), status(&folder, "long")), (json!(200), json!(400)));
    succeeds(&folder.run(&[]), &["0 requests, 2 done before", "1 with errors of earlier runs"]);
    assert_eq!(folder.records(), first);
    succeeds(&folder.run(&["--retry-errors"]), &["1 request, ", "1 done before"]);
    assert_eq!((status(&folder, "short"), status(&folder, "long")), (json!(200), json!(200)));
    let good = |records: &[Value]| records.iter().find(|r| r["custom_id"] == "short").cloned();
    assert_eq!(good(&folder.records()), good(&first), "an answer stays as it is");
    let output = folder.run(&["--retry-errors"]);
    assert!(!stderr(&output).contains("with errors"), "{}", stderr(&output));
}

#[test]
fn an_output_is_started_afresh_on_request() {
    let folder = short_and_long();
    succeeds(&folder.run(&SMALL), &[]);
    succeeds(&folder.run(&["--overwrite"]), &["2 requests"]);
    assert_eq!((status(&folder, "short"), status(&folder, "long")), (json!(200), json!(200)));
    let both = folder.run(&["--overwrite", "--retry-errors"]);
    assert_eq!(both.status.code(), Some(2), "{}", stderr(&both));
    fs::write(folder.path("out.jsonl"), "my notes\n").unwrap();
    assert!(!folder.run(&["--overwrite"]).status.success());
    assert_eq!(fs::read_to_string(folder.path("out.jsonl")).unwrap(), "my notes\n", "it is somebody else's");
}

#[test]
fn errors_fail_the_run_on_request() {
    let folder = short_and_long();
    let small = [&SMALL[..], &["--fail-on-error"]].concat();
    assert_eq!(folder.run(&small).status.code(), Some(3));
    assert_eq!(folder.records().len(), 2, "every line is answered all the same");
    let again = folder.run(&["--fail-on-error"]);
    assert_eq!(again.status.code(), Some(3), "an earlier run's errors count: {}", stderr(&again));
    succeeds(&folder.run(&["--fail-on-error", "--retry-errors"]), &["1 request, "]);
}

#[test]
fn other_settings_do_not_pass_for_a_continuation() {
    let folder = short_and_long();
    succeeds(&folder.run(&["--temperature", "0.5"]), &[]);
    let records = folder.records();
    let refused = folder.run(&["--temperature", "0.7", "--seed", "3"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    says(&refused, &["temperature was 0.5 and is 0.7", "seed was 0 and is 3", "--overwrite"]);
    let model = fixture("text");
    let refused = folder.run(&["--temperature", "0.5", "--model", model.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    says(&refused, &["model was \"embedded\" and is ", "chat_template was "]);
    assert_eq!(folder.records(), records, "nothing is lost");
    succeeds(&folder.run(&["--temperature", "0.5"]), &["2 done before"]);
    succeeds(&folder.run(&["--temperature", "0.7", "--overwrite"]), &["2 requests"]);
    succeeds(&folder.run(&["--temperature", "0.7"]), &["2 done before"]);
    fs::remove_file(folder.path("out.jsonl.run.json")).unwrap();
    succeeds(&folder.run(&["--temperature", "0.9"]), &["2 done before", "there is no", "out.jsonl.run.json"]);
}

/// Records belong to their lines, even if the lines have left the input.
#[test]
fn errors_whose_lines_have_left_the_input_stay() {
    let folder = short_and_long();
    succeeds(&folder.run(&SMALL), &["1 with errors"]);
    let before = folder.records();
    folder.write(&[completion("new", json!({"prompt": "x", "temperature": "hot"}))]);
    let small = [&SMALL[..], &["--retry-errors", "--fail-on-error"]].concat();
    let output = folder.run(&small);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    says(&output, &["1 with errors", "1 with errors of earlier runs"]);
    assert_eq!(folder.records()[..2], before);
    assert_eq!((status(&folder, "long"), status(&folder, "new")), (json!(400), json!(400)));
    let line = completion("new", json!({"prompt": "x", "max_tokens": 1, "temperature": 0}));
    folder.write(&[line]);
    succeeds(&folder.run(&["--retry-errors"]), &["1 request, ", "1 with errors of earlier runs"]);
    assert_eq!((status(&folder, "long"), status(&folder, "new")), (json!(400), json!(200)));
    assert_eq!(folder.records().len(), 3);
}

#[test]
fn the_dtype_and_a_context_that_cuts_are_settings() {
    let folder = short_and_long();
    let f32 = ["--dtype", "f32"];
    succeeds(&folder.run(&f32), &[]);
    let refused = folder.run(&["--dtype", "bf16"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    says(&refused, &["dtype was \"f32\" and is \"bf16\""]);
    succeeds(&folder.run(&[&f32[..], &["--max-model-len", "256"]].concat()), &["2 done before"]);
    let cuts = folder.run(&[&f32[..], &SMALL[..]].concat());
    assert_eq!(cuts.status.code(), Some(2), "{}", stderr(&cuts));
    says(&cuts, &["max_model_len was 512 and is 32"]);
}

#[test]
fn a_line_that_changed_is_not_answered() {
    let folder = short_and_long();
    succeeds(&folder.run(&SMALL), &[]);
    let before = folder.records();
    let short = completion("short", json!({"prompt": "another", "max_tokens": 2}));
    let long = completion("long", json!({"prompt": "no longer long", "max_tokens": 2}));
    folder.write(&[json!("no request"), short.clone()]);
    let refused = folder.run(&[]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    says(&refused, &["line 2", "\"short\"", "--overwrite"]);
    assert_eq!(folder.records()[..2], before, "what is answered stays");
    let original = records(&fs::read(short_and_long().path("in.jsonl")).unwrap())[0].clone();
    folder.write(&[original, long]);
    succeeds(&folder.run(&["--retry-errors"]), &["1 request, ", "1 done before"]);
    folder.write(&[short]);
    succeeds(&folder.run(&["--overwrite"]), &["1 request, "]);
}
