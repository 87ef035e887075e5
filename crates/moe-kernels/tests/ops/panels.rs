//! Weights in panels: every op gives the bits that it gives with the same weights in rows.

use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};
use moe_kernels::{
    Activation, CpuIsa, Exec, ExpertGroups, Float, Segment, View, ViewMut, Weight, WeightOrder, WeightView,
    embedding_into, grouped_down_into, grouped_down_segment_into, grouped_gate_up_into, linear_into,
    linear_row_parallel_into, linear_segment_into,
};
use proptest::prelude::*;

use crate::common::{bits, data, exec, filled, isas, values, view};

/// Lengths around chains and segments; 4112 has chains inside segments.
const LENGTHS: [usize; 9] = [16, 32, 48, 64, 256, 272, 512, 1040, 4112];

/// A weight of random values in both orders; `None` if the path reads rows best.
fn both<T: Float>(dims: &[usize], run: usize, isa: CpuIsa, seed: u64) -> Option<[Weight; 2]> {
    let values = data::<T>(dims.iter().product(), seed);
    let rows = Weight::new(Tensor::from_vec(values, dims, &Device::Cpu).unwrap()).unwrap();
    let panels = rows.clone().packed(Some(isa), run).unwrap();
    assert_eq!(rows.order(), WeightOrder::Rows);
    (panels.order() == WeightOrder::Panels).then_some([rows, panels])
}

/// Checks that an op writes the same to `dims` with both orders.
fn same<O: Float>(
    weights: &[Weight; 2],
    dims: &[usize],
    ex: &mut Exec,
    op: impl Fn(WeightView, ViewMut, &mut Exec) -> Result<()>,
) {
    let [rows, panels] = weights.each_ref().map(|weight| {
        let mut out = filled::<O>(dims).unwrap();
        op(weight.read().unwrap().view().unwrap(), out.view_mut(), ex).unwrap();
        bits(&values::<O>(&out))
    });
    assert!(rows == panels, "{:?} {:?}: panels give other bits", ex.isa(), weights[0].dims());
}

struct Case {
    t: usize,
    n: usize,
    k: usize,
    threads: usize,
    seed: u64,
}

fn dense<T: Float>(c: &Case) {
    let x = data::<T>(c.t * c.k, c.seed);
    let bias = data::<T>(c.n, c.seed ^ 1);
    let x = view(&x, &[c.t, c.k]);
    let bias = view(&bias, &[c.n]);
    for isa in isas() {
        let Some(w) = both::<T>(&[c.n, c.k], c.n, isa, c.seed ^ 2) else { continue };
        let ex = &mut exec(isa, c.threads);
        let out = &[c.t, c.n];
        same::<f32>(&w, out, ex, |w, out, ex| linear_into(x, w, None, out, ex));
        same::<T>(&w, out, ex, |w, out, ex| linear_into(x, w, Some(bias), out, ex));
        same::<f32>(&w, out, ex, |w, out, ex| linear_row_parallel_into(x, w, Some(bias), out, ex));
        for of in [1, 2, 8] {
            let segment = Segment { index: of - 1, of };
            same::<f32>(&w, out, ex, |w, out, ex| linear_segment_into(x, w, segment, out, ex));
        }
        let ids: Vec<u32> = (0..c.t).map(|i| (i * 7 % c.n) as u32).collect();
        let out = &[c.t, c.k];
        same::<f32>(&w, out, ex, |w, out, ex| embedding_into(w, view(&ids, &[c.t]), out, ex));
    }
}

fn experts<T: Float>(c: &Case) {
    let h = c.k;
    let i = c.n;
    let p = c.t;
    let x = data::<T>(p * h, c.seed);
    let act = data::<T>(p * i, c.seed ^ 1);
    // Three experts, the second without rows.
    let offsets = [0, p as u32 / 3, p as u32 / 3, p as u32];
    let rows: Vec<u32> = (0..p as u32).rev().collect();
    let groups = ExpertGroups {
        offsets: view(&offsets, &[4]),
        in_rows: view(&rows, &[p]),
        out_rows: view(&rows, &[p]),
    };
    for isa in isas() {
        let ex = &mut exec(isa, c.threads);
        if let Some(w) = both::<T>(&[3, 2 * i, h], i, isa, c.seed ^ 2) {
            same::<T>(&w, &[p, i], ex, |w, out, ex| {
                grouped_gate_up_into(view(&x, &[p, h]), &groups, w, None, Activation::SwiGlu, out, ex)
            });
        }
        if let Some(w) = both::<T>(&[3, h, i], h, isa, c.seed ^ 3) {
            let x: View = view(&act, &[p, i]);
            same::<f32>(&w, &[p, h], ex, |w, out, ex| grouped_down_into(x, &groups, w, None, out, ex));
            let segment = Segment { index: 1, of: 4 };
            same::<f32>(&w, &[p, h], ex, |w, out, ex| {
                grouped_down_segment_into(x, &groups, w, segment, out, ex)
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn panels_have_the_bits_of_rows(
        t in 0usize..40, panels in 1usize..6, k in proptest::sample::select(&LENGTHS[..]),
        threads in 1usize..4, seed: u64, dtype in 0usize..3,
    ) {
        let c = Case { t, n: 16 * panels, k, threads, seed };
        match dtype {
            0 => { dense::<f32>(&c); experts::<f32>(&c) }
            1 => { dense::<bf16>(&c); experts::<bf16>(&c) }
            _ => { dense::<f16>(&c); experts::<f16>(&c) }
        }
    }
}

/// More rows than a piece, and a number of panels that is odd.
#[test]
fn many_rows_have_the_bits_of_rows() {
    for t in [239, 241, 500] {
        let c = Case { t, n: 48, k: 528, threads: 2, seed: t as u64 };
        dense::<bf16>(&c);
        dense::<f16>(&c);
        experts::<f32>(&c);
    }
}

#[test]
fn a_packed_weight_gives_its_rows_back() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let rows =
            Tensor::arange(0f32, 2. * 32. * 48., &Device::Cpu)?.reshape((2, 32, 48))?.to_dtype(dtype)?;
        for isa in isas() {
            let packed = Weight::new(rows.clone())?.packed(Some(isa), 32)?;
            assert_eq!(packed.order(), WeightOrder::best(isa, dtype, 32, 48));
            assert_eq!(
                (packed.dims(), packed.dtype(), packed.bytes()),
                (rows.dims(), dtype, 3072 * dtype.size_in_bytes())
            );
            let back = packed.to_tensor()?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(back, rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    Ok(())
}

#[test]
fn what_panels_do_not_fit_stays_in_rows() -> Result<()> {
    use CpuIsa::{AmxBf16, Avx2, Avx512Bf16, Scalar};
    let best = |isa, dtype, run, k| WeightOrder::best(isa, dtype, run, k) == WeightOrder::Panels;
    assert!(
        best(Avx2, DType::BF16, 16, 16)
            && best(Avx512Bf16, DType::F16, 48, 32)
            && best(AmxBf16, DType::F32, 16, 16)
    );
    assert!(!best(AmxBf16, DType::BF16, 16, 16) && !best(Scalar, DType::F32, 16, 16));
    assert!(
        !best(Avx2, DType::BF16, 24, 16)
            && !best(Avx2, DType::BF16, 16, 24)
            && !best(Avx2, DType::U8, 16, 16)
    );
    let weight = |dims: &[usize]| Weight::new(Tensor::zeros(dims, DType::BF16, &Device::Cpu)?);
    for (dims, run) in [(&[16, 24][..], 16), (&[24, 16], 24), (&[2, 0, 16], 16), (&[0, 32, 16], 16)] {
        assert_eq!(weight(dims)?.packed(Some(Avx2), run)?.order(), WeightOrder::Rows);
    }
    assert_eq!(weight(&[16, 16])?.packed(None, 16)?.order(), WeightOrder::Rows);
    assert!(weight(&[16]).unwrap_err().to_string().contains("[N, K]"));
    Ok(())
}

/// Gate and up rows in one panel are refused, as is a kernel's wish for rows.
#[test]
fn panels_that_an_op_cannot_read_are_errors() -> Result<()> {
    if !CpuIsa::Avx2.is_supported() {
        return Ok(());
    }
    let weight = Weight::new(Tensor::zeros((1, 16, 16), DType::F32, &Device::Cpu)?)?;
    let weight = weight.packed(Some(CpuIsa::Avx2), 16)?;
    let x = [0f32; 16];
    let ids = [0u32];
    let mut out = filled::<f32>(&[1, 8])?;
    let groups = ExpertGroups {
        offsets: view(&[0u32, 1], &[2]),
        in_rows: view(&ids, &[1]),
        out_rows: view(&ids, &[1]),
    };
    let x = view(&x, &[1, 16]);
    let guard = weight.read()?;
    let activation = Activation::SwiGlu;
    let ex = &mut exec(CpuIsa::Avx2, 1);
    let got = grouped_gate_up_into(x, &groups, guard.view()?, None, activation, out.view_mut(), ex);
    assert!(got.unwrap_err().to_string().contains("runs of 8 rows"));
    let got = guard.view()?.rows("some_op").unwrap_err().to_string();
    assert!(got.contains("some_op: expected a weight in rows"), "{got}");
    Ok(())
}
