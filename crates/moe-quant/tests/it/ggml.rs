//! Every block format of ggml, compared with the reference decoders of the package `gguf`.
//! `tests/reference/make_gguf_fixtures.py` makes the fixtures.

use moe_quant::safetensors::{Dtype, SafeTensors, tensor::TensorView};
use moe_quant::{Format, GgmlType, QuantRows, Reader, dequantise, layout};

const FILE: &[u8] = include_bytes!("../fixtures/ggml.safetensors");

struct Case {
    ggml: GgmlType,
    bytes: TensorView<'static>,
    shape: (usize, usize),
    weights: Vec<f32>,
}

fn cases() -> impl Iterator<Item = Case> {
    let file = SafeTensors::deserialize(FILE).unwrap();
    GgmlType::all().map(move |ggml| {
        let bytes = file.tensor(&format!("{}.weight", ggml.name())).unwrap();
        let weights = file.tensor(&format!("{}.dequantised", ggml.name())).unwrap();
        let shape = (weights.shape()[0], weights.shape()[1]);
        let weights = weights.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Case { ggml, bytes, shape, weights }
    })
}

impl Case {
    fn reader(&self) -> Reader<'static> {
        let find = |suffix: &str| (suffix == "weight").then(|| self.bytes.clone());
        Reader::new("m", Format::Ggml(self.ggml), self.shape, find).unwrap()
    }
}

/// Returns the bits of weights, with 0.0 instead of -0.0. Both are the same weight: the product of a code in the middle
/// and a negative scale is -0.0 in one decoder and 0.0 in another.
fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|w| (w + 0.0).to_bits()).collect()
}

#[test]
fn blocks_are_what_the_reference_decoders_make_of_them() {
    for case in cases() {
        let got = dequantise(&case.reader()).unwrap();
        assert!(case.weights.iter().any(|w| *w != 0.0));
        assert!(bits(&got) == bits(&case.weights), "{}", case.ggml.name());
        case.reader().check_finite().unwrap();
    }
}

#[test]
fn parts_of_ranks_are_parts_of_the_matrix() {
    for case in cases() {
        let (_, k) = case.shape;
        let group = case.reader().scheme().group_size(k);
        for columns in [0..group, group..k - 2 * group, 256..k, k - group..k] {
            let part = case.reader().rows(1..4).unwrap().columns(columns.clone()).unwrap();
            let got = dequantise(&part).unwrap();
            let row = |n: usize| &case.weights[n * k + columns.start..n * k + columns.end];
            let want: Vec<f32> = (1..4).flat_map(|n| row(n).to_vec()).collect();
            assert!(bits(&got) == bits(&want), "{} {columns:?}", case.ggml.name());
        }
        let error = case.reader().columns(0..group / 2).unwrap_err().to_string();
        assert!(error.contains("cut a group") && error.contains("1, 2, 4"), "{error}");
    }
}

#[test]
fn sizes_that_no_block_has_are_errors() {
    for case in cases() {
        let format = Format::Ggml(case.ggml);
        let size = case.ggml.columns();
        let error = layout(format, 4, size + 16).unwrap_err().to_string();
        assert!(error.contains(case.ggml.name()) && error.contains(&format!("blocks of {size}")), "{error}");
        let short = |_: &str| TensorView::new(Dtype::U8, vec![5, 1], &[0; 5]).ok();
        let error = Reader::new("m", format, case.shape, short).unwrap_err().to_string();
        assert!(error.contains("expected shape"), "{error}");
    }
}

#[test]
fn a_scale_that_is_not_finite_is_found() {
    let nan = [0xff; 34];
    let view = TensorView::new(Dtype::U8, vec![1, 34], &nan).unwrap();
    let reader = Reader::new("m", Format::Ggml(GgmlType::Q8_0), (1, 32), |_| Some(view.clone())).unwrap();
    assert!(reader.check_finite().unwrap_err().to_string().contains("a scale of row 0 is NaN"));
}
