//! Segments of row-parallel products: the ranks' sums, added in ascending order, are the product.

use candle_core::{DType, Result};
use half::bf16;
use moe_kernels::{
    Buffer, CpuIsa, Exec, ExpertGroups, Float, Segment, grouped_down_into, grouped_down_segment_into,
    linear_row_parallel_into, linear_segment_into, row_parallel_segments,
};
use proptest::prelude::*;

use crate::common::{bits, data, exec, filled, isas, values, view};

/// Columns of rank `rank` of `tp` of a matrix [rows, k].
fn columns<T: Float>(m: &[T], k: usize, rank: usize, tp: usize) -> Vec<T> {
    m.chunks(k).flat_map(|row| row[rank * k / tp..(rank + 1) * k / tp].to_vec()).collect()
}

/// Adds up what each rank's segments give, ascending.
fn summed(
    k: usize,
    tp: usize,
    len: usize,
    mut part: impl FnMut(usize, Segment) -> Result<Vec<f32>>,
) -> Result<Vec<f32>> {
    let of = row_parallel_segments(k) / tp;
    let mut sum = vec![0f32; len];
    for s in 0..tp * of {
        let part = part(s / of, Segment { index: s % of, of })?;
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum = if s == 0 { x } else { *sum + x });
    }
    Ok(sum)
}

fn check_linear<T: Float>(t: usize, n: usize, k: usize, tp: usize, isa: CpuIsa, seed: u64) -> Result<()> {
    let x = data::<T>(t * k, seed);
    let w = data::<T>(n * k, !seed);
    let mut whole = filled::<f32>(&[t, n])?;
    let ex = &mut exec(isa, 2);
    linear_row_parallel_into(view(&x, &[t, k]), view(&w, &[n, k]), None, whole.view_mut(), ex)?;
    let sum = summed(k, tp, t * n, |rank, segment| {
        let x = columns(&x, k, rank, tp);
        let w = columns(&w, k, rank, tp);
        let mut out = filled::<f32>(&[t, n])?;
        let x = view(&x, &[t, k / tp]);
        let w = view(&w, &[n, k / tp]);
        linear_segment_into(x, w, segment, out.view_mut(), ex)?;
        Ok(values(&out))
    })?;
    assert_eq!(bits(&sum), bits(&values::<f32>(&whole)), "{isa:?} {t} {n} {k} over {tp}");
    Ok(())
}

/// Experts with 0 to 3 rows each, written in reverse order.
fn check_grouped<T: Float>(e: usize, h: usize, k: usize, tp: usize, isa: CpuIsa, seed: u64) -> Result<()> {
    let counts: Vec<u32> = (0..e as u32).map(|i| (i * 7 + seed as u32 % 5) % 4).collect();
    let mut offsets = vec![0];
    counts.iter().for_each(|n| offsets.push(offsets[offsets.len() - 1] + n));
    let p = offsets[e] as usize;
    let rows = (0..p as u32).rev().collect::<Vec<_>>();
    let x = data::<T>(p * k, seed);
    let w = data::<T>(e * h * k, !seed);
    let groups = ExpertGroups {
        offsets: view(&offsets, &[e + 1]),
        in_rows: view(&rows, &[p]),
        out_rows: view(&rows, &[p]),
    };
    let ex = &mut exec(isa, 2);
    let mut whole = filled::<f32>(&[p, h])?;
    grouped_down_into(view(&x, &[p, k]), &groups, view(&w, &[e, h, k]), None, whole.view_mut(), ex)?;
    let sum = summed(k, tp, p * h, |rank, segment| {
        let x = columns(&x, k, rank, tp);
        let w = columns(&w, k, rank, tp);
        let mut out = filled::<f32>(&[p, h])?;
        let x = view(&x, &[p, k / tp]);
        let w = view(&w, &[e, h, k / tp]);
        grouped_down_segment_into(x, &groups, w, segment, out.view_mut(), ex)?;
        Ok(values(&out))
    })?;
    assert_eq!(bits(&sum), bits(&values::<f32>(&whole)), "{isa:?} {e} {h} {k} over {tp}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn the_sums_of_the_ranks_add_up_to_the_product(
        t in 0usize..30, n in 1usize..40, part in 1usize..40, experts in 1usize..5,
        tp in prop::sample::select(vec![1usize, 2, 4, 8]), long: bool, wide: bool, seed: u64,
    ) {
        // Long segments have several blocks of 256.
        let k = 8 * if long { part + 256 } else { part };
        let (t, n) = if long { (t / 4, n / 4 + 1) } else { (t, n) };
        for isa in isas() {
            if wide {
                check_linear::<f32>(t, n, k, tp, isa, seed).unwrap();
                check_grouped::<f32>(experts, n, k, tp, isa, seed).unwrap();
            } else {
                check_linear::<bf16>(t, n, k, tp, isa, seed).unwrap();
                check_grouped::<bf16>(experts, n, k, tp, isa, seed).unwrap();
            }
        }
    }
}

#[test]
fn wrong_segments_and_shapes_are_refused() -> Result<()> {
    let x = data::<f32>(24, 1);
    let w = data::<f32>(36, 2);
    let ex = &mut Exec::cpu();
    let mut refused = |index, of, dims: [usize; 2], dtype| {
        let mut out = Buffer::zeros(dtype, &dims).unwrap();
        let segment = Segment { index, of };
        let x = view(&x, &[2, 12]);
        let w = view(&w, &[3, 12]);
        linear_segment_into(x, w, segment, out.view_mut(), ex).unwrap_err().to_string()
    };
    for (index, of) in [(0, 0), (2, 2), (0, 5)] {
        let e = refused(index, of, [2, 3], DType::F32);
        assert!(e.contains("linear_segment: Segment") && e.contains("is no segment of K = 12"), "{e}");
    }
    let e = refused(0, 2, [3, 2], DType::F32);
    assert!(e.contains("expected out with dims [2, 3], got [3, 2]"), "{e}");
    let e = refused(0, 2, [2, 3], DType::BF16);
    assert!(e.contains("expected out of dtype f32, got bf16"), "{e}");
    let ids = [0u32, 1, 1];
    let groups = ExpertGroups {
        offsets: view(&[0u32, 3], &[2]),
        in_rows: view(&ids, &[3]),
        out_rows: view(&ids, &[3]),
    };
    let x = data::<f32>(12, 1);
    let w = data::<f32>(8, 2);
    let mut out = Buffer::zeros(DType::F32, &[3, 2])?;
    let segment = Segment { index: 0, of: 1 };
    let x = view(&x, &[3, 4]);
    let w = view(&w, &[1, 2, 4]);
    let e = grouped_down_segment_into(x, &groups, w, segment, out.view_mut(), ex).unwrap_err().to_string();
    assert!(e.contains("out_rows[2] names row 1 a second time"), "{e}");
    Ok(())
}
