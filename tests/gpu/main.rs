//! Compares every op on a CUDA device with the same op on the CPU: fresh random inputs, odd shapes, empty inputs,
//! misaligned views. A failure prints the seed; GPU_TEST_SEED repeats it.
//!
//! The binary exists only with the feature `cuda` and fails without a device: nothing is skipped.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not tests in clippy's eyes

mod align;
mod attention;
mod attention_forms;
mod attention_fp8_rows;
mod attention_rates;
mod biased;
mod checksum;
mod common;
mod deepseek;
mod definition;
mod delta;
mod delta_chunks;
mod delta_rates;
mod dequantised;
mod engine;
mod experts;
mod explained;
mod f32_gates;
mod fused;
mod gates;
mod grouped;
mod hybrid;
mod invariant;
mod layer;
mod load;
mod load_bench;
mod load_parts;
mod load_quantised;
mod mla;
mod mla_rows;
#[cfg(feature = "nccl")]
mod nccl;
mod offload;
mod packs;
mod products;
mod ptx;
mod quant;
mod ranks;
mod route;
mod routed;
mod rows;
mod sampled_engine;
mod sampling;
mod step;
mod tensor_calls;
mod timeline;
mod watched;
