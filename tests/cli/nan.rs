//! A checkpoint with an expert whose weights are NaN. The tests of programs include this file.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Copies the embedded checkpoint of `model-qwen3moe` into a new folder, with NaN in expert 3 of the first layer.
pub fn copy_with_nan(to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/families/checkpoint");
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    let weights = to.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let offsets = &header["model.layers.0.mlp.experts.3.down_proj.weight"]["data_offsets"];
    let [begin, end] = [0, 1].map(|i| 8 + header_len + offsets[i].as_u64().unwrap() as usize);
    bytes[begin..end].fill(0xFF);
    fs::write(&weights, bytes).unwrap();
}
