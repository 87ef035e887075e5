//! Rows of attention in FP8, as an output product in FP8 takes them.

use candle_core::DType;
use moe_kernels::plan::Fp8Activations;
use moe_kernels::quant::QuantUse;
use moe_kernels::{ProductRows, QuantGroup, linear_into, rope_attention_into};

use crate::attention::{Case, Sequence};
use crate::common::*;
use crate::quant::matrices::{Matrix, Source, fp8};

/// If the output product takes rows in FP8, the launches of a step write them in FP8, with the bits of rows that are
/// quantised after attention. For other heads a separate launch quantises them.
#[test]
fn rows_for_a_product_in_fp8_are_those_of_bf16() {
    let mut rng = Rng::new();
    let decoding = |n: usize| (0..n).map(|i| (i * 7 % 90, 1)).collect::<Vec<_>>();
    let with = |mut all: Vec<Sequence>, more: &[Sequence]| {
        all.extend(more);
        all
    };
    let steps: [(Vec<Sequence>, usize); 5] = [
        (decoding(70), 6),
        (vec![(0, 70), (3, 1), (40, 200)], 0),
        (with(decoding(100), &[(0, 300), (5, 2), (64, 110)]), 0),
        (with(decoding(1), &[(900, 1), (0, 130)]), 2),
        (with(decoding(1), &[(1000, 515)]), 0),
    ];
    for (sequences, padding) in small(steps, 80, |step| step.0.iter().map(|s| s.1).sum()) {
        for (heads, head_dim) in [((8, 2), 128), ((12, 1), 128), ((24, 8), 128), ((4, 4), 64), ((16, 2), 256)]
        {
            let case = Case::new(heads, head_dim, 16, &sequences);
            let case = Case { sinks: head_dim == 128, gates: head_dim == 256, padding, ..case };
            let data = case.data(&mut rng, DType::BF16, DType::F32);
            let columns = heads.0 * head_dim;
            let n = 128;
            let scheme = fp8(QuantGroup::Block { n: 128, k: 128 });
            let matrix = Matrix::new(&mut rng, n, columns, scheme, 1);
            let source = Source { matrices: [("o".to_string(), matrix)].into(), inputs: None };
            let ex = cuda().with_fp8_activations(Fp8Activations::Auto);
            let weight = source.weight(&[&["o".to_string()]], QuantUse::Linear, DType::BF16, &ex);
            let mut p = Place::new(ex);
            let guard = weight.read().unwrap();
            let placed = data.placed(&p);
            let product = |rows: &ProductRows, p: &mut Place| {
                let mut out = p.out(DType::F32, &[data.rows, n]);
                linear_into(rows.rows(), guard.view().unwrap(), None, out.view_mut(), &mut p.ex).unwrap();
                out.host(p)
            };
            let mut floats = ProductRows::Floats(p.ex.scratch(DType::BF16, &[data.rows, columns]).unwrap());
            let mut rows = ProductRows::of_product(data.rows, guard.view().unwrap(), false, &p.ex).unwrap();
            assert_eq!(
                matches!(rows, ProductRows::Fp8(_)),
                data.rows < 512 || data.rows.is_multiple_of(4),
                "{} rows",
                data.rows
            );
            for to in [&mut floats, &mut rows] {
                let args = placed.args(&case);
                let meta = placed.meta(&case);
                let [mut k, mut v] = [&data.caches[0], &data.caches[1]].map(|cache| p.put(cache));
                let k = k.view_mut();
                let v = v.view_mut();
                rope_attention_into(&args, &meta, case.step_rows(), k, v, to.rows_mut(), &mut p.ex).unwrap();
            }
            let what = format!("{heads:?} heads of {head_dim}, {} rows", data.rows);
            assert_same(&what, &product(&floats, &mut p), &product(&rows, &mut p));
        }
    }
}
