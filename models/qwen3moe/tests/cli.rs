//! The program as a user runs it: text, exit codes, and a clear error for every kind of bad input.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::fs;
use std::path::Path;
use std::process::Output;

use program::{Copied, Program, fixture, stdout};
use serde_json::{Value, json};

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_model-qwen3moe"), flags: &[] };

fn run(args: &[&str]) -> Output {
    PROGRAM.run(args)
}

fn fails(args: &[&str], code: i32, words: &[&str]) {
    PROGRAM.fails(args, code, words);
}

/// Gives a model a tokenizer. Without one, the program ends before it reads the weights.
fn with_tokenizer(model: &Copied) {
    fs::copy(fixture("text").join("tokenizer.json"), model.path("tokenizer.json")).unwrap();
}

/// Checks that a model cannot be run, and the words of the error.
fn unusable(model: &Copied, words: &[&str]) {
    fails(&["--model", model.dir(), "--prompt", "x"], 1, words);
}

#[test]
fn the_embedded_model_continues_a_prompt() {
    let args = ["--prompt", "First Citizen:", "--max-new-tokens", "40", "--temperature", "0"];
    let first = run(&args);
    assert!(first.status.success());
    assert!(stdout(&first).chars().count() > 40, "{}", stdout(&first));
    assert!(!stdout(&first).contains("First Citizen:\nFirst Citizen:"), "only the continuation is printed");
    assert_eq!(stdout(&first), stdout(&run(&args)), "greedy output repeats");
    assert_eq!(stdout(&first), stdout(&run(&[&["generate"], &args[..]].concat())));
    let one_thread = [&args[..], &["--num-threads", "1", "--block-size", "3"]].concat();
    assert_eq!(stdout(&first), stdout(&run(&one_thread)), "threads and blocks do not change the text");
}

#[test]
fn sampling_is_reproducible_by_seed() {
    let with_seed = |seed: &str| stdout(&run(&["--prompt", "x", "--max-new-tokens", "24", "--seed", seed]));
    assert_eq!(with_seed("7"), with_seed("7"));
    assert_ne!(with_seed("7"), with_seed("8"));
}

#[test]
fn text_equals_that_of_transformers() {
    PROGRAM.continues_like_transformers("text");
}

#[test]
fn prompts_come_from_files_and_stdin() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    fs::write(&file, "ROMEO:").unwrap();
    let common = ["--max-new-tokens", "8", "--temperature", "0"];
    let by_flag = run(&[&["--prompt", "ROMEO:"], &common[..]].concat());
    let by_file = run(&[&["--prompt-file", file.to_str().unwrap()], &common[..]].concat());
    assert_eq!(stdout(&by_flag), stdout(&by_file));
    let by_stdin = PROGRAM
        .command(&[&["-"], &common[..]].concat())
        .stdin(fs::File::open(&file).unwrap())
        .output()
        .unwrap();
    assert_eq!(stdout(&by_flag), stdout(&by_stdin));
}

#[test]
fn wrong_calls_are_usage_errors() {
    fails(&["--prompt", "x", "--prompt-file", "y"], 2, &["cannot be used with"]);
    fails(&["--prompt", "x", "--device", "tpu"], 2, &["tpu"]);
    fails(&["--prompt", "x", "--dtype", "int3"], 2, &["int3", "f32, bf16, f16"]);
    fails(&["--prompt", "x", "--cpu-isa", "sse9"], 2, &["sse9", "scalar, avx2"]);
    fails(&["--prompt", "x", "--num-threads", "0"], 2, &["--num-threads 0", "expected 1 to 1024"]);
    fails(&["--prompt", "x", "--top-p", "1.5"], 2, &["top_p", "1.5"]);
    fails(&["--prompt", "x", "--temperature", "-1"], 2, &["temperature"]);
    fails(&["--prompt", "x", "--top-k", "-7"], 2, &["--top-k -7"]);
    fails(&["--prompt", "x", "--num-threads", "100000"], 2, &["100000", "1024"]);
    fails(&["--prompt", "x", "--block-size", "0"], 2, &["--block-size"]);
    fails(&["--prompt", "x", "--max-model-len", "100000"], 2, &["--max-model-len", "512"]);
    fails(&["--prompt", "x", "--model", "/no/such/folder"], 2, &["/no/such/folder"]);
    fails(&["--prompt", "x", "--moe-backend", "warp"], 2, &["--moe-backend warp", "cpu"]);
    fails(&["--prompt", "x", "--moe-backend", "cpu_batched"], 1, &["cpu_batched", "BatchedExperts"]);
}

#[test]
fn bad_prompts_are_named() {
    fails(&["--prompt", ""], 2, &["prompt is empty"]);
    fails(&["--prompt", &"word ".repeat(1000)], 2, &["longer than the context", "512"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latin1.txt");
    fs::write(&file, b"caf\xe9").unwrap();
    fails(&["--prompt-file", file.to_str().unwrap()], 1, &["not UTF-8", "0xe9", "offset 3", "latin1.txt"]);
    fails(&["--prompt-file", "/no/such/file"], 2, &["/no/such/file"]);
}

#[test]
fn damaged_weights_are_named() {
    let model = Copied::new("text");
    let weights = model.path("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let huge = [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat();
    for damaged in [&bytes[..bytes.len() / 2], &bytes[..3], &huge, b""] {
        fs::write(&weights, damaged).unwrap();
        unusable(&model, &["model.safetensors"]);
    }
    fs::remove_file(&weights).unwrap();
    fs::remove_file(model.path("reference.safetensors")).unwrap();
    unusable(&model, &["safetensors"]);
}

fn layers(model: &Copied) -> u64 {
    let config: Value = serde_json::from_slice(&fs::read(model.path("config.json")).unwrap()).unwrap();
    config["num_hidden_layers"].as_u64().unwrap()
}

#[test]
fn every_mismatch_is_in_one_message() {
    let model = Copied::new("text");
    let layers = layers(&model);
    // With another width, many tensors have another shape. With one more layer, all tensors of a layer are missing.
    model.config("moe_intermediate_size", json!(24));
    model.config("num_hidden_layers", json!(layers + 1));
    unusable(
        &model,
        &["missing", &format!("model.layers.{layers}.input_layernorm.weight"), "of another shape", "24"],
    );
    model.config("num_hidden_layers", json!(layers - 1));
    unusable(&model, &["unexpected", &format!("model.layers.{}.input_layernorm.weight", layers - 1)]);
}

/// The config ties the embeddings although the file has another output matrix, and the file has a layer too many. Both
/// models run, and each contradiction is reported once, for any number of ranks.
#[test]
fn contradictions_of_config_and_weights_are_told_once() {
    let plain = Copied::new("text");
    let model = Copied::new("text");
    let layers = layers(&model);
    model.config("tie_word_embeddings", json!(true));
    for model in [&plain, &model] {
        model.config("num_hidden_layers", json!(layers - 1));
    }
    let text = |model: &Copied, flags: &[&str]| {
        let args = ["--model", model.dir(), "--prompt", "The", "--temperature", "0", "--max-new-tokens", "8"];
        let out = run(&[&args[..], flags, &["--log", "warn"]].concat());
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        (stdout(&out), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (want, told) = text(&plain, &[]);
    assert_eq!(told.lines().count(), 1, "{told}");
    for flags in [&[][..], &["--tp", "2"]] {
        let (got, told) = text(&model, flags);
        assert_eq!(got, want);
        assert!(told.contains(&format!("model.layers.{}.* (", layers - 1)), "{told}");
        assert!(told.contains("lm_head of other values") && told.lines().count() == 2, "{told}");
    }
}

#[test]
fn a_missing_shard_is_named() {
    let model = Copied::new("sharded");
    with_tokenizer(&model);
    let shard = fs::read_dir(model.dir())
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.to_string_lossy().contains("-of-"))
        .unwrap();
    fs::remove_file(&shard).unwrap();
    unusable(&model, &[shard.file_name().unwrap().to_str().unwrap()]);
}

#[test]
fn broken_configs_are_refused_before_anything_is_allocated() {
    for (key, value, words) in [
        ("model_type", json!("llama"), &["model_type", "llama", "qwen3_moe", "`moe` runs"][..]),
        ("model_type", json!(["qwen3_moe"]), &["`model_type`: expected a string"]),
        ("hidden_size", json!(1u64 << 60), &["hidden_size"]),
        ("hidden_size", json!(-1), &["hidden_size", "-1"]),
        ("hidden_size", json!("many"), &["hidden_size", "many"]),
        ("num_hidden_layers", json!(1e12), &["num_hidden_layers"]),
        ("vocab_size", json!(u64::MAX), &["vocab_size"]),
        ("num_experts_per_tok", json!(1000), &["num_experts_per_tok"]),
        ("num_experts_per_tok", json!(0), &["num_experts_per_tok"]),
        ("num_attention_heads", json!(3), &["num_key_value_heads"]),
        ("head_dim", json!(7), &["head_dim"]),
        ("hidden_act", json!("relu6"), &["relu6"]),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8}), &["llama3"]),
        ("quantization_config", json!({"quant_method": "hqq"}), &["hqq", "gptq, awq"]),
        ("torch_dtype", json!("float8"), &["float8"]),
    ] {
        let model = Copied::new("text");
        model.config(key, value);
        unusable(&model, words);
    }
    let model = Copied::new("text");
    fs::write(model.path("config.json"), "{\"model_type\": ").unwrap();
    unusable(&model, &["config.json", "JSON"]);
    fs::remove_file(model.path("config.json")).unwrap();
    unusable(&model, &["config.json"]);
}

#[test]
fn not_finite_weights_are_reported_on_request() {
    let model = Copied::new("f32");
    with_tokenizer(&model);
    let weights = model.path("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    fails(&["--model", model.dir(), "--prompt", "x", "--check-weights"], 1, &["not finite", "NaN"]);
}

#[test]
fn a_missing_tokenizer_is_named() {
    let model = Copied::new("base");
    unusable(&model, &["tokenizer.json"]);
    let model = Copied::new("text");
    fs::write(model.path("tokenizer.json"), "[]").unwrap();
    unusable(&model, &["tokenizer.json"]);
}

#[test]
fn absurd_sizes_are_errors_and_not_aborts() {
    let model = fixture("base");
    let bench = |flags: &[&str], words: &[&str]| {
        fails(&[&["bench", "--model", model.to_str().unwrap()], flags].concat(), 2, words);
    };
    bench(&["--prompt", "100000000000"], &["--prompt", "100000000000"]);
    bench(&["--prompt", "4", "--output", "4", "--batches", "10000000000"], &["--batches 10000000000"]);
    bench(&["--prompt", "4", "--output", "4", "--lengths", "18446744073709551615"], &["--lengths"]);
    let long = Copied::new("text");
    long.config("max_position_embeddings", json!(1u64 << 31));
    let path = long.dir().to_string();
    let flags = ["--model", &path, "--prompt", "x", "--max-new-tokens", "2000000000"];
    fails(&flags, 2, &["holds", "raise --kv-cache-memory", "--max-new-tokens"]);
    fails(&[&flags[..], &["--max-model-len", "2000000000"]].concat(), 2, &["holds", "--max-model-len"]);
    // The memory is allocated at the start, or the program ends with an error.
    let all = ["--max-model-len", "2000000000", "--kv-cache-memory", "1000000GB"];
    fails(&[&flags[..], &all].concat(), 2, &["bytes of memory are available"]);
}

#[test]
fn a_full_disk_behind_stdout_is_an_error() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = PROGRAM
        .command(&["--prompt", "x", "--max-new-tokens", "2", "--ignore-eos"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write to stdout"));
}

#[test]
fn backends_are_explained_as_json() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let flag = format!("--explain-backends={}", file.path().display());
    run(&["--prompt", "x", "--max-new-tokens", "1", &flag]);
    let explained: Value = serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap();
    assert_eq!(explained["chosen"], "cpu");
    let rejected: Vec<&str> =
        explained["rejected"].as_array().unwrap().iter().map(|r| r["backend"].as_str().unwrap()).collect();
    assert!(rejected.contains(&"cpu_batched") && rejected.contains(&"cuda_fused"), "{rejected:?}");
    let plan = &explained["plans"][0];
    assert_eq!((&plan["step"], &plan["rows"]), (&json!("decode"), &json!([1, null])));
    assert_eq!(plan["attention"][1]["computes"], json!(["qkv"]));
    assert_eq!(plan["attention"][1]["kernel"], "cpu_linear");
    let reason = &plan["mlp"][1]["rejected"][0]["reason"];
    assert_eq!(reason["check"], "device", "{plan:#}");
}

#[test]
fn backends_are_explained_as_a_table() {
    let output = run(&["--prompt", "x", "--max-new-tokens", "1", "--log", "warn", "--explain-backends"]);
    let text = String::from_utf8(output.stderr).unwrap();
    for want in [
        "expert backend: cpu\n",
        "not cuda_fused: ",
        "decode, any number of rows",
        "qkv ",
        "not layer_stream",
    ] {
        assert!(text.contains(want), "{want:?} in {text}");
    }
}

fn parity<'a>(model: &'a str, reference: &'a Path) -> [&'a str; 5] {
    ["parity", "--model", model, "--reference", reference.to_str().unwrap()]
}

#[test]
fn parity_fails_on_a_foreign_reference() {
    let model = fixture("base");
    let foreign = fixture("f32").join("reference.safetensors");
    // The sizes do not fit this model.
    fails(&parity(model.to_str().unwrap(), &foreign), 1, &["expected"]);
}

#[test]
fn a_reference_with_absurd_noise_does_not_switch_the_comparison_off() {
    let model = Copied::new("base");
    let reference = model.path("reference.safetensors");
    let mut bytes = fs::read(&reference).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let at = 8 + header_len + header["bf16_noise"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&reference, bytes).unwrap();
    fails(&parity(model.dir(), &reference), 1, &["bf16_noise", "NaN"]);
}

#[test]
fn parity_names_the_first_tensor_that_differs() {
    let model = Copied::new("f32");
    let weights = model.path("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    // This byte has the sign of one weight in the last tensor of the file.
    let end = bytes.len();
    bytes[end - 1] ^= 0x80;
    fs::write(&weights, bytes).unwrap();
    let reference = model.path("reference.safetensors");
    let output = run(&[&parity(model.dir(), &reference)[..], &["--dtype", "f32"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["passed"], json!(false));
    assert!(
        report["failures"][0].as_str().unwrap().contains("is the first tensor that differs"),
        "{report:#}"
    );
}

#[test]
fn other_formats_and_other_programs_models_are_named() {
    let deepseek = fixture("deepseek-text");
    let args = ["--prompt", "x", "--model"];
    let words = ["deepseek_v2", "the program `moe` runs", "\"deepseek_v2\""];
    fails(&[&args[..], &[deepseek.to_str().unwrap()]].concat(), 1, &words);
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("tiny-q4.gguf");
    fs::write(&gguf, b"GGUF").unwrap();
    for path in [gguf.as_path(), dir.path()] {
        let words = ["tiny-q4.gguf is not a valid GGUF file", "truncated"];
        fails(&[&args[..], &[path.to_str().unwrap()]].concat(), 1, &words);
    }
    let weights = fixture("text").join("model.safetensors");
    fails(&[&args[..], &[weights.to_str().unwrap()]].concat(), 2, &["is a file", "name its folder"]);
}

#[test]
fn a_wrong_flag_is_found_before_weights_are_read() {
    let model = Copied::new("text");
    fs::write(model.path("model.safetensors"), b"").unwrap();
    for (flags, words) in [
        (&["--max-new-tokens", "0"][..], &["--max-new-tokens 0"][..]),
        (&["--stop", ""], &["--stop \"\""]),
        (&["--temperature", "-1"], &["temperature"]),
        (&["--moe-backend", "warp"], &["--moe-backend warp"]),
    ] {
        fails(&[&["--model", model.dir(), "--prompt", "x"], flags].concat(), 2, words);
    }
}
