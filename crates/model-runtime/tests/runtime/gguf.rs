//! Headers of GGUF files: what opens, and what is refused with which words.

use std::path::Path;

use candle_core::{DType, Device};
use model_runtime::Checkpoint;
use model_runtime::checkpoint::{Configs, Gguf};
use tempfile::TempDir;

#[allow(dead_code)] // Other tests write other values.
#[path = "../../../../tests/gguf/writer.rs"]
pub mod writer;

use writer::{Meta, Tensor, Writer};

pub const F32: u32 = 0;
pub const Q8_0: u32 = 8;

pub fn tensor(name: &str, shape: &[usize], kind: u32) -> Tensor {
    let elements: usize = shape.iter().product();
    let bytes = match kind {
        F32 => (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect(),
        Q8_0 => (0..elements / 32).flat_map(|i| [vec![0, 0x3c], vec![i as u8; 32]].concat()).collect(),
        _ => vec![0; 1024],
    };
    Tensor { name: name.to_string(), shape: shape.to_vec(), kind, bytes }
}

/// The metadata of an architecture that every file has.
pub fn sizes(architecture: &str, layers: u32) -> Writer {
    let mut file = Writer::default();
    file.put("general.architecture", Meta::Text(architecture.into()));
    for (key, value) in [
        ("block_count", layers),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", 32),
    ] {
        file.put(&format!("{architecture}.{key}"), Meta::U32(value));
    }
    file
}

/// The header of a Qwen3-MoE of one layer, and some of its tensors.
fn model() -> Writer {
    let mut file = sizes("qwen3moe", 1);
    file.put("qwen3moe.rope.freq_base", Meta::F32(1e6));
    file.put("qwen3moe.attention.layer_norm_rms_epsilon", Meta::F32(1e-6));
    file.tensors.push(tensor("token_embd.weight", &[8, 32], Q8_0));
    file.tensors.push(tensor("blk.0.ffn_gate_exps.weight", &[2, 32, 32], Q8_0));
    file.tensors.push(tensor("blk.0.attn_norm.weight", &[32], F32));
    file
}

pub fn save(dir: &TempDir, bytes: &[u8]) -> std::path::PathBuf {
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The error of a file of these bytes.
fn error(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(save(&dir, bytes)).err().expect("an error").to_string();
    assert!(error.contains("model.gguf"), "{error}");
    error
}

fn error_of(change: impl FnOnce(&mut Writer)) -> String {
    let mut file = model();
    change(&mut file);
    error(&file.bytes())
}

#[test]
fn a_file_is_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(&dir, &model().bytes());
    for path in [path.as_path(), dir.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        let config = &checkpoint.config;
        assert_eq!(config.opt_string(&["model_type"]).unwrap(), Some("qwen3_moe"));
        assert_eq!(config.size(&["vocab_size"], 1..=100).unwrap(), 8);
        assert_eq!(config.float_or(&["rope_theta"], 0.).unwrap(), 1e6);
        assert!(config.bool_or(&["tie_word_embeddings"], false).unwrap());
        assert_eq!(checkpoint.dtype().unwrap(), DType::BF16);
        let quantisation = checkpoint.quantisation.as_ref().unwrap();
        let module = "model.layers.0.mlp.experts.1.gate_proj";
        assert_eq!(quantisation.scheme_of(module).unwrap().to_string(), "int8 group 32");
        // The second expert's blocks follow the first one's 32.
        let info = checkpoint.tensors.info(&format!("{module}.weight")).unwrap();
        assert_eq!(info.shape, [32, 34]);
        let bytes = checkpoint.tensors.tensor(&format!("{module}.weight")).unwrap();
        assert_eq!(bytes.to_vec2::<u8>().unwrap()[0][2], 32);
        let norm = checkpoint.tensors.var_builder(DType::F32, &Device::Cpu);
        let norm = norm.get(32, "model.layers.0.input_layernorm.weight").unwrap();
        assert_eq!(norm.to_vec1::<f32>().unwrap()[31], 31.0);
        assert_eq!(Configs::read(path).unwrap().config.size(&["num_experts"], 1..=9).unwrap(), 2);
    }
}

#[test]
fn version_2_has_the_same_form() {
    let mut bytes = model().bytes();
    bytes[4] = 2;
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::open(save(&dir, &bytes)).unwrap();
    bytes[4] = 1;
    assert!(error(&bytes).contains("version 1 of the format; expected 2 or 3"));
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(error(&bytes).contains("big-endian"));
    bytes[0] = b'X';
    assert!(error(&bytes).contains("does not begin with GGUF"));
}

/// Every cut of a header, and every count that is larger than the file, is one error.
#[test]
fn cut_and_absurd_headers_are_errors() {
    let bytes = model().bytes();
    for len in (1..bytes.len()).step_by(7) {
        let error = error(&bytes[..len]);
        assert!(error.contains("truncated") || error.contains("damaged"), "{len}: {error}");
    }
    for (at, what) in [(8, "tensors"), (16, "entries of metadata")] {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(error(&bytes).contains(&format!("announces {} {what}", u64::MAX)), "{what}");
    }
    let mut long = bytes.clone();
    long[24..32].copy_from_slice(&(1u64 << 60).to_le_bytes());
    assert!(error(&long).contains("truncated"));
    assert!(error(b"").contains("empty"));
    assert!(error(b"version https://git-lfs.github.com/spec/v1\n").contains("Git LFS pointer"));
}

#[test]
fn tensors_that_no_file_holds_are_errors() {
    let odd = |shape: &[usize], kind: u32| {
        let shape = shape.to_vec();
        error_of(|file| file.tensors.push(Tensor { name: "x".into(), shape, kind, bytes: vec![0; 64] }))
    };
    assert!(odd(&[usize::MAX, usize::MAX], F32).contains("larger than any file"));
    assert!(odd(&[1 << 40], F32).contains("truncated: tensor `x` ends at"));
    assert!(odd(&[2, 40], Q8_0).contains("blocks of 32 columns of Q8_0 do not divide 40"));
    assert!(odd(&[0, 4], F32).contains("dimensions of at least 1"));
    let crowd = error_of(|file| file.tensors.push(tensor("blk.0.ffn_up_exps.weight", &[1 << 20, 1, 1], F32)));
    assert!(crowd.contains("experts, got 1048576"), "{crowd}");
    assert!(odd(&[1; 5], F32).contains("5 dimensions; expected 1 to 4"));
    let error = odd(&[1, 256], 16);
    assert!(
        error.contains("type IQ2_XXS") && error.contains("supported are F32, F16, BF16, Q4_0"),
        "{error}"
    );
    assert!(odd(&[1, 256], 77).contains("type number 77"));
    let twice = error_of(|file| file.tensors.push(tensor("token_embd.weight", &[8, 32], Q8_0)));
    assert!(twice.contains("`model.embed_tokens.weight` is in both"), "{twice}");
    let flat = error_of(|file| file.tensors.push(tensor("blk.0.ffn_up_exps.weight", &[32, 32], Q8_0)));
    assert!(flat.contains("expected [experts, rows, columns], got [32, 32]"), "{flat}");
}

#[test]
fn metadata_that_are_not_read_are_errors() {
    let twice = error_of(|file| file.put("qwen3moe.block_count", Meta::U32(1)));
    assert!(twice.contains("`qwen3moe.block_count` is there twice"), "{twice}");
    let with = |key: &str, value: Meta| {
        error_of(|file| {
            file.metadata.retain(|(other, _)| other != key);
            file.put(key, value);
        })
    };
    assert!(with("general.architecture", Meta::Text("gemma3".into())).contains("supported are qwen3moe, "));
    assert!(with("qwen3moe.expert_count", Meta::U32(0)).contains("dense models are not supported"));
    assert!(with("general.alignment", Meta::U32(24)).contains("a power of two"));
    assert!(with("qwen3moe.attention.value_length", Meta::U32(8)).contains("expected 16"));
    assert!(with("qwen3moe.rope.dimension_count", Meta::U32(8)).contains("expected 16"));
    let width = with("qwen3moe.attention.key_length", Meta::I32(-1));
    assert!(width.contains("`qwen3moe.attention.key_length`: expected a whole number, got -1"), "{width}");
    for (key, number) in [("rope.freq_base", f32::INFINITY), ("attention.layer_norm_rms_epsilon", f32::NAN)] {
        let error = with(&format!("qwen3moe.{key}"), Meta::F32(number));
        assert!(error.contains(&format!("`qwen3moe.{key}`: expected a finite number, got")), "{error}");
    }
    let heads = with("qwen3moe.attention.head_count_kv", Meta::I32s(vec![1, 2]));
    assert!(heads.contains("one value for all layers, got a list"), "{heads}");
    let lacks = error_of(|file| file.metadata.retain(|(key, _)| !key.ends_with("layer_norm_rms_epsilon")));
    assert!(lacks.contains("it has no `qwen3moe.attention.layer_norm_rms_epsilon`"), "{lacks}");
    let frequencies = error_of(|file| file.tensors.push(tensor("rope_freqs.weight", &[8], F32)));
    assert!(frequencies.contains("rotary frequencies of their own"), "{frequencies}");
    let dir = tempfile::tempdir().unwrap();
    let mut file = model();
    file.put("qwen3moe.attention.softcap", Meta::F32(3.0));
    let checkpoint = Checkpoint::open(save(&dir, &file.bytes())).unwrap();
    let notes = checkpoint.quantisation.unwrap().notes().join("");
    assert!(notes.contains("not read: qwen3moe.attention.softcap"), "{notes}");
}

/// The offset of a tensor may be changed so that it shares bytes with another one.
#[test]
fn tensors_that_share_bytes_are_errors() {
    let file = model();
    let bytes = file.bytes();
    // The offset is the last field of a tensor's entry: name, number of dimensions, dimensions, type, offset.
    let name = b"blk.0.attn_norm.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 4 + 8 + 4;
    let mut moved = bytes.clone();
    moved[at..at + 8].copy_from_slice(&32u64.to_le_bytes());
    let error = error(&moved);
    assert!(error.contains("tensor `blk.0.attn_norm.weight` begins at byte"), "{error}");
    assert!(error.contains("before tensor `token_embd.weight` ends"), "{error}");
}

/// Tensors of several parts are one checkpoint; a part that lacks or is of another file is named.
#[test]
fn parts_are_found_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let part = |number: u32| dir.path().join(format!("m-{number:05}-of-00002.gguf"));
    let mut first = model();
    let mut second = Writer::default();
    second.tensors.extend(first.tensors.pop());
    for (number, file) in [&mut first, &mut second].into_iter().enumerate() {
        file.put("split.no", Meta::U32(number as u32));
        file.put("split.count", Meta::U32(2));
    }
    first.put("split.tensors.count", Meta::U32(3));
    first.save(&part(1));
    let open =
        |path: &Path| Checkpoint::open(path).map(|c| c.tensors.iter().count()).map_err(|e| e.to_string());
    let missing = open(&part(1)).unwrap_err();
    assert!(
        missing.contains("1 of 2 parts are missing") && missing.contains("m-00002-of-00002"),
        "{missing}"
    );
    second.save(&part(2));
    for path in [part(1), part(2), dir.path().to_path_buf()] {
        assert_eq!(open(&path), Ok(4), "two experts, an embedding and a norm: {}", path.display());
    }
    first.save(&part(2));
    assert!(open(&part(1)).unwrap_err().contains("`split.no`: expected 1, got 0"));
    second.metadata.retain(|(key, _)| key != "split.count");
    second.put("split.count", Meta::U32(3));
    second.save(&part(2));
    assert!(open(&part(1)).unwrap_err().contains("`split.count`: expected 2, got 3"));
    let renamed = dir.path().join("renamed.gguf");
    std::fs::rename(part(1), &renamed).unwrap();
    assert!(open(&renamed).unwrap_err().contains("one of 2 parts"));
    std::fs::remove_file(&renamed).unwrap();
    for path in [part(2), dir.path().to_path_buf()] {
        let error = open(&path).unwrap_err();
        assert!(error.contains("m-00001-of-00002.gguf: the first part of the file is missing"), "{error}");
    }
}

#[test]
fn a_folder_of_several_models_is_an_error_with_their_names() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Gguf::find(dir.path()).unwrap(), None);
    model().save(&dir.path().join("a.gguf"));
    assert_eq!(Gguf::find(dir.path()).unwrap(), Some(dir.path().join("a.gguf")));
    model().save(&dir.path().join("b.gguf"));
    let error = Gguf::find(dir.path()).unwrap_err().to_string();
    assert!(error.contains("2 GGUF models; name the file of one: a.gguf, b.gguf"), "{error}");
    std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
    assert_eq!(Gguf::find(dir.path()).unwrap(), None, "the usual weights count");
}

/// If bytes of a header are changed, the result is an error or a checkpoint whose tensors can be read, and no panic.
#[test]
fn changed_bytes_never_panic() {
    let bytes = model().bytes();
    let header = bytes.len() - 32 * 34 * 2 - 8 * 34 - 128;
    let dir = tempfile::tempdir().unwrap();
    let mut state = 7u64;
    let mut random = |bound: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    };
    let mut opened = 0;
    for _ in 0..4000 {
        let mut bytes = bytes.clone();
        for _ in 0..1 + random(3) {
            let at = random(header);
            bytes[at] = [0, 1, 0xff, 0x80, random(256) as u8][random(5)];
        }
        let Ok(checkpoint) = Checkpoint::open(save(&dir, &bytes)) else { continue };
        opened += 1;
        for tensor in checkpoint.tensors.iter() {
            assert_eq!(checkpoint.tensors.tensor(tensor.name).unwrap().dims(), tensor.shape);
        }
    }
    assert!((50..3500).contains(&opened), "{opened} of 4000 opened");
}
