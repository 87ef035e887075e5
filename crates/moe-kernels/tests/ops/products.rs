//! Dense products.

use candle_core::{DType, Result};
use half::{bf16, f16};
use moe_kernels::{Buffer, CpuIsa, Float, linear_into, linear_row_parallel_into, row_parallel_segments};
use proptest::prelude::*;

use crate::common::{bits, bound, data, exact, exec, filled, isas, product, values, view};

/// Lengths around vectors, blocks and segments; 2056 and 4112 have blocks inside segments.
pub const LENGTHS: [usize; 24] =
    [0, 1, 2, 3, 7, 12, 15, 16, 17, 31, 32, 33, 63, 64, 100, 255, 256, 257, 300, 513, 600, 1032, 2056, 4112];

struct Problem<T> {
    t: usize,
    n: usize,
    k: usize,
    x: Vec<T>,
    w: Vec<T>,
    bias: Option<Vec<T>>,
}

impl<T: Float> Problem<T> {
    fn new(t: usize, n: usize, k: usize, bias: bool, seed: u64) -> Self {
        let x = data(t * k, seed);
        let w = data(n * k, seed ^ 0xabcd);
        Self { t, n, k, x, w, bias: bias.then(|| data(n, seed ^ 0x1234)) }
    }

    fn run<O: Float>(&self, row_parallel: bool, isa: CpuIsa, threads: usize) -> Result<Vec<O>> {
        let mut out = filled::<O>(&[self.t, self.n])?;
        let op = if row_parallel { linear_row_parallel_into } else { linear_into };
        let bias = self.bias.as_ref().map(|b| view(b, &[self.n]));
        let x = view(&self.x, &[self.t, self.k]);
        let w = view(&self.w, &[self.n, self.k]);
        op(x, w, bias, out.view_mut(), &mut exec(isa, threads))?;
        Ok(values(&out))
    }

    /// Output (t, n) in the defined order.
    fn defined(&self, row_parallel: bool, isa: CpuIsa, t: usize, n: usize) -> f32 {
        let segments = if row_parallel { row_parallel_segments(self.k) } else { 1 };
        let x = &self.x[t * self.k..(t + 1) * self.k];
        let w = &self.w[n * self.k..(n + 1) * self.k];
        let sum = product(isa, x, w, segments);
        self.bias.as_ref().map_or(sum, |b| sum + b[n].widen())
    }

    fn check<O: Float>(&self, row_parallel: bool, threads: usize) -> Result<()> {
        for isa in isas() {
            let got = self.run::<O>(row_parallel, isa, threads)?;
            for (i, got) in got.iter().enumerate() {
                let want = O::narrow(self.defined(row_parallel, isa, i / self.n, i % self.n));
                let got = got.widen();
                let want = want.widen();
                let place = (i / self.n, i % self.n);
                assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} at {place:?}: {got} {want}");
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever M, N, K, the dtype and the threads: every output has the bits of its own defined
    /// chain of additions.
    #[test]
    fn every_output_is_its_own_chain(
        t in 0usize..40, n in 0usize..70, k in proptest::sample::select(&LENGTHS[..]),
        bias: bool, row_parallel: bool, wide_out: bool, threads in 1usize..4, seed: u64,
        dtype in 0usize..3,
    ) {
        let (t, n) = if k > 1000 { (t / 4, n / 4) } else { (t, n) };
        match (dtype, wide_out) {
            (0, _) => Problem::<f32>::new(t, n, k, bias, seed).check::<f32>(row_parallel, threads),
            (1, false) => Problem::<bf16>::new(t, n, k, bias, seed).check::<bf16>(row_parallel, threads),
            (1, true) => Problem::<bf16>::new(t, n, k, bias, seed).check::<f32>(row_parallel, threads),
            (_, false) => Problem::<f16>::new(t, n, k, bias, seed).check::<f16>(row_parallel, threads),
            (_, true) => Problem::<f16>::new(t, n, k, bias, seed).check::<f32>(row_parallel, threads),
        }.unwrap();
    }
}

#[test]
fn many_rows_cross_pieces_and_waves() -> Result<()> {
    for t in [239, 241, 500, 961, 1921] {
        Problem::<bf16>::new(t, 33, 40, true, t as u64).check::<bf16>(false, 2)?;
        Problem::<f32>::new(t, 17, 24, false, t as u64).check::<f32>(true, 2)?;
    }
    Ok(())
}

#[test]
fn the_error_is_within_the_stated_bound() -> Result<()> {
    for (k, row_parallel) in [(300, false), (4096, false), (4096, true), (7168, true)] {
        let p = Problem::<bf16>::new(3, 40, k, false, 5);
        for isa in isas() {
            for (i, got) in p.run::<f32>(row_parallel, isa, 1)?.into_iter().enumerate() {
                let x = &p.x[i / 40 * k..][..k];
                let w = &p.w[i % 40 * k..][..k];
                let (sum, abs) = exact(x, w);
                let error = (got as f64 - sum).abs();
                assert!(error <= bound(k, abs), "{isa:?} K {k}: error {error}, bound {}", bound(k, abs));
            }
        }
    }
    Ok(())
}

/// The fused paths do the same arithmetic; only the BF16 dot product orders pairs differently.
#[test]
fn fused_paths_agree_bit_for_bit() -> Result<()> {
    fn check<T: Float>() -> Result<()> {
        let p = Problem::<T>::new(14, 50, 700, true, 9);
        let fused = isas().filter(|isa| !matches!(isa, CpuIsa::Scalar | CpuIsa::Avx512Dot | CpuIsa::AmxBf16));
        let all = fused.map(|isa| p.run::<f32>(true, isa, 2)).collect::<Result<Vec<_>>>()?;
        assert!(all.windows(2).all(|pair| bits(&pair[0]) == bits(&pair[1])));
        Ok(())
    }
    check::<f32>()?;
    check::<bf16>()?;
    check::<f16>()
}

#[test]
fn a_rank_of_two_reproduces_the_row_parallel_sum() -> Result<()> {
    let n = 20;
    let k = 208;
    let p = Problem::<f32>::new(3, n, k, false, 11);
    for isa in isas() {
        // Each rank holds four of eight segments; the partials are added in ascending order.
        let mut sum = vec![0f32; 3 * n];
        for segment in 0..8 {
            let columns = |m: &[f32]| -> Vec<f32> {
                m.chunks(k).flat_map(|row| row[segment * 26..(segment + 1) * 26].to_vec()).collect()
            };
            let part = Problem { t: 3, n, k: 26, x: columns(&p.x), w: columns(&p.w), bias: None };
            for (sum, part) in sum.iter_mut().zip(part.run::<f32>(false, isa, 1)?) {
                *sum = if segment == 0 { part } else { *sum + part };
            }
        }
        assert_eq!(bits(&sum), bits(&p.run::<f32>(true, isa, 2)?), "{isa:?}");
    }
    Ok(())
}

#[test]
fn segments_divide_k() {
    let expected = [(8, 8), (12, 4), (6, 2), (7, 1), (1, 1), (0, 8), (768, 8), (100, 4)];
    assert!(expected.iter().all(|&(k, s)| row_parallel_segments(k) == s));
}

#[test]
fn subnormals_infinities_and_nan_go_through() -> Result<()> {
    for isa in isas() {
        let mut out = Buffer::zeros(DType::F32, &[1, 2])?;
        let x = [f32::INFINITY, 1.0];
        let w = [1.0, 0.0, f32::NAN, 1.0];
        linear_into(view(&x, &[1, 2]), view(&w, &[2, 2]), None, out.view_mut(), &mut exec(isa, 1))?;
        let got = values::<f32>(&out);
        assert!(got[0] == f32::INFINITY && got[1].is_nan(), "{isa:?}: {got:?}");
    }
    Ok(())
}
