//! The checkpoint that programs contain: a small model trained on Shakespeare by tests/reference/train_tiny.py, so that a
//! program does something real before anything is downloaded.

use moe_engine::{Embedded, EmbeddedChat};

/// A small trained Qwen3-MoE.
pub static EMBEDDED: Embedded = Embedded {
    weights: include_bytes!("../checkpoint/model.safetensors"),
    config: include_str!("../checkpoint/config.json"),
    generation_config: include_str!("../checkpoint/generation_config.json"),
    tokenizer: include_bytes!("../checkpoint/tokenizer.json"),
    prompt: "First Citizen:\n",
    // It was trained on plays, in which a blank line ends what a character says.
    chat: Some(EmbeddedChat { template: include_str!("../checkpoint/play.jinja"), stop: "\n\n" }),
};
