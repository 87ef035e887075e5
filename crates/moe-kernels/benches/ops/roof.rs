//! What this machine can do: read bandwidth and multiply-add peaks, on all threads of the pool.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;

/// Measured limits.
pub struct Roof {
    /// Bytes per second of a parallel sum over a buffer of 1 GiB.
    pub read: f64,
    /// FLOP per second of f32 multiply-adds in registers.
    pub fma: f64,
    /// FLOP per second of BF16 dot products in registers; 0 where there are none.
    pub dot: f64,
}

impl Roof {
    /// Measures for a second or so.
    pub fn measure() -> Self {
        let buffer = vec![1f32; 1 << 28];
        let bytes = (buffer.len() * 4) as f64;
        let read = || buffer.par_chunks(1 << 16).map(sum).sum::<f32>();
        let threads = rayon::current_num_threads();
        let flops = |kernel: fn(usize) -> f64| {
            let all = || (0..threads).into_par_iter().map(|_| kernel(200_000)).sum::<f64>();
            let flop = all();
            flop / best(10, all)
        };
        Self { read: bytes / best(5, read), fma: flops(kernels::fma), dot: flops(kernels::dot) }
    }
}

fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0f32; 64];
    for x in x.as_chunks::<64>().0 {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x;
        }
    }
    lanes.iter().sum()
}

fn best<R>(times: usize, f: impl Fn() -> R) -> f64 {
    let run = |_| {
        let start = Instant::now();
        black_box(f());
        start.elapsed().as_secs_f64()
    };
    (0..times).map(run).fold(f64::INFINITY, f64::min)
}

#[cfg(target_arch = "x86_64")]
mod kernels {
    use std::arch::x86_64::*;

    /// Registers that each take one instruction per round: enough to hide the latency.
    const CHAINS: usize = 16;

    pub fn fma(rounds: usize) -> f64 {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512 is there.
            unsafe { fma512(rounds) }
        } else if is_x86_feature_detected!("fma") {
            // SAFETY: FMA is there.
            unsafe { fma256(rounds) }
        } else {
            0.0
        }
    }

    pub fn dot(rounds: usize) -> f64 {
        if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512 BF16 is there.
            unsafe { dot512(rounds) }
        } else {
            0.0
        }
    }

    #[target_feature(enable = "avx512f")]
    fn fma512(rounds: usize) -> f64 {
        let (a, b) = (_mm512_set1_ps(0.5), _mm512_set1_ps(std::hint::black_box(1e-3)));
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(*acc, a, b);
            }
        }
        std::hint::black_box(acc.map(|v| _mm512_reduce_add_ps(v)));
        (rounds * CHAINS * 32) as f64
    }

    #[target_feature(enable = "avx2,fma")]
    fn fma256(rounds: usize) -> f64 {
        let (a, b) = (_mm256_set1_ps(0.5), _mm256_set1_ps(std::hint::black_box(1e-3)));
        let mut acc = [_mm256_setzero_ps(); 12];
        for _ in 0..rounds {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(*acc, a, b);
            }
        }
        std::hint::black_box(acc.map(|v| _mm256_cvtss_f32(v)));
        (rounds * 12 * 16) as f64
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dot512(rounds: usize) -> f64 {
        let a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5), _mm512_set1_ps(0.5));
        let small = _mm512_set1_ps(std::hint::black_box(1e-3));
        let b = _mm512_cvtne2ps_pbh(small, small);
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for acc in &mut acc {
                *acc = _mm512_dpbf16_ps(*acc, a, b);
            }
        }
        std::hint::black_box(acc.map(|v| _mm512_reduce_add_ps(v)));
        (rounds * CHAINS * 64) as f64
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod kernels {
    pub fn fma(_rounds: usize) -> f64 {
        0.0
    }
    pub fn dot(_rounds: usize) -> f64 {
        0.0
    }
}
