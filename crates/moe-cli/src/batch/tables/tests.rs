//! Tables that other programs have written (`tests/reference/make_parquet.py`), damaged ones, and our own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).with_extension("parquet")
}

fn lines(name: &str, questions: bool) -> Vec<Value> {
    let (requests, rows) = Requests::open(&data(name), questions).unwrap();
    let bytes: Vec<Vec<u8>> = requests.map(|line| line.unwrap().bytes.unwrap()).collect();
    assert_eq!(bytes.len() as u64, rows);
    bytes.iter().map(|bytes| serde_json::from_slice(bytes).unwrap()).collect()
}

fn refused(path: &Path, questions: bool) -> String {
    Requests::open(path, questions).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn structs_are_bodies_without_their_nulls() {
    let messages = json!([{"role": "user", "content": "é\n\"漢\""}]);
    let want = [
        json!({"custom_id": "a", "url": "/v1/completions",
            "body": {"prompt": "To be", "max_tokens": 3, "temperature": 0.0}}),
        json!({"custom_id": "b", "url": "/v1/chat/completions",
            "body": {"messages": messages, "max_tokens": 4}}),
        json!({"custom_id": "c", "url": "/v1/chat/completions",
            "body": {"prompt": "x", "stop": ["a", "b"]}}),
        json!({"url": "/v1/completions", "body": {"prompt": "y"}}),
        json!({"custom_id": "e", "url": "/v1/completions"}),
    ];
    assert_eq!(lines("structs", false), want);
}

#[test]
fn texts_are_bodies_as_they_are_written() {
    let (requests, _) = Requests::open(&data("texts"), false).unwrap();
    let bytes: Vec<Vec<u8>> = requests.map(|line| line.unwrap().bytes.unwrap()).collect();
    let text = |i: usize| std::str::from_utf8(&bytes[i]).unwrap();
    let chat = r#""/v1/chat/completions","body":{"messages": [{"role": "user", "content": "hi"}], "seed": 18446744073709551615}}"#;
    let completions = r#""/v1/completions","body":"#;
    assert_eq!(
        text(0),
        format!(r#"{{"custom_id":"7","url":{completions}{{"prompt": "To be", "max_tokens": 3}}}}"#)
    );
    assert_eq!(text(1), format!(r#"{{"custom_id":"8","url":{chat}"#));
    assert_eq!(
        text(2),
        format!(r#"{{"custom_id":"9","url":{completions}"{{not json"}}"#),
        "a body of the wrong type"
    );
    assert!(std::str::from_utf8(&bytes[3]).is_err(), "the record of the row will say where");
}

#[test]
fn columns_are_fields_of_a_body() {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let line = |number: usize, body: Value| json!({"custom_id": format!("row-{number}"), "url": "/v1/chat/completions", "body": body});
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let want = [
        line(1, json!({"messages": messages, "max_tokens": 5, "temperature": 0.7, "tools": tools})),
        line(2, json!({"messages": [{"role": "user", "content": "Bye"}], "logit_bias": {"5": -1.5}})),
        line(3, json!({"messages": [], "temperature": null})),
    ];
    assert_eq!(lines("conversations", false), want, "and the columns `source` and `time` are ignored");
    let ids = lines("ids", false);
    assert_eq!(ids[0]["body"], json!({"prompt": [1, 2, 3], "n": 2}));
    assert_eq!((&ids[1]["custom_id"], &ids[1]["url"]), (&json!("row-2"), &json!("/v1/completions")));
}

#[test]
fn tables_that_ask_nothing_are_named() {
    for (name, questions, words) in [
        ("brotli", false, &["`prompt`", "BROTLI", "zstd"][..]),
        ("times", false, &["`stop`", "Date"]),
        ("ids", true, &["--chat", "`prompt`"]),
        ("texts", true, &["--chat", "`body`"]),
    ] {
        let error = refused(&data(name), questions);
        words.iter().for_each(|word| assert!(error.contains(word), "{name}: {error}"));
    }
}

/// Writes a table with optional columns.
fn table(path: &Path, schema: &str, rows: &[[Option<&str>; 2]]) {
    use parquet::data_type::{ByteArray, ByteArrayType};
    let schema = parquet::schema::parser::parse_message_type(schema).unwrap();
    let mut file = parquet::file::writer::SerializedFileWriter::new(
        File::create(path).unwrap(),
        schema.into(),
        Default::default(),
    )
    .unwrap();
    let mut group = file.next_row_group().unwrap();
    for i in 0..2 {
        let Some(mut column) = group.next_column().unwrap() else { break };
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row[i].is_some())).collect();
        let values: Vec<ByteArray> = rows.iter().filter_map(|row| row[i]).map(ByteArray::from).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    file.close().unwrap();
}

#[test]
fn columns_are_checked_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.parquet");
    let two = |a: &str, b: &str| {
        format!("message m {{ optional byte_array {a} (string); optional byte_array {b} (string); }}")
    };
    table(&path, &two("question", "answer"), &[[Some("a"), None]]);
    let error = refused(&path, false);
    assert!(
        error.contains("`body`, `prompt` or `messages`") && error.contains("question, answer"),
        "{error}"
    );
    table(&path, &two("prompt", "messages"), &[[Some("a"), None]]);
    assert!(refused(&path, false).contains("leave one of them out"));
    table(&path, "message m { optional byte_array prompt (decimal(5,2)); }", &[[Some("a"), None]]);
    let error = refused(&path, false);
    assert!(error.contains("`prompt`") && error.contains("expected text"), "{error}");
    table(&path, &two("prompt", "custom_id"), &[[Some("To be"), Some("a")], [None, Some("b")]]);
    let (requests, _) = Requests::open(&path, true).unwrap();
    let got: Vec<Value> =
        requests.map(|line| serde_json::from_slice(&line.unwrap().bytes.unwrap()).unwrap()).collect();
    assert_eq!(got[0]["body"], json!({"messages": [{"role": "user", "content": "To be"}]}));
    assert_eq!(got[1], json!({"custom_id": "b", "url": "/v1/chat/completions", "body": {}}));
}

/// A damaged file gives an error, whatever part of it is damaged. The program never panics and never ends without a
/// message.
#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.parquet");
    for name in ["structs", "texts", "conversations", "ids"] {
        let whole = fs::read(data(name)).unwrap();
        for len in (4..whole.len()).step_by(7) {
            fs::write(&path, &whole[..len]).unwrap();
            let error = refused(&path, false);
            assert!(error.contains("cut off or damaged"), "{name}, {len} bytes: {error}");
        }
        let rows = lines_of(&data(name)).unwrap().len();
        let mut noticed = 0;
        for at in (4..whole.len()).step_by(3) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            fs::write(&path, &bytes).unwrap();
            match lines_of(&path) {
                Ok(lines) if lines.len() < rows => panic!("{name}, byte {at}: {} rows", lines.len()),
                Ok(_) => {}
                Err(_) => noticed += 1,
            }
        }
        assert!(noticed > whole.len() / 30, "{name}: {noticed} of {}", whole.len());
    }
}

/// The lines of a table; the error of opening or of reading it.
fn lines_of(path: &Path) -> Result<Vec<Option<Vec<u8>>>, String> {
    let (requests, _) = Requests::open(path, false).map_err(|e| e.to_string())?;
    requests.map(|line| line.map(|line| line.bytes).map_err(|e| e.to_string())).collect()
}

const ANSWER: &str = r#"{"id":"request-3","custom_id":"a","response":{"status_code":200,"request_id":"r","body":{"choices":[{"index":0,"text":"é\n","finish_reason":"length"},{"index":1,"text":"no"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}},"error":null}"#;
const CHAT: &str = r#"{"id":"request-4","custom_id":"b","response":{"status_code":200,"request_id":"r","body":{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}},"error":null}"#;
const ERROR: &str = r#"{"id":"line-5","custom_id":null,"response":{"status_code":400,"request_id":"r","body":null},"error":{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}}"#;

/// Writes a table of these records.
fn answers(records: &str, path: &Path) {
    let lines = path.with_extension("lines");
    fs::write(&lines, records).unwrap();
    write(&File::open(&lines).unwrap(), &mut File::create(path).unwrap()).unwrap();
}

#[test]
fn answers_have_columns_and_their_records() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.parquet");
    answers(&format!("{ANSWER}\n{CHAT}\n{ERROR}\n"), &path);
    let file = requests::open(&path).unwrap();
    let rows: Vec<String> = parquet::record::reader::RowIter::from_file_into(Box::new(file))
        .map(|row| {
            let mut columns = row.unwrap().into_columns();
            columns.pop();
            columns.iter().map(|(_, value)| value.to_string()).collect::<Vec<_>>().join(" ")
        })
        .collect();
    let want = [
        "\"a\" 3 200 \"é\n\" \"length\" 5 2 null",
        "\"b\" 4 200 \"yes\" \"stop\" 5 2 null",
        "null 5 400 null null null null \"no\"",
    ];
    assert_eq!(rows, want);
    let again = dir.path().join("out.jsonl");
    restore(&path, &again).unwrap();
    assert_eq!(fs::read_to_string(&again).unwrap(), format!("{ANSWER}\n{CHAT}\n{ERROR}\n"));
}

#[test]
fn tables_of_others_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let lines = dir.path().join("out.jsonl");
    for path in [data("structs"), dir.path().join("notes.parquet")] {
        if !path.exists() {
            fs::write(&path, "my notes").unwrap();
        }
        for error in [check(&path).unwrap_err(), restore(&path, &lines).unwrap_err()] {
            assert!(error.to_string().contains("something else"), "{error}");
        }
        assert!(!lines.exists());
    }
}

/// 100,000 rows in many row groups come back byte for byte, in both directions.
#[test]
fn many_rows_make_a_round_trip() {
    const ROWS: usize = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.parquet");
    let prompts: Vec<String> = (0..ROWS).map(|i| format!("prompt {i} {}", "x".repeat(i % 50))).collect();
    let names: Vec<String> = (0..ROWS).map(|i| format!("id-{i}")).collect();
    let rows: Vec<[Option<&str>; 2]> =
        names.iter().zip(&prompts).map(|(name, prompt)| [Some(&**name), Some(&**prompt)]).collect();
    let schema = "message m { optional byte_array custom_id (string); optional byte_array prompt (string); }";
    table(&path, schema, &rows);
    let got = lines_of(&path).unwrap();
    for (i, line) in got.iter().enumerate() {
        let line: Value = serde_json::from_slice(line.as_ref().unwrap()).unwrap();
        assert_eq!((&line["custom_id"], &line["body"]["prompt"]), (&json!(names[i]), &json!(prompts[i])));
    }
    assert_eq!(got.len(), ROWS);

    let record =
        |i: usize| ANSWER.replace("request-3", &format!("request-{i}")).replace("\"a\"", &format!("\"{i}\""));
    let records: String = (0..ROWS).map(|i| record(i) + "\n").collect();
    let out = dir.path().join("out.parquet");
    answers(&records, &out);
    let groups = {
        use parquet::file::reader::FileReader;
        requests::open(&out).unwrap().num_row_groups()
    };
    assert!((4..=6).contains(&groups), "{groups} groups of {} bytes", records.len());
    let again = dir.path().join("again.jsonl");
    restore(&out, &again).unwrap();
    assert!(fs::read_to_string(&again).unwrap() == records);
}
