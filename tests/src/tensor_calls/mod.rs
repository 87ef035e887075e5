//! One table of every call on candle tensors, for any device, dtype and memory layout.
//!
//! A case gets its inputs from [`Case`]: fixed random numbers, rounded to the dtype, laid out as asked and put on the
//! device. So the same call can be made on contiguous tensors of the CPU and on anything else, and compared.

mod blocks;
mod case;
mod modules;
mod routing;

use candle_core::{DType, Device, Tensor};

pub use case::{Call, Case, LAYOUTS, Layout, Sizes, Variables};

/// Every call on tensors that both devices take, by name.
pub fn calls() -> Vec<(&'static str, Call)> {
    [blocks::CALLS, modules::CALLS, routing::CALLS].concat()
}

/// Sizes that every dtype is tried with: one row, several sequences, odd widths, many rows, nothing at all.
pub const SMALL: [Sizes; 5] = [
    Sizes { tokens: &[1, 1], hidden: 64, inter: 64, experts: 4, top_k: 2 },
    Sizes { tokens: &[2, 3], hidden: 36, inter: 20, experts: 5, top_k: 3 },
    Sizes { tokens: &[9], hidden: 128, inter: 64, experts: 8, top_k: 2 },
    Sizes { tokens: &[2, 35], hidden: 64, inter: 36, experts: 6, top_k: 1 },
    Sizes { tokens: &[2, 0], hidden: 64, inter: 64, experts: 4, top_k: 2 },
];

/// Sizes of Qwen3-30B-A3B with fewer experts, which the fast kernels take.
pub const LARGE: [Sizes; 3] = [
    Sizes { tokens: &[1, 1], hidden: 2048, inter: 768, experts: 4, top_k: 2 },
    Sizes { tokens: &[2, 8], hidden: 2048, inter: 768, experts: 4, top_k: 2 },
    Sizes { tokens: &[70], hidden: 2048, inter: 768, experts: 4, top_k: 2 },
];

/// Fails unless each result has the dims and dtype of the expected one and differs by at most `tolerance` of its
/// largest magnitude; integers must be equal. Everything is compared on the host.
pub fn assert_close(what: &str, expected: &[Tensor], got: &[Tensor], tolerance: f64) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for (i, (want, got)) in expected.iter().zip(got).enumerate() {
        assert_eq!((want.dims(), want.dtype()), (got.dims(), got.dtype()), "{what}: result {i}");
        let want = values(want);
        let got = values(got);
        let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
        for (at, (w, g)) in want.iter().zip(&got).enumerate() {
            let close = (w - g).abs() <= tolerance * largest;
            assert!(close, "{what}: result {i}, element {at} of {}: expected {w}, got {g}", want.len());
        }
    }
}

/// Elements as f64, which holds every value of the dtypes here.
fn values(x: &Tensor) -> Vec<f64> {
    if x.elem_count() == 0 {
        return Vec::new();
    }
    let host = x.to_device(&Device::Cpu).and_then(|x| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1());
    host.unwrap_or_else(|e| panic!("results cannot be read: {e}"))
}
