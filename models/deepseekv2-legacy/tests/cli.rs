//! The program as a user runs it: text, conversations, files of requests, and a clear error for every unsupported
//! option.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::fs;
use std::io::Write;
use std::process::{Output, Stdio};

use program::{Copied, Program, fixture, stdout};
use serde_json::{Value, json};

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_model-deepseekv2-legacy"), flags: &[] };

fn run(args: &[&str]) -> Output {
    PROGRAM.run(args)
}

fn fails(args: &[&str], code: i32, words: &[&str]) {
    PROGRAM.fails(args, code, words);
}

#[test]
fn text_equals_that_of_transformers_on_both_paths_and_in_both_forms() {
    for (path, form) in
        [("legacy", "absorbed"), ("fused", "absorbed"), ("legacy", "naive"), ("fused", "naive")]
    {
        let flags = ["--moe-path", path, "--mla", form];
        Program { flags: &flags, ..PROGRAM }.continues_like_transformers("deepseek-text");
    }
}

#[test]
fn sampled_text_is_that_of_the_seed_on_both_paths() {
    let dir = fixture("deepseek-text");
    let text = |seed: &str, flags: &[&str]| {
        let common = ["--model", dir.to_str().unwrap(), "--prompt", "The router", "--temperature", "1"];
        let more = ["--max-new-tokens", "24", "--ignore-eos", "--seed", seed];
        stdout(&run(&[&common[..], &more[..], flags].concat()))
    };
    let first = text("7", &[]);
    assert_eq!(text("7", &["--moe-path", "fused", "--num-threads", "1", "--block-size", "3"]), first);
    assert_ne!(text("8", &[]), first);
}

#[test]
fn batch_answers_and_chat_talks() {
    let model = fixture("deepseek-text");
    let dir = tempfile::tempdir().unwrap();
    let model = model.to_str().unwrap();
    let body = |content: &str| {
        json!({"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0,
            "ignore_eos": true})
    };
    let line = |id: &str, body: Value| {
        json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}).to_string()
    };
    let input = dir.path().join("in.jsonl");
    let output = dir.path().join("out.jsonl");
    fs::write(&input, format!("{}\n{}\n", line("a", body("Hello")), line("b", json!({"messages": 1}))))
        .unwrap();
    let files = ["--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
    let done = run(&[&["batch", "--model", model], &files[..]].concat());
    assert!(done.status.code().is_some(), "{done:?}");
    let answers = fs::read_to_string(&output).unwrap();
    let answers: Vec<Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let find = |id: &str| answers.iter().find(|answer| answer["custom_id"] == id).unwrap();
    assert_eq!(find("b")["response"]["status_code"], 400);
    let answer =
        find("a")["response"]["body"]["choices"][0]["message"]["content"].as_str().unwrap().to_string();

    let flags = ["chat", "--model", model, "--max-new-tokens", "6", "--temperature", "0", "--ignore-eos"];
    let mut chat = PROGRAM.command(&flags);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"Hello\n").unwrap();
    let talked = stdout(&chat.wait_with_output().unwrap());
    assert_eq!(talked, format!("{answer}\n"), "chat and batch ask the same");
    assert!(!answer.is_empty());
}

#[test]
fn a_model_must_be_named() {
    fails(&[], 2, &["no model is given", "--model"]);
    fails(&["--prompt", "x"], 2, &["--model"]);
    fails(&["chat"], 2, &["--model"]);
}

#[test]
fn wrong_choices_are_named() {
    let text = fixture("deepseek-text");
    let with = |flags: &[&str], code, words: &[&str]| {
        fails(&[&["--model", text.to_str().unwrap(), "--prompt", "x"], flags].concat(), code, words);
    };
    with(&["--moe-path", "quick"], 2, &["--moe-path", "quick", "fused or legacy"]);
    with(&["--mla", "folded"], 2, &["--mla", "folded", "absorbed or naive"]);
    with(
        &["--moe-path", "legacy", "--moe-backend", "cpu"],
        1,
        &["legacy expert path has no backends", "cpu"],
    );
    with(&["--moe-backend", "warp"], 2, &["warp", "cpu"]);
    let qwen = fixture("text");
    fails(
        &["--model", qwen.to_str().unwrap(), "--prompt", "x"],
        1,
        &["qwen3_moe", "deepseek_v2", "the program `moe` runs"],
    );
}

#[test]
fn the_path_is_told() {
    let text = fixture("deepseek-text");
    let explained = |flags: &[&str]| -> Value {
        let args =
            ["--model", text.to_str().unwrap(), "--prompt", "x", "--max-new-tokens", "1", "--log", "error"];
        let file = tempfile::NamedTempFile::new().unwrap();
        let flag = format!("--explain-backends={}", file.path().display());
        run(&[&args[..], &[flag.as_str()], flags].concat());
        serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap()
    };
    assert_eq!(explained(&[])["chosen"], "cpu");
    assert_eq!(explained(&["--moe-path", "legacy"])["chosen"], "legacy");
}

#[test]
fn unsupported_values_are_refused_by_name() {
    for (key, value, words) in [
        ("model_type", json!("deepseek_v3"), &["deepseek_v3", "deepseek_v2", "`moe` runs"][..]),
        ("model_type", json!("qwen3_moe"), &["qwen3_moe", "deepseek_v2"]),
        ("topk_method", json!("random"), &["topk_method", "random"]),
        ("scoring_func", json!("tanh"), &["scoring_func", "tanh"]),
        ("quantization_config", json!({"quant_method": "aqlm"}), &["aqlm", "original float dtype"]),
        ("torch_dtype", json!("float8_e4m3fn"), &["torch_dtype", "float8_e4m3fn"]),
        ("mlp_bias", json!(true), &["mlp_bias"]),
        ("hidden_act", json!("relu6"), &["relu6"]),
        ("num_key_value_heads", json!(2), &["num_key_value_heads", "num_attention_heads = 4", "2"]),
        ("qk_rope_head_dim", json!(7), &["qk_rope_head_dim", "even", "7"]),
        ("kv_lora_rank", json!(0), &["kv_lora_rank", "0"]),
        ("kv_lora_rank", json!(1u64 << 50), &["kv_lora_rank"]),
        ("v_head_dim", json!("wide"), &["v_head_dim", "wide"]),
        ("num_experts_per_tok", json!(null), &["num_experts_per_tok"]),
        ("num_experts_per_tok", json!(7), &["7", "6"]),
        ("routed_scaling_factor", json!(0), &["routed_scaling_factor", "0"]),
        ("n_shared_experts", json!(-1), &["n_shared_experts", "-1"]),
        ("moe_layer_freq", json!("often"), &["moe_layer_freq", "often"]),
        ("rope_scaling", json!({"type": "longrope", "factor": 8}), &["longrope"]),
        (
            "rope_scaling",
            json!({"type": "yarn", "factor": 4, "mscale_all_dim": -1}),
            &["mscale_all_dim", "-1"],
        ),
        ("rope_scaling", json!({"type": "yarn", "factor": 0.5}), &["factor", "0.5"]),
    ] {
        let model = Copied::with("deepseek-text", &[(key, value)]);
        fails(&["--model", model.dir(), "--prompt", "x"], 1, words);
    }
    let grouped = [("topk_method", json!("group_limited_greedy"))];
    for (groups, kept, words) in [
        (json!(null), json!(1), &["n_group"][..]),
        (json!(4), json!(2), &["6", "4"]),
        (json!(3), json!(4), &["4", "3"]),
        (json!(6), json!(1), &["2", "1"]),
    ] {
        let changes = [&grouped[..], &[("n_group", groups), ("topk_group", kept)]].concat();
        let model = Copied::with("deepseek-text", &changes);
        fails(&["--model", model.dir(), "--prompt", "x"], 1, words);
    }
}

#[test]
fn checkpoints_that_do_not_fit_are_listed() {
    let model = Copied::with("deepseek-text", &[("q_lora_rank", json!(8))]);
    let names =
        ["missing", "q_a_proj.weight [8, 40]", "q_a_layernorm.weight", "q_b_proj", "unexpected", "q_proj"];
    fails(&["--model", model.dir(), "--prompt", "x"], 1, &names);
    // If the config says that there are no shared experts, the ones in the file are reported.
    let model = Copied::with("deepseek-text", &[("n_shared_experts", json!(0))]);
    fails(&["--model", model.dir(), "--prompt", "x"], 1, &["shared_experts.gate_proj.weight", "[0, 40]"]);
    // An explicit null means a dense model, so every expert in the file is reported.
    let model = Copied::with("deepseek-text", &[("n_routed_experts", json!(null))]);
    fails(&["--model", model.dir(), "--prompt", "x"], 1, &["unexpected", "experts.0.gate_proj.weight"]);
}

#[test]
fn what_transformers_ignores_is_said() {
    for (name, words) in [
        ("deepseek-norm-topk", "norm_topk_prob true is honoured here, but transformers 5.17 ignores it"),
        ("deepseek-sigmoid", "scoring_func \"sigmoid\" is honoured"),
        ("deepseek-layer-freq", "moe_layer_freq 2 is honoured"),
        ("deepseek-v2", ""),
    ] {
        let dir = fixture(name);
        let reference = dir.join("reference.safetensors");
        let model = ["--model", dir.to_str().unwrap(), "--reference", reference.to_str().unwrap()];
        let output = run(&[&["parity"][..], &model].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let told = stderr.contains("transformers 5.17 ignores it");
        assert_eq!(told, !words.is_empty(), "{name}: {stderr}");
        assert!(stderr.contains(words), "{name}: {stderr}");
    }
}

#[test]
fn random_weights_can_be_timed_on_both_paths() {
    let config = fixture("deepseek-v2").join("config.json");
    let json = tempfile::NamedTempFile::new().unwrap();
    for flags in [["--moe-path", "legacy"], ["--moe-path", "fused"]] {
        let output = run(&[
            &["bench", "--config", config.to_str().unwrap(), "--dummy-weights", "--batches", "2"][..],
            &["--prompt", "4", "--output", "65", "--lengths", "8", "--repeat", "1", "--json"],
            &[json.path().to_str().unwrap()],
            &flags,
        ]
        .concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let result: Value = serde_json::from_slice(&fs::read(json.path()).unwrap()).unwrap();
        assert!(result["decode"]["2"]["tok_s"].as_f64().unwrap() > 0.0, "{result}");
        assert_eq!(result["dtype"], "bf16");
    }
}
