//! Tests of the crate's contract through its public interface.

// Helpers here may panic like the tests that call them.
#![allow(clippy::unwrap_used)]

mod experts;
mod families;
mod fused;
mod loading;
mod reference;
