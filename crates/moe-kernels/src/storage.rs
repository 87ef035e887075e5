//! The memory of views and buffers: host memory or memory of a CUDA device.
//!
//! candle's CPU storage is an enum of typed vectors. The same structure is used here, so that a view of a candle tensor
//! is a plain borrow and no kernel ever reinterprets bytes.

#[cfg(feature = "cuda")]
mod device;
mod slice;

use candle_core::{CpuStorage, DType, Storage};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

#[cfg(feature = "cuda")]
pub(crate) use device::{DeviceMemory, cuda_address, storage_slice};
pub use slice::DeviceSlice;

/// A scalar type that a [`View`](crate::View) can hold.
pub trait Element: Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// The candle dtype of this type.
    const DTYPE: DType;
    /// The typed slice, if `s` holds this type.
    fn slice(s: Data<'_>) -> Option<&[Self]>;
    /// The typed mutable slice, if `s` holds this type.
    fn slice_mut(s: DataMut<'_>) -> Option<&mut [Self]>;
    /// Wraps a slice of this type.
    fn wrap(s: &[Self]) -> Data<'_>;
    /// Wraps a mutable slice of this type.
    fn wrap_mut(s: &mut [Self]) -> DataMut<'_>;
    /// Wraps a vector of this type.
    fn wrap_vec(v: Vec<Self>) -> Memory;
    /// Zeros that use system memory only when they are written.
    fn zeros(len: usize) -> Vec<Self>;
}

/// Declares the enums of elements, with one variant for each type, and the conversions between types and enums.
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
            /// Moves the memory into candle's storage without a copy. Only the first `len` elements of host memory are
            /// kept.
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
    // The bits of zero are all zero. A vector of half::bf16 would be written element by element, so a vector of u16 is
    // used.
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
