//! Errors that are found before a weight is downloaded.

use std::path::Path;

use serde_json::json;

use super::{Hub, fixture, text};

#[test]
fn no_weight_is_downloaded_for_a_checkpoint_that_cannot_be_run() {
    let hub = Hub::new("text");
    let args = ["--model", "org/tiny", "--prompt", "x"];
    for (key, value, words) in [
        ("quantization_config", json!({"quant_method": "hqq"}), &["hqq", "original float dtype"][..]),
        ("model_type", json!("llama"), &["llama", "qwen3_moe", "the program `moe` runs"]),
        ("model_type", json!("deepseek_v2"), &["the program `moe` runs \"qwen3_moe\", \"deepseek_v2\""]),
        ("model_type", json!(7), &["`model_type`: expected a string, got 7"]),
        ("hidden_size", json!(null), &["hidden_size", "config.json"]),
        ("num_experts_per_tok", json!(1000), &["num_experts_per_tok"]),
    ] {
        // Each case needs a new hub with an empty cache, because a cache keeps the config.
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
    hub.refuses(&args, 1, &["tiny-q4.gguf is not a valid GGUF file", "truncated"]);
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
    bench(&["--json", "/no/such/folder/x"], &["--json /no/such/folder/x", "cannot write"]);
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
