//! A matrix in every format and with every option, packed by `tests/reference/make_quant_fixtures.py`. It must be read
//! with exactly the same bits.

use moe_quant::safetensors::{Dtype, SafeTensors, tensor::TensorView};
use moe_quant::{Format, LogicalRows, QuantConfig, QuantRows, Reader, dequantise, layout};
use serde_json::{Value, json};

const FILE: &[u8] = include_bytes!("../fixtures/formats.safetensors");

/// A fixture: its format according to the header, and its weights.
pub struct Case {
    pub name: String,
    pub format: Format,
    pub shape: (usize, usize),
    pub weights: Vec<f32>,
    file: SafeTensors<'static>,
}

impl Case {
    pub fn reader(&self) -> Reader<'static> {
        Reader::new(&self.name, self.format, self.shape, |suffix| self.tensor(suffix)).unwrap()
    }

    pub fn tensor(&self, suffix: &str) -> Option<TensorView<'static>> {
        self.file.tensor(&format!("{}.{suffix}", self.name)).ok()
    }

    pub fn suffixes(&self) -> Vec<String> {
        let names = self.file.names().into_iter();
        names.filter_map(|n| n.strip_prefix(&format!("{}.", self.name)).map(str::to_string)).collect()
    }
}

/// Returns the names of the fixtures with their headers, in the order of their names.
pub fn headers() -> Vec<(String, String)> {
    let (_, metadata) = SafeTensors::read_metadata(FILE).unwrap();
    let mut headers: Vec<_> = metadata.metadata().clone().unwrap().into_iter().collect();
    headers.sort();
    headers
}

pub fn cases() -> Vec<Case> {
    let case = |(name, header): (String, String)| {
        let file = SafeTensors::deserialize(FILE).unwrap();
        let header: Value = serde_json::from_str(&header).unwrap();
        let config = QuantConfig::from_json(&json!({ "quantization_config": header })).unwrap().unwrap();
        let view = file.tensor(&format!("{name}.dequantised")).unwrap();
        let weights = view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let shape = (view.shape()[0], view.shape()[1]);
        Case { format: config.format_of(&name).unwrap(), name, shape, weights, file }
    };
    headers().into_iter().map(case).collect()
}

pub fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|w| w.to_bits()).collect()
}

#[test]
fn every_format_reads_bit_for_bit() {
    let cases = cases();
    assert_eq!(cases.len(), 39);
    for case in cases {
        let reader = case.reader();
        assert_eq!(bits(&dequantise(&reader).unwrap()), bits(&case.weights), "{}", case.name);
        assert_eq!(reader.shape(), case.shape, "{}", case.name);
        assert_eq!(reader.scheme(), case.format.scheme(), "{}", case.name);
        reader.check_finite().unwrap();
    }
}

#[test]
fn a_layout_lists_the_tensors_of_its_format() {
    for case in cases() {
        let specs = layout(case.format, case.shape.0, case.shape.1).unwrap();
        for suffix in case.suffixes().iter().filter(|suffix| *suffix != "dequantised") {
            let spec =
                specs.iter().find(|spec| spec.suffix == suffix).unwrap_or_else(|| panic!("{}", case.name));
            let tensor = case.tensor(suffix).unwrap();
            spec.check(&case.name, tensor.dtype(), tensor.shape()).unwrap();
        }
        for spec in specs.iter().filter(|spec| spec.required) {
            assert!(case.tensor(spec.suffix).is_some(), "{}.{}", case.name, spec.suffix);
            let other = case.tensor(spec.suffix).unwrap();
            let found = spec.check("m", Dtype::BOOL, other.shape()).unwrap_err().to_string();
            assert!(found.starts_with(&format!("m.{}: expected dtype", spec.suffix)), "{found}");
        }
    }
}

#[test]
fn rows_are_the_same_in_any_portions() {
    for case in cases() {
        let reader = case.reader();
        let (n, _) = reader.shape();
        let mut all = LogicalRows::default();
        let mut some = LogicalRows::default();
        reader.read(0..n, &mut all).unwrap();
        for size in [1, 3, 5] {
            let mut together = LogicalRows::default();
            for first in (0..n).step_by(size) {
                reader.read(first..n.min(first + size), &mut some).unwrap();
                together.append(&some);
            }
            assert_eq!(together, all, "{} by {size}", case.name);
        }
        assert!(reader.read(0..n + 1, &mut some).unwrap_err().to_string().contains("but there are"));
    }
}

#[test]
fn symmetric_zero_points_are_in_the_middle() {
    let mut rows = LogicalRows::default();
    case("gptq_int4_g32").reader().read(0..2, &mut rows).unwrap();
    assert!(rows.zero.iter().all(|zero| *zero == 8) && rows.zero.len() == 4);
    case("ct_int8_channel").reader().read(0..2, &mut rows).unwrap();
    assert_eq!(rows.zero, [128, 128]);
    case("fp8_tensor").reader().read(0..2, &mut rows).unwrap();
    assert_eq!((rows.zero.len(), rows.scale.len()), (0, 2));
}
