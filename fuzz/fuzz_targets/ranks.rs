//! What arrives from another rank: frames, with checksums as they come or made right, and the messages in them. Refused
//! with a reason, or one that a rank of a small model can have sent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model_runtime::kv_cache::KvLayout;
use model_runtime::{ModelInfo, MoeInfo};
use moe_engine::parallel::{MessageKind, check_message};
use moe_fuzz::frame;

/// The model of the ranks.
fn info() -> ModelInfo {
    let dtype = moe_comm::candle::DType::F32;
    ModelInfo {
        vocab_size: 100,
        hidden_size: 1,
        num_layers: 1,
        max_context_len: 64,
        keys_depend_on_prompt_len: false,
        dtype,
        states: KvLayout { num_kv_heads: 1, head_dim: 2, value_dim: None, dtype }.layers(1),
        moe: Some(MoeInfo { layers: vec![0], num_experts: 4, top_k: 2 }),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let [kind, bytes @ ..] = bytes else { return };
    let kind = match kind % 6 {
        0 => return drop(moe_comm::check_frames(bytes).map_err(|e| e.to_string())),
        1 => {
            let [len, bytes @ ..] = bytes else { return };
            let (head, data) = bytes.split_at(usize::from(*len).min(bytes.len()));
            return drop(moe_comm::check_frames(&frame(head, data)).map_err(|e| e.to_string()));
        }
        2 => MessageKind::Group,
        3 => MessageKind::Question,
        5 => return drop(moe_comm::check_formed(bytes, 5).map_err(|e| e.to_string())),
        _ => MessageKind::Reply { prompt: 5 },
    };
    let _ = check_message(kind, bytes, &info()).map_err(|e| format!("{e:#}"));
});
