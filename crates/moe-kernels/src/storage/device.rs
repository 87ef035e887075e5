//! Owned memory of CUDA devices, and what candle holds there.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError,
};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use half::{bf16, f16};

use super::slice::DeviceSlice;
use crate::cuda::counts;

/// Declares the enum of allocations, one variant for each type.
macro_rules! allocations {
    ($($variant:ident $ty:ty),*) => {
        /// An owned, typed allocation on a CUDA device.
        #[derive(Debug)]
        enum CudaVec { $($variant(CudaSlice<$ty>)),* }

        impl CudaVec {
            /// `len` elements of whatever the memory holds; `None` for a dtype that no view holds.
            fn unspecified(device: &CudaDevice, dtype: DType, len: usize) -> Result<Option<Self>> {
                Ok(match dtype {
                    // SAFETY: any bits are a number, and the host never reads them in place.
                    $(DType::$variant => Some(Self::$variant(unsafe { device.alloc(len)? })),)*
                    _ => None
                })
            }
            /// Makes all elements zero, in stream order.
            fn clear(&mut self, stream: &Arc<CudaStream>) -> std::result::Result<(), DriverError> {
                match self { $(Self::$variant(v) => stream.memset_zeros(v)),* }
            }
            fn dtype(&self) -> DType { match self { $(Self::$variant(_) => DType::$variant),* } }
            fn len(&self) -> usize { match self { $(Self::$variant(v) => v.len()),* } }
            fn address(&self, stream: &CudaStream) -> u64 {
                match self { $(Self::$variant(v) => device_address(v, stream)),* }
            }
            /// Moves the allocation into candle's storage, as written by what is on the device's stream.
            fn into_storage(self, device: CudaDevice) -> CudaStorage {
                match self { $(Self::$variant(mut v) => {
                    written(&mut v, &device.cuda_stream());
                    CudaStorage::wrap_cuda_slice(v, device)
                }),* }
            }
        }

        /// Address of what a candle CUDA storage holds; `None` for dtypes that no view holds.
        pub(crate) fn cuda_address(s: &CudaStorage) -> Option<u64> {
            use candle_core::cuda_backend::CudaStorageSlice;
            let stream = s.device.cuda_stream();
            match &s.slice { $(CudaStorageSlice::$variant(v) => Some(device_address(v, &stream)),)* _ => None }
        }
    };
}

allocations!(U8 u8, U32 u32, I32 i32, I64 i64, F32 f32, BF16 bf16, F16 f16);

/// The address of an allocation, ordered after what other streams wrote there if events are tracked. The guard that
/// orders later writes is dropped at once: the reader asks once more when the reads are on the stream.
fn device_address<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

/// Tells other streams, if events are tracked, that what is on this one may write the allocation.
fn written<T>(slice: &mut CudaSlice<T>, stream: &CudaStream) {
    drop(slice.device_ptr_mut(stream).1);
}

/// Owned elements on a CUDA device.
#[derive(Debug)]
pub struct DeviceMemory {
    data: CudaVec,
    address: u64,
    device: CudaDevice,
    ordinal: usize,
}

impl DeviceMemory {
    /// `len` zeros. An error if the device has not that much memory left.
    pub(crate) fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let mut memory = Self::unspecified(device, dtype, len)?;
        memory.data.clear(&device.cuda_stream()).w()?;
        Ok(memory)
    }

    /// `len` elements of whatever the memory holds. An error if the device has not that much left.
    pub(crate) fn unspecified(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(dtype.size_in_bytes());
        counts::allocation();
        // An empty allocation is refused by the driver.
        let data = match CudaVec::unspecified(device, dtype, len.max(1)) {
            Ok(Some(data)) => data,
            Ok(None) => bail!("no buffer holds dtype {}", dtype.as_str()),
            Err(e) => bail!("the device refuses {bytes} bytes of memory: {e}"),
        };
        let stream = device.cuda_stream();
        let ordinal = stream.context().ordinal();
        Ok(Self { address: data.address(&stream), data, device: device.clone(), ordinal })
    }

    pub(crate) fn dtype(&self) -> DType {
        self.data.dtype()
    }

    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    pub(crate) fn as_slice(&self) -> DeviceSlice<'_> {
        DeviceSlice::new(self.address, self.dtype(), self.len(), self.ordinal)
    }

    /// Moves the allocation into candle's storage, without a copy.
    pub(crate) fn into_storage(self) -> CudaStorage {
        self.data.into_storage(self.device)
    }
}

/// The first `len` elements of candle's storage; `None` for dtypes that no view holds.
pub(crate) fn storage_slice(storage: &CudaStorage, len: usize) -> Option<DeviceSlice<'_>> {
    use candle_core::backend::BackendStorage;
    let ordinal = storage.device.cuda_stream().context().ordinal();
    Some(DeviceSlice::new(cuda_address(storage)?, storage.dtype(), len, ordinal))
}
