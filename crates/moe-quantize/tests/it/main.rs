//! Checkpoints made from floats: what they hold, how well they stand for their source, and what is refused.
#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod calibration;
mod checkpoints;
mod dequantised;
mod random;
mod refusals;
mod rounding;
mod support;
mod untied;
