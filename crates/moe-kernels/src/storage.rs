//! Where the elements of views and buffers lie: in host memory or on a CUDA device.

use std::marker::PhantomData;

use candle_core::{DType, Result, bail};

use crate::element::{CpuSlice, CpuSliceMut, CpuVec};

/// Borrowed elements in the memory of a CUDA device. Only kernels read them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceSlice<'a> {
    address: u64,
    dtype: DType,
    len: usize,
    /// Ordinal of the device.
    device: usize,
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

    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> usize {
        self.device
    }

    /// Elements `start..start + len`; the caller has checked the range.
    fn range(self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Self { address: self.address + (start * self.dtype.size_in_bytes()) as u64, len, ..self }
    }
}

/// Borrowed elements.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data<'a> {
    Cpu(CpuSlice<'a>),
    Device(DeviceSlice<'a>),
}

/// Borrowed, writable elements.
#[derive(Debug)]
pub(crate) enum DataMut<'a> {
    Cpu(CpuSliceMut<'a>),
    Device(DeviceSlice<'a>),
}

impl<'a> Data<'a> {
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Cpu(s) => s.dtype(),
            Self::Device(s) => s.dtype,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Cpu(s) => s.len(),
            Self::Device(s) => s.len,
        }
    }

    pub(crate) fn range(self, start: usize, len: usize) -> Self {
        match self {
            Self::Cpu(s) => Self::Cpu(s.range(start, len)),
            Self::Device(s) => Self::Device(s.range(start, len)),
        }
    }

    /// The elements in host memory; an error if they lie on a device.
    pub(crate) fn cpu(self) -> Result<CpuSlice<'a>> {
        match self {
            Self::Cpu(s) => Ok(s),
            Self::Device(s) => bail!("expected a view of host memory, got one on CUDA device {}", s.device),
        }
    }
}

impl<'a> DataMut<'a> {
    pub(crate) fn dtype(&self) -> DType {
        self.as_data().dtype()
    }

    pub(crate) fn len(&self) -> usize {
        self.as_data().len()
    }

    pub(crate) fn as_data(&self) -> Data<'_> {
        match self {
            Self::Cpu(s) => Data::Cpu(s.as_slice()),
            Self::Device(s) => Data::Device(*s),
        }
    }

    pub(crate) fn reborrow(&mut self) -> DataMut<'_> {
        match self {
            Self::Cpu(s) => DataMut::Cpu(s.reborrow()),
            Self::Device(s) => DataMut::Device(*s),
        }
    }

    pub(crate) fn range(self, start: usize, len: usize) -> Self {
        match self {
            Self::Cpu(s) => Self::Cpu(s.range(start, len)),
            Self::Device(s) => Self::Device(s.range(start, len)),
        }
    }

    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Cpu(s) => {
                let (a, b) = s.split_at(mid);
                (Self::Cpu(a), Self::Cpu(b))
            }
            Self::Device(s) => (Self::Device(s.range(0, mid)), Self::Device(s.range(mid, s.len - mid))),
        }
    }

    /// The elements in host memory; an error if they lie on a device.
    pub(crate) fn cpu(self) -> Result<CpuSliceMut<'a>> {
        match self {
            Self::Cpu(s) => Ok(s),
            Self::Device(s) => bail!("expected a view of host memory, got one on CUDA device {}", s.device),
        }
    }
}

/// Owned elements.
#[derive(Debug)]
pub(crate) enum Memory {
    Cpu(CpuVec),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::DeviceMemory),
}

impl Memory {
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Cpu(v) => v.dtype(),
            #[cfg(feature = "cuda")]
            Self::Cuda(v) => v.dtype(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Cpu(v) => v.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(v) => v.len(),
        }
    }

    pub(crate) fn as_data(&self) -> Data<'_> {
        match self {
            Self::Cpu(v) => Data::Cpu(v.as_slice()),
            #[cfg(feature = "cuda")]
            Self::Cuda(v) => Data::Device(v.as_slice()),
        }
    }

    pub(crate) fn as_data_mut(&mut self) -> DataMut<'_> {
        match self {
            Self::Cpu(v) => DataMut::Cpu(v.as_slice_mut()),
            #[cfg(feature = "cuda")]
            Self::Cuda(v) => DataMut::Device(v.as_slice()),
        }
    }

    /// Ordinal of the CUDA device that holds the elements; `None` for host memory.
    pub(crate) fn device(&self) -> Option<usize> {
        match self.as_data() {
            Data::Cpu(_) => None,
            Data::Device(s) => Some(s.device),
        }
    }
}
