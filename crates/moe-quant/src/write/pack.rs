//! Packs the integers of a matrix into the words of a format.

use half::{bf16, f16};
use safetensors::Dtype;

use super::{IntMatrix, StoredSpec, StoredTensor, group_size, stored};
use crate::error::QuantError;
use crate::format::{Format, GptqZeros, IntFormat};

/// Returns the tensors that [`stored`] lists for a matrix, with their bytes.
///
/// # Errors
/// A format that cannot be written; sizes that it does not support; integers, scales, zero points or groups that do not
/// fit the format. `module` is the name of the matrix in errors.
pub fn pack(
    module: &str,
    format: Format,
    matrix: &IntMatrix,
    scales: Dtype,
) -> Result<Vec<StoredTensor>, QuantError> {
    let Some(int) = format.int() else {
        return Err(QuantError::matrix(module, format!("{} has no integers to pack", format.name())));
    };
    let specs = stored(format, matrix.n, matrix.k, scales)?;
    check(int, matrix, scales).map_err(|problem| QuantError::matrix(module, problem))?;
    let tensor = |spec: StoredSpec| {
        let bytes = bytes(format, int, matrix, &spec);
        StoredTensor { spec, bytes }
    };
    Ok(specs.into_iter().map(tensor).collect())
}

fn check(int: IntFormat, m: &IntMatrix, scales: Dtype) -> Result<(), String> {
    let groups = m.k / group_size(int, m.k);
    for (what, got, expected) in [
        ("integers", m.q.len(), m.n * m.k),
        ("scales", m.scale.len(), m.n * groups),
        ("zero points", m.zero.len(), m.n * groups),
    ] {
        if got != expected {
            return Err(format!("expected {expected} {what}, got {got}"));
        }
    }
    let most = ((1u16 << int.bits) - 1) as u8;
    if let Some(q) = m.q.iter().chain(&m.zero).find(|q| **q > most) {
        return Err(format!("{q} does not fit into {} bits", int.bits));
    }
    if let Some(scale) =
        m.scale.iter().find(|scale| !scale.is_finite() || stored_scale(**scale, scales) != **scale)
    {
        return Err(format!("the scale {scale} is not a value of {scales:?}"));
    }
    if !int.zero_point && m.zero.iter().any(|zero| *zero != int.middle()) {
        return Err(format!("a symmetric format has the zero point {} everywhere", int.middle()));
    }
    match &m.g_idx {
        Some(_) if !int.act_order => Err("an order of columns, but the format has no act-order".to_string()),
        None if int.act_order => {
            Err("the format has act-order, but there is no order of columns".to_string())
        }
        Some(order) => check_order(order, m.k, groups),
        None => Ok(()),
    }
}

fn check_order(order: &[u32], k: usize, groups: usize) -> Result<(), String> {
    let mut columns = vec![0; groups];
    for group in order {
        *columns.get_mut(*group as usize).ok_or(format!("group {group}, but there are {groups}"))? += 1;
    }
    match order.len() == k && columns.iter().all(|count| *count == k / groups) {
        true => Ok(()),
        false => Err(format!("expected groups of {} columns each in the order of {k} columns", k / groups)),
    }
}

fn stored_scale(scale: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => scale,
        Dtype::BF16 => bf16::from_f32(scale).to_f32(),
        _ => f16::from_f32(scale).to_f32(),
    }
}

fn bytes(format: Format, int: IntFormat, m: &IntMatrix, spec: &StoredSpec) -> Vec<u8> {
    let groups = m.scale.len() / m.n;
    match spec.suffix {
        "qweight" => words(&along_columns(&m.q, int, m.n, m.k, Order::WordsFirst)),
        "weight_packed" => words(&along_columns(&m.q, int, m.n, m.k, Order::RowsFirst)),
        // These are packed along the rows, so the transpose is packed along its columns.
        "qzeros" => words(&zeros(format, int, along_rows(&m.zero, int, m.n, groups, Order::RowsFirst))),
        "weight_zero_point" => words(&along_rows(&m.zero, int, m.n, groups, Order::WordsFirst)),
        "scales" => floats(transposed(&m.scale, m.n, groups).into_iter(), spec.dtype),
        "weight_scale" => floats(m.scale.iter().copied(), spec.dtype),
        "weight_shape" => [m.n, m.k].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect(),
        _ => {
            let size = group_size(int, m.k);
            let group = |column| m.g_idx.as_ref().map_or((column / size) as u32, |order| order[column]);
            (0..m.k).flat_map(|column| group(column).to_le_bytes()).collect()
        }
    }
}

/// The order in which packed words [rows, words of a row] are stored.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    RowsFirst,
    /// The words are transposed.
    WordsFirst,
}

/// Packs integers [n, k] along each row. The last word of a row ends in zeros if it is not full.
fn along_columns(q: &[u8], int: IntFormat, n: usize, k: usize, order: Order) -> Vec<u32> {
    let width = k.div_ceil(int.per_word());
    let mut out = vec![0; n * width];
    for (row, q) in q.chunks_exact(k).enumerate() {
        for (at, part) in q.chunks(int.per_word()).enumerate() {
            let place = if order == Order::RowsFirst { row * width + at } else { at * n + row };
            out[place] = word(part.iter().copied(), int.bits);
        }
    }
    out
}

/// Packs integers [n, k] along each column.
fn along_rows(q: &[u8], int: IntFormat, n: usize, k: usize, order: Order) -> Vec<u32> {
    along_columns(&transposed(q, n, k), int, k, n, order)
}

fn word(part: impl Iterator<Item = u8>, bits: u8) -> u32 {
    part.enumerate().fold(0, |word, (place, q)| word | u32::from(q) << (place * usize::from(bits)))
}

/// Packs zero points. Version 1 subtracts one from each integer of a word and borrows from the next one, as in the
/// original implementation.
fn zeros(format: Format, int: IntFormat, mut packed: Vec<u32>) -> Vec<u32> {
    if matches!(format, Format::Gptq { zeros: GptqZeros::V1, .. }) {
        let ones = u32::MAX / ((1 << int.bits) - 1);
        packed.iter_mut().for_each(|word| *word = word.wrapping_sub(ones));
    }
    packed
}

fn transposed<T: Copy>(values: &[T], n: usize, k: usize) -> Vec<T> {
    (0..k).flat_map(|column| (0..n).map(move |row| values[row * k + column])).collect()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn floats(values: impl Iterator<Item = f32>, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
    }
}
