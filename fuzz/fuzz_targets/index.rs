//! model.safetensors.index.json over two good shards, and a config.json after a NUL.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model_runtime::Checkpoint;
use moe_fuzz::{folder, read_all, safetensors, split};

const A: &[u8] = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,1],"data_offsets":[8,10]}}"#;
const B: &[u8] = br#"{"c":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#;

fuzz_target!(|bytes: &[u8]| {
    let (index, config) = split(bytes);
    let dir = folder(&[
        ("model.safetensors.index.json", index),
        ("config.json", config),
        ("a.safetensors", &safetensors(A, &[1; 10])),
        ("b.safetensors", &safetensors(B, &[1; 1])),
    ]);
    read_all(dir.path());
    if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
        let _ = (checkpoint.dtype(), checkpoint.eos_token_ids());
    }
});
