//! Test data, conversions and the defined order of a product.

use candle_core::{DType, Result};
use moe_kernels::{Buffer, CpuIsa, Element, Exec, Float, View};

/// Every path that this machine runs.
pub fn isas() -> impl Iterator<Item = CpuIsa> {
    CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// A context with a path and a number of threads.
pub fn exec(isa: CpuIsa, threads: usize) -> Exec {
    Exec::cpu().with_isa(isa).unwrap().with_threads(threads).unwrap()
}

/// `n` values in -1..1 of a dtype, from a seed.
pub fn data<T: Float>(n: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            T::narrow((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}

/// Values as f64.
pub fn wide<T: Float>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.widen() as f64).collect()
}

/// Bits of the widened values, so that NaN and -0 compare.
pub fn bits<T: Float>(x: &[T]) -> Vec<u32> {
    x.iter().map(|x| x.widen().to_bits()).collect()
}

/// A buffer of a type, filled with a value that no result has.
pub fn filled<T: Float>(dims: &[usize]) -> Result<Buffer> {
    Buffer::from_vec(vec![T::narrow(77.0); dims.iter().product()], dims)
}

/// The values of a buffer.
pub fn values<T: Element>(b: &Buffer) -> Vec<T> {
    b.view().cpu::<T>().unwrap().to_vec()
}

/// A view of a slice.
pub fn view<'a, T: Element>(x: &'a [T], dims: &[usize]) -> View<'a> {
    View::new(x, dims).unwrap()
}

/// x · w in the defined order: chains of 256 from 0, blocks, then segments, all ascending;
/// with the BF16 dot product, the second of a pair before the first; with AMX, one chain of blocks of 32 per segment.
pub fn product<T: Float>(isa: CpuIsa, x: &[T], w: &[T], segments: usize) -> f32 {
    let ascending = |sums: Vec<f32>| sums.into_iter().reduce(|a, b| a + b).unwrap_or(0.0);
    let length = x.len() / segments;
    let segment = |s: usize| {
        let range = s * length..(s + 1) * length;
        if isa == CpuIsa::AmxBf16 && <T as Element>::DTYPE == DType::BF16 {
            return amx_chain(&x[range.clone()], &w[range]);
        }
        let blocks = x[range.clone()].chunks(256).zip(w[range].chunks(256));
        ascending(blocks.map(|(x, w)| chain(isa, x, w)).collect())
    };
    ascending((0..segments).map(segment).collect())
}

/// Blocks of 32, each the sum of an even and an odd chain.
fn amx_chain<T: Float>(x: &[T], w: &[T]) -> f32 {
    x.chunks(32).zip(w.chunks(32)).fold(0.0, |sum, (x, w)| {
        let mut chains = [0f32; 2];
        for (i, (x, w)) in x.iter().zip(w).enumerate() {
            chains[i % 2] = x.widen().mul_add(w.widen(), chains[i % 2]);
        }
        sum + (chains[0] + chains[1])
    })
}

fn chain<T: Float>(isa: CpuIsa, x: &[T], w: &[T]) -> f32 {
    let at = |v: &[T], i: usize| v.get(i).map_or(0.0, |v| v.widen());
    let mut sum = 0f32;
    if isa == CpuIsa::Avx512Dot && <T as Element>::DTYPE == DType::BF16 {
        for i in (0..x.len()).step_by(2) {
            sum = at(x, i + 1).mul_add(at(w, i + 1), sum);
            sum = at(x, i).mul_add(at(w, i), sum);
        }
        return sum;
    }
    for i in 0..x.len() {
        sum = match isa {
            CpuIsa::Scalar => at(x, i) * at(w, i) + sum,
            _ => at(x, i).mul_add(at(w, i), sum),
        };
    }
    sum
}

/// Σ x w and Σ |x w| in f64.
pub fn exact<T: Float>(x: &[T], w: &[T]) -> (f64, f64) {
    let terms = x.iter().zip(w).map(|(x, w)| x.widen() as f64 * w.widen() as f64);
    terms.fold((0.0, 0.0), |(sum, abs), t| (sum + t, abs + t.abs()))
}

/// The stated bound of a product over K against the exact sum of terms of this magnitude: every
/// term passes at most 256 + K / 256 + 8 additions (AMX: K / 32 + 18); the multiplication may round too, and a
/// little is left for higher orders.
pub fn bound(k: usize, abs: f64) -> f64 {
    2.0 * (256.0f64.min(k as f64) + (k as f64 / 256.0).ceil() + 9.0) * f64::powi(2.0, -24) * abs * 1.01
        + 1e-30
}

/// Half a unit in the last place of a dtype, relative.
pub fn rounding<T: Float>() -> f64 {
    match <T as Element>::DTYPE {
        DType::F32 => f64::powi(2.0, -24),
        DType::F16 => f64::powi(2.0, -11),
        _ => f64::powi(2.0, -8),
    }
}
