//! Tests of the files that a download leaves on disk, and of the few requests of a second one.

use std::fs;

use model_runtime::Checkpoint;
use moe_engine::tokenizer::Tokenizer;

use super::server::{COMMIT, Request};
use super::{Case, fixture, names};

/// The files of a fixture in the order of their names.
const TEXT: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

fn same_weights(dir: &std::path::Path, fixture: &std::path::Path) {
    let ours = Checkpoint::open(dir).unwrap().tensors;
    let theirs = Checkpoint::open(fixture).unwrap().tensors;
    assert_eq!(ours.iter().count(), theirs.iter().count());
    for tensor in theirs.iter() {
        let a = ours.tensor(tensor.name).unwrap();
        let b = theirs.tensor(tensor.name).unwrap();
        let bits = |t: candle_core::Tensor| {
            t.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(bits(a), bits(b), "{}", tensor.name);
    }
}

#[test]
fn a_checkpoint_is_downloaded_and_nothing_else() {
    let case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    assert_eq!(dir, case.folder().join("snapshots").join(COMMIT));
    assert_eq!(names(&dir), TEXT);
    same_weights(&dir, &fixture("text"));
    assert!(Tokenizer::from_dir(&dir).unwrap().vocab_size() > 0);
    // This is the standard layout, so other clients of the hub find the files.
    assert_eq!(fs::read_to_string(case.folder().join("refs/main")).unwrap(), COMMIT);
    let mut blobs: Vec<String> = TEXT.iter().map(|file| case.server.etag(file)).collect();
    blobs.sort();
    assert_eq!(names(case.folder().join("blobs")), blobs);
    for file in TEXT {
        let expected = format!("../../blobs/{}", case.server.etag(file));
        assert_eq!(fs::read_link(dir.join(file)).unwrap().to_str().unwrap(), expected);
    }
}

#[test]
fn every_shard_of_an_index_is_downloaded() {
    let case = Case::new("sharded");
    case.server.put("model-00009-of-00003.safetensors", b"not named by the index");
    case.server.put("chat_template.jinja", b"{{ messages }}");
    let dir = case.get("org/tiny@main").unwrap();
    let shards = (1..=3).map(|i| format!("model-0000{i}-of-00003.safetensors"));
    let mut expected = vec!["chat_template.jinja".to_string(), "config.json".to_string()];
    expected.extend(shards.chain(["model.safetensors.index.json".to_string()]));
    assert_eq!(names(&dir), expected);
    same_weights(&dir, &fixture("sharded"));
}

/// The rule is the same as in a folder: a template for requests with tools is used, and so are weights whose name says
/// how they are quantised.
#[test]
fn further_templates_and_weights_of_another_name_are_downloaded() {
    let case = Case::new("text");
    let weights = fs::read(fixture("text").join("model.safetensors")).unwrap();
    case.server.put("gptq_model-4bit-128g.safetensors", &weights);
    case.server.put("additional_chat_templates/tool_use.jinja", b"{{ tools }}");
    case.server.put("onnx/model.safetensors", b"not a checkpoint");
    case.server.remove("model.safetensors");
    let dir = case.get("org/tiny").unwrap();
    assert_eq!(fs::read(dir.join("additional_chat_templates/tool_use.jinja")).unwrap(), b"{{ tools }}");
    assert!(!dir.join("onnx").exists());
    same_weights(&dir, &fixture("text"));
    // A copy in the cache without the template gets it.
    fs::remove_file(dir.join("additional_chat_templates/tool_use.jinja")).unwrap();
    case.get("org/tiny").unwrap();
    assert!(dir.join("additional_chat_templates/tool_use.jinja").exists());
}

#[test]
fn a_second_run_asks_for_the_commit_only_and_a_pinned_one_for_nothing() {
    let case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    case.server.seen();
    assert_eq!(case.get("org/tiny").unwrap(), dir);
    let paths: Vec<String> = case.server.seen().into_iter().map(|r| r.path).collect();
    assert_eq!(paths, ["/api/models/org/tiny/revision/main"]);
    assert_eq!(case.get(&format!("org/tiny@{COMMIT}")).unwrap(), dir);
    assert_eq!(case.server.seen(), []);
    // Another name of the same commit uses the same files.
    assert_eq!(case.get("org/tiny@refs/pr/1").unwrap(), dir);
    assert_eq!(case.server.seen().len(), 1);
    assert_eq!(fs::read_to_string(case.folder().join("refs/refs/pr/1")).unwrap(), COMMIT);
}

#[test]
fn the_cache_serves_without_a_network() {
    let mut case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    case.settings.offline = true;
    case.server.seen();
    assert_eq!(case.get("org/tiny").unwrap(), dir);
    assert_eq!(case.server.seen(), [], "offline means no request");
    let error = case.error("org/tiny@v2");
    assert!(
        error.contains("HF_HUB_OFFLINE") && error.contains("org/tiny@v2 was never downloaded"),
        "{error}"
    );
    // If the server does not answer, that is not an error as long as the cache has a complete copy.
    case.settings.offline = false;
    case.settings.endpoint = "http://127.0.0.1:1".into();
    assert_eq!(case.get("org/tiny").unwrap(), dir);
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    assert!(case.error("org/tiny").contains("check the connection"));
    case.settings.offline = true;
    assert!(case.error("org/tiny").contains("has neither model.safetensors nor"));
}

#[test]
fn a_deleted_blob_is_downloaded_again() {
    let case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    fs::remove_file(case.folder().join("blobs").join(case.server.etag("model.safetensors"))).unwrap();
    assert!(!dir.join("model.safetensors").exists());
    case.get("org/tiny").unwrap();
    same_weights(&dir, &fixture("text"));
}

#[test]
fn the_token_goes_to_the_hub_and_no_further() {
    let mut case = Case::new("text");
    case.settings.token = Some("hf_secret".into());
    case.get("org/tiny").unwrap();
    let (storage, hub): (Vec<Request>, Vec<Request>) =
        case.server.seen().into_iter().partition(|r| r.host.starts_with("localhost"));
    assert!(storage.iter().any(|r| r.path.starts_with("/storage/")));
    assert!(storage.iter().all(|r| r.token.is_none()), "{storage:?}");
    assert!(hub.iter().any(|r| r.path.starts_with("/cached/")));
    assert!(hub.iter().all(|r| r.token.as_deref() == Some("Bearer hf_secret")), "{hub:?}");
}

#[test]
fn two_processes_download_a_file_once() {
    let case = Case::new("sharded");
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..3).map(|_| scope.spawn(|| case.get("org/tiny").unwrap())).collect();
        for run in runs {
            same_weights(&run.join().unwrap(), &fixture("sharded"));
        }
    });
    let is_body = |r: &&Request| r.method == "GET" && r.path.starts_with("/storage/");
    assert_eq!(case.server.seen().iter().filter(is_body).count(), 3);
}
