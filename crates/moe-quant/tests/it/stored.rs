//! Compares the places of a matrix's values that readers report with the values that they read.

use half::{bf16, f16};
use moe_kernels::quant::{StoredBytes, StoredTensor, StoredWords};
use moe_quant::candle::DType;
use moe_quant::{LogicalRows, QuantRows, Reader};
use proptest::prelude::*;

use crate::fixtures::{case, cases};
use crate::pack::pack;
use crate::round_trip::matrices;

/// Returns the integer of one element, from the words of a tensor at the reported place.
fn integer(
    bytes: &dyn StoredBytes,
    tensor: StoredTensor,
    words: StoredWords,
    row: usize,
    column: usize,
) -> u8 {
    let mut word = [0; 4];
    bytes.read_bytes(tensor, 4 * words.grid.element(row, column), &mut word).unwrap();
    words.integer(u32::from_le_bytes(word), row, column)
}

/// Compares every integer, scale and zero point with the values that `read` returns.
fn check(what: &str, reader: &Reader) {
    let parts = match reader.stored() {
        Ok(parts) => parts,
        Err(why) => {
            let reasons = ["no whole words of 4", "its scales have 8 bits"];
            let is_known = reasons.iter().any(|reason| why.contains(reason));
            return assert!(reader.perm().is_some() || is_known, "{what}: {why}");
        }
    };
    assert!(reader.perm().is_none(), "{what}");
    let (n, k) = reader.shape();
    let groups = reader.scheme().groups(k);
    let mut rows = LogicalRows::default();
    reader.read(0..n, &mut rows).unwrap();
    let [part] = parts.as_slice() else { panic!("{what}: {} parts", parts.len()) };
    assert_eq!(part.rows, n, "{what}");
    let m = part.matrix;
    let bytes = part.bytes;
    for row in 0..n {
        let stored = m.first_row + row;
        for column in 0..k {
            let q = integer(bytes, StoredTensor::Codes, m.codes, stored, m.first_column + column);
            assert_eq!(q, rows.q[row * k + column], "{what}: row {row}, column {column}");
        }
        for group in 0..groups {
            let of = m.first_group + group;
            let mut scale = vec![0; m.scales.bytes];
            let first = m.scales.element(stored, of) * m.scales.bytes;
            bytes.read_bytes(StoredTensor::Scales, first, &mut scale).unwrap();
            let scale = match m.scale_dtype {
                DType::F32 => f32::from_le_bytes(scale.try_into().unwrap()),
                DType::BF16 => bf16::from_le_bytes(scale.try_into().unwrap()).to_f32(),
                _ => f16::from_le_bytes(scale.try_into().unwrap()).to_f32(),
            };
            assert_eq!(scale, rows.scale[row * groups + group], "{what}: row {row}, group {group}");
            if let (Some(zeros), Some(zero)) = (m.zeros, rows.zero.get(row * groups + group)) {
                let got = integer(bytes, StoredTensor::Zeros, zeros, stored, of);
                assert_eq!(got, *zero, "{what}: row {row}, group {group}");
            }
        }
    }
}

#[test]
fn every_format_says_where_its_integers_lie() {
    for case in cases() {
        let name = case.name.as_str();
        let (n, k) = case.shape;
        check(name, &case.reader());
        check(name, &case.reader().rows(3..n - 2).unwrap());
        for tp in case.format.tp_sizes(k) {
            check(name, &case.reader().columns(k / tp * (tp - 1)..k).unwrap());
        }
    }
}

#[test]
fn bytes_behind_a_tensor_are_an_error() {
    let reader = case("gptq_int4_asym_v2").reader();
    let e = reader.read_bytes(StoredTensor::Codes, 1 << 20, &mut [0; 4]).unwrap_err().to_string();
    assert!(e.contains("gptq_int4_asym_v2: bytes 1048576 to 1048580 of Codes, which has"), "{e}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_matrices_say_where_their_integers_lie(
        (format, matrix) in matrices(true), cut in any::<[prop::sample::Index; 3]>()
    ) {
        let tensors = pack(format, &matrix);
        let find = |suffix: &str| tensors.iter().find(|t| t.suffix == suffix).map(|t| t.view());
        let reader = Reader::new("m", format, (matrix.n, matrix.k), find).unwrap();
        let tp = *cut[0].get(&format.tp_sizes(matrix.k));
        let rank = cut[1].index(tp);
        let width = matrix.k / tp;
        let rows = cut[2].index(matrix.n)..matrix.n;
        check("m", &reader.rows(rows).unwrap().columns(rank * width..(rank + 1) * width).unwrap());
    }
}
