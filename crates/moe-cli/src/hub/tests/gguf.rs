//! Tests of GGUF files on the hub: which file is chosen, and which requests the first and the second run send.

use std::fs;

use model_runtime::Checkpoint;

use super::super::{Trust, locate_on_hub};
use super::server::COMMIT;
use super::{Case, ModelName};
use writer::{Meta, Tensor, Writer};

#[allow(dead_code)] // Other tests write other values.
#[path = "../../../../../tests/gguf/writer.rs"]
mod writer;

const F32: u32 = 0;

/// Returns a file with a header and this number of bytes of weights.
fn file(bytes: usize) -> Vec<u8> {
    let mut file = Writer::default();
    file.put("general.architecture", Meta::Text("qwen3moe".into()));
    for key in ["block_count", "context_length", "attention.head_count", "expert_count", "expert_used_count"]
    {
        file.put(&format!("qwen3moe.{key}"), Meta::U32(2));
    }
    file.put("qwen3moe.embedding_length", Meta::U32(16));
    file.put("qwen3moe.attention.layer_norm_rms_epsilon", Meta::F32(1e-6));
    let shape = vec![bytes / 64, 16];
    file.tensors.push(Tensor { name: "token_embd.weight".into(), shape, kind: F32, bytes: vec![1; bytes] });
    file.bytes()
}

/// Returns a repository that has only GGUF files.
fn case() -> Case {
    let case = Case::new("base");
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        case.server.remove(name);
    }
    case.server.put("m-Q4_K_M.gguf", &file(1 << 16));
    case.server.put("m-Q8_0.gguf", &file(1 << 17));
    case
}

#[test]
fn the_file_of_a_tag_is_downloaded_and_nothing_else() {
    let case = case();
    for (name, file) in [("org/tiny", "m-Q4_K_M.gguf"), ("org/tiny:q8_0", "m-Q8_0.gguf")] {
        let path = case.get(name).unwrap();
        assert_eq!(path, case.folder().join("snapshots").join(COMMIT).join(file));
        assert!(Checkpoint::open(&path).unwrap().tensors.info("model.embed_tokens.weight").is_some());
        // The model is in the cache, so it is found without the hub, too.
        let offline = super::Settings { offline: true, ..case.settings.clone() };
        let parsed = ModelName::parse(name).unwrap();
        assert_eq!(locate_on_hub(parsed, offline, Trust::Present).unwrap().weights().unwrap(), path);
    }
    let report = super::super::check_snapshot(&case.folder().join("snapshots").join(COMMIT));
    assert_eq!((report.files, report.faults.len()), (2, 0), "{:?}", report.faults);
}

#[test]
fn the_header_is_here_before_the_weights() {
    let case = case();
    let name = ModelName::parse("org/tiny:Q8_0").unwrap();
    let located = locate_on_hub(name, case.settings.clone(), Trust::Present).unwrap();
    assert!(located.is_header_alone());
    let header = located.dir().to_path_buf();
    assert_eq!(fs::metadata(&header).unwrap().len(), file(1 << 17).len() as u64);
    let checkpoint = Checkpoint::open(&header).unwrap();
    assert!(checkpoint.config.has("model_type"));
    assert!(!case.folder().join("blobs").exists(), "no weight is here");
    drop(located);
    assert!(!header.exists());
}

/// The headers of two models that are in use at the same time are in different folders.
#[test]
fn headers_of_two_models_are_here_at_the_same_time() {
    let case = case();
    let located = ["org/tiny:Q8_0", "org/tiny"].map(|name| {
        locate_on_hub(ModelName::parse(name).unwrap(), case.settings.clone(), Trust::Present).unwrap()
    });
    assert!(located.iter().all(|one| one.is_header_alone() && one.dir().exists()));
    assert_ne!(located[0].dir(), located[1].dir());
}

#[test]
fn a_tag_that_no_file_has_is_an_error_with_those_that_there_are() {
    let error = case().error("org/tiny:Q6_K");
    assert!(error.contains("no GGUF file Q6_K; it has Q4_K_M, Q8_0"), "{error}");
}
