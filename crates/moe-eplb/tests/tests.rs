//! Integration tests in one binary.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;
mod control;
mod inputs;
#[cfg(feature = "serde")]
mod json;
mod migration;
mod plans;
mod refusals;
mod runtime;
