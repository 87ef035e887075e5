//! `--model ORG/NAME` in the program: downloaded with progress out of the way of the text, then used
//! without a network.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../crates/moe-cli/src/hub/tests/server.rs"]
mod server;

use std::path::Path;
use std::process::{Command, Output};

use server::{Act, Server};

/// Runs the program on a model with these variables and no others of the hub.
fn generate(model: &str, vars: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
    command.args(["--model", model, "--prompt", "the", "--max-new-tokens", "12", "--temperature", "0"]);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HF_") {
            command.env_remove(name);
        }
    }
    command.envs(vars.iter().copied()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_model_of_the_hub_generates_what_its_folder_does() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/text");
    let expected = generate(fixture.to_str().unwrap(), &[]).stdout;
    assert!(!expected.is_empty());

    let (server, home) = (Server::of_folder(&fixture), tempfile::tempdir().unwrap());
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
