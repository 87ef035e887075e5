//! Checks of sizes and dtypes that many forms share, each with its reason.

use std::ops::{Bound, RangeBounds};

use candle_core::DType;

use super::reason::Reason;

pub(super) fn expect_bf16(dtype: DType) -> Result<(), Reason> {
    match dtype {
        DType::BF16 => Ok(()),
        other => Err(Reason::Dtype { got: other.as_str(), accepted: vec!["bf16"] }),
    }
}

/// Fails for a gate that has more digits than the rows: in f32, next to rows of another dtype. Kernels that contain the
/// router read both in one dtype.
pub(super) fn expect_gate(gate: DType, rows: DType) -> Result<(), Reason> {
    if gate == rows { Ok(()) } else { Err(Reason::Part { part: "a gate in f32" }) }
}

pub(super) fn expect_rows(accepted: impl RangeBounds<usize>, got: usize) -> Result<(), Reason> {
    if accepted.contains(&got) {
        return Ok(());
    }
    let least = match accepted.start_bound() {
        Bound::Included(&n) => n,
        Bound::Excluded(&n) => n + 1,
        Bound::Unbounded => 0,
    };
    let most = match accepted.end_bound() {
        Bound::Included(&n) => Some(n),
        Bound::Excluded(&n) => Some(n.saturating_sub(1)),
        Bound::Unbounded => None,
    };
    Err(Reason::Rows { least, most, got })
}

pub(super) fn expect_at_most(dimension: &'static str, most: usize, got: usize) -> Result<(), Reason> {
    if got <= most { Ok(()) } else { Err(Reason::TooLarge { dimension, most, got }) }
}

/// Fails unless a size is a positive multiple of `multiple_of`.
pub(super) fn expect_steps(dimension: &'static str, got: usize, multiple_of: usize) -> Result<(), Reason> {
    if got > 0 && got.is_multiple_of(multiple_of) {
        return Ok(());
    }
    Err(Reason::Shape { dimension, multiple_of, got })
}
