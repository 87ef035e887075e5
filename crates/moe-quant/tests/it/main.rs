//! Tests of headers, layouts and readers with fixtures of an independent packer, and with a packer of these tests.
#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod cuts;
mod faults;
mod fixtures;
mod ggml;
mod headers;
mod mutations;
mod mxfp4;
mod nvfp4;
mod pack;
mod refusals;
mod round_trip;
mod stored;
mod write;
