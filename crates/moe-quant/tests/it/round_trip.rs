//! Packed matrices are read back: random sizes, values, orders and cuts.

use moe_quant::{Format, Reader, dequantise};
use proptest::prelude::*;

use crate::pack::{Matrix, format, pack};

/// Generates a matrix in any format. `short` allows a shorter last group in the rows of GPTQ.
pub fn matrices(short: bool) -> impl Strategy<Value = (Format, Matrix)> {
    let sizes = (0usize..4, prop::bool::ANY, 1usize..4, 1usize..5, 0usize..5);
    (sizes, prop::bool::ANY, prop::bool::ANY, any::<u64>()).prop_map(
        move |((kind, wide, rows, groups, group), zero_point, act_order, seed)| {
            let group = [0, 8, 16, 32, 64][group];
            let format = format(kind, if wide { 8 } else { 4 }, group, zero_point, act_order);
            let packs_by_eight = !matches!(format, Format::PackQuantized { .. });
            let n = if packs_by_eight { 8 * rows } else { 5 * rows + 1 };
            let ends_short = short && matches!(format, Format::Gptq { .. });
            let shorter = if ends_short { seed as usize % group.max(8) / 8 * 8 } else { 0 };
            let k = if group > 0 {
                group * groups - shorter
            } else if packs_by_eight {
                8 * groups
            } else {
                7 * groups + 2
            };
            (format, matrix(format, n, k, seed))
        },
    )
}

fn matrix(format: Format, n: usize, k: usize, seed: u64) -> Matrix {
    let int = format.int().unwrap();
    let mut state = seed | 1;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let size = int.group.columns(k);
    let groups = k.div_ceil(size);
    let most = (1usize << int.bits) - 1;
    let mut g_idx: Vec<u32> = (0..k).map(|column| (column / size) as u32).collect();
    if int.act_order {
        (1..k).rev().for_each(|at| g_idx.swap(at, next() % (at + 1)));
    }
    let codes = (0..n * k).map(|_| (next() & most) as u8).collect();
    let zero = |value: usize| if int.zero_point { (value & most) as u8 } else { 1 << (int.bits - 1) };
    let zeros = (0..n * groups).map(|_| zero(next())).collect();
    let scales = (0..n * groups).map(|_| (next() % 2000) as f32 / 1e4 - 0.05).collect();
    Matrix { n, k, codes, zeros, scales, g_idx }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn packed_then_read((format, matrix) in matrices(true), cut in any::<[prop::sample::Index; 3]>()) {
        let tensors = pack(format, &matrix);
        let find = |suffix: &str| tensors.iter().find(|t| t.suffix == suffix).map(|t| t.view());
        let reader = Reader::new("m", format, (matrix.n, matrix.k), find).unwrap();
        let weights = matrix.weights();
        prop_assert_eq!(&dequantise(&reader).unwrap(), &weights);
        let sizes = format.tp_sizes(matrix.k);
        let tp = *cut[0].get(&sizes);
        let rank = cut[1].index(tp);
        let width = matrix.k / tp;
        let first = cut[2].index(matrix.n);
        let part = reader.rows(first..matrix.n).unwrap().columns(rank * width..(rank + 1) * width).unwrap();
        let expected: Vec<f32> = (first..matrix.n)
            .flat_map(|row| weights[row * matrix.k + rank * width..][..width].to_vec())
            .collect();
        prop_assert_eq!(dequantise(&part).unwrap(), expected);
    }
}
