//! Checkpoints on disk: what loads, and what is refused with which words.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};
use model_runtime::checkpoint::CheckpointError;
use model_runtime::{Checkpoint, TensorFiles, TensorSpec};
use tempfile::TempDir;

use crate::message;

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn save(path: &Path, tensors: &[(&str, Tensor)]) {
    let tensors: HashMap<&str, Tensor> = tensors.iter().map(|(n, t)| (*n, t.clone())).collect();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

fn ramp(from: f32, dims: &[usize]) -> Tensor {
    let n = dims.iter().product::<usize>();
    Tensor::arange(from, from + n as f32, &Device::Cpu).unwrap().reshape(dims).unwrap()
}

fn index(dir: &Path, map: &[(&str, &str)]) {
    let map: serde_json::Map<String, serde_json::Value> =
        map.iter().map(|(n, f)| (n.to_string(), (*f).into())).collect();
    let json = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(dir.join("model.safetensors.index.json"), json.to_string()).unwrap();
}

/// A directory with one tensor `w` [2, 3] in model.safetensors; returns the file's bytes.
fn one_tensor(dir: &Path) -> Vec<u8> {
    let path = dir.join("model.safetensors");
    save(&path, &[("w", ramp(0.0, &[2, 3]))]);
    std::fs::read(path).unwrap()
}

fn open_error(dir: &Path) -> CheckpointError {
    TensorFiles::open_dir(dir).err().expect("an error")
}

/// A file with this JSON header and this many bytes of data.
fn with_header(dir: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

#[test]
fn floats_convert_with_one_rounding() -> Result<()> {
    let values = [0.1f32, -1.0, 65504.0, 1e-8, 3.3333333, 1e5, f32::NEG_INFINITY];
    let dir = dir();
    let file = dir.path().join("x.safetensors");
    let source = Tensor::new(&values, &Device::Cpu)?;
    for stored in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        save(&file, &[("w", source.to_dtype(stored)?)]);
        let files = TensorFiles::open_file(&file).unwrap();
        assert_eq!(files.float_dtype(), Some(stored));
        assert_eq!(files.tensor("w")?.dtype(), stored);
        for wanted in [DType::F32, DType::BF16, DType::F16] {
            let got = files.var_builder(wanted, &Device::Cpu).get(values.len(), "w")?;
            assert_eq!(got.dtype(), wanted);
            let widened = source.to_dtype(stored)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            let want: Vec<f32> = widened
                .iter()
                .map(|&x| match wanted {
                    DType::BF16 => bf16::from_f32(x).to_f32(),
                    DType::F16 => f16::from_f32(x).to_f32(),
                    _ => x,
                })
                .collect();
            assert_eq!(got.to_dtype(DType::F32)?.to_vec1::<f32>()?, want, "{stored:?} to {wanted:?}");
        }
    }
    Ok(())
}

#[test]
fn large_tensors_load_whole() -> Result<()> {
    // More than one parallel chunk, and not a multiple of it.
    let n = (1 << 18) * 3 + 5;
    let dir = dir();
    let file = dir.path().join("x.safetensors");
    let t = Tensor::arange(0u32, n as u32, &Device::Cpu)?;
    save(&file, &[("i", t.clone()), ("x", t.to_dtype(DType::F32)?)]);
    let files = TensorFiles::open_file(&file).unwrap();
    assert_eq!(files.tensor("i")?.to_vec1::<u32>()?, t.to_vec1::<u32>()?);
    // Twice: the pages were given back after the first time.
    for _ in 0..2 {
        let x = files.var_builder(DType::F32, &Device::Cpu).get(n, "x")?.to_vec1::<f32>()?;
        assert!(x.iter().enumerate().all(|(i, &x)| x == i as f32));
    }
    Ok(())
}

#[test]
fn integers_load_as_they_are_and_do_not_become_floats() -> Result<()> {
    let dir = dir();
    let file = dir.path().join("x.safetensors");
    save(&file, &[("ids", Tensor::new(&[[1i64, -2]], &Device::Cpu)?)]);
    let files = TensorFiles::open_file(&file).unwrap();
    assert_eq!(files.tensor("ids")?.to_vec2::<i64>()?, [[1, -2]]);
    let e = message(files.var_builder(DType::F32, &Device::Cpu).get((1, 2), "ids"));
    assert!(e.contains("`ids`") && e.contains("dtype I64") && e.contains("loaded as f32"), "{e}");
    assert_eq!(files.float_dtype(), None);
    Ok(())
}

#[test]
fn missing_tensor_and_wrong_shape_name_the_tensor() {
    let dir = dir();
    one_tensor(dir.path());
    let vb = TensorFiles::open_dir(dir.path()).unwrap().var_builder(DType::F32, &Device::Cpu);
    let e = message(vb.pp("layers").pp(0).get((2, 3), "w"));
    assert!(e.contains("`layers.0.w` is missing from"), "{e}");
    let e = message(vb.get((3, 2), "w"));
    assert!(e.contains("`w` of") && e.contains("expected shape [3, 2], got [2, 3]"), "{e}");
    assert!(vb.contains_tensor("w") && !vb.contains_tensor("v"));
    assert_eq!(vb.get_unchecked("w").unwrap().dims(), [2, 3]);
}

#[test]
fn truncated_files_say_how_many_bytes_are_missing() {
    let dir = dir();
    let whole = one_tensor(dir.path());
    let path = dir.path().join("model.safetensors");
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for len in 1..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        let e = open_error(dir.path());
        let want = if len < 8 {
            8
        } else if len < 8 + header {
            8 + header
        } else {
            whole.len()
        };
        let missing = format!("is truncated: its header needs {want} bytes, the file has {len};");
        assert!(e.to_string().contains(&missing), "{len}: {e}");
    }
    std::fs::write(&path, b"").unwrap();
    assert!(open_error(dir.path()).to_string().contains("the file is empty"));
}

#[test]
fn corrupt_files_are_refused() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let whole = one_tensor(dir.path());
    let check = |bytes: &[u8], words: &str| {
        std::fs::write(&path, bytes).unwrap();
        let e = open_error(dir.path()).to_string();
        assert!(e.contains("model.safetensors is not a valid safetensors file") && e.contains(words), "{e}");
    };
    check(&[whole.as_slice(), b"x"].concat(), "header describes");
    check(b"<!DOCTYPE html><html>not the weights</html>", "another kind of file");
    check(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull");
    let mut header = whole.clone();
    header[9] = b'!';
    check(&header, "invalid JSON");
    let mut utf8 = whole.clone();
    utf8[10] = 0xff;
    check(&utf8, "UTF-8");

    let refused = |header: &str, data: usize| {
        with_header(dir.path(), header, data);
        let e = open_error(dir.path()).to_string();
        let says = |words| e.contains(words);
        assert!(says("is not a valid safetensors file") || says("is truncated"), "{header}: {e}");
    };
    refused(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4);
    refused(r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8);
    refused(r#"{"w":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#, 4);
    refused(r#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4);
    refused(r#"{"w":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}"#, 4);
    refused(r#"[1, 2]"#, 0);
    // A size that wraps around 2^64 must not pass for the file's own.
    refused(
        r#"{"w":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
        0,
    );
}

#[test]
fn every_single_byte_of_the_header_may_be_damaged() {
    let dir = dir();
    let whole = one_tensor(dir.path());
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in 0..8 + header {
        for byte in [0, b'9', b'"', b'}', 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            std::fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
            // It may open (a renamed tensor is valid); it must not panic, also when read.
            if let Ok(files) = TensorFiles::open_dir(dir.path()) {
                for t in files.iter() {
                    let _ = files.tensor(t.name);
                }
            }
        }
    }
}

#[test]
fn directories_without_weights_say_what_is_expected() {
    let dir = dir();
    let e = open_error(dir.path()).to_string();
    assert!(e.contains("no weights in") && e.contains("model.safetensors.index.json"), "{e}");
    std::fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();
    assert!(open_error(dir.path()).to_string().contains("convert PyTorch files"));
    let e = open_error(&dir.path().join("absent")).to_string();
    assert!(e.contains("cannot read") && e.contains("absent"), "{e}");
}

#[test]
fn shards_load_through_the_index() -> Result<()> {
    let dir = dir();
    save(&dir.path().join("a.safetensors"), &[("x", ramp(0.0, &[2])), ("y", ramp(5.0, &[3]))]);
    save(&dir.path().join("b.safetensors"), &[("z", ramp(9.0, &[1, 2]))]);
    index(dir.path(), &[("x", "a.safetensors"), ("y", "a.safetensors"), ("z", "b.safetensors")]);
    let files = TensorFiles::open_dir(dir.path()).unwrap();
    assert_eq!(files.iter().map(|t| t.name).collect::<Vec<_>>(), ["x", "y", "z"]);
    let vb = files.var_builder(DType::BF16, &Device::Cpu);
    assert_eq!(vb.get((1, 2), "z")?.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[9.0, 10.0]]);
    assert_eq!(vb.get(3, "y")?.to_dtype(DType::F32)?.to_vec1::<f32>()?, [5.0, 6.0, 7.0]);

    // Without an index, all files count.
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(TensorFiles::open_dir(dir.path()).unwrap().iter().count(), 3);

    // One file called model.safetensors wins over everything else.
    one_tensor(dir.path());
    assert_eq!(TensorFiles::open_dir(dir.path()).unwrap().iter().count(), 1);
    Ok(())
}

#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let dir = dir();
    save(&dir.path().join("a.safetensors"), &[("x", ramp(0.0, &[2]))]);
    save(&dir.path().join("b.safetensors"), &[("y", ramp(0.0, &[2]))]);
    let check = |map: &[(&str, &str)], words: &[&str]| {
        index(dir.path(), map);
        let e = open_error(dir.path()).to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    check(&[("x", "a.safetensors"), ("z", "c.safetensors")], &["1 of 2 shards are missing", "c.safetensors"]);
    check(&[("x", "a.safetensors"), ("z", "b.safetensors")], &["not in the shards", "z (", "b.safetensors)"]);
    // A tensor in another shard than the index says.
    check(&[("x", "b.safetensors"), ("y", "a.safetensors")], &["2 tensors are not in the shards"]);
    check(&[("x", "../a.safetensors")], &["\"../a.safetensors\"", "plain file name"]);
    check(&[("x", "/etc/passwd")], &["plain file name"]);
    check(&[], &["`weight_map` is empty"]);
    let path = dir.path().join("model.safetensors.index.json");
    for (text, words) in [
        ("{", "not valid JSON"),
        ("{}", "expected an object `weight_map`"),
        ("[]", "expected an object `weight_map`"),
        (r#"{"weight_map": {"x": 3}}"#, "expected a file name, got 3"),
    ] {
        std::fs::write(&path, text).unwrap();
        let e = open_error(dir.path()).to_string();
        assert!(e.contains("index.json") && e.contains(words), "{e}");
    }
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let dir = dir();
    save(&dir.path().join("a.safetensors"), &[("x", ramp(0.0, &[2]))]);
    save(&dir.path().join("b.safetensors"), &[("x", ramp(0.0, &[2]))]);
    let e = open_error(dir.path()).to_string();
    assert!(
        e.contains("`x` is in both") && e.contains("a.safetensors") && e.contains("b.safetensors"),
        "{e}"
    );
}

#[test]
fn verify_lists_everything_in_one_error() {
    let dir = dir();
    let file = dir.path().join("x.safetensors");
    save(
        &file,
        &[
            ("a", ramp(0.0, &[2, 3])),
            ("b", ramp(0.0, &[4])),
            ("odd", ramp(0.0, &[5])),
            ("layers.0.rotary_emb.inv_freq", ramp(0.0, &[2])),
        ],
    );
    let files = TensorFiles::open_file(&file).unwrap();
    let ignored = ["*.rotary_emb.inv_freq"];
    let exact = || [TensorSpec::new("a", &[2, 3]), TensorSpec::new("b", &[4]), TensorSpec::new("odd", &[5])];
    assert_eq!(files.verify(exact(), &ignored).unwrap().warnings().count(), 0);
    // What is unexpected alone is left out.
    let verified = files.verify(exact(), &[]).unwrap();
    assert_eq!(verified.left_out.names(), ["layers.0.rotary_emb.inv_freq"]);
    let told: Vec<String> = verified.warnings().collect();
    assert!(
        told.len() == 1 && told[0].contains("left out (1 in all)") && told[0].contains("layers.*"),
        "{told:?}"
    );

    let wrong = [TensorSpec::new("a", &[3, 2]), TensorSpec::new("b", &[4]), TensorSpec::new("c", &[7, 8])];
    let e = message(files.verify(wrong, &ignored));
    assert!(e.contains("1 missing:\n  c [7, 8]"), "{e}");
    assert!(e.contains("1 unexpected:\n  odd [5]"), "{e}");
    assert!(e.contains("1 of another shape:\n  a: expected [3, 2], got [2, 3]"), "{e}");
    assert!(e.contains("x.safetensors does not hold the tensors"), "{e}");

    let many = exact().into_iter().chain((0..120).map(|i| TensorSpec::new(format!("m{i:03}"), &[1])));
    let e = message(files.verify(many, &ignored));
    assert!(e.contains("120 missing:") && e.contains("m049 [1]") && !e.contains("m050"), "{e}");
    assert!(e.contains("... and 70 more"), "{e}");
}

#[test]
fn weights_that_are_not_finite_are_counted_per_tensor() -> Result<()> {
    let dir = dir();
    let file = dir.path().join("x.safetensors");
    let bad = Tensor::new(&[1f32, f32::NAN, f32::INFINITY, f32::NEG_INFINITY], &Device::Cpu)?;
    save(
        &file,
        &[
            ("clean", ramp(0.0, &[3])),
            ("bad.f32", bad.clone()),
            ("bad.bf16", bad.to_dtype(DType::BF16)?),
            ("bad.f16", bad.to_dtype(DType::F16)?),
            ("ids", Tensor::new(&[1u32], &Device::Cpu)?),
        ],
    );
    let e = message(TensorFiles::open_file(&file).unwrap().check_finite());
    assert!(e.starts_with("3 of 4 tensors hold weights that are not finite:"), "{e}");
    for name in ["bad.bf16", "bad.f16", "bad.f32"] {
        assert!(e.contains(&format!("{name}: 1 NaN, 2 infinite")), "{e}");
    }
    Ok(())
}

#[test]
fn a_checkpoint_reads_its_configs() -> Result<()> {
    let dir = dir();
    one_tensor(dir.path());
    assert!(message(Checkpoint::open(dir.path())).contains("config.json"));
    std::fs::write(dir.path().join("config.json"), r#"{"torch_dtype": "bfloat16", "eos_token_id": 5}"#)
        .unwrap();
    let checkpoint = Checkpoint::open(dir.path())?;
    assert_eq!(checkpoint.dtype()?, DType::BF16);
    assert_eq!(checkpoint.eos_token_ids()?, [5]);
    assert_eq!(checkpoint.dir(), Some(dir.path()));
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [7, 8]}"#).unwrap();
    assert_eq!(Checkpoint::open(dir.path())?.eos_token_ids()?, [7, 8]);
    std::fs::write(dir.path().join("generation_config.json"), "nonsense").unwrap();
    assert!(message(Checkpoint::open(dir.path())).contains("generation_config.json: not valid JSON"));
    Ok(())
}

#[test]
fn an_embedded_checkpoint_need_not_be_aligned() -> Result<()> {
    let dir = dir();
    let bytes = one_tensor(dir.path());
    for shift in 0..4 {
        let mut padded = vec![0u8; shift];
        padded.extend(&bytes);
        let padded: &'static [u8] = Box::leak(padded.into_boxed_slice());
        let checkpoint = Checkpoint::from_static(&padded[shift..], "{}", None)?;
        assert_eq!(checkpoint.dtype()?, DType::F32);
        assert_eq!(checkpoint.eos_token_ids()?, Vec::<u32>::new());
        let w = checkpoint.tensors.var_builder(DType::F32, &Device::Cpu).get((2, 3), "w")?;
        assert_eq!(w.to_vec2::<f32>()?, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]);
    }
    let e = message(Checkpoint::from_static(&[1, 2], "{}", None));
    assert!(e.contains("the embedded checkpoint is truncated"), "{e}");
    Ok(())
}
