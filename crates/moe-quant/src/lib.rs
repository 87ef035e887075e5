//! Quantised checkpoints, read as they are: headers, tensors, rows; and written.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod error;
mod format;
mod ggml;
mod layout;
mod packed;
mod read;
pub mod write;

pub use config::{QuantConfig, UNREAD_TENSORS};
pub use error::QuantError;
pub use format::{Format, Fp4Tensors, GptqZeros, IntFormat};
pub use ggml::{Block as GgmlBlock, GgmlType, name_of_id, supported};
pub use layout::{TensorSpec, layout};
pub use packed::{ExpertPart, PackTensor, PackedExpert};
pub use read::{FloatRows, Reader, dequantise, e4m3, suffixes};

pub use candle_core as candle;
pub use moe_kernels::quant::{LogicalRows, QuantRows};
pub use moe_kernels::{QuantGroup, QuantScheme};
pub use safetensors;
