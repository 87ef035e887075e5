//! What a later run does with the records of earlier ones.

use std::fs;

use serde_json::{Value, json};

use super::{Folder, by_name, completion, fixture, records};

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

#[test]
fn errors_are_answered_again_on_request() {
    let folder = short_and_long();
    folder.ends(0, &SMALL, &["2 requests", "1 with errors"]);
    let first = folder.records();
    assert_eq!((status(&folder, "short"), status(&folder, "long")), (json!(200), json!(400)));
    folder.ends(0, &[], &["0 requests, 2 done before", "1 with errors of earlier runs"]);
    assert_eq!(folder.records(), first);
    let told = folder.ends(0, &["--retry-errors"], &["1 request, ", "1 done before"]);
    assert!(!told.contains("with errors"), "{told}");
    assert_eq!((status(&folder, "short"), status(&folder, "long")), (json!(200), json!(200)));
    assert!(first.contains(&folder.record("short")), "an answer stays as it is");
}

#[test]
fn an_output_is_started_afresh_on_request() {
    let folder = short_and_long();
    folder.succeeds(&SMALL);
    folder.ends(0, &["--overwrite"], &["2 requests"]);
    assert_eq!((status(&folder, "short"), status(&folder, "long")), (json!(200), json!(200)));
    folder.ends(2, &["--overwrite", "--retry-errors"], &[]);
    fs::write(folder.path("out.jsonl"), "my notes\n").unwrap();
    folder.ends(1, &["--overwrite"], &[]);
    assert_eq!(fs::read_to_string(folder.path("out.jsonl")).unwrap(), "my notes\n", "it is somebody else's");
}

#[test]
fn errors_fail_the_run_on_request() {
    let folder = short_and_long();
    let small = [&SMALL[..], &["--fail-on-error"]].concat();
    folder.ends(3, &small, &[]);
    assert_eq!(folder.records().len(), 2, "every line is answered all the same");
    // An earlier run's errors count.
    folder.ends(3, &["--fail-on-error"], &[]);
    folder.ends(0, &["--fail-on-error", "--retry-errors"], &["1 request, "]);
}

#[test]
fn other_settings_do_not_pass_for_a_continuation() {
    let folder = short_and_long();
    folder.succeeds(&["--temperature", "0.5"]);
    let records = folder.records();
    folder.ends(
        2,
        &["--temperature", "0.7", "--seed", "3"],
        &["temperature was 0.5 and is 0.7", "seed was 0 and is 3", "--overwrite"],
    );
    let model = fixture("text");
    folder.ends(
        2,
        &["--temperature", "0.5", "--model", model.to_str().unwrap()],
        &["model was \"embedded\" and is ", "chat_template was "],
    );
    assert_eq!(folder.records(), records, "nothing is lost");
    folder.ends(0, &["--temperature", "0.5"], &["2 done before"]);
    folder.ends(0, &["--temperature", "0.7", "--overwrite"], &["2 requests"]);
    folder.ends(0, &["--temperature", "0.7"], &["2 done before"]);
    fs::remove_file(folder.path("out.jsonl.run.json")).unwrap();
    folder.ends(0, &["--temperature", "0.9"], &["2 done before", "there is no", "out.jsonl.run.json"]);
}

/// Records belong to their lines, even if the lines have left the input.
#[test]
fn errors_whose_lines_have_left_the_input_stay() {
    let folder = short_and_long();
    folder.ends(0, &SMALL, &["1 with errors"]);
    let before = folder.records();
    folder.write(&[completion("new", json!({"prompt": "x", "temperature": "hot"}))]);
    let small = [&SMALL[..], &["--retry-errors", "--fail-on-error"]].concat();
    folder.ends(3, &small, &["1 with errors", "1 with errors of earlier runs"]);
    assert_eq!(folder.records()[..2], before);
    assert_eq!((status(&folder, "long"), status(&folder, "new")), (json!(400), json!(400)));
    let line = completion("new", json!({"prompt": "x", "max_tokens": 1, "temperature": 0}));
    folder.write(&[line]);
    folder.ends(0, &["--retry-errors"], &["1 request, ", "1 with errors of earlier runs"]);
    assert_eq!((status(&folder, "long"), status(&folder, "new")), (json!(400), json!(200)));
    assert_eq!(folder.records().len(), 3);
}

#[test]
fn the_dtype_and_a_context_that_cuts_are_settings() {
    let folder = short_and_long();
    let f32 = ["--dtype", "f32"];
    folder.succeeds(&f32);
    folder.ends(2, &["--dtype", "bf16"], &["dtype was \"f32\" and is \"bf16\""]);
    folder.ends(0, &[&f32[..], &["--max-model-len", "256"]].concat(), &["2 done before"]);
    folder.ends(2, &[&f32[..], &SMALL[..]].concat(), &["max_model_len was 512 and is 32"]);
}

#[test]
fn a_line_that_changed_is_not_answered() {
    let folder = short_and_long();
    folder.succeeds(&SMALL);
    let before = folder.records();
    let short = completion("short", json!({"prompt": "another", "max_tokens": 2}));
    let long = completion("long", json!({"prompt": "no longer long", "max_tokens": 2}));
    folder.write(&[json!("no request"), short.clone()]);
    folder.ends(2, &[], &["line 2", "\"short\"", "--overwrite"]);
    assert_eq!(folder.records()[..2], before, "what is answered stays");
    let original = records(&fs::read(short_and_long().path("in.jsonl")).unwrap())[0].clone();
    folder.write(&[original, long]);
    folder.ends(0, &["--retry-errors"], &["1 request, ", "1 done before"]);
    folder.write(&[short]);
    folder.ends(0, &["--overwrite"], &["1 request, "]);
}
