//! Bytes of a safetensors file to candle tensors: one copy, converting on the way.
//!
//! Large tensors are decoded in parallel chunks. Bytes are read as little-endian values, so
//! neither the alignment of an embedded file nor the byte order of the machine matters.

use bytemuck::{AnyBitPattern, NoUninit};
use candle_core::{DType, Device, Result, Tensor, WithDType};
use half::{bf16, f16};
use moe_kernels::{Element, with_element};
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
    converts(stored, wanted).then(|| match wanted {
        // The one dtype that no view holds.
        DType::F64 => build(vec![0f64; bytes.len() / size_of::<f64>()], bytes, stored, shape),
        _ => with_element!(wanted, "checkpoint", T => {
            build(<T as Element>::zeros(bytes.len() * 8 / stored.bitsize()), bytes, stored, shape)
        }),
    })
}

/// Fills `data`, which is zeros, and makes it a tensor. The pages of `data` have not been touched yet, so each page is
/// first written by the thread that decodes it.
fn build<T: WithDType + NoUninit + AnyBitPattern>(
    mut data: Vec<T>,
    bytes: &[u8],
    stored: Dtype,
    shape: &[usize],
) -> Result<Tensor> {
    let from = bytes.par_chunks(CHUNK * stored.bitsize() / 8);
    let to = data.par_chunks_mut(CHUNK).zip(from);
    to.for_each(|(to, from)| into_bytes(from, stored, T::DTYPE, bytemuck::cast_slice_mut(to)));
    Tensor::from_vec(data, shape, &Device::Cpu)
}

/// Whether [`into_bytes`] converts this pair of dtypes.
pub(super) fn converts(stored: Dtype, wanted: DType) -> bool {
    let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    let from = dtype_of(stored);
    from == Some(wanted) || from.is_some_and(|d| d == DType::F64 || is_float(d)) && is_float(wanted)
}

/// Converts elements, on one thread, into the machine's bytes. `out` has room for the number of elements in `bytes`.
/// For a pair that [`converts`] refuses, nothing is written.
pub(super) fn into_bytes(bytes: &[u8], stored: Dtype, wanted: DType, out: &mut [u8]) {
    match (stored, wanted) {
        (Dtype::F32, DType::BF16 | DType::F16) => narrow_into(bytes, wanted, out, f32::from_le_bytes),
        (Dtype::BF16, DType::F32 | DType::F16) => narrow_into(bytes, wanted, out, widen_bf16),
        (Dtype::F16, DType::F32 | DType::BF16) => {
            narrow_into(bytes, wanted, out, |b| f16::from_le_bytes(b).to_f32());
        }
        (Dtype::F64, DType::F32 | DType::BF16 | DType::F16) => {
            narrow_into(bytes, wanted, out, |b| f64::from_le_bytes(b) as f32);
        }
        _ if dtype_of(stored) != Some(wanted) => {}
        // On a machine with the file's byte order, the compiler turns these loops into copies.
        _ => match stored.bitsize() {
            16 => fill(bytes, out, |b| u16::from_le_bytes(b).to_ne_bytes()),
            32 => fill(bytes, out, |b| u32::from_le_bytes(b).to_ne_bytes()),
            64 => fill(bytes, out, |b| u64::from_le_bytes(b).to_ne_bytes()),
            _ => out.copy_from_slice(bytes),
        },
    }
}

fn narrow_into<const N: usize>(bytes: &[u8], wanted: DType, out: &mut [u8], widen: impl Fn([u8; N]) -> f32) {
    match wanted {
        DType::F32 => fill(bytes, out, |b| widen(b).to_ne_bytes()),
        DType::BF16 => fill(bytes, out, |b| bf16::from_f32(widen(b)).to_ne_bytes()),
        DType::F16 => fill(bytes, out, |b| f16::from_f32(widen(b)).to_ne_bytes()),
        _ => {}
    }
}

fn fill<const N: usize, const M: usize>(bytes: &[u8], out: &mut [u8], convert: impl Fn([u8; N]) -> [u8; M]) {
    for (to, &from) in out.as_chunks_mut::<M>().0.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *to = convert(from);
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

fn count<const N: usize>(bytes: &[u8], widen: impl Fn([u8; N]) -> f32 + Sync) -> (usize, usize) {
    let (elements, _) = bytes.as_chunks::<N>();
    let chunk = |elements: &[[u8; N]]| {
        let mut nan = 0;
        let mut inf = 0;
        for &e in elements {
            let x = widen(e);
            nan += x.is_nan() as usize;
            inf += x.is_infinite() as usize;
        }
        (nan, inf)
    };
    elements.par_chunks(CHUNK).map(chunk).reduce(|| (0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
}
