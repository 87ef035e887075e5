//! The checkpoint that is part of the programs: a small model that tests/reference/train_tiny.py trained on
//! Shakespeare, so that a program does something useful before anything is downloaded.

use moe_engine::{Embedded, EmbeddedChat};

/// A small trained Qwen3-MoE.
pub static EMBEDDED: Embedded = Embedded {
    weights: include_bytes!("../checkpoint/model.safetensors"),
    config: include_str!("../checkpoint/config.json"),
    generation_config: include_str!("../checkpoint/generation_config.json"),
    tokenizer: include_bytes!("../checkpoint/tokenizer.json"),
    prompt: "First Citizen:\n",
    // The model was trained on plays, in which a blank line ends the words of a character.
    chat: Some(EmbeddedChat { template: include_str!("../checkpoint/play.jinja"), stop: "\n\n" }),
};
