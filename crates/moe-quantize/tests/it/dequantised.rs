//! Tests which files of a folder belong to the checkpoint whose weights are read.

use std::path::Path;

use moe_quantize::Dequantised;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};

use crate::support::error;

/// Writes a file of tensors that have one number each.
fn write(path: &Path, tensors: &[(&str, f32)]) {
    let bytes: Vec<_> = tensors.iter().map(|(name, value)| (*name, value.to_le_bytes())).collect();
    let views =
        bytes.iter().map(|(name, bytes)| (*name, TensorView::new(Dtype::F32, vec![1], bytes).unwrap()));
    std::fs::write(path, serialize(views, None).unwrap()).unwrap();
}

#[test]
fn files_that_the_index_does_not_name_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write(&path("first.safetensors"), &[("a", 1.)]);
    write(&path("second.safetensors"), &[("b", 2.)]);
    // This file is an earlier export that was left in the folder.
    write(&path("old.safetensors"), &[("a", 7.), ("b", 7.), ("c", 7.)]);
    let index = r#"{"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}"#;
    std::fs::write(path("model.safetensors.index.json"), index).unwrap();
    let weights = Dequantised::open(dir.path(), &serde_json::json!({})).unwrap().var_builder();
    let value = |name: &str| weights.get(1, name).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!((value("a"), value("b")), (vec![1.], vec![2.]));
    assert!(!weights.contains_tensor("c"));
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("first.safetensors"), &[("a", 1.)]);
    write(&dir.path().join("second.safetensors"), &[("a", 2.), ("b", 2.)]);
    let error = error(Dequantised::open(dir.path(), &serde_json::json!({})));
    assert!(error.contains("tensor `a` is in both") && error.contains("remove one"), "{error}");
}
