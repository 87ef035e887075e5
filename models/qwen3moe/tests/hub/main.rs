//! `--model ORG/NAME` in the program: the model is downloaded, with the progress separate from the text, and then used
//! without a network.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../../crates/moe-cli/src/hub/tests/server.rs"]
mod server;

mod early;
mod inspect;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use server::{Act, Server};

/// Runs the program with these variables, and with no other variables about the hub.
fn run(args: &[&str], vars: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
    command.args(args);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HF_") {
            command.env_remove(name);
        }
    }
    command.envs(vars.iter().copied()).output().unwrap()
}

fn generate(model: &str, vars: &[(&str, &str)]) -> Output {
    run(&["--model", model, "--prompt", "the", "--max-new-tokens", "12", "--temperature", "0"], vars)
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// A hub with a model, and a user with an empty cache.
struct Hub {
    server: Server,
    home: tempfile::TempDir,
}

impl Hub {
    fn new(name: &str) -> Self {
        Self { server: Server::of_folder(&fixture(name)), home: tempfile::tempdir().unwrap() }
    }

    fn run(&self, args: &[&str]) -> Output {
        let url = self.server.url();
        run(args, &[("HF_HOME", self.home.path().to_str().unwrap()), ("HF_ENDPOINT", &url)])
    }

    /// Another value in the model's config.json.
    fn config(&self, key: &str, value: serde_json::Value) {
        let text = std::fs::read(fixture("text").join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config[key] = value;
        self.server.put("config.json", config.to_string().as_bytes());
    }

    /// Runs the program and expects this exit code, these words on stderr, and no request for a weight.
    fn refuses(&self, args: &[&str], code: i32, words: &[&str]) {
        let output = self.run(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{words:?} in {stderr}");
        let seen = self.server.seen();
        assert!(
            seen.iter().all(|r| !r.path.contains(".safetensors") && !r.path.contains("/storage/")),
            "{seen:?}"
        );
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_model_of_the_hub_generates_what_its_folder_does() {
    let fixture = fixture("text");
    let expected = generate(fixture.to_str().unwrap(), &[]).stdout;
    assert!(!expected.is_empty());

    let server = Server::of_folder(&fixture);
    let home = tempfile::tempdir().unwrap();
    let home = home.path().to_str().unwrap();
    std::fs::write(Path::new(home).join("token"), "hf_from_file\n").unwrap();
    server.spoil("GET", "/storage/", 1, Act::Cut(60_000));
    let url = server.url();
    let vars = [("HF_HOME", home), ("HF_ENDPOINT", url.as_str())];
    let first = generate("org/tiny", &vars);
    assert_eq!(text(&first.stdout), text(&expected), "{}", text(&first.stderr));
    assert!(
        text(&first.stderr).contains("downloading model.safetensors: 130.35 KiB"),
        "{}",
        text(&first.stderr)
    );
    assert_eq!(server.seen()[0].token.as_deref(), Some("Bearer hf_from_file"));
    drop(server);

    let offline = [&vars[..], &[("HF_HUB_OFFLINE", "1")]].concat();
    let again = generate("org/tiny@main", &offline);
    assert_eq!(text(&again.stdout), text(&expected), "{}", text(&again.stderr));

    let missing = generate("org/tiny@v2", &offline);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("org/tiny@v2 was never downloaded"), "{}", text(&missing.stderr));
}

/// At the level trace the HTTP client logs what it sends, byte by byte.
#[test]
fn no_log_holds_the_token() {
    let hub = Hub::new("text");
    for (flags, log) in [
        (&["download", "org/tiny"][..], "trace"),
        (&["--model", "org/tiny", "--prompt", "x"], "ureq=trace,trace"),
    ] {
        let url = hub.server.url();
        let home = tempfile::tempdir().unwrap();
        let vars = [
            ("HF_HOME", home.path().to_str().unwrap()),
            ("HF_ENDPOINT", url.as_str()),
            ("HF_TOKEN", "hf_Zq9"),
            ("RUST_LOG", log),
        ];
        let output = run(flags, &vars);
        let stderr = text(&output.stderr);
        assert!(output.status.success() && stderr.contains("downloading"), "{stderr}");
        assert!(hub.server.seen().iter().any(|r| r.token.as_deref() == Some("Bearer hf_Zq9")));
        // As text, and in the hexadecimal digits of a dump: "Bear".
        for secret in ["hf_Zq9", "Zq9", "42 65 61 72", "Bearer", "42656172"] {
            assert!(!stderr.contains(secret), "{secret} in {stderr}");
        }
    }
}

#[test]
fn a_pipe_gets_no_colours() {
    let hub = Hub::new("text");
    let output = hub.run(&["download", "org/tiny"]);
    let stderr = text(&output.stderr);
    assert!(
        output.status.success() && !stderr.contains('\x1b') && stderr.contains("downloading"),
        "{stderr}"
    );
    let output = hub.run(&["download", "org/tiny", "--force"]);
    assert!(output.status.success() && text(&output.stderr).contains("downloading model.safetensors"));
    let silent = hub.run(&["download", "org/tiny"]);
    assert!(!text(&silent.stderr).contains("downloading"), "{}", text(&silent.stderr));
}

#[test]
fn an_address_of_the_hub_is_a_name() {
    let hub = Hub::new("text");
    let expected = hub.run(&["--model", "org/tiny", "--prompt", "x", "--temperature", "0"]).stdout;
    for address in [
        "https://huggingface.co/org/tiny",
        "hf.co/org/tiny/tree/main",
        "https://huggingface.co/org/tiny/resolve/main/model.safetensors?download=true",
        &format!("{}/org/tiny", hub.server.url()),
    ] {
        let output = hub.run(&["--model", address, "--prompt", "x", "--temperature", "0"]);
        assert!(output.status.success() && output.stdout == expected, "{address}: {}", text(&output.stderr));
    }
    hub.server.seen();
    hub.refuses(&["--model", "https://example.com/org/tiny", "--prompt", "x"], 2, &["HF_ENDPOINT"]);
    hub.refuses(&["download", "https://huggingface.co/datasets/org/tiny"], 2, &["not a model's"]);
}

#[test]
fn download_prints_the_folder_and_check_finds_damage() {
    let hub = Hub::new("sharded");
    let unfinished = hub.run(&["download", "org/tiny", "--check"]);
    assert_eq!(unfinished.status.code(), Some(1));
    assert!(
        text(&unfinished.stderr).contains("run `download org/tiny@main`"),
        "{}",
        text(&unfinished.stderr)
    );
    let output = hub.run(&["download", "org/tiny"]);
    let stderr = text(&output.stderr);
    assert!(output.status.success() && stderr.contains("downloading 3 files: "), "{stderr}");
    let dir = PathBuf::from(text(&output.stdout).trim_end());
    assert!(dir.join("model-00002-of-00003.safetensors").exists(), "{}", dir.display());
    let whole = hub.run(&["download", "org/tiny", "--check"]);
    assert!(whole.status.success() && text(&whole.stderr).contains("5 files are whole"), "{whole:?}");
    std::fs::write(dir.join("model-00002-of-00003.safetensors"), b"cut").unwrap();
    let damaged = hub.run(&["download", "org/tiny", "--check"]);
    assert_eq!(damaged.status.code(), Some(1));
    let stderr = text(&damaged.stderr);
    assert!(stderr.contains("model-00002-of-00003.safetensors: damaged: expected SHA-256"), "{stderr}");
    let folder = run(&["download", dir.to_str().unwrap()], &[]);
    assert_eq!(folder.status.code(), Some(2), "{folder:?}");
}

#[test]
fn devices_are_listed() {
    let output = run(&["list-devices"], &[]);
    let lines = text(&output.stdout);
    assert!(output.status.success() && lines.starts_with("cpu: "), "{lines}");
    assert!(lines.contains("\ncuda"), "{lines}");
}
