//! Where the elements of views and buffers lie: in host memory or on a CUDA device.
//!
//! candle's CPU storage is an enum of typed vectors. The same shape is used here, so that a
//! view of a candle tensor is a plain borrow and no kernel ever reinterprets bytes.

use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError,
};
use candle_core::{CpuStorage, DType, Storage};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::cuda::DeviceMemory;
use crate::element::Element;

/// Borrowed elements in the memory of a CUDA device. Only kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a> {
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

    /// The same memory as bytes.
    #[cfg(feature = "cuda")]
    pub(crate) fn bytes(self) -> Self {
        Self { dtype: DType::U8, len: self.len * self.dtype.size_in_bytes(), ..self }
    }

    /// Elements `start..start + len`; the caller has checked the range.
    fn range(self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Self { address: self.address + (start * self.dtype.size_in_bytes()) as u64, len, ..self }
    }
}

/// Declares the enums of elements, one variant for each type, and how types get in and out.
macro_rules! elements {
    ($($variant:ident $ty:ty, $zeros:expr);* $(;)?) => {
        /// Borrowed elements.
        #[derive(Clone, Copy, Debug)]
        pub enum Data<'a> {
            $(#[doc = stringify!($ty)] $variant(&'a [$ty]),)*
            /// On a device.
            Device(DeviceSlice<'a>),
        }

        /// Borrowed, writable elements.
        #[derive(Debug)]
        pub enum DataMut<'a> {
            $(#[doc = stringify!($ty)] $variant(&'a mut [$ty]),)*
            /// On a device.
            Device(DeviceSlice<'a>),
        }

        /// Owned elements.
        #[derive(Debug)]
        pub enum Memory {
            $(#[doc = stringify!($ty)] $variant(Vec<$ty>),)*
            /// On a device.
            #[cfg(feature = "cuda")]
            Cuda(DeviceMemory),
        }

        impl Data<'_> {
            pub(crate) fn dtype(&self) -> DType {
                match self { $(Self::$variant(_) => DType::$variant,)* Self::Device(s) => s.dtype }
            }
            pub(crate) fn len(&self) -> usize {
                match self { $(Self::$variant(s) => s.len(),)* Self::Device(s) => s.len }
            }
            /// Elements `start..start + len`; the caller has checked the range.
            pub(crate) fn range(self, start: usize, len: usize) -> Self {
                match self {
                    $(Self::$variant(s) => Self::$variant(&s[start..start + len]),)*
                    Self::Device(s) => Self::Device(s.range(start, len)),
                }
            }
        }

        impl DataMut<'_> {
            pub(crate) fn as_data(&self) -> Data<'_> {
                match self { $(Self::$variant(s) => Data::$variant(s),)* Self::Device(s) => Data::Device(*s) }
            }
            pub(crate) fn reborrow(&mut self) -> DataMut<'_> {
                match self { $(Self::$variant(s) => DataMut::$variant(s),)* Self::Device(s) => DataMut::Device(*s) }
            }
            pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
                match self {
                    $(Self::$variant(s) => {
                        let (a, b) = s.split_at_mut(mid);
                        (Self::$variant(a), Self::$variant(b))
                    })*
                    Self::Device(s) => (Self::Device(s.range(0, mid)), Self::Device(s.range(mid, s.len - mid))),
                }
            }
            /// Elements `start..start + len`; the caller has checked the range.
            pub(crate) fn range(self, start: usize, len: usize) -> Self {
                self.split_at(start).1.split_at(len).0
            }
        }

        impl Memory {
            /// `len` zeros in host memory; `None` for a dtype that no view holds.
            pub(crate) fn zeros(dtype: DType, len: usize) -> Option<Self> {
                match dtype { $(DType::$variant => Some(Self::$variant(<$ty>::zeros(len))),)* _ => None }
            }
            pub(crate) fn as_data(&self) -> Data<'_> {
                match self {
                    $(Self::$variant(v) => Data::$variant(v),)*
                    #[cfg(feature = "cuda")]
                    Self::Cuda(v) => Data::Device(v.as_slice()),
                }
            }
            pub(crate) fn as_data_mut(&mut self) -> DataMut<'_> {
                match self {
                    $(Self::$variant(v) => DataMut::$variant(v),)*
                    #[cfg(feature = "cuda")]
                    Self::Cuda(v) => DataMut::Device(v.as_slice()),
                }
            }
            /// Moves the memory into candle's storage, without a copy; of host memory the first `len` elements.
            pub(crate) fn into_storage(self, len: usize) -> Storage {
                match self {
                    $(Self::$variant(mut v) => {
                        v.truncate(len);
                        Storage::Cpu(CpuStorage::$variant(v))
                    })*
                    #[cfg(feature = "cuda")]
                    Self::Cuda(v) => Storage::Cuda(v.into_storage()),
                }
            }
        }

        /// The elements that a candle CPU storage holds; `None` for dtypes that no view holds.
        pub(crate) fn cpu_data(s: &CpuStorage) -> Option<Data<'_>> {
            match s { $(CpuStorage::$variant(v) => Some(Data::$variant(v)),)* _ => None }
        }

        /// An owned, typed allocation on a CUDA device.
        #[cfg(feature = "cuda")]
        #[derive(Debug)]
        pub(crate) enum CudaVec { $($variant(CudaSlice<$ty>)),* }

        #[cfg(feature = "cuda")]
        impl CudaVec {
            /// `len` elements of whatever the memory holds; `None` for a dtype that no view holds.
            pub(crate) fn unspecified(device: &candle_core::CudaDevice, dtype: DType, len: usize) -> candle_core::Result<Option<Self>> {
                Ok(match dtype {
                    // SAFETY: any bits are a number, and the host never reads them in place.
                    $(DType::$variant => Some(Self::$variant(unsafe { device.alloc(len)? })),)*
                    _ => None
                })
            }
            /// Makes all elements zero, in stream order.
            pub(crate) fn clear(&mut self, stream: &std::sync::Arc<CudaStream>) -> Result<(), DriverError> {
                match self { $(Self::$variant(v) => stream.memset_zeros(v)),* }
            }
            pub(crate) fn dtype(&self) -> DType { match self { $(Self::$variant(_) => DType::$variant),* } }
            pub(crate) fn len(&self) -> usize { match self { $(Self::$variant(v) => v.len()),* } }
            pub(crate) fn address(&self, stream: &CudaStream) -> u64 {
                match self { $(Self::$variant(v) => device_address(v, stream)),* }
            }
            /// Moves the allocation into candle's storage, as written by what is on the device's stream.
            pub(crate) fn into_storage(self, device: candle_core::CudaDevice) -> candle_core::CudaStorage {
                match self { $(Self::$variant(mut v) => {
                    written(&mut v, &device.cuda_stream());
                    candle_core::CudaStorage::wrap_cuda_slice(v, device)
                }),* }
            }
        }

        /// Address of what a candle CUDA storage holds; `None` for dtypes that no view holds.
        #[cfg(feature = "cuda")]
        pub(crate) fn cuda_address(s: &candle_core::CudaStorage) -> Option<u64> {
            use candle_core::cuda_backend::CudaStorageSlice;
            let stream = s.device.cuda_stream();
            match &s.slice { $(CudaStorageSlice::$variant(v) => Some(device_address(v, &stream)),)* _ => None }
        }

        $(impl Element for $ty {
            const DTYPE: DType = DType::$variant;
            fn slice(s: Data<'_>) -> Option<&[Self]> {
                match s { Data::$variant(s) => Some(s), _ => None }
            }
            fn slice_mut(s: DataMut<'_>) -> Option<&mut [Self]> {
                match s { DataMut::$variant(s) => Some(s), _ => None }
            }
            fn wrap(s: &[Self]) -> Data<'_> { Data::$variant(s) }
            fn wrap_mut(s: &mut [Self]) -> DataMut<'_> { DataMut::$variant(s) }
            fn wrap_vec(v: Vec<Self>) -> Memory { Memory::$variant(v) }
            fn zeros(len: usize) -> Vec<Self> { $zeros(len) }
        })*
    };
}

elements!(
    U8 u8, |n| vec![0; n];
    U32 u32, |n| vec![0; n];
    I32 i32, |n| vec![0; n];
    I64 i64, |n| vec![0; n];
    F32 f32, |n| vec![0.; n];
    // Zero bits are zero; a vector of half::bf16 would be written element by element.
    BF16 bf16, |n| vec![0u16; n].reinterpret_into();
    F16 f16, |n| vec![0u16; n].reinterpret_into();
);

impl Data<'_> {
    /// Ordinal of the CUDA device that holds the elements; `None` for host memory.
    pub(crate) fn device(&self) -> Option<usize> {
        match self {
            Self::Device(s) => Some(s.device),
            _ => None,
        }
    }
}

impl DataMut<'_> {
    pub(crate) fn dtype(&self) -> DType {
        self.as_data().dtype()
    }

    pub(crate) fn len(&self) -> usize {
        self.as_data().len()
    }
}

/// The address of an allocation, ordered after what other streams wrote there if events are tracked. The guard that
/// orders later writes is dropped at once: the reader asks once more when the reads are on the stream.
#[cfg(feature = "cuda")]
fn device_address<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

/// Tells other streams, if events are tracked, that what is on this one may write the allocation.
#[cfg(feature = "cuda")]
fn written<T>(slice: &mut CudaSlice<T>, stream: &CudaStream) {
    drop(slice.device_ptr_mut(stream).1);
}
