//! Dense products with quantised weights by each of their kernels, compared with their definition: every weight, rows
//! of any magnitude, rows that must not depend on other rows.

use candle_core::DType;
use moe_kernels::half::bf16;
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Buffer, Levels, PreNorm, QuantGroup, QuantScheme, Weight, linear_add_into, linear_into, norm_linear_into,
};

use super::matrices::{Matrix, Source, fp4, fp8, int, q4k};
use crate::common::*;
use crate::definition::{product, relative_error};

/// Schemes that the fast kernels read.
fn schemes() -> [QuantScheme; 11] {
    let [mxfp4, nvfp4] = fp4();
    [
        int(4, 128, false, false),
        int(4, 32, true, false),
        int(4, 0, false, false),
        int(8, 128, false, false),
        int(8, 0, true, false),
        fp8(QuantGroup::Block { n: 128, k: 128 }),
        fp8(QuantGroup::Channel),
        fp8(QuantGroup::Tensor),
        mxfp4,
        nvfp4,
        q4k(),
    ]
}

/// Whether one row with such weights is multiplied as 16-bit integers, with one unit for 128 columns.
fn is_digits(scheme: QuantScheme) -> bool {
    schemes().iter().enumerate().any(|(i, of)| *of == scheme && [0, 2, 3, 4].contains(&i))
}

/// The weight of one matrix.
fn weight(matrix: Matrix) -> Weight {
    let source = Source { matrices: [("m".to_string(), matrix)].into(), inputs: None };
    source.weight(&[&["m".to_string()]], QuantUse::Linear, DType::BF16, &cuda())
}

fn multiply(x: &Buffer, w: &Weight, p: &mut Place) -> Vec<f32> {
    let guard = w.read().unwrap();
    let (x, mut out) = (p.put(x), p.out(DType::F32, &[x.dims()[0], w.dims()[0]]));
    linear_into(x.view(), guard.view().unwrap(), None, out.view_mut(), &mut p.ex).unwrap();
    out.floats(p)
}

/// Products with rows of the identity return the weights themselves: every code with every zero point and scale at its
/// place.
#[test]
fn products_read_every_weight() {
    let mut rng = Rng::new();
    let mut p = Place::new(cuda());
    for (n, k) in small([(160, 320), (64, 640)], 160, |size| size.0) {
        for scheme in schemes() {
            let matrix = Matrix::new(&mut rng, n, k, scheme, 1).with_every_code(&mut rng);
            let floats = matrix.floats();
            let parts = (scheme == q4k()).then(|| matrix.rounded_parts());
            let w = weight(matrix);
            let one = |i: usize| bf16::from_f32(f32::from(u8::from(i / k == i % k)));
            let eye = Buffer::from_vec((0..k * k).map(one).collect(), &[k, k]).unwrap();
            // One rounding by the scale, here and in the definition, or two of a scale in two levels; or weights that
            // are rounded to bf16 once.
            let exact = 2f64.powi(if scheme.levels == Levels::Fp8 { -22 } else { -23 });
            for (rows, bound) in [(8, exact), (64, exact), (k, 1.02 * 2f64.powi(-8))] {
                for first in (0..k).step_by(rows) {
                    let got = multiply(&cut(&eye, first, rows.min(k - first)), &w, &mut p);
                    for (row, got) in got.chunks(n).enumerate() {
                        for (column, got) in got.iter().enumerate() {
                            let want = f64::from(floats[column * k + first + row]);
                            let off = (f64::from(*got) - want).abs();
                            let at = (first + row, column);
                            // Q4_K's weights are rounded for any number of rows.
                            let bound = match &parts {
                                Some(parts) => 2f64.powi(-8) * f64::from(parts[column * k + first + row]),
                                None => bound * want.abs(),
                            };
                            assert!(off <= bound, "{scheme} {rows} rows, {at:?}: {got}, not {want}");
                        }
                    }
                }
            }
        }
    }
}

/// As digits, a value below 2^-7 of the largest of its 128 columns loses at most 2^-15 of that value, and other values
/// lose nothing. A row with a value that is not finite gives no numbers, and changes no other row.
#[test]
fn rows_of_any_magnitude_keep_their_values() {
    let mut rng = Rng::new();
    let n = 160;
    let k = 1088;
    let m = 7;
    for scheme in schemes() {
        let matrix = Matrix::new(&mut rng, n, k, scheme, 1);
        let floats = matrix.floats();
        let parts = (scheme == q4k()).then(|| matrix.rounded_parts());
        let w = weight(matrix);
        let mut x: Vec<f32> = Vec::new();
        for _ in 0..m {
            let of_row = rng.below(180) as i32 - 90;
            x.extend((0..k).map(|_| rng.float() * 2f32.powi(of_row - rng.below(25) as i32)));
        }
        x[128..256].fill(0.0);
        x[k..2 * k].fill(0.0);
        x[2 * k + 256..2 * k + 384].fill(511.0 / 256.0); // the largest number of an exponent
        let x: Vec<bf16> = x.into_iter().map(bf16::from_f32).collect();
        let mut p = Place::new(cuda());
        let mut each_alone = |x: &[bf16]| -> Vec<Vec<f32>> {
            let row = |row: &[bf16]| multiply(&Buffer::from_vec(row.to_vec(), &[1, k]).unwrap(), &w, &mut p);
            x.chunks(k).map(row).collect()
        };
        let out = each_alone(&x);
        let sizes: Vec<f64> = floats.iter().map(|w| f64::from(w.abs())).collect();
        let rounded: Option<Vec<f64>> = parts.map(|parts| parts.iter().map(|x| f64::from(*x)).collect());
        for (row, got) in x.chunks(k).zip(&out) {
            let row: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
            let lost = row.chunks(128).flat_map(|block| {
                let most = block.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())));
                block.iter().map(move |x| {
                    let size = f64::from(x.abs());
                    let small = is_digits(scheme) && size < most / 128.0;
                    4e-6 * size + if small { most * 2f64.powi(-15) } else { 0.0 }
                })
            });
            let lost: Vec<f64> = lost.collect();
            for (column, want) in product(&row, &floats, k).into_iter().enumerate() {
                let mut bound: f64 = lost.iter().zip(&sizes[column * k..]).map(|(x, w)| x * w).sum();
                if let Some(rounded) = &rounded {
                    let terms = row.iter().zip(&rounded[column * k..]);
                    bound += terms.map(|(x, part)| f64::from(x.abs()) * part * 2f64.powi(-8)).sum::<f64>();
                }
                let off = (f64::from(got[column]) - want).abs();
                assert!(
                    off <= bound,
                    "{scheme}, column {column}: {} instead of {want}, bound {bound}",
                    got[column]
                );
            }
        }
        let mut x = x;
        x[2 * k + 5] = bf16::NAN;
        x[3 * k + 1000] = bf16::NEG_INFINITY;
        for (i, (lost, out)) in each_alone(&x).iter().zip(&out).enumerate() {
            let is_lost = (2..4).contains(&i);
            let as_it_was = if is_lost { lost.iter().all(|x| !x.is_finite()) } else { lost == out };
            assert!(as_it_was, "{scheme}: row {i} with numbers that are none in rows 2 and 3");
        }
    }
}

/// The numbers of rows go from one to a number for which the weights are dequantised to memory first. Results are
/// stored in f32 and bf16, or added, with a bias, after a norm.
#[test]
fn products_are_those_of_their_definition() {
    let mut rng = Rng::new();
    let rows = small([1, 3, 4, 8, 17, 33, 64, 65, 140, 300, 520], 64, |m| *m);
    for (n, k) in small([(304, 1088), (160, 2944), (2048, 512)], 304 * 1088, |size| size.0 * size.1) {
        for scheme in schemes() {
            let matrix = Matrix::new(&mut rng, n, k, scheme, 1);
            let floats = matrix.floats();
            let w = weight(matrix);
            for (i, &m) in rows.iter().enumerate() {
                let x = rng.floats(DType::BF16, &[m, k]);
                let bias = rng.floats(DType::BF16, &[n]);
                let before = rng.floats(DType::F32, &[m, n]);
                let bias = (i % 2 == 0).then_some(&bias);
                let mut want = product(&x.view().to_f32_vec().unwrap(), &floats, k);
                if let Some(bias) = bias {
                    let bias = bias.view().to_f32_vec().unwrap();
                    want.iter_mut().enumerate().for_each(|(i, x)| *x += f64::from(bias[i % n]));
                }
                let starts = before.view().to_f32_vec().unwrap();
                let added: Vec<f64> = want.iter().zip(&starts).map(|(x, y)| x + f64::from(*y)).collect();
                let mut p = Place::new(cuda());
                let guard = w.read().unwrap();
                let x = p.put(&x);
                let bias = p.put_some(bias);
                let mut run = || {
                    let mut stored = p.out(DType::F32, &[m, n]);
                    let mut rounded = p.out(DType::BF16, &[m, n]);
                    let mut sums = p.put(&before);
                    let w = guard.view().unwrap();
                    let bias = view_of(&bias);
                    linear_into(x.view(), w, bias, stored.view_mut(), &mut p.ex).unwrap();
                    linear_into(x.view(), w, bias, rounded.view_mut(), &mut p.ex).unwrap();
                    linear_add_into(x.view(), w, bias, sums.view_mut(), &mut p.ex).unwrap();
                    [stored, rounded, sums].map(|placed| placed.host(&p))
                };
                let got = run();
                let again = run();
                // A single row is computed by digits. From 65 rows on, and with Q4_K always, weights are rounded to
                // bf16.
                let bound = if m <= 64 && scheme != q4k() { 5e-5 } else { 4e-3 };
                let bounds = [("stored", &want, bound), ("in bf16", &want, 4e-3), ("added", &added, bound)];
                for ((part, want, bound), (got, again)) in bounds.into_iter().zip(got.iter().zip(&again)) {
                    let what = format!("{scheme} {part} {m} x {n} x {k}");
                    let off = relative_error(want, &got.view().to_f32_vec().unwrap());
                    assert!(off < bound, "{what}: off by {off}");
                    assert_same(&what, got, again);
                }
            }
        }
    }
}

/// If weights are streamed past a few rows, a row's bits do not depend on the other rows, except for one row with
/// integer weights.
#[test]
fn rows_that_weights_stream_past_do_not_depend_on_each_other() {
    let mut rng = Rng::new();
    let (n, k) = if tiny() { (96, 1024) } else { (640, 2048) };
    for scheme in schemes() {
        let w = weight(Matrix::new(&mut rng, n, k, scheme, 1));
        let guard = w.read().unwrap();
        let mut p = Place::new(cuda());
        let x = rng.floats(DType::BF16, &[8, k]);
        let stream = rng.floats(DType::F32, &[4, k]);
        let gain = p.put(&rng.floats(DType::BF16, &[k]));
        let mut run = |rows: usize| {
            let normed_rows = rows.min(4);
            let x = p.put(&cut(&x, 0, rows));
            let stream = p.put(&cut(&stream, 0, normed_rows));
            let mut plain = p.out(DType::F32, &[rows, n]);
            let mut normed = p.out(DType::F32, &[normed_rows, n]);
            let w = guard.view().unwrap();
            let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
            linear_into(x.view(), w, None, plain.view_mut(), &mut p.ex).unwrap();
            norm_linear_into(stream.view(), &norm, w, None, normed.view_mut(), &mut p.ex).unwrap();
            [plain, normed].map(|placed| placed.host(&p))
        };
        let whole = run(8);
        for rows in (1..8).skip(usize::from(is_digits(scheme))) {
            for (whole, part) in whole.iter().zip(&run(rows)) {
                assert_same(&format!("{scheme}: {rows} of 8 rows"), &cut(whole, 0, part.dims()[0]), part);
            }
        }
    }
}
