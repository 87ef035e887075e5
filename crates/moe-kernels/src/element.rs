//! The scalar types that views and buffers hold.
//!
//! candle's CPU storage is an enum of typed vectors. The same shape is used here, so that a
//! view of a candle tensor is a plain borrow and no kernel ever reinterprets bytes.

use candle_core::DType;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

/// A scalar type that a [`View`](crate::View) can hold.
pub trait Element: Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// The candle dtype of this type.
    const DTYPE: DType;
    /// The typed slice, if `s` holds this type.
    fn slice<'a>(s: CpuSlice<'a>) -> Option<&'a [Self]>;
    /// The typed mutable slice, if `s` holds this type.
    fn slice_mut<'a>(s: CpuSliceMut<'a>) -> Option<&'a mut [Self]>;
    /// Wraps a slice of this type.
    fn wrap(s: &[Self]) -> CpuSlice<'_>;
    /// Wraps a mutable slice of this type.
    fn wrap_mut(s: &mut [Self]) -> CpuSliceMut<'_>;
    /// Wraps a vector of this type.
    fn wrap_vec(v: Vec<Self>) -> CpuVec;
    /// Zeros that take memory from the system only as they are written.
    fn zeros(len: usize) -> Vec<Self>;
}

/// A float type of weights and activations. Every kernel accumulates in f32.
pub trait Float: Element + candle_core::WithDType {
    /// Exact widening.
    fn widen(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn narrow(x: f32) -> Self;
}

macro_rules! elements {
    ($($variant:ident $ty:ty, $zeros:expr);* $(;)?) => {
        /// A typed slice in host memory.
        #[derive(Clone, Copy, Debug)]
        pub enum CpuSlice<'a> { $(#[doc = stringify!($ty)] $variant(&'a [$ty])),* }

        /// A typed mutable slice in host memory.
        #[derive(Debug)]
        pub enum CpuSliceMut<'a> { $(#[doc = stringify!($ty)] $variant(&'a mut [$ty])),* }

        /// An owned, typed vector in host memory.
        #[derive(Debug)]
        pub enum CpuVec { $(#[doc = stringify!($ty)] $variant(Vec<$ty>)),* }

        impl<'a> CpuSlice<'a> {
            /// The dtype of the elements.
            pub fn dtype(self) -> DType { match self { $(Self::$variant(_) => DType::$variant),* } }
            /// Number of elements.
            pub fn len(self) -> usize { match self { $(Self::$variant(s) => s.len()),* } }
            /// Whether there is no element.
            pub fn is_empty(self) -> bool { self.len() == 0 }
            /// Elements `start..start + len`; the caller has checked the range.
            pub(crate) fn range(self, start: usize, len: usize) -> Self {
                match self { $(Self::$variant(s) => Self::$variant(&s[start..start + len])),* }
            }
        }

        impl<'a> CpuSliceMut<'a> {
            /// The dtype of the elements.
            pub fn dtype(&self) -> DType { match self { $(Self::$variant(_) => DType::$variant),* } }
            /// Number of elements.
            pub fn len(&self) -> usize { match self { $(Self::$variant(s) => s.len()),* } }
            /// Whether there is no element.
            pub fn is_empty(&self) -> bool { self.len() == 0 }
            pub(crate) fn as_slice(&self) -> CpuSlice<'_> {
                match self { $(Self::$variant(s) => CpuSlice::$variant(s)),* }
            }
            pub(crate) fn reborrow(&mut self) -> CpuSliceMut<'_> {
                match self { $(Self::$variant(s) => CpuSliceMut::$variant(s)),* }
            }
            pub(crate) fn range(self, start: usize, len: usize) -> Self {
                match self { $(Self::$variant(s) => Self::$variant(&mut s[start..start + len])),* }
            }
            pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
                match self { $(Self::$variant(s) => {
                    let (a, b) = s.split_at_mut(mid);
                    (Self::$variant(a), Self::$variant(b))
                }),* }
            }
        }

        impl CpuVec {
            /// A vector of `len` zeros; `None` for a dtype that no view holds.
            pub(crate) fn zeros(dtype: DType, len: usize) -> Option<Self> {
                match dtype { $(DType::$variant => Some(Self::$variant(<$ty>::zeros(len))),)* _ => None }
            }
            pub(crate) fn dtype(&self) -> DType { match self { $(Self::$variant(_) => DType::$variant),* } }
            pub(crate) fn len(&self) -> usize { match self { $(Self::$variant(v) => v.len()),* } }
            pub(crate) fn as_slice(&self) -> CpuSlice<'_> {
                match self { $(Self::$variant(v) => CpuSlice::$variant(v)),* }
            }
            pub(crate) fn as_slice_mut(&mut self) -> CpuSliceMut<'_> {
                match self { $(Self::$variant(v) => CpuSliceMut::$variant(v)),* }
            }
            pub(crate) fn truncate(&mut self, len: usize) {
                match self { $(Self::$variant(v) => v.truncate(len)),* }
            }
            /// Moves the vector into candle's storage, without a copy.
            pub(crate) fn into_storage(self) -> candle_core::CpuStorage {
                match self { $(Self::$variant(v) => candle_core::CpuStorage::$variant(v)),* }
            }
        }

        /// An owned, typed allocation on a CUDA device.
        #[cfg(feature = "cuda")]
        #[derive(Debug)]
        pub(crate) enum CudaVec { $($variant(cudarc::driver::CudaSlice<$ty>)),* }

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
            pub(crate) fn clear(&mut self, stream: &std::sync::Arc<cudarc::driver::CudaStream>) -> Result<(), cudarc::driver::DriverError> {
                match self { $(Self::$variant(v) => stream.memset_zeros(v)),* }
            }
            pub(crate) fn dtype(&self) -> DType { match self { $(Self::$variant(_) => DType::$variant),* } }
            pub(crate) fn len(&self) -> usize { match self { $(Self::$variant(v) => v.len()),* } }
            pub(crate) fn address(&self, stream: &cudarc::driver::CudaStream) -> u64 {
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

        /// Address and length of what a candle CUDA storage holds; `None` for dtypes that no view holds.
        #[cfg(feature = "cuda")]
        pub(crate) fn cuda_address(s: &candle_core::CudaStorage) -> Option<u64> {
            use candle_core::cuda_backend::CudaStorageSlice;
            let stream = s.device.cuda_stream();
            match &s.slice { $(CudaStorageSlice::$variant(v) => Some(device_address(v, &stream)),)* _ => None }
        }

        /// The slice that a candle CPU storage holds; `None` for dtypes that no view holds.
        pub(crate) fn storage_slice(s: &candle_core::CpuStorage) -> Option<CpuSlice<'_>> {
            match s { $(candle_core::CpuStorage::$variant(v) => Some(CpuSlice::$variant(v)),)* _ => None }
        }

        $(impl Element for $ty {
            const DTYPE: DType = DType::$variant;
            fn slice<'a>(s: CpuSlice<'a>) -> Option<&'a [Self]> {
                match s { CpuSlice::$variant(s) => Some(s), _ => None }
            }
            fn slice_mut<'a>(s: CpuSliceMut<'a>) -> Option<&'a mut [Self]> {
                match s { CpuSliceMut::$variant(s) => Some(s), _ => None }
            }
            fn wrap(s: &[Self]) -> CpuSlice<'_> { CpuSlice::$variant(s) }
            fn wrap_mut(s: &mut [Self]) -> CpuSliceMut<'_> { CpuSliceMut::$variant(s) }
            fn wrap_vec(v: Vec<Self>) -> CpuVec { CpuVec::$variant(v) }
            fn zeros(len: usize) -> Vec<Self> { $zeros(len) }
        })*
    };
}

/// The address of an allocation, ordered after what other streams wrote there if events are tracked. The guard that
/// orders later writes is dropped at once: whoever reads asks once more when the reads are on the stream.
#[cfg(feature = "cuda")]
fn device_address<T>(slice: &cudarc::driver::CudaSlice<T>, stream: &cudarc::driver::CudaStream) -> u64 {
    use cudarc::driver::DevicePtr;
    slice.device_ptr(stream).0
}

/// Tells other streams, if events are tracked, that what is on this one may write the allocation.
#[cfg(feature = "cuda")]
fn written<T>(slice: &mut cudarc::driver::CudaSlice<T>, stream: &cudarc::driver::CudaStream) {
    use cudarc::driver::DevicePtrMut;
    drop(slice.device_ptr_mut(stream).1);
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

impl Float for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        f16::from_f32(x)
    }
}

/// A match on a dtype, with the type `$t` bound in the arm of each listed one.
#[doc(hidden)]
#[macro_export]
macro_rules! match_types {
    ($dtype:expr, $t:ident => $body:expr, [$($variant:ident $type:ty),*], $other:ident => $else:expr) => {
        match $dtype {
            $($crate::candle::DType::$variant => {
                type $t = $type;
                $body
            })*
            $other => $else,
        }
    };
}

/// Runs `$body` with the type `$t` bound to the Rust type of any dtype that views hold; any other
/// dtype is an error that names the op.
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $op:expr, $t:ident => $body:expr) => {
        $crate::match_types!($dtype, $t => $body, [U8 u8, U32 u32, I32 i32, I64 i64],
            dtype => $crate::with_float!(dtype, $op, $t => $body))
    };
}

/// Runs `$body` with the type `$t` bound to the Rust type of a float dtype (f32, bf16, f16);
/// any other dtype is an error that names the op.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $op:expr, $t:ident => $body:expr) => {
        $crate::match_types!($dtype, $t => $body, [F32 f32, BF16 $crate::half::bf16, F16 $crate::half::f16],
            other => Err($crate::candle::Error::Msg(format!(
                "{}: expected dtype f32, bf16 or f16, got {}",
                $op,
                other.as_str()
            ))
            .bt()))
    };
}
