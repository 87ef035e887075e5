//! Parquet files as input and output.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::SerializedFileReader;
use parquet::file::writer::SerializedFileWriter;
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

#[cfg(unix)]
use super::faults::kill_ten_runs;
use super::faults::two_hundred_lines;
use super::{Folder, by_name, completion, ended, essence};

/// A table that pyarrow has written.
fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/moe-cli/tests/data").join(name)
}

/// Writes lines as a table: `custom_id`, and `body` as text.
fn write(path: &Path, lines: &[Value]) {
    let schema = "message m { optional byte_array custom_id (string); optional byte_array body (string); }";
    let schema = parse_message_type(schema).unwrap();
    let file = File::create(path).unwrap();
    let mut file = SerializedFileWriter::new(file, schema.into(), Default::default()).unwrap();
    for lines in lines.chunks(64) {
        let mut group = file.next_row_group().unwrap();
        for name in ["custom_id", "body"] {
            let text = |line: &Value| match &line[name] {
                Value::String(text) => ByteArray::from(text.as_str()),
                value => ByteArray::from(value.to_string().as_str()),
            };
            let values: Vec<ByteArray> = lines.iter().map(text).collect();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&vec![1; lines.len()]), None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    file.close().unwrap();
}

/// The records of a table of answers.
fn records(path: &Path) -> Vec<Value> {
    let file = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let rows = RowIter::from_file_into(Box::new(file));
    rows.map(|row| match row.unwrap().into_columns().pop() {
        Some((name, Field::Str(record))) if name == "record" => serde_json::from_str(&record).unwrap(),
        other => panic!("{other:?}"),
    })
    .collect()
}

fn command(folder: &Folder, flags: &[&str]) -> Command {
    let mut command = folder.command("in.parquet", "out.parquet");
    command.args(flags);
    command
}

fn run(folder: &Folder, flags: &[&str]) -> Output {
    command(folder, flags).output().unwrap()
}

fn names(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(folder.path(".")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Tables and lines that ask the same have the same answers. Ten kills lose, duplicate and change nothing.
#[cfg(unix)]
#[test]
fn killed_runs_of_tables_continue() {
    let lines = two_hundred_lines();
    let undisturbed = Folder::new(&lines);
    let flags = ["--max-num-seqs", "8"];
    undisturbed.succeeds(&flags);
    let want = by_name(&undisturbed.records());

    let folder = Folder::new(&[]);
    write(&folder.path("in.parquet"), &lines);
    let journal = folder.path("out.parquet.jsonl");
    let whole = fs::metadata(undisturbed.path("out.jsonl")).unwrap().len();
    kill_ten_runs(|| command(&folder, &flags), &journal, whole);
    ended(&run(&folder, &flags), 0, &["done before"]);
    assert_eq!(by_name(&records(&folder.path("out.parquet"))), want);
    assert!(!journal.exists(), "the table has everything");

    let before = records(&folder.path("out.parquet"));
    ended(&run(&folder, &flags), 0, &["0 requests", "200 done before"]);
    assert_eq!(records(&folder.path("out.parquet")), before, "nothing is left to do");
    assert_eq!(names(&folder), ["in.jsonl", "in.parquet", "out.parquet", "out.parquet.jsonl.run.json"]);
}

/// A crash between the table and the removal of its lines, and one in the middle of writing the table.
#[test]
fn a_crash_at_the_end_costs_no_answer() {
    let lines: Vec<Value> =
        (0..5).map(|i| completion(&format!("{i}"), json!({"prompt": "x", "max_tokens": 2}))).collect();
    let folder = Folder::new(&[]);
    write(&folder.path("in.parquet"), &lines);
    ended(&run(&folder, &[]), 0, &["5 requests"]);
    let want = by_name(&records(&folder.path("out.parquet")));
    let text: String =
        records(&folder.path("out.parquet")).iter().map(|record| format!("{record}\n")).collect();
    for keep_table in [true, false] {
        fs::write(folder.path("out.parquet.jsonl"), &text).unwrap();
        fs::write(folder.path("out.parquet.tmp"), "half of a table").unwrap();
        if !keep_table {
            fs::remove_file(folder.path("out.parquet")).unwrap();
        }
        ended(&run(&folder, &[]), 0, &["0 requests", "5 done before"]);
        assert_eq!(by_name(&records(&folder.path("out.parquet"))), want);
    }
}

#[test]
fn a_finished_table_is_continued_as_a_file_of_lines_is() {
    let line = |id: &str, words: usize| {
        completion(id, json!({"prompt": "word ".repeat(words), "max_tokens": 2, "temperature": 0}))
    };
    let folder = Folder::new(&[]);
    let table = folder.path("out.parquet");
    let input = folder.path("in.parquet");
    write(&input, &[line("short", 1), line("long", 40)]);
    let small = ["--max-model-len", "32"];
    ended(&run(&folder, &small), 0, &["2 requests", "1 with errors"]);
    let status = |id: &str| by_name(&records(&table))[id][0].clone();
    assert_eq!((status("short"), status("long")), (json!(200), json!(400)));
    ended(&run(&folder, &["--temperature", "0.3"]), 2, &["temperature was"]);
    write(&input, &[line("short", 1), line("long", 40), line("new", 2)]);
    ended(&run(&folder, &small), 0, &["1 request, ", "2 done before", "1 with errors of earlier runs"]);
    assert_eq!((status("new"), status("long")), (json!(200), json!(400)));
    ended(&run(&folder, &["--retry-errors"]), 0, &["1 request, ", "2 done before"]);
    assert_eq!((status("short"), status("long")), (json!(200), json!(200)));
    ended(&run(&folder, &["--overwrite"]), 0, &["3 requests"]);
    assert_eq!(records(&table).len(), 3);
}

#[test]
fn tables_of_other_programs_are_read() {
    let folder = Folder::new(&[]);
    let answered = |name: &str, output: &str, flags: &[&str]| {
        let mut command = folder.command(data(name).to_str().unwrap(), output);
        ended(&command.args(flags).output().unwrap(), 0, &[]);
        records(&folder.path(output))
    };
    let texts = answered("texts.parquet", "texts.parquet", &["--max-new-tokens", "3"]);
    let by_id = |id: &str| texts.iter().find(|record| record["id"] == id).map(essence).unwrap();
    assert_eq!(by_id("request-1")[0], 200);
    assert!(by_id("request-3")[3].to_string().contains("body: expected an object"));
    assert!(by_id("line-4")[3].to_string().contains("not UTF-8"));
    let ids = answered("ids.parquet", "ids.parquet", &["--max-new-tokens", "3"]);
    assert_eq!(ids.iter().filter(|record| record["response"]["status_code"] == 200).count(), 2);
    let row = ids.iter().find(|record| record["custom_id"] == "row-1").unwrap();
    assert_eq!(row["response"]["body"]["choices"].as_array().unwrap().len(), 2, "its n");
}

#[test]
fn wrong_tables_end_the_run_before_it_begins() {
    let folder = Folder::new(&[completion("a", json!({"prompt": "x"}))]);
    let whole = fs::read(data("ids.parquet")).unwrap();
    fs::write(folder.path("cut.parquet"), &whole[..whole.len() - 9]).unwrap();
    fs::write(folder.path("notes.parquet"), "my notes").unwrap();
    let brotli = data("brotli.parquet");
    let ids = data("ids.parquet");
    let ids = ids.to_str().unwrap();
    for (input, output, flags, words) in [
        ("cut.parquet", "out.parquet", &[][..], &["cut.parquet", "cut off or damaged"][..]),
        (brotli.to_str().unwrap(), "out.parquet", &[], &["BROTLI"]),
        (ids, "out.parquet", &["--input-format", "text"], &["--input-format text"]),
        ("in.jsonl", "notes.parquet", &[], &["something else"]),
        (ids, ids, &[], &["is the input"]),
    ] {
        ended(&folder.command(input, output).args(flags).output().unwrap(), 2, words);
    }
    assert_eq!(fs::read_to_string(folder.path("notes.parquet")).unwrap(), "my notes");
    assert_eq!(names(&folder), ["cut.parquet", "in.jsonl", "notes.parquet"]);
    let mut piped = folder.command("-", "out.jsonl");
    let result = piped.stdin(File::open(ids).unwrap()).output().unwrap();
    ended(&result, 1, &["a Parquet file", "stream"]);
}
