//! A GGUF file: header, metadata and tensors, its tokenizer and its chat templates; every tensor is read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model_runtime::Checkpoint;
use moe_engine::chat::ChatFiles;
use moe_engine::tokenizer::Tokenizer;
use moe_fuzz::folder;

fuzz_target!(|bytes: &[u8]| {
    let dir = folder(&[("model.gguf", bytes)]);
    let file = dir.path().join("model.gguf");
    if let Ok(tokenizer) = Tokenizer::from_dir(&file)
        && let Ok(ids) = tokenizer.encode("A text, 12 and <s>")
    {
        let _ = tokenizer.decode(&ids);
    }
    let _ = ChatFiles::from_dir(&file).map_err(|e| e.to_string());
    match Checkpoint::open(&file) {
        Ok(checkpoint) => {
            for tensor in checkpoint.tensors.iter() {
                if let Ok(loaded) = checkpoint.tensors.tensor(tensor.name) {
                    assert_eq!(loaded.dims(), tensor.shape, "{}", tensor.name);
                }
            }
            let _ = (checkpoint.dtype(), checkpoint.eos_token_ids());
        }
        Err(e) => drop(e.to_string()),
    }
});
