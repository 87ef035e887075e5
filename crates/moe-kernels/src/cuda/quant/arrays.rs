//! The arrays of which a pack on a device consists.

use candle_core::Result;

use crate::buffer::Buffer;
use crate::exec::Exec;
use crate::storage::Element;
use crate::view::View;

/// The arrays of a pack, whether the host or the device made it.
pub(super) struct Arrays {
    pub q: Buffer,
    pub scales: Buffer,
    pub scale_rows: usize,
    pub in_blocks: bool,
    pub zeros: Option<Buffer>,
}

/// A copy of host data on the device.
pub(super) fn upload<T: Element>(data: &[T], ex: &Exec) -> Result<Buffer> {
    ex.buffer_from_host(View::new(data, &[data.len()])?)
}
