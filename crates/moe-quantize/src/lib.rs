//! Creates quantised checkpoints from float checkpoints.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod calibrate;
mod convert;
mod dequantised;
mod exceptions;
mod fp4;
mod gguf;
mod gptq;
mod job;
mod loss;
mod model;
mod plan;
mod progress;
mod random;
mod report;
mod round;
mod settings;
mod source;
mod write;

pub use convert::quantize;
pub use dequantised::Dequantised;
pub use gguf::{GgufMix, quantize_gguf};
pub use gptq::{Feedback, Hessian, NoFactor, gptq};
pub use loss::{Loss, loss};
pub use model::model_of;
pub use random::{RandomSettings, random_checkpoint};
pub use report::Report;
pub use round::{Grid, round_to_nearest};
pub use settings::{Calibration, FileFormat, Indivisible, Method, Settings, TextSettings};
