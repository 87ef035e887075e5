//! Runs a program as a user does, and makes models that a test may damage. The tests of each program include this file
//! and use the parts that they need.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A program with flags that every run has.
#[derive(Clone, Copy)]
pub struct Program<'a> {
    pub path: &'a str,
    pub flags: &'a [&'a str],
}

impl Program<'_> {
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path);
        command.args(args).args(self.flags).env("RUST_BACKTRACE", "0");
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// stdout of a run that succeeds.
    pub fn text(&self, args: &[&str]) -> String {
        stdout(&self.run(args))
    }

    /// Runs the program, and expects this exit code and all of these words on stderr.
    pub fn fails(&self, args: &[&str], code: i32, words: &[&str]) {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}\n{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        for word in words {
            assert!(stderr.contains(word), "{args:?}: expected {word:?} in\n{stderr}");
        }
    }

    /// The greedy text in f32 for the prompts of a fixture is the text of transformers.
    pub fn continues_like_transformers(&self, name: &str) {
        let dir = fixture(name);
        let case: Value = serde_json::from_slice(&fs::read(dir.join("text_case.json")).unwrap()).unwrap();
        for greedy in case["greedy"].as_array().unwrap() {
            let count = greedy["generated_ids"].as_array().unwrap().len().to_string();
            let prompt = greedy["prompt"].as_str().unwrap();
            let model = ["--model", dir.to_str().unwrap(), "--prompt", prompt, "--max-new-tokens", &count];
            let greedily = ["--temperature", "0", "--ignore-eos", "--dtype", "f32"];
            let text = self.text(&[&model[..], &greedily].concat());
            assert_eq!(text, greedy["generated_text"].as_str().unwrap(), "{:?} {prompt:?}", self.flags);
        }
    }
}

/// stdout of a run that succeeded.
pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// A copy of a fixture that a test may damage.
pub struct Copied(tempfile::TempDir);

impl Copied {
    pub fn new(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        Self(dir)
    }

    /// A copy with another config.
    pub fn with(name: &str, changes: &[(&str, Value)]) -> Self {
        let copied = Self::new(name);
        changes.iter().for_each(|(key, value)| copied.config(key, value.clone()));
        copied
    }

    pub fn config(&self, key: &str, value: Value) {
        let path = self.path("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(path, config.to_string()).unwrap();
    }

    pub fn dir(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }
}
