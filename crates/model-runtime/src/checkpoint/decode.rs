//! Bytes of a safetensors file to candle tensors: one copy, converting on the way.
//!
//! Large tensors are decoded in parallel chunks. Bytes are read as little-endian values, so
//! neither the alignment of an embedded file nor the byte order of the machine matters.

use candle_core::{DType, Device, Result, Tensor, WithDType};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;

/// Elements per parallel task.
const CHUNK: usize = 1 << 18;

/// The candle dtype of a stored dtype; `None` for dtypes that are not loaded here.
pub(super) fn dtype_of(stored: Dtype) -> Option<DType> {
    Some(match stored {
        Dtype::U8 => DType::U8,
        Dtype::U32 => DType::U32,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        _ => return None,
    })
}

/// Decodes a tensor. Floats convert into each other through f32, rounding to nearest even;
/// integers only load as what they are. `None` if the pair of dtypes is not supported.
pub(super) fn tensor(bytes: &[u8], stored: Dtype, shape: &[usize], wanted: DType) -> Option<Result<Tensor>> {
    if dtype_of(stored) == Some(wanted) {
        return Some(copied(bytes, wanted, shape));
    }
    match stored {
        Dtype::F32 => converted(bytes, shape, wanted, f32::from_le_bytes),
        Dtype::BF16 => converted(bytes, shape, wanted, widen_bf16),
        Dtype::F16 => converted(bytes, shape, wanted, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::F64 => converted(bytes, shape, wanted, |b| f64::from_le_bytes(b) as f32),
        _ => None,
    }
}

/// Whether [`into_bytes`] converts this pair of dtypes: those that [`tensor`] does.
#[cfg(any(feature = "cuda", test))]
pub(super) fn converts(stored: Dtype, wanted: DType) -> bool {
    let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    let from = dtype_of(stored);
    from == Some(wanted) || from.is_some_and(|d| d == DType::F64 || is_float(d)) && is_float(wanted)
}

/// Converts elements as [`tensor`] does, on one thread, into little-endian bytes; `out` has room for as
/// many as `bytes` holds. Of pairs that [`converts`] refuses, nothing is written.
#[cfg(any(feature = "cuda", test))]
pub(super) fn into_bytes(bytes: &[u8], stored: Dtype, wanted: DType, out: &mut [u8]) {
    match stored {
        _ if dtype_of(stored) == Some(wanted) => out.copy_from_slice(bytes),
        Dtype::F32 => narrow_into(bytes, wanted, out, f32::from_le_bytes),
        Dtype::BF16 => narrow_into(bytes, wanted, out, widen_bf16),
        Dtype::F16 => narrow_into(bytes, wanted, out, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::F64 => narrow_into(bytes, wanted, out, |b| f64::from_le_bytes(b) as f32),
        _ => {}
    }
}

#[cfg(any(feature = "cuda", test))]
fn narrow_into<const N: usize>(bytes: &[u8], wanted: DType, out: &mut [u8], widen: impl Fn([u8; N]) -> f32) {
    fn fill<const N: usize, const M: usize>(
        bytes: &[u8],
        out: &mut [u8],
        convert: impl Fn([u8; N]) -> [u8; M],
    ) {
        let (from, to) = (bytes.as_chunks::<N>().0, out.as_chunks_mut::<M>().0);
        for (to, &from) in to.iter_mut().zip(from) {
            *to = convert(from);
        }
    }
    match wanted {
        DType::F32 => fill(bytes, out, |b| widen(b).to_le_bytes()),
        DType::BF16 => fill(bytes, out, |b| bf16::from_f32(widen(b)).to_le_bytes()),
        DType::F16 => fill(bytes, out, |b| f16::from_f32(widen(b)).to_le_bytes()),
        _ => {}
    }
}

/// How many elements are NaN and how many infinite; `None` for dtypes other than floats.
pub(super) fn count_non_finite(bytes: &[u8], stored: Dtype) -> Option<(usize, usize)> {
    Some(match stored {
        Dtype::F32 => count(bytes, f32::from_le_bytes),
        Dtype::BF16 => count(bytes, widen_bf16),
        Dtype::F16 => count(bytes, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::F64 => count(bytes, |b| {
            let x = f64::from_le_bytes(b);
            // A finite f64 beyond f32's range becomes infinite when loaded; it is not reported here.
            if x.is_finite() { 0.0 } else { x as f32 }
        }),
        _ => return None,
    })
}

fn widen_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits((u16::from_le_bytes(bytes) as u32) << 16)
}

fn copied(bytes: &[u8], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    match dtype {
        DType::BF16 => build(decode(bytes, u16::from_le_bytes).reinterpret_into::<bf16>(), shape),
        DType::F16 => build(decode(bytes, u16::from_le_bytes).reinterpret_into::<f16>(), shape),
        DType::F32 => build(decode(bytes, f32::from_le_bytes), shape),
        DType::F64 => build(decode(bytes, f64::from_le_bytes), shape),
        DType::I64 => build(decode(bytes, i64::from_le_bytes), shape),
        DType::I32 => build(decode(bytes, i32::from_le_bytes), shape),
        DType::U32 => build(decode(bytes, u32::from_le_bytes), shape),
        _ => build(decode(bytes, u8::from_le_bytes), shape),
    }
}

fn converted<const N: usize>(
    bytes: &[u8],
    shape: &[usize],
    wanted: DType,
    widen: impl Fn([u8; N]) -> f32 + Sync,
) -> Option<Result<Tensor>> {
    Some(match wanted {
        DType::F32 => build(decode(bytes, widen), shape),
        DType::BF16 => {
            let bits = decode(bytes, |b| bf16::from_f32(widen(b)).to_bits());
            build(bits.reinterpret_into::<bf16>(), shape)
        }
        DType::F16 => {
            let bits = decode(bytes, |b| f16::from_f32(widen(b)).to_bits());
            build(bits.reinterpret_into::<f16>(), shape)
        }
        _ => return None,
    })
}

/// `N` bytes to one element each. For the primitive types used here, `vec!` asks for zeroed pages
/// that nothing touches, so every page is first written by the thread that decodes it.
fn decode<const N: usize, T: Primitive>(bytes: &[u8], element: impl Fn([u8; N]) -> T + Sync) -> Vec<T> {
    let (elements, _) = bytes.as_chunks::<N>();
    let mut out = T::zeros(elements.len());
    let fill = |(out, elements): (&mut [T], &[[u8; N]])| {
        for (o, &e) in out.iter_mut().zip(elements) {
            *o = element(e);
        }
    };
    if elements.len() <= CHUNK {
        fill((&mut out, elements));
    } else {
        out.par_chunks_mut(CHUNK).zip(elements.par_chunks(CHUNK)).for_each(fill);
    }
    out
}

/// A primitive number: only for these does `vec![0; n]` come as untouched zero pages.
trait Primitive: Copy + Send + Sync {
    fn zeros(len: usize) -> Vec<Self>;
}

macro_rules! primitives {
    ($($t:ty),*) => { $(impl Primitive for $t {
        fn zeros(len: usize) -> Vec<Self> {
            vec![0 as $t; len]
        }
    })* };
}
primitives!(u8, u16, u32, i32, i64, f32, f64);

fn build<T: WithDType>(data: Vec<T>, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(data, shape, &Device::Cpu)
}

fn count<const N: usize>(bytes: &[u8], widen: impl Fn([u8; N]) -> f32 + Sync) -> (usize, usize) {
    let (elements, _) = bytes.as_chunks::<N>();
    let chunk = |elements: &[[u8; N]]| {
        let (mut nan, mut inf) = (0, 0);
        for &e in elements {
            let x = widen(e);
            nan += x.is_nan() as usize;
            inf += x.is_infinite() as usize;
        }
        (nan, inf)
    };
    elements.par_chunks(CHUNK).map(chunk).reduce(|| (0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
}
