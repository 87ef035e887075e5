//! A reader as the source of a pack's rows.

use std::ops::Range;

use moe_kernels::QuantScheme;
use moe_kernels::quant::{LogicalRows, QuantRows, StoredPart};

use super::Reader;

impl QuantRows for Reader<'_> {
    fn shape(&self) -> (usize, usize) {
        (self.rows.len(), self.columns.width)
    }

    fn scheme(&self) -> QuantScheme {
        self.columns.scheme(self.format.scheme())
    }

    fn perm(&self) -> Option<&[u32]> {
        self.columns.order.as_ref().map(|order| order.perm.as_slice())
    }

    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> candle_core::Result<()> {
        Ok(self.fill(rows, out)?)
    }

    fn stored(&self) -> Result<Vec<StoredPart<'_>>, String> {
        self.stored_in(self)
    }
}
