//! Cross-crate tests, one binary.

mod invariance;
mod layouts;
