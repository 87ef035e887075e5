//! Tests of the public API, in one binary.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod attention;
mod checkpoint;
mod config;
mod differing;
mod gguf;
mod gguf_families;
mod layers;
mod layout;
mod logprobs;
mod mla;
mod processors;
mod rope;
mod run;
mod sampling;
mod slices;
mod step;
mod tiny;
mod vocab;

/// The message of an error, or of a success that should have been one.
fn message<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    match result {
        Ok(_) => "no error".to_string(),
        Err(e) => e.to_string(),
    }
}
