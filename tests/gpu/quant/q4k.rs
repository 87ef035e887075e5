//! Q4_K with scales and minima at the ends of their range, by every form of the products.

use candle_core::DType;
use moe_kernels::half::{bf16, f16};
use moe_kernels::linear_into;
use moe_kernels::plan::ExpertsForm;
use moe_kernels::quant::QuantUse;

use super::matrices::{Matrix, Source, q4k};
use crate::common::*;
use crate::fused::check;
use crate::packs::Packs;

const ROWS: usize = 64;
/// Two and a half units of 128 columns.
const COLUMNS: usize = 320;

/// Which scales the rows of a matrix have, row by row and again from the first kind on.
const KINDS: [&str; 8] =
    ["usual", "no scale", "no minimum", "nothing", "largest", "smallest", "negative", "minimum alone"];

fn kind(row: usize) -> &'static str {
    KINDS[row % KINDS.len()]
}

fn matrix(rng: &mut Rng) -> Matrix {
    let smallest = f16::from_bits(1).to_f32();
    Matrix::new(rng, ROWS, COLUMNS, q4k(), 1).with_levels(|row, group, integers, floats| match kind(row) {
        "no scale" => floats[0] = 0.0,
        "no minimum" => floats[1] = 0.0,
        "nothing" => *integers = [0, 0],
        "largest" => (*integers, *floats) = ([127, 127], [1000.0, 2000.0]),
        "smallest" => *floats = [smallest; 2],
        "negative" => *floats = [-floats[0].abs(), -floats[1].abs()],
        "minimum alone" => integers[0] = if group % 2 == 0 { 0 } else { integers[0] },
        _ => {}
    })
}

#[test]
fn every_scale_is_dequantised() {
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
                let what = kind(i / COLUMNS);
                assert!(
                    want == *got,
                    "{usage:?} {}, {what}, weight {i}: {want:e}, not {got:e}",
                    dtype.as_str()
                );
            }
        }
    }
}

/// Rows by every form of the products, with weights that are rounded.
#[test]
fn products_have_every_scale() {
    let mut rng = Rng::new();
    let m = matrix(&mut rng);
    let (floats, parts) = (m.floats(), m.rounded_parts());
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
            let x = &x[i / ROWS * COLUMNS..][..COLUMNS];
            let of = |values: &[f32]| -> Vec<f64> {
                let values = &values[row * COLUMNS..][..COLUMNS];
                x.iter().zip(values).map(|(x, w)| f64::from(*x) * f64::from(*w)).collect()
            };
            let want: f64 = of(&floats).iter().sum();
            let bound: f64 = of(&parts).iter().map(|part| part.abs() * 2f64.powi(-8)).sum();
            let what = kind(row);
            // The smallest weights are below 2^-20.
            let right = (f64::from(*got) - want).abs() <= 1.01 * bound + 1e-30;
            assert!(right, "{rows} rows, {what}, output {i}: {want:e}, not {got:e}");
        }
    }
}

/// The shape of Qwen3-30B-A3B with fewer experts, by each form, around the bounds between integers, few rows and
/// warpgroups.
#[test]
fn experts_of_the_published_shape_are_those_of_their_definition() {
    use ExpertsForm::{OneLaunch, Tensor, Wide};
    let mut rng = Rng::new();
    let (hidden, inter) = if tiny() { (256, 256) } else { (2048, 768) };
    let packs = Packs::new(&mut rng, 16, [hidden, inter], Some(q4k()));
    let forms = [
        (false, OneLaunch, 1),
        (false, OneLaunch, 4),
        (false, Tensor, 5),
        (false, Tensor, 8),
        (false, Tensor, 9),
        (false, Tensor, 11),
        (false, Tensor, 20),
        (false, Tensor, 60),
        (false, Tensor, 120),
        (true, Tensor, 7),
        (true, Tensor, 30),
        (false, Wide, 512),
    ];
    for (invariant, form, tokens) in small(forms, 9, |form| form.2) {
        check(
            &mut rng,
            (form, [16, 8, hidden, inter], tokens),
            &packs,
            &cuda().with_batch_invariant(invariant),
        );
    }
}
