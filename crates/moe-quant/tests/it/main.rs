//! Headers, layouts and readers, against fixtures of an independent packer and against packing of its own.
#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod cuts;
mod faults;
mod fixtures;
mod headers;
mod mutations;
mod mxfp4;
mod pack;
mod refusals;
mod round_trip;
mod stored;
mod write;
