//! Tests of checkpoints that are made from floats: their contents, how well they approximate their source, and which
//! inputs are refused.
#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod calibration;
mod checkpoints;
mod dequantised;
mod fp4;
mod gguf;
mod random;
mod refusals;
mod rounding;
mod support;
mod untied;
