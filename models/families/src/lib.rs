//! The model families that this project runs, a module each: its config, its tensors, how it is loaded.
#![doc = include_str!("../README.md")]

pub mod deepseek_v2;
pub mod qwen3_moe;
