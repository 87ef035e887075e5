//! Quantised checkpoints, read as they are: headers, tensors, rows; and written.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod error;
mod format;
mod layout;
mod read;
pub mod write;

pub use config::{QuantConfig, UNREAD_TENSORS};
pub use error::QuantError;
pub use format::{Format, GptqZeros, IntFormat};
pub use layout::{TensorSpec, layout};
pub use read::{Reader, dequantise, e4m3, suffixes};

pub use candle_core as candle;
pub use moe_kernels::quant::{LogicalRows, QuantRows};
pub use moe_kernels::{QuantGroup, QuantScheme};
pub use safetensors;
