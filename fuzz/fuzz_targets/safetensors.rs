//! A safetensors file: the bytes as they are, and the bytes as header (up to a NUL) and data.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_fuzz::{folder, read_all, safetensors, split};

fuzz_target!(|bytes: &[u8]| {
    let (header, data) = split(bytes);
    for file in [bytes, &safetensors(header, data)] {
        read_all(folder(&[("model.safetensors", file)]).path());
    }
});
