//! Checks of what launchers take: sizes and alignment.

use candle_core::{Result, bail};

use crate::storage::Data;
use crate::view::View;

/// A size as launchers take it.
pub(super) fn small(op: &str, n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{op}: a size of {n} does not fit 32 bits"),
    }
}

/// Whether all views begin at multiples of 16 bytes, as vector loads want.
pub(super) fn aligned(views: &[View]) -> bool {
    views.iter().all(|view| matches!(view.data(), Data::Device(s) if s.address().is_multiple_of(16)))
}

/// Fails unless all views begin at multiples of 16 bytes.
pub(super) fn expect_aligned(op: &str, views: &[View]) -> Result<()> {
    match aligned(views) {
        true => Ok(()),
        false => bail!("{op}: expected views that begin at multiples of 16 bytes; copy the others first"),
    }
}
