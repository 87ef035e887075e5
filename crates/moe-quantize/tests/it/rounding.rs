//! Tests of rounding to nearest. Every weight must be within half a step.

use moe_quant::write::round_scale;
use moe_quant::{Format, GptqZeros, IntFormat, QuantGroup};
use moe_quantize::{Grid, round_to_nearest};
use proptest::prelude::*;
use safetensors::Dtype;

use crate::support::error;

fn formats(bits: u8, group: QuantGroup, zero_point: bool) -> [Format; 2] {
    let int = IntFormat { bits, group, zero_point, act_order: false };
    [Format::PackQuantized { int }, Format::Gptq { int, zeros: GptqZeros::V1 }]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn within_half_a_step(
        weights in prop::collection::vec(-1f32..1., 96),
        shift in prop::sample::select(vec![0f32, 0.3, 1., -1., 5.]),
        size in prop::sample::select(vec![1f32, 1e-3, 40.]),
        wide in prop::bool::ANY,
        zero_point in prop::bool::ANY,
        by_row in prop::bool::ANY,
        scales in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::BF16]),
    ) {
        let group = if by_row { QuantGroup::Channel } else { QuantGroup::Size(16) };
        let weights: Vec<f32> = weights.iter().map(|w| (w + shift) * size).collect();
        for format in formats(if wide { 8 } else { 4 }, group, zero_point) {
            let grid = Grid::new(format, scales).unwrap();
            let matrix = round_to_nearest(&grid, &weights, 2, 48).unwrap();
            let width = if by_row { 48 } else { 16 };
            for (at, (weight, rounded)) in weights.iter().zip(matrix.weights().unwrap()).enumerate() {
                let step = matrix.scale[at / 48 * (48 / width) + at % 48 / width];
                // The products themselves are rounded to f32.
                let bound = step * 0.5 + 1e-5 * weight.abs();
                prop_assert!((weight - rounded).abs() <= bound, "{weight} {rounded} {step} {format:?}");
                prop_assert_eq!(round_scale(step, scales), Some(step));
            }
            if matches!(format, Format::Gptq { .. }) {
                prop_assert!(matrix.zero.iter().all(|zero| *zero > 0));
            }
        }
    }
}

#[test]
fn the_step_is_as_small_as_it_can_be() {
    let weights: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
    let largest = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
    let (low, high) = weights.iter().fold((0f32, 0f32), |(l, h), w| (l.min(*w), h.max(*w)));
    for (zero_point, step) in [(false, largest / 7.5), (true, (high - low) / 15.)] {
        let [format, _] = formats(4, QuantGroup::Channel, zero_point);
        let matrix = round_to_nearest(&Grid::new(format, Dtype::F32).unwrap(), &weights, 1, 32).unwrap();
        assert!((matrix.scale[0] / step - 1.).abs() < 1e-6);
    }
}

#[test]
fn a_group_of_zeros_stays_zero() {
    for zero_point in [false, true] {
        for format in formats(4, QuantGroup::Size(8), zero_point) {
            let matrix = round_to_nearest(&Grid::new(format, Dtype::F16).unwrap(), &[0.; 16], 1, 16).unwrap();
            assert_eq!(matrix.weights().unwrap(), [0.; 16]);
        }
    }
}

#[test]
fn weights_that_no_scale_reaches_are_refused() {
    let [format, _] = formats(4, QuantGroup::Channel, false);
    let grid = Grid::new(format, Dtype::F16).unwrap();
    for bad in [f32::NAN, f32::INFINITY, 1e7] {
        let error = round_to_nearest(&grid, &[0.1, 0.2, 0.3, bad], 2, 2).unwrap_err().to_string();
        assert!(error.contains("row 1 holds weights that are not finite, or too large"), "{error}");
    }
    assert!(Grid::new(Format::Plain, Dtype::F16).is_err());
}

#[test]
fn sizes_that_do_not_match_are_refused() {
    let of = |group, len, n, k| {
        let [format, _] = formats(4, group, false);
        error(round_to_nearest(&Grid::new(format, Dtype::F32).unwrap(), &vec![0.; len], n, k))
    };
    let groups = QuantGroup::Size(8);
    for (len, n, k) in [(15, 2, 8), (16, 0, 8), (0, 2, 0), (0, usize::MAX, 2)] {
        let error = of(groups, len, n, k);
        assert!(error.contains(&format!("expected weights [{n}, {k}]")), "{error}");
    }
    assert!(of(QuantGroup::Channel, 0, 1, 0).contains("at least one row and column"));
    // The first case has fewer columns than a group. In the second one an incomplete group follows the last whole one.
    for (len, n, k) in [(8, 2, 4), (24, 2, 12)] {
        let error = of(groups, len, n, k);
        assert!(error.contains(&format!("groups of 8 columns do not divide {k}")), "{error}");
    }
    assert!(of(QuantGroup::Size(0), 16, 2, 8).contains("groups of 0 columns"));
}
