//! One program for every family: config.json says which one runs.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::collections::BTreeMap;

use program::{Copied, Program, fixture, stdout};
use serde_json::{Value, json};

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_moe"), flags: &[] };

/// A fixture with recorded text of each family.
fn texts() -> Vec<String> {
    let folder = fixture("");
    let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.filter_map(|name| name.into_string().ok());
    let recorded = names.filter(|name| folder.join(name).join("text_case.json").is_file());
    let by_type = recorded.map(|name| {
        let config = std::fs::read(folder.join(&name).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        (config["model_type"].to_string(), name)
    });
    let texts: Vec<String> = by_type.collect::<BTreeMap<_, _>>().into_values().collect();
    assert!(texts.len() > 1, "{texts:?}");
    texts
}

#[test]
fn every_family_continues_like_transformers() {
    texts().iter().for_each(|name| PROGRAM.continues_like_transformers(name));
}

#[test]
fn without_a_model_the_embedded_one_talks() {
    let text = PROGRAM.text(&["--prompt", "First Citizen:", "--max-new-tokens", "8", "--temperature", "0"]);
    assert!(!text.trim().is_empty());
    let embedded = ["--prompt", "x", "--max-new-tokens", "1", "--mla", "naive"];
    PROGRAM.fails(&embedded, 2, &["--mla", "no multi-head latent attention"]);
    let latent = fixture("deepseek-text");
    let flags =
        ["--model", latent.to_str().unwrap(), "--mla", "naive", "--prompt", "x", "--max-new-tokens", "1"];
    PROGRAM.text(&flags);
}

#[test]
fn inspect_tells_of_each_that_it_runs() {
    for name in texts() {
        let facts = stdout(&PROGRAM.run(&["inspect", fixture(&name).to_str().unwrap(), "--json"]));
        let facts: Value = serde_json::from_str(&facts).unwrap();
        assert_eq!(facts["runs_here"], true, "{facts}");
    }
}

#[test]
fn inspect_tells_what_a_head_for_multi_token_prediction_takes() {
    let facts = |name: &str| -> Value {
        let model = fixture(name);
        serde_json::from_str(&PROGRAM.text(&["inspect", model.to_str().unwrap(), "--json"])).unwrap()
    };
    // The tensors of the head in bf16.
    let bytes = 2 * 42688;
    let stored = facts("qwen3_5-part");
    assert_eq!(stored["mtp_head_bytes"], bytes, "{stored}");
    assert!(stored["notes"].as_str().unwrap().contains("mtp.*"), "{stored}");
    assert_eq!(facts("qwen3_5-text")["mtp_head_bytes"], Value::Null);
}

#[test]
fn inspect_tells_of_gates_in_f32() {
    let gates = |name: &str| {
        // The fixture has no tokenizer, so `inspect` also says that it makes no text here, and fails.
        let output = PROGRAM.run(&["inspect", fixture(name).to_str().unwrap(), "--json"]);
        let facts: Value = serde_json::from_slice(&output.stdout).unwrap();
        facts["router_gates"].as_str().map(str::to_string)
    };
    let told = gates("ernie-f32-gate").unwrap();
    assert_eq!(told, "stored in f32, and kept in f32 where bf16 would round them");
    assert_eq!(gates("ernie"), None);
}

#[test]
fn an_architecture_names_the_family_where_the_model_type_is_missing() {
    for name in texts() {
        let model = Copied::with(&name, &[("model_type", Value::Null)]);
        PROGRAM.text(&["--model", model.dir(), "--prompt", "x", "--max-new-tokens", "1"]);
    }
}

#[test]
fn an_unknown_model_is_refused_with_the_known_ones() {
    let unknown = Copied::with("text", &[("model_type", json!("llama"))]);
    let words =
        ["model_type \"llama\" is not supported; this program runs model_type", "qwen3_moe", "deepseek_v2"];
    PROGRAM.fails(&["--model", unknown.dir(), "--prompt", "x"], 1, &words);
    let nameless = [("model_type", Value::Null), ("architectures", json!(["LlamaForCausalLM"]))];
    let nameless = Copied::with("text", &nameless);
    PROGRAM.fails(
        &["--model", nameless.dir(), "--prompt", "x"],
        1,
        &["`model_type`", "`architectures`", "got nothing"],
    );
}
