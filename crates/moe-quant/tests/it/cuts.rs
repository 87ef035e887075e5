//! A rank's part of a matrix has the same weights as this part of the whole matrix.

use moe_quant::{QuantGroup, QuantRows, QuantScheme, dequantise};

use crate::fixtures::{Case, case, cases};

fn part(case: &Case, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Vec<f32> {
    let k = case.shape.1;
    rows.flat_map(|row| case.weights[row * k..][columns.clone()].to_vec()).collect()
}

#[test]
fn rows_are_cut_anywhere() {
    for case in cases() {
        let (n, k) = case.shape;
        for rows in [0..n, 1..n, 3..n - 2, n..n] {
            let reader = case.reader().rows(rows.clone()).unwrap();
            assert_eq!(reader.shape(), (rows.len(), k));
            assert_eq!(dequantise(&reader).unwrap(), part(&case, rows, 0..k), "{}", case.name);
        }
        let twice = case.reader().rows(2..n).unwrap().rows(1..3).unwrap();
        assert_eq!(dequantise(&twice).unwrap(), part(&case, 3..5, 0..k), "{}", case.name);
        assert!(case.reader().rows(0..n + 1).is_err());
    }
}

#[test]
fn columns_are_cut_into_the_sizes_that_are_named() {
    for case in cases() {
        let (n, k) = case.shape;
        let sizes = case.format.tp_sizes(k);
        assert_eq!(sizes[0], 1);
        for tp in sizes {
            for rank in 0..tp {
                let columns = rank * (k / tp)..(rank + 1) * (k / tp);
                let reader = case.reader().columns(columns.clone()).unwrap();
                assert_eq!(reader.inputs(), k / tp);
                assert_eq!(dequantise(&reader).unwrap(), part(&case, 0..n, columns), "{} tp {tp}", case.name);
            }
        }
        for tp in
            (2..=k).filter(|tp| k.is_multiple_of(*tp) && !case.format.tp_sizes(k).contains(tp) && *tp <= 64)
        {
            let error = case.reader().columns(0..k / tp).unwrap_err().to_string();
            assert!(error.contains("in two; tensor-parallel sizes that work: 1"), "{error}");
        }
    }
}

#[test]
fn a_cut_through_a_group_names_what_works() {
    let error = case("gptq_int4_asym_v2").reader().columns(32..64).unwrap_err().to_string();
    assert!(error.contains("columns 32..64 of 128 cut a group of 64 in two"), "{error}");
    assert!(error.contains("sizes that work: 1, 2; or expert parallelism"), "{error}");
    let error = case("fp8_block").reader().columns(0..36).unwrap_err().to_string();
    assert!(error.contains("cut a group of 32 in two"), "{error}");
}

#[test]
fn rows_and_columns_together() {
    let case = case("gptq_int4_asym_v2");
    let reader = case.reader().rows(5..20).unwrap().columns(64..128).unwrap();
    assert_eq!(dequantise(&reader).unwrap(), part(&case, 5..20, 64..128));
}

#[test]
fn act_order_sorts_columns_and_keeps_scales() {
    let case = case("gptq_int4_act_order_g64_asym");
    let whole = case.reader();
    let perm = whole.perm().unwrap().to_vec();
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..256).collect::<Vec<u32>>());
    // A quarter of the columns cuts every group, so groups are smaller and filled up.
    let reader = case.reader().columns(64..128).unwrap();
    let (_, width) = reader.shape();
    assert!(width > 64 && width.is_multiple_of(32) && width <= 64 + 4 * 31, "{width}");
    let expected = QuantScheme::int(4, QuantGroup::Size(32)).with_zero_points(true).with_act_order(true);
    assert_eq!(reader.scheme(), expected);
    assert!(reader.perm().unwrap().iter().all(|input| *input < 64));
    assert_eq!(dequantise(&reader).unwrap(), part(&case, 0..16, 64..128));
    let mut rows = moe_quant::LogicalRows::default();
    reader.read(0..1, &mut rows).unwrap();
    assert_eq!(rows.scale.len(), width / 32);
    // The weight of every column occurs once. Columns that fill up a group have the weight zero.
    let weight = |column: usize| {
        rows.scale[column / 32] * (f32::from(rows.q[column]) - f32::from(rows.zero[column / 32]))
    };
    let sum: f64 = (0..width).map(|column| f64::from(weight(column))).sum();
    let expected: f64 = part(&case, 0..1, 64..128).iter().map(|w| f64::from(*w)).sum();
    assert!((sum - expected).abs() < 1e-6);
}
