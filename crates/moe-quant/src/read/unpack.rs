//! Where each format keeps the integer of a row and a column.
//!
//! Sources, read for their definitions: GPTQModel's `PackableQuantLinear`, AutoAWQ's `WQLinear_GEMM`,
//! compressed-tensors' `pack_to_int32`.

use std::ops::Range;

use super::columns::Columns;
use super::words::{AWQ_PLACE, Words};
use crate::format::{Format, GptqZeros, IntFormat};

/// Writes the integers or bytes of these rows of the stored matrix to `q` [rows, width], in the columns' logical order.
pub(super) fn codes(
    format: Format,
    bytes: &[u8],
    stored: (usize, usize),
    rows: Range<usize>,
    columns: &Columns,
    q: &mut [u8],
) {
    match &columns.order {
        None if whole_words(format, bytes, stored, rows.clone(), columns, q) => {}
        None => place_codes(format, bytes, stored, rows, columns, q, |column| column),
        Some(order) => {
            place_codes(format, bytes, stored, rows, columns, q, |column| order.place[column] as usize);
        }
    }
}

/// Rows of whole words of which each holds neighbouring columns: most that there are, and a word at a time. Whether
/// they are.
fn whole_words(
    format: Format,
    bytes: &[u8],
    (n, k): (usize, usize),
    rows: Range<usize>,
    Columns { source, width, .. }: &Columns,
    q: &mut [u8],
) -> bool {
    if !matches!(
        format,
        Format::Gptq { .. } | Format::PackQuantized { .. } | Format::Mxfp4(_) | Format::Nvfp4(_)
    ) {
        return false;
    }
    let bits = format.scheme().bits();
    let size = 32 / bits;
    if source.is_empty() || !source.start.is_multiple_of(size) || !source.end.is_multiple_of(size) {
        return false;
    }
    let words = Words::new(bytes, bits as u8);
    let lines = source.start / size..source.end / size;
    if matches!(format, Format::Gptq { .. }) {
        for (line, column) in lines.zip((0..).step_by(size)) {
            for (row, q) in rows.clone().zip(q.chunks_exact_mut(*width)) {
                words.unpack(words.word(line * n + row), &mut q[column..column + size]);
            }
        }
        return true;
    }
    for (row, q) in rows.zip(q.chunks_exact_mut(*width)) {
        for (line, q) in lines.clone().zip(q.chunks_exact_mut(size)) {
            words.unpack(words.word(row * k.div_ceil(size) + line), q);
        }
    }
    true
}

/// `place` says the logical column of a source column; both count from the source's first.
fn place_codes(
    format: Format,
    bytes: &[u8],
    (n, k): (usize, usize),
    rows: Range<usize>,
    columns: &Columns,
    q: &mut [u8],
    place: impl Fn(usize) -> usize,
) {
    let Columns { source, width, .. } = columns;
    match format {
        Format::Gptq { int, .. } => {
            let words = Words::new(bytes, int.bits);
            for (line, inside) in words_of(source, int.per_word()) {
                for (row, q) in rows.clone().zip(q.chunks_exact_mut(*width)) {
                    let word = words.word(line * n + row);
                    for (column, part) in inside.clone() {
                        q[place(column)] = words.part(word, part);
                    }
                }
            }
        }
        Format::Awq { int } => {
            let words = Words::new(bytes, int.bits);
            for (column, line) in source.clone().enumerate() {
                let to = place(column);
                for (row, q) in rows.clone().zip(q.chunks_exact_mut(*width)) {
                    let word = words.word(line * (n / 8) + row / 8);
                    q[to] = words.part(word, AWQ_PLACE[row % 8]);
                }
            }
        }
        // Of two codes in a byte the lower bits are the first, so words of 32 bits hold eight as integers' words do.
        Format::PackQuantized { .. } | Format::Mxfp4(_) | Format::Nvfp4(_) => {
            let bits = format.scheme().bits();
            let words = Words::new(bytes, bits as u8);
            let size = 32 / bits;
            let line = k.div_ceil(size);
            for (row, q) in rows.zip(q.chunks_exact_mut(*width)) {
                for (at, inside) in words_of(source, size) {
                    let word = words.word(row * line + at);
                    for (column, part) in inside {
                        q[place(column)] = words.part(word, part);
                    }
                }
            }
        }
        // Blocks hold scales, too, and are decoded as a whole: `ggml::fill`.
        Format::Ggml(_) => {}
        Format::Fp8 { .. } | Format::Plain => {
            for (row, q) in rows.zip(q.chunks_exact_mut(*width)) {
                q.copy_from_slice(&bytes[row * k + source.start..row * k + source.end]);
            }
        }
    }
}

/// The words of `size` codes that hold these columns, and for each its columns, counted from the first, with their
/// places.
fn words_of(
    source: &Range<usize>,
    size: usize,
) -> impl Iterator<Item = (usize, impl Iterator<Item = (usize, u32)> + Clone + use<>)> + use<> {
    let start = source.start;
    let end = source.end;
    (start / size..end.div_ceil(size)).map(move |word| {
        let first = (word * size).max(start);
        let last = ((word + 1) * size).min(end);
        (word, (first..last).map(move |column| (column - start, (column - word * size) as u32)))
    })
}

/// The zero point of a row and a stored group.
pub(super) fn zero(format: Format, words: Words, (n, k): (usize, usize), row: usize, group: usize) -> u8 {
    match format {
        Format::Gptq { int, zeros } => {
            let size = int.per_word();
            let word = words.word(group * (n / size) + row / size);
            let word = if zeros == GptqZeros::V1 { words.plus_one(word) } else { word };
            words.part(word, (row % size) as u32)
        }
        Format::Awq { .. } => words.part(words.word(group * (n / 8) + row / 8), AWQ_PLACE[row % 8]),
        _ => {
            let groups = format.scheme().groups(k);
            let size = format.int().map_or(8, IntFormat::per_word);
            words.part(words.word(row / size * groups + group), (row % size) as u32)
        }
    }
}
