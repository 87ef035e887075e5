//! GGUF files, which llama.cpp and its relatives run: one file, or several parts, holds weights, config and tokenizer.

mod architecture;
mod config;
mod file;
mod header;
mod latent;
mod layers;
mod metadata;
mod names;
mod open;
mod parts;
mod rope;
mod tensors;
mod values;
mod written;

pub use architecture::architectures;
pub(in crate::checkpoint) use config::GgufContents;
pub use file::{Gguf, GgufTensor};
pub use header::holds_header;
pub use written::{GgufNames, GgufPlace};
