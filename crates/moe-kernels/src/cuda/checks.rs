//! Checks of launch arguments: sizes and alignment.

use candle_core::{Result, bail};

use crate::storage::Data;
use crate::view::View;

/// A size as an i32, which launchers take.
pub(super) fn small(op: &str, n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{op}: a size of {n} does not fit 32 bits"),
    }
}

/// Whether all views have addresses that are multiples of 16 bytes, which vector loads need.
pub(super) fn aligned(views: &[View]) -> bool {
    views.iter().all(|view| matches!(view.data(), Data::Device(s) if s.address().is_multiple_of(16)))
}

/// Fails unless all views have addresses that are multiples of 16 bytes.
pub(super) fn expect_aligned(op: &str, views: &[View]) -> Result<()> {
    match aligned(views) {
        true => Ok(()),
        false => bail!("{op}: expected views that begin at multiples of 16 bytes; copy the others first"),
    }
}
