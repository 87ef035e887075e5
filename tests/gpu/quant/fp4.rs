//! FP4 with scales at the ends of their range (zero and NaN, the smallest and the largest powers of two, and both in
//! one row), and experts with sizes that are no multiples of 128, in Q4_K, too.

use candle_core::DType;
use moe_kernels::half::bf16;
use moe_kernels::linear_into;
use moe_kernels::plan::ExpertsForm;
use moe_kernels::quant::QuantUse;

use super::matrices::{Matrix, Source, fp4, q4k};
use crate::common::*;
use crate::fused::check;
use crate::packs::Packs;

const ROWS: usize = 64;
const COLUMNS: usize = 320;

/// Which scales the rows of a matrix have, row by row and again from the first kind on.
const KINDS: [&str; 8] = ["usual", "smallest", "large", "both", "zero", "some zero", "some NaN", "all NaN"];

fn kind(row: usize) -> &'static str {
    KINDS[row % KINDS.len()]
}

/// MXFP4 whose codes, which are random, have signs at zeros, too.
fn matrix(rng: &mut Rng) -> Matrix {
    let [mxfp4, _] = fp4();
    Matrix::new(rng, ROWS, COLUMNS, mxfp4, 1).with_scales(|row, group| match (kind(row), group % 2) {
        ("smallest", _) | ("both", 1) => Some(2f32.powi(-127)),
        // So large that sums are still finite.
        ("large", _) | ("both", _) => Some(2f32.powi(115)),
        ("zero", _) | ("some zero", 0) => Some(0.0),
        ("all NaN", _) | ("some NaN", 1) => Some(f32::NAN),
        _ => None,
    })
}

#[test]
fn scales_at_the_ends_of_their_range_are_kept() {
    let mut rng = Rng::new();
    let m = matrix(&mut rng);
    let floats = m.floats();
    let source = Source { matrices: [("m".to_string(), m)].into(), inputs: None };
    for usage in [QuantUse::Linear, QuantUse::GateUp] {
        for dtype in [DType::F32, DType::BF16] {
            let weight = source.weight(&[&["m".to_string()]], usage, dtype, &cuda());
            let tensor = weight.to_tensor().unwrap().to_device(&candle_core::Device::Cpu).unwrap();
            let got = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (i, (want, got)) in floats.iter().zip(&got).enumerate() {
                let want = if dtype == DType::BF16 { bf16::from_f32(*want).to_f32() } else { *want };
                let same = want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan());
                let what = kind(i / COLUMNS);
                assert!(same, "{usage:?} {}, {what}, weight {i}: {want:e}, not {got:e}", dtype.as_str());
            }
        }
    }
}

/// Rows by every form of the products. A weight that is 2^-254 of another one in its row may be zero.
#[test]
fn products_have_scales_at_the_ends_of_their_range() {
    let mut rng = Rng::new();
    let m = matrix(&mut rng);
    let floats = m.floats();
    let source = Source { matrices: [("m".to_string(), m)].into(), inputs: None };
    let w = source.weight(&[&["m".to_string()]], QuantUse::Linear, DType::BF16, &cuda());
    let w = w.read().unwrap();
    for rows in [1, 3, 8, 20, 64, 100, 300] {
        let x = rng.floats(DType::BF16, &[rows, COLUMNS]);
        let mut p = Place::new(cuda());
        let placed = p.put(&x);
        let mut out = p.out(DType::F32, &[rows, ROWS]);
        linear_into(placed.view(), w.view().unwrap(), None, out.view_mut(), &mut p.ex).unwrap();
        let got = out.floats(&p);
        let x = x.view().to_f32_vec().unwrap();
        for (i, got) in got.iter().enumerate() {
            let row = i % ROWS;
            let terms = x[i / ROWS * COLUMNS..][..COLUMNS].iter().zip(&floats[row * COLUMNS..][..COLUMNS]);
            let terms: Vec<f64> = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).collect();
            let want: f64 = terms.iter().sum();
            let size: f64 = terms.iter().map(|term| term.abs()).sum();
            let what = kind(row);
            // The smallest sums have fewer bits.
            let bound = 1e-5 * size + 4.0 * f64::from(f32::from_bits(1));
            let right = if want.is_nan() { got.is_nan() } else { (f64::from(*got) - want).abs() <= bound };
            assert!(right, "{rows} rows, {what}, output {i}: {want:e}, not {got:e}");
        }
    }
}

/// The sizes of gpt-oss are 2,880.
#[test]
fn experts_of_any_multiple_of_64_are_those_of_their_definition() {
    use ExpertsForm::{OneLaunch, Stream, Tensor, Wide};
    let mut rng = Rng::new();
    let forms: [(bool, ExpertsForm, usize, usize); 10] = [
        (false, OneLaunch, 4, 1),
        (false, OneLaunch, 3, 4),
        (false, Stream, 9, 4),
        (false, Tensor, 4, 5),
        (false, Tensor, 4, 20),
        (false, Tensor, 4, 30),
        (false, Tensor, 4, 64),
        (false, Tensor, 4, 160),
        (true, Tensor, 4, 9),
        (false, Wide, 4, 240),
    ];
    for [hidden, inter] in small([[64, 192], [320, 64], [2880, 192], [192, 2880]], 64, |size| size[0]) {
        for scheme in fp4().into_iter().chain([q4k()]) {
            let packs = Packs::new(&mut rng, 12, [hidden, inter], Some(scheme));
            for (invariant, form, top_k, tokens) in small(forms, 9, |form| form.3) {
                let case = (form, [12, top_k, hidden, inter], tokens);
                check(&mut rng, case, &packs, &cuda().with_batch_invariant(invariant));
            }
        }
    }
}
