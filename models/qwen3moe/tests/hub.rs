//! `--model ORG/NAME` in the program: downloaded with progress out of the way of the text, then used
//! without a network.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../crates/moe-cli/src/hub/tests/server.rs"]
mod server;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;
use server::{Act, Server};

/// Runs the program with these variables and no others of the hub.
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

/// A hub with a model, and a user who has nothing of it.
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

    /// Runs, and expects this exit code, these words on stderr, and that no weight was asked for.
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

/// The HTTP client dumps what it sends byte by byte at trace.
#[test]
fn no_log_holds_the_token() {
    let hub = Hub::new("text");
    for (flags, log) in [
        (&["download", "org/tiny"][..], "trace"),
        (&["--model", "org/tiny", "--prompt", "x"], "ureq=trace,trace"),
    ] {
        let (url, home) = (hub.server.url(), tempfile::tempdir().unwrap());
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
fn no_weight_is_downloaded_for_a_checkpoint_that_cannot_be_run() {
    let hub = Hub::new("text");
    let args = ["--model", "org/tiny", "--prompt", "x"];
    for (key, value, words) in [
        ("quantization_config", json!({"quant_method": "hqq"}), &["hqq", "original float dtype"][..]),
        ("model_type", json!("llama"), &["llama", "qwen3_moe", "model-deepseekv2-legacy runs"]),
        ("model_type", json!("deepseek_v2"), &["model-deepseekv2-legacy runs \"deepseek_v2\""]),
        ("model_type", json!(null), &["`model_type` is missing", "model-qwen3moe runs"]),
        ("hidden_size", json!(null), &["hidden_size", "config.json"]),
        ("num_experts_per_tok", json!(1000), &["num_experts_per_tok"]),
    ] {
        // Every time another file, which the cache lacks.
        let hub = Hub::new("text");
        hub.config(key, value);
        hub.refuses(&args, 1, words);
    }
    hub.server.put("generation_config.json", br#"{"do_sample": true, "temperature": -2}"#);
    hub.refuses(&args, 1, &["generation_config.json", "temperature", "-2"]);
    let hub = Hub::new("text");
    hub.server.put("tokenizer.json", b"[]");
    hub.refuses(&args, 1, &["tokenizer.json is not a tokenizer"]);
    let hub = Hub::new("text");
    hub.server.remove("tokenizer.json");
    hub.refuses(&args, 1, &["tokenizer.json", "needs the checkpoint's tokenizer"]);
    let hub = Hub::new("text");
    for file in ["model.safetensors", "reference.safetensors", "config.json"] {
        hub.server.remove(file);
    }
    hub.server.put("tiny-q4.gguf", b"GGUF");
    hub.refuses(
        &args,
        1,
        &["org/tiny@main", "only as GGUF files (tiny-q4.gguf)", "safetensors", "llama.cpp"],
    );
}

#[test]
fn no_weight_is_downloaded_for_ranks_that_would_cut_groups() {
    let hub = Hub::new("text");
    let header = json!({"quant_method": "gptq", "bits": 4, "group_size": 20, "sym": true, "desc_act": false});
    hub.config("quantization_config", header);
    let args = ["--model", "org/tiny", "--prompt", "x", "--tp", "2"];
    hub.refuses(&args, 2, &["self_attn.o_proj", "2 parts of 32 columns", "cuts through groups", "1 work"]);
}

#[test]
fn no_weight_is_downloaded_for_a_wrong_flag() {
    let hub = Hub::new("text");
    for (flags, words) in [
        (&["--temperature", "-1"][..], &["temperature", "-1"][..]),
        (&["--max-new-tokens", "0"], &["--max-new-tokens 0", "at least 1"]),
        (&["--stop", ""], &["--stop \"\"", "not empty"]),
        (&["--min-tokens", "9", "--max-new-tokens", "8"], &["min_tokens", "max_tokens = 8"]),
        (&["--logit-bias", "99999999=1"], &["logit_bias", "99999999"]),
        (&["--num-sequences", "0"], &["n must be from 1"]),
        (&["--moe-backend", "warp"], &["--moe-backend warp", "cpu_batched"]),
        (&["--device", "cuda:99"], &["cuda"]),
        (&["--mla", "naive"], &["--mla", "no multi-head latent attention"]),
        (&["--max-num-seqs", "0"], &["--max-num-seqs"]),
        (&["--max-model-len", "1000000000"], &["--max-model-len 1000000000", "the context of the model"]),
    ] {
        hub.refuses(&[&["--model", "org/tiny", "--prompt", "x"], flags].concat(), 2, words);
    }
}

#[test]
fn no_weight_is_downloaded_for_a_prompt_that_does_not_fit() {
    let hub = Hub::new("text");
    let generate =
        |flags: &[&str], words: &[&str]| hub.refuses(&[&["--model", "org/tiny"], flags].concat(), 2, words);
    let long = "x ".repeat(700);
    generate(&["--prompt", &long], &["longer than the context", "512"]);
    generate(&["--prompt", "x", "--prompt", &long], &["prompt 2 of 2", "longer than the context"]);
    generate(&["--prompt", "a long text", "--max-model-len", "2"], &["model length of 2"]);
    let ids = |prompt, words: &[&str]| generate(&["--skip-tokenizer-init", "--prompt", prompt], words);
    ids("ROMEO:", &["\"ROMEO:\"", "token ids such as"]);
    ids("5, 99999", &["token id 99999 at position 1", "vocabulary of"]);
    ids(" , ", &["the prompt is empty"]);
    let missing = ["--model", "org/tiny", "--prompt", "x", "--replay-routed-experts", "no-such-file"];
    hub.refuses(&missing, 1, &["no-such-file"]);
}

#[test]
fn no_weight_is_downloaded_for_a_bench_that_cannot_run() {
    let hub = Hub::new("text");
    let bench = |flags: &[&str], words: &[&str]| {
        hub.refuses(&[&["bench", "--model", "org/tiny"], flags].concat(), 2, words);
    };
    bench(&["--batches", "0"], &["--batches 0", "1 to 65535"]);
    bench(&["--batches", "1,70000"], &["--batches 70000"]);
    bench(&["--prompt", "400", "--output", "400"], &["--prompt 400 and --output 400", "context of 512"]);
    bench(&["--lengths", "512"], &["--lengths 512", "context is 512"]);
    bench(&["--long-context", "500"], &["--long-context 500", "512"]);
    bench(&["--max-num-batched-tokens", "0"], &["--max-num-batched-tokens"]);
    hub.refuses(&["bench", "--config", "no-such.json", "--dummy-weights"], 2, &["--config", "no-such.json"]);
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(config.path(), r#"{"model_type": "qwen3_moe"}"#).unwrap();
    let path = config.path().to_str().unwrap();
    hub.refuses(&["bench", "--config", path, "--dummy-weights"], 1, &["hidden_size"]);
}

#[test]
fn no_weight_is_downloaded_for_another_models_reference() {
    let hub = Hub::new("text");
    let parity = |file: &Path, words: &[&str]| {
        let words = [&[file.to_str().unwrap()], words].concat();
        hub.refuses(&["parity", "--model", "org/tiny", "--reference", file.to_str().unwrap()], 1, &words);
    };
    parity(
        &fixture("base").join("reference.safetensors"),
        &["not a usable reference", "the model has 2 layers"],
    );
    parity(&fixture("text").join("model.safetensors"), &["no tensor input_ids"]);
    parity(Path::new("no-such-file"), &[]);
    let own = fixture("text").join("reference.safetensors");
    let output = hub.run(&["parity", "--model", "org/tiny", "--reference", own.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn no_weight_is_downloaded_to_chat_without_a_template() {
    let hub = Hub::new("text");
    let chat = ["chat", "--model", "org/tiny"];
    hub.server.put("tokenizer_config.json", b"{}");
    hub.refuses(&chat, 1, &["org/tiny has no chat template", "--chat-template FILE"]);
    hub.server.put("chat_template.jinja", b"{% if %}");
    let output = hub.run(&chat);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("chat template"), "{}", text(&output.stderr));
    let seen = hub.server.seen();
    assert!(seen.iter().all(|r| !r.path.contains("model.safetensors")), "{seen:?}");
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

#[test]
fn inspect_reads_headers_alone() {
    let dir = fixture("text");
    let output = run(&["inspect", dir.to_str().unwrap(), "--json"], &[]);
    let facts: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&facts["model type"], &facts["runs here"]), (&json!("qwen3_moe"), &json!("yes")), "{facts}");
    assert!(facts["tensors"].as_u64().unwrap() > 10 && facts["experts"].as_u64().unwrap() > 1, "{facts}");
    let size = std::fs::metadata(dir.join("model.safetensors")).unwrap().len();
    let bytes = facts["weight bytes"].as_u64().unwrap();
    assert!(bytes < size && bytes > size / 2, "{bytes} of {size}");
    let parameters: u64 = facts["parameters"].as_u64().unwrap();
    assert_eq!(parameters * 2, bytes, "of bf16: {facts}");
    // The command that it names does what it says.
    let words = text(&run(&["inspect", dir.to_str().unwrap()], &[]).stdout);
    let command = words.lines().last().unwrap().trim();
    let args: Vec<_> = command.strip_prefix("model-qwen3moe ").unwrap().split(' ').collect();
    let explained = run(&args, &[]);
    assert!(text(&explained.stderr).contains("expert backend: cpu"), "{command}: {explained:?}");
    let words = text(&run(&["inspect", fixture("deepseek-text").to_str().unwrap()], &[]).stdout);
    assert!(words.contains("model-deepseekv2-legacy") && words.contains("--explain-backends"), "{words}");
    // A model of the hub that is not here shows its config.
    let hub = Hub::new("text");
    hub.refuses(&["inspect", "org/tiny"], 0, &[]);
    let words = text(&hub.run(&["inspect", "org/tiny"]).stdout);
    assert!(words.contains("`model-qwen3moe download org/tiny` fetches"), "{words}");
}
