//! The output file over several runs, and changes by other programs.

use std::path::Path;

use anyhow::Result;

use super::super::entries::Key;
use super::super::known::{Known, name};
use super::super::settings::Settings;
use super::{Earlier, Journal};

fn open(path: &Path) -> Result<(Journal, Known)> {
    open_for(path, Earlier::Keep)
}

fn open_for(path: &Path, earlier: Earlier) -> Result<(Journal, Known)> {
    let mut known = Known::with_lines(0);
    Ok((Journal::open(path, Path::new("in.jsonl"), earlier, &mut known)?, known))
}

fn is_done(known: &Known, custom_id: &str) -> bool {
    known.answered(&name("request-9", Some(custom_id))).is_some()
}

fn key(custom_id: &str) -> Key {
    Key { id: "request-9".into(), custom_id: Some(custom_id.into()), request: None }
}

#[test]
fn errors_make_room_for_answers_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let good = r#"{"id":"request-1","custom_id":"a","response":{},"error":null}"#;
    let bad = r#"{"id":"request-2","custom_id":"b","response":{},"error":{"error":{"message":"no"}}}"#;
    let before = format!("{good}\n{bad}\n");
    let text = || std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &before).unwrap();
    assert_eq!(open(&path).unwrap().0.earlier_errors(), 1);
    let (mut journal, known) = open_for(&path, Earlier::RetryErrors).unwrap();
    assert!(is_done(&known, "a") && !is_done(&known, "b"));
    journal.begin(&Settings::default()).unwrap();
    assert_eq!(
        (text(), journal.earlier_errors()),
        (before.clone(), 1),
        "an error stays until there is better"
    );
    let better = good.replace("\"a\"", "\"b\"");
    journal.append(&key("b"), better.clone()).unwrap();
    assert_eq!((text(), journal.earlier_errors()), (format!("{before}{better}\n"), 0));
    drop(journal); // a crash
    let (journal, known) = open(&path).unwrap();
    assert_eq!((is_done(&known, "b"), journal.earlier_errors()), (true, 0));
    journal.finish().unwrap();
    assert_eq!(text(), format!("{good}\n{better}\n"));
    let (mut journal, known) = open_for(&path, Earlier::Overwrite).unwrap();
    assert!(!is_done(&known, "a"));
    journal.begin(&Settings::default()).unwrap();
    assert_eq!((journal.records, text().as_str()), (0, ""));
    assert!(open(&path).is_err(), "it is still locked");
    journal.append(&key("a"), bad.replace("\"b\"", "\"a\"")).unwrap();
    assert!(journal.how_to_continue().contains("without"), "or it would begin again");
    journal.finish().unwrap();
    assert_eq!(text().lines().count(), 1);
}

/// The lines of records may be removed from the input; the records stay.
#[test]
fn errors_whose_lines_are_gone_stay() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let bad = r#"{"id":"line-2","custom_id":null,"response":{"body":null},"error":{"error":{}}}"#;
    let long = r#"{"id":"request-1","custom_id":"a","response":{"body":{"usage":{"total_tokens":40}}},"error":null}"#;
    let text = format!("{bad}\n{long}\n{}\n", bad.replace("line-2", "line-3"));
    std::fs::write(&path, &text).unwrap();
    let (mut journal, _) = open_for(&path, Earlier::RetryErrors).unwrap();
    assert_eq!((journal.longest, journal.answers), (40, 1));
    journal.begin(&Settings::default()).unwrap();
    let answered = Key { id: "line-3".into(), custom_id: None, request: None };
    journal.append(&answered, bad.replace("line-2", "line-3")).unwrap();
    assert_eq!(journal.earlier_errors(), 1);
    journal.finish().unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "one error made room for its like");
}

#[test]
fn a_torn_last_line_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let whole = r#"{"id":"request-1","custom_id":"a","response":{},"error":null}"#;
    for torn in ["", "{", r#"{"id":"#, r#"{"id":"request-2","custom_id":"b","resp"#, "\0\0\0"] {
        std::fs::write(&path, format!("{whole}\n{torn}")).unwrap();
        let (mut journal, known) = open(&path).unwrap();
        assert_eq!(journal.records, 1);
        assert!(is_done(&known, "a") && !is_done(&known, "b"));
        journal.append(&key("b"), r#"{"id":"request-2","custom_id":"b"}"#).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, format!("{whole}\n{{\"id\":\"request-2\",\"custom_id\":\"b\"}}\n"), "{torn:?}");
    }
}

#[test]
fn a_file_of_something_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes.txt");
    for text in ["my notes\n", "my notes", "{\"id\": 5}\n", "[1]\n{\"id\":\"", "\u{1}\0"] {
        std::fs::write(&path, text).unwrap();
        let error = format!("{:#}", open(&path).err().unwrap());
        assert!(error.contains("notes.txt") && error.contains("line 1"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
}

#[test]
fn a_folder_that_takes_no_file_is_found_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    // Root may write to every folder, but not over this folder.
    std::fs::create_dir(dir.path().join("out.jsonl.run.json.probe")).unwrap();
    let error = open(&path).err().unwrap().to_string();
    assert!(error.contains("out.jsonl.run.json") && error.contains("another folder"), "{error}");
    let record = r#"{"id":"request-1","custom_id":"a","response":{},"error":null}"#;
    std::fs::write(&path, format!("{record}\n")).unwrap();
    assert!(open(&path).is_ok(), "a run that goes on only appends");
    assert!(open_for(&path, Earlier::Overwrite).is_err());
}

#[test]
fn what_is_not_kept_cannot_be_continued() {
    let (stdout, _) = open(Path::new("-")).unwrap();
    assert!(stdout.how_to_continue().contains("--output FILE"));
    let dir = tempfile::tempdir().unwrap();
    let (file, _) = open(&dir.path().join("out.jsonl")).unwrap();
    assert!(file.how_to_continue().contains("same command"));
}

#[test]
fn two_runs_cannot_write_to_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let first = open(&path).unwrap();
    let error = open(&path).err().unwrap().to_string();
    assert!(error.contains("another run"), "{error}");
    drop(first);
    assert!(open(&path).is_ok());
}

#[test]
fn the_input_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.jsonl");
    std::fs::write(&path, "").unwrap();
    let other = dir.path().join(".").join("in.jsonl");
    let opened = Journal::open(&other, &path, Earlier::Overwrite, &mut Known::with_lines(0));
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("is the input"), "{error}");
}

/// Records are written to a file that other programs can also change.
#[cfg(unix)]
#[test]
fn an_output_that_others_change_is_an_error() {
    use std::fs;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let record = r#"{"id":"request-1","custom_id":"a","response":{},"error":null}"#;
    type Change = fn(&Path);
    let changes: [(Change, &str); 5] = [
        (|path| fs::remove_file(path).unwrap(), "deleted or replaced"),
        (|path| fs::rename(path, path.with_extension("old")).unwrap(), "deleted or replaced"),
        (
            |path| {
                fs::remove_file(path).unwrap();
                fs::write(path, "").unwrap();
            },
            "deleted or replaced",
        ),
        (|path| fs::write(path, "").unwrap(), "shortened it from 62 to 0 bytes"),
        (|path| fs::write(path, "x".repeat(99)).unwrap(), "wrote to it: it has 99 bytes, expected 62"),
    ];
    for (change, words) in changes {
        let _ = fs::remove_file(&path);
        let started = || {
            let mut journal = open(&path).unwrap().0;
            journal.append(&key("a"), record).unwrap();
            change(&path);
            journal
        };
        let error = started().append(&key("b"), record).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("out.jsonl"), "{error}");
        let _ = fs::remove_file(&path);
        let error = started().finish().unwrap_err().to_string();
        assert!(error.contains(words), "after the last record: {error}");
    }
}
