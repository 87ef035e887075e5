//! Tensors that do not fit their header give an error of one sentence, and never a panic.

use moe_quant::safetensors::Dtype;
use moe_quant::safetensors::tensor::TensorView;
use moe_quant::{Format, IntFormat, QuantError, QuantGroup, QuantRows, Reader, layout};

use crate::fixtures::{case, cases};
use crate::pack::{Matrix, Tensor, format, pack};

fn plain_matrix(n: usize, k: usize, groups: usize, zero: u8) -> Matrix {
    Matrix {
        n,
        k,
        codes: vec![3; n * k],
        zeros: vec![zero; n * groups],
        scales: vec![0.5; n * groups],
        g_idx: (0..k).map(|column| (column * groups / k) as u32).collect(),
    }
}

fn open(format: Format, shape: (usize, usize), tensors: &[Tensor]) -> Result<Reader<'_>, QuantError> {
    Reader::new("layer.up_proj", format, shape, |suffix| {
        tensors.iter().find(|t| t.suffix == suffix).map(Tensor::view)
    })
}

/// Returns the error after one change to a valid GPTQ matrix [8, 64] with act-order and groups of 32.
fn gptq_fault(change: impl Fn(&mut Vec<Tensor>)) -> String {
    let format = format(0, 4, 32, false, true);
    let mut tensors = pack(format, &plain_matrix(8, 64, 2, 8));
    assert!(open(format, (8, 64), &tensors).is_ok());
    change(&mut tensors);
    open(format, (8, 64), &tensors).unwrap_err().to_string()
}

fn g_idx(tensors: &mut [Tensor], column: usize, group: i32) {
    tensors[3].bytes[column * 4..column * 4 + 4].copy_from_slice(&group.to_le_bytes());
}

#[test]
fn a_missing_tensor_is_named() {
    for (at, name) in ["qweight", "qzeros", "scales", "g_idx"].into_iter().enumerate() {
        let error = gptq_fault(|tensors| drop(tensors.remove(at)));
        assert!(
            error.starts_with(&format!("layer.up_proj.{name}: the checkpoint has no such tensor")),
            "{error}"
        );
    }
}

#[test]
fn a_wrong_shape_or_dtype_shows_both() {
    let error = gptq_fault(|tensors| tensors[0].shape = vec![4, 16]);
    assert_eq!(error, "layer.up_proj.qweight: expected shape [8, 8], got [4, 16]");
    let error = gptq_fault(|tensors| tensors[2].dtype = Dtype::I32);
    assert_eq!(error, "layer.up_proj.scales: expected dtype F16 or BF16 or F32, got I32");
}

#[test]
fn g_idx_is_checked() {
    let error = gptq_fault(|tensors| g_idx(tensors, 5, 2));
    assert_eq!(error, "layer.up_proj.g_idx: column 5 is of group 2, but there are groups 0 to 1");
    let error = gptq_fault(|tensors| g_idx(tensors, 5, -1));
    assert!(error.contains("column 5 is of group -1"), "{error}");
    let error = gptq_fault(|tensors| g_idx(tensors, 5, 1));
    assert_eq!(error, "layer.up_proj.g_idx: group 0 has 31 columns, expected 32");
}

/// DeepSeek-V2-Lite's dense layer has 85.5 groups of 128 columns.
#[test]
fn the_last_group_of_gptq_may_be_shorter() {
    let format = format(0, 4, 32, false, false);
    let g_idx_in_order = (0..80).map(|column| column / 32).collect();
    let mut tensors = pack(format, &Matrix { g_idx: g_idx_in_order, ..plain_matrix(8, 80, 3, 8) });
    let reader = open(format, (8, 80), &tensors).unwrap();
    assert_eq!((reader.shape(), reader.scheme().groups(80)), ((8, 80), 3));
    let error = reader.columns(0..40).unwrap_err().to_string();
    assert!(error.contains("cut a group of 32 in two; tensor-parallel sizes that work: 1;"), "{error}");
    g_idx(&mut tensors, 79, 1);
    let error = open(format, (8, 80), &tensors).unwrap_err().to_string();
    assert_eq!(error, "layer.up_proj.g_idx: group 1 has 33 columns, expected 32");
}

#[test]
fn an_order_without_act_order_is_refused() {
    let mut matrix = plain_matrix(8, 64, 2, 8);
    matrix.g_idx.swap(0, 63);
    let format = format(0, 4, 32, false, false);
    let error = open(format, (8, 64), &pack(format, &matrix)).unwrap_err().to_string();
    assert!(error.contains("set `desc_act` to true"), "{error}");
}

#[test]
fn an_order_that_was_never_set_is_in_order() {
    let format = format(3, 4, 32, false, true);
    let mut tensors = pack(format, &plain_matrix(8, 64, 2, 8));
    tensors[4].bytes = vec![255; 64 * 4];
    let reader = open(format, (8, 64), &tensors).unwrap();
    assert_eq!(reader.perm().unwrap(), (0..64).collect::<Vec<u32>>());
}

#[test]
fn zero_points_of_a_symmetric_matrix() {
    for kind in [0, 2] {
        let format = format(kind, 4, 32, false, false);
        let tensors = pack(format, &plain_matrix(8, 64, 2, 7));
        let reader = open(format, (8, 64), &tensors).unwrap();
        let error = reader.read(0..1, &mut Default::default()).unwrap_err().to_string();
        assert!(
            error.contains("row 0, group 0 has the zero point 7") && error.contains("means 8"),
            "{error}"
        );
    }
}

#[test]
fn scales_are_checked_on_request() {
    for (value, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let mut matrix = plain_matrix(8, 64, 2, 8);
        matrix.scales[7] = value;
        let format = format(3, 8, 32, true, false);
        let tensors = pack(format, &matrix);
        let error = open(format, (8, 64), &tensors).unwrap().check_finite().unwrap_err().to_string();
        assert!(error.contains(&format!("the scale of row 3, group 1 is {name}")), "{error}");
    }
}

#[test]
fn a_weight_that_is_nan_is_named() {
    let fp8 = cases().into_iter().find(|case| matches!(case.format, Format::Fp8 { .. })).unwrap();
    let mut bytes = fp8.tensor("weight").unwrap().data().to_vec();
    bytes[5 * fp8.shape.1 + 3] = 0xFF;
    let find = |suffix: &str| {
        let view = fp8.tensor(suffix)?;
        let damaged = || TensorView::new(view.dtype(), view.shape().to_vec(), &bytes).unwrap();
        Some(if suffix == "weight" { damaged() } else { view })
    };
    let reader = Reader::new(&fp8.name, fp8.format, fp8.shape, find).unwrap();
    assert!(reader.read(0..5, &mut Default::default()).is_ok());
    let error = reader.read(4..8, &mut Default::default()).unwrap_err().to_string();
    assert!(
        error.contains(&fp8.name) && error.contains("row 5 is NaN") && error.contains("again"),
        "{error}"
    );
}

#[test]
fn a_shape_that_contradicts_is_refused() {
    let format = format(3, 4, 32, false, false);
    let mut tensors = pack(format, &plain_matrix(8, 64, 2, 8));
    tensors[3].bytes[0] = 9;
    let error = open(format, (8, 64), &tensors).unwrap_err().to_string();
    assert_eq!(error, "layer.up_proj.weight_shape: expected [8, 64], got [9, 64]");
}

#[test]
fn sizes_that_a_format_cannot_hold() {
    let fault = |format, n, k| layout(format, n, k).unwrap_err().to_string();
    assert!(
        fault(format(2, 4, 128, false, false), 8, 192).contains("groups of 128 columns do not divide 192")
    );
    assert!(fault(format(3, 4, 32, false, false), 8, 48).contains("groups of 32 columns do not divide 48"));
    assert!(
        fault(format(0, 4, 0, false, false), 8, 60)
            .contains("columns are packed 8 to a word, but there are 60")
    );
    assert!(
        fault(format(2, 4, 0, false, false), 12, 64)
            .contains("rows are packed 8 to a word, but there are 12")
    );
    assert!(fault(format(0, 3, 0, false, false), 8, 64).contains("the format has no 3 bits"));
    let awq = IntFormat { bits: 8, group: QuantGroup::Channel, zero_point: true, act_order: false };
    assert!(fault(Format::Awq { int: awq }, 8, 64).contains("the format has no 8 bits"));
    let awq = IntFormat { bits: 4, group: QuantGroup::Size(32), act_order: true, ..awq };
    assert!(fault(Format::Awq { int: awq }, 8, 64).contains("no 4 bits with act-order"));
    assert!(fault(format(0, 8, 0, false, false), 0, 64).contains("at least one row"));
    let plain = Reader::new("m", Format::Plain, (8, 64), |_| None).unwrap_err().to_string();
    assert!(plain.contains("not quantised"), "{plain}");
    let error =
        Reader::new("m", format(3, 4, 128, false, false), (8, 192), |_| None).unwrap_err().to_string();
    assert!(error.starts_with("m (pack-quantized [8, 192]): groups of 128"), "{error}");
}

#[test]
fn another_shape_than_the_file_has() {
    let fp8 = case("fp8_block");
    let error = Reader::new("m", fp8.format, (40, 71), |suffix| fp8.tensor(suffix)).unwrap_err().to_string();
    assert!(error.contains("expected shape [40, 71], got [40, 72]"), "{error}");
}
