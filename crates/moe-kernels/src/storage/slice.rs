//! Borrowed memory of a CUDA device.

use std::marker::PhantomData;

use candle_core::DType;

/// Borrowed elements in the memory of a CUDA device. Only kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a> {
    address: u64,
    pub(super) dtype: DType,
    pub(super) len: usize,
    /// Ordinal of the device.
    pub(super) device: usize,
    lender: PhantomData<&'a [u8]>,
}

impl DeviceSlice<'_> {
    #[cfg(feature = "cuda")]
    pub(crate) fn new(address: u64, dtype: DType, len: usize, device: usize) -> Self {
        Self { address, dtype, len, device, lender: PhantomData }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The same memory as bytes.
    #[cfg(feature = "cuda")]
    pub(crate) fn bytes(self) -> Self {
        Self { dtype: DType::U8, len: self.len * self.dtype.size_in_bytes(), ..self }
    }

    /// Elements `start..start + len`; the caller has checked the range.
    pub(super) fn range(self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Self { address: self.address + (start * self.dtype.size_in_bytes()) as u64, len, ..self }
    }
}
