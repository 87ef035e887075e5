//! Device allocations, pinned host memory, and copies between them.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice};
use candle_core::{DType, Result, bail};

use super::counts;
use crate::storage::{Data, DataMut, DeviceSlice};
use crate::view::{View, ViewMut};

/// Memory of a device that the caller allocated or mapped, as a view [len] u8.
///
/// # Safety
/// As long as the view is used, `address` points to `len` bytes that device `ordinal` may access. The caller orders the
/// writes and reads of these bytes.
///
/// # Errors
/// A view of one dimension gives none.
pub unsafe fn mapped_bytes<'a>(address: u64, len: usize, ordinal: usize) -> Result<View<'a>> {
    View::from_data(Data::Device(DeviceSlice::new(address, DType::U8, len, ordinal)), &[len])
}

/// [`mapped_bytes`] as a view to write to.
///
/// # Safety
/// The promises of [`mapped_bytes`].
///
/// # Errors
/// A view of one dimension gives none.
pub unsafe fn mapped_bytes_mut<'a>(address: u64, len: usize, ordinal: usize) -> Result<ViewMut<'a>> {
    ViewMut::from_data(DataMut::Device(DeviceSlice::new(address, DType::U8, len, ordinal)), &[len])
}

/// Page-locked host memory for u32 words. A device copies from and to it directly.
///
/// Copies are ordered on a stream and return at once ([`Exec::upload`](crate::Exec::upload),
/// [`Exec::download`](crate::Exec::download)); [`wait`](Self::wait) blocks until the last one has ended.
pub struct PinnedWords {
    words: PinnedHostSlice<u32>,
    copied: CudaEvent,
}

impl PinnedWords {
    pub(super) fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        counts::allocation();
        // SAFETY: any bits are valid u32 values, and the words are initialised before they are read.
        let mut words = unsafe { stream.context().alloc_pinned_with_flags::<u32>(len.max(1), 0) }.w()?;
        words.as_mut_slice().w()?.fill(0);
        Ok(Self { words, copied: stream.record_event(None).w()? })
    }

    /// The words, after the last copy has ended.
    pub fn wait(&mut self) -> Result<&mut [u32]> {
        if !self.copied.try_is_complete().w()? {
            counts::wait();
            self.copied.synchronize().w()?;
        }
        self.words.as_mut_slice().w()
    }

    /// The first `len` words and the event of their last copy, for a copy that is now put on a stream. The caller has
    /// waited for the copy before.
    pub(super) fn first(&mut self, op: &str, len: usize) -> Result<FirstWords<'_>> {
        let words = self.words.as_mut_slice().w()?;
        let available = words.len();
        match words.get_mut(..len) {
            Some(words) => Ok(FirstWords { words, copied: &self.copied }),
            None => bail!("{op}: expected at most {available} words, got {len}"),
        }
    }
}

/// Page-locked words of a copy.
pub(super) struct FirstWords<'a> {
    pub words: &'a mut [u32],
    /// The event to record after the copy.
    pub copied: &'a CudaEvent,
}
