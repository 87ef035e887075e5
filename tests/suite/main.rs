//! Cross-crate tests, one binary.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

mod chunk_cuts;
mod contradictions;
mod deepseek;
mod engine;
mod explained;
mod f32_gates;
mod geometries;
mod gguf;
mod gguf_configs;
mod gguf_names;
mod gguf_orders;
mod gguf_tokenizer;
mod invariance;
mod layouts;
mod moves;
mod mtp;
mod parallel;
mod placements;
mod published;
mod quantised;
mod ranks;
mod replicas;
mod request_soak;
mod requests;
mod running;
mod saboteur;
mod saved_states;
mod soak;
mod states;
mod structured;
mod tensor_calls;
