//! Tests of writing: the bytes agree with an independent packer, and headers and tensors can be read back.

use moe_quant::safetensors::{Dtype, tensor::TensorView};
use moe_quant::write::{Exception, IntMatrix, StoredTensor, header, pack, round_scale, stored};
use moe_quant::{
    Format, Fp4Tensors, GptqZeros, IntFormat, QuantConfig, QuantGroup, QuantRows, Reader, dequantise, layout,
};
use proptest::prelude::*;

use crate::pack::{self, Matrix};
use crate::round_trip::matrices;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

fn int_matrix(format: Format, m: &Matrix, scales: Dtype) -> IntMatrix {
    let act_order = format.int().unwrap().act_order;
    IntMatrix {
        n: m.n,
        k: m.k,
        q: m.codes.clone(),
        scale: m.scales.iter().map(|scale| round_scale(scale.abs() + 1e-3, scales).unwrap()).collect(),
        zero: m.zeros.clone(),
        g_idx: act_order.then(|| m.g_idx.clone()),
    }
}

fn view(tensor: &StoredTensor) -> TensorView<'_> {
    TensorView::new(tensor.spec.dtype, tensor.spec.shape.clone(), &tensor.bytes).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn written_then_read((format, m) in matrices(false), scales in 0usize..3) {
        let scales = DTYPES[scales];
        let matrix = int_matrix(format, &m, scales);
        let written = pack("m", format, &matrix, scales);
        if matches!(format, Format::Awq { .. }) {
            prop_assert!(written.unwrap_err().to_string().contains("gptq, pack-quantized, mxfp4-pack-quantized and"));
            return Ok(());
        }
        let written = written.unwrap();
        let specs: Vec<_> = written.iter().map(|tensor| tensor.spec.clone()).collect();
        prop_assert_eq!(specs, stored(format, m.n, m.k, scales).unwrap());
        for tensor in &written {
            prop_assert_eq!(tensor.spec.len(), tensor.bytes.len());
        }
        let find = |suffix: &str| written.iter().find(|t| t.spec.suffix == suffix).map(view);
        let reader = Reader::new("m", format, (m.n, m.k), find).unwrap();
        prop_assert_eq!(dequantise(&reader).unwrap(), matrix.weights().unwrap());
        let mut rows = Default::default();
        reader.read(0..m.n, &mut rows).unwrap();
        if reader.perm().is_none() {
            prop_assert_eq!(&rows.q, &m.codes);
            prop_assert_eq!(&rows.zero, &m.zeros);
        }
        // The words must be the same as those that an independent packer makes.
        for other in pack::pack(format, &m) {
            if let Some(tensor) = written.iter().find(|t| t.spec.suffix == other.suffix && t.spec.dtype == Dtype::I32) {
                prop_assert_eq!(&tensor.bytes, &other.bytes, "{}", other.suffix);
            }
        }
    }

    #[test]
    fn scales_are_rounded_up(bits in 0u32..0x7f80_0000, dtype in 0usize..3) {
        let scale = f32::from_bits(bits);
        let dtype = DTYPES[dtype];
        if let Some(rounded) = round_scale(scale, dtype) {
            prop_assert!(rounded >= scale && rounded > 0.);
            prop_assert_eq!(round_scale(rounded, dtype), Some(rounded));
            if scale > 1e-4 {
                prop_assert!(rounded <= scale * (1. + 1. / 128.), "{scale} {rounded}");
            }
        } else {
            prop_assert!(scale == 0. || scale > 65000.);
        }
    }
}

fn int(bits: u8, group: QuantGroup, zero_point: bool, act_order: bool) -> IntFormat {
    IntFormat { bits, group, zero_point, act_order }
}

#[test]
fn headers_read_back() {
    for (bits, group, zero_point, act_order) in [
        (4, QuantGroup::Size(128), false, false),
        (4, QuantGroup::Size(32), true, true),
        (8, QuantGroup::Channel, false, false),
        (8, QuantGroup::Size(64), true, false),
    ] {
        let int = int(bits, group, zero_point, act_order);
        let by_row = IntFormat { group: QuantGroup::Channel, act_order: false, ..int };
        for (format, other) in [
            (Format::PackQuantized { int }, Format::PackQuantized { int: by_row }),
            (Format::Gptq { int, zeros: GptqZeros::V1 }, Format::Gptq { int: by_row, zeros: GptqZeros::V1 }),
            (Format::Gptq { int, zeros: GptqZeros::V2 }, Format::Gptq { int: by_row, zeros: GptqZeros::V2 }),
        ] {
            for lm_head in [false, true] {
                let exceptions = [
                    Exception { pattern: r"model\.layers\.\d+\.mlp\.gate$".into(), format: None },
                    Exception { pattern: r".*\.down_proj$".into(), format: Some(other) },
                ];
                let json =
                    serde_json::json!({"quantization_config": header(format, lm_head, &exceptions).unwrap()});
                let config = QuantConfig::from_json(&json).unwrap().unwrap();
                let format_of = |name| config.format_of(name).unwrap();
                assert_eq!(format_of("model.layers.0.self_attn.q_proj"), format);
                assert_eq!(format_of("model.layers.12.mlp.gate"), Format::Plain);
                assert_eq!(format_of("model.layers.12.mlp.gate_proj"), format);
                assert_eq!(format_of("model.layers.3.mlp.experts.7.down_proj"), other);
                assert_eq!(format_of("lm_head"), if lm_head { format } else { Format::Plain });
            }
        }
    }
}

#[test]
fn floats_of_4_bits_have_a_header_and_a_list_of_tensors() {
    for (format, dtypes) in [
        (Format::Mxfp4(Fp4Tensors::Packed), vec![Dtype::U8, Dtype::U8]),
        (Format::Nvfp4(Fp4Tensors::Packed), vec![Dtype::U8, Dtype::F8_E4M3, Dtype::F32]),
    ] {
        let exceptions = [Exception { pattern: r".*\.down_proj$".into(), format: None }];
        let header = header(format, false, &exceptions).unwrap();
        let config = QuantConfig::from_header("q", &header).unwrap();
        assert_eq!(config.format_of("model.layers.0.self_attn.q_proj"), Ok(format));
        for plain in ["model.layers.0.mlp.down_proj", "lm_head"] {
            assert_eq!(config.format_of(plain), Ok(Format::Plain));
        }
        let specs = stored(format, 4, 64, Dtype::BF16).unwrap();
        assert_eq!(specs.iter().map(|spec| spec.dtype).collect::<Vec<_>>(), dtypes);
        for (spec, tensor) in layout(format, 4, 64).unwrap().iter().zip(&specs) {
            spec.check("m", tensor.dtype, &tensor.shape).unwrap();
        }
        let error = pack("m", format, &sound().1, Dtype::F32).unwrap_err().to_string();
        assert!(error.contains("has no integers to pack"), "{error}");
    }
    let modelopt = Format::Nvfp4(Fp4Tensors::Plain);
    let error = stored(modelopt, 4, 64, Dtype::F32).unwrap_err().to_string();
    assert!(error.contains("writing the format nvfp4 is not supported"), "{error}");
}

#[test]
fn formats_that_differ_in_kind_are_refused() {
    let int = int(4, QuantGroup::Channel, false, false);
    let exceptions = [Exception { pattern: "x$".into(), format: Some(Format::PackQuantized { int }) }];
    let error =
        header(Format::Gptq { int, zeros: GptqZeros::V1 }, false, &exceptions).unwrap_err().to_string();
    assert!(error.contains("pack-quantized among modules in gptq"), "{error}");
    let error = header(Format::Plain, false, &[]).unwrap_err().to_string();
    assert!(error.contains("writing the format plain is not supported"), "{error}");
}

/// Returns a valid matrix of the symmetric int4 format with two groups of 8.
fn sound() -> (Format, IntMatrix) {
    let format = Format::PackQuantized { int: int(4, QuantGroup::Size(8), false, false) };
    let matrix =
        IntMatrix { n: 2, k: 16, q: vec![3; 32], scale: vec![0.5; 4], zero: vec![8; 4], g_idx: None };
    (format, matrix)
}

#[test]
fn a_matrix_that_does_not_fit_its_format_is_refused() {
    let broken = |change: fn(&mut IntMatrix), scales: Dtype| {
        let (format, mut matrix) = sound();
        change(&mut matrix);
        pack("m", format, &matrix, scales).unwrap_err().to_string()
    };
    assert!(pack("m", sound().0, &sound().1, Dtype::F32).is_ok());
    for (change, scales, part) in [
        ((|m| m.q[0] = 16) as fn(&mut IntMatrix), Dtype::F32, "16 does not fit into 4 bits"),
        (|m| m.q.truncate(31), Dtype::F32, "expected 32 integers, got 31"),
        (|m| m.scale[0] = 0.1, Dtype::F16, "the scale 0.1 is not a value of F16"),
        (|m| m.scale[0] = f32::NAN, Dtype::F32, "the scale NaN is not a value of F32"),
        (|m| m.zero[0] = 7, Dtype::F32, "a symmetric format has the zero point 8 everywhere"),
        (|m| m.g_idx = Some(vec![0; 16]), Dtype::F32, "has no act-order"),
        (|m| m.k = 15, Dtype::F32, "groups of 8 columns do not divide 15"),
        (|_| {}, Dtype::I32, "not in I32"),
    ] {
        let error = broken(change, scales);
        assert!(error.contains(part), "{error}");
    }
    let (_, mut matrix) = sound();
    let ordered = Format::PackQuantized { int: int(4, QuantGroup::Size(8), false, true) };
    let error = pack("m", ordered, &matrix, Dtype::F32).unwrap_err().to_string();
    assert!(error.contains("there is no order"), "{error}");
    matrix.g_idx = Some(vec![1; 16]);
    let error = pack("m", ordered, &matrix, Dtype::F32).unwrap_err().to_string();
    assert!(error.contains("expected groups of 8 columns each"), "{error}");
    matrix.g_idx = Some(vec![2; 16]);
    let error = pack("m", ordered, &matrix, Dtype::F32).unwrap_err().to_string();
    assert!(error.contains("group 2, but there are 2"), "{error}");
}

/// The fields are public, so a matrix may have lists of any length.
#[test]
fn weights_of_a_malformed_matrix_are_an_error() {
    let broken = |change: fn(&mut IntMatrix)| {
        let (_, mut matrix) = sound();
        change(&mut matrix);
        matrix.weights().unwrap_err().to_string()
    };
    assert_eq!(sound().1.weights().unwrap(), [-2.5; 32]);
    let scales = "expected `scale` with one scale for each of n = 2 rows";
    for (change, part) in [
        ((|m| m.q.truncate(31)) as fn(&mut IntMatrix), "expected `q` with n * k = 32 integers, got 31"),
        (|m| m.q.push(0), "expected `q` with n * k = 32 integers, got 33"),
        (|m| m.n = usize::MAX, "more integers than memory holds"),
        (|m| m.n = 0, "expected `q` with n * k = 0 integers, got 32"),
        (|m| m.scale.clear(), scales),
        (|m| m.scale.truncate(3), scales),
        (|m| m.scale = vec![0.5; 6], scales),
        (|m| m.scale = vec![0.5; 64], scales),
        (|m| m.zero.truncate(3), "expected `zero` as long as `scale`, 4, got 3"),
        (|m| m.zero.clear(), "expected `zero` as long as `scale`, 4, got 0"),
        (|m| m.g_idx = Some(vec![0; 15]), "expected `g_idx` with k = 16 groups of columns, got 15"),
        (|m| m.g_idx = Some(vec![2; 16]), "expected groups below 2 in `g_idx`, got 2"),
    ] {
        let error = broken(change);
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    }
    assert_eq!(IntMatrix::default().weights().unwrap(), [0f32; 0]);
    let no_columns = IntMatrix { n: 3, ..IntMatrix::default() };
    assert_eq!(no_columns.weights().unwrap(), [0f32; 0]);
}
