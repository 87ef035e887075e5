//! Batches against the host's packing: what `pack_stored.cu` does with one, in plain Rust, gives the same bytes.

use candle_core::{DType, bail};
use half::f16;

use super::*;
use crate::quant::source::Stack;
use crate::quant::tiles::{TILE_ROWS, TileRow, TileScratch, tile_columns};
use crate::quant::{LogicalRows, QuantPart, StoredBytes, StoredGrid};
use crate::scheme::{QuantGroup, QuantScheme};

/// How a file holds integers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Words along K, transposed; zero points stored less one.
    Gptq,
    /// Words along N, in another order.
    Awq,
    /// Words along K.
    Rows,
}

/// Some rows and columns of a matrix of a file.
struct Stored {
    bits: u8,
    scheme: QuantScheme,
    n: usize,
    k: usize,
    matrix: StoredMatrix,
    tensors: [Vec<u8>; 3],
}

fn hash(seed: u64, i: usize) -> u64 {
    let mut x = (seed ^ (i as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 24
}

impl Stored {
    /// Rows `rows` and columns `columns` of a matrix [n, k] of random bits.
    fn new(
        kind: Kind,
        scheme: QuantScheme,
        (n, k): (usize, usize),
        rows: Range<usize>,
        columns: Range<usize>,
        seed: u64,
    ) -> Self {
        let (bits, own) = (scheme.bits() as u8, scheme.has_zero_points());
        let (size, groups) = (32 / usize::from(bits), scheme.groups(k));
        let words = |rows, columns, row_stride, column_stride| StoredWords {
            grid: StoredGrid { bytes: 4, rows, columns, row_stride, column_stride },
            bits,
            place: if kind == Kind::Awq { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] },
            plus: if kind == Kind::Gptq { u32::MAX / ((1 << bits) - 1) } else { 0 },
        };
        let (mut codes, zeros) = match kind {
            Kind::Gptq => (words(1, size, 1, n), words(size, 1, 1, n / size)),
            Kind::Awq => (words(size, 1, 1, n / size), words(size, 1, 1, n / size)),
            Kind::Rows => (words(1, size, k.div_ceil(size), 1), words(size, 1, groups, 1)),
        };
        codes.plus = 0;
        let scale = |rows, row_stride, column_stride, bytes| StoredGrid {
            bytes,
            rows,
            columns: 1,
            row_stride,
            column_stride,
        };
        let (scales, scale_dtype) = match scheme.group {
            QuantGroup::Block { n, .. } => (scale(n, groups, 1, 4), DType::F32),
            QuantGroup::Tensor => (scale(1, 0, 0, 4), DType::F32),
            _ if !scheme.is_int() => (scale(1, groups, 1, 4), DType::F32),
            _ if kind == Kind::Rows => (scale(1, groups, 1, 2), DType::F16),
            _ => (scale(1, 1, n, 2), DType::F16),
        };
        // As FP8 none of the bytes is NaN.
        let random = |seed: u64, grid: StoredGrid, columns: usize| -> Vec<u8> {
            let len = (grid.element(n - 1, columns - 1) + 1) * grid.bytes;
            (0..len).map(|i| hash(seed, i) as u8 & 0xf7).collect()
        };
        let mut tensors = [
            random(seed, codes.grid, k),
            random(seed ^ 1, zeros.grid, groups),
            random(seed ^ 2, scales, groups),
        ];
        for scale in tensors[2].chunks_exact_mut(scales.bytes) {
            let value = f16::from_f32((scale[0] as f32 + 1.0) / 512.0);
            match scales.bytes {
                2 => scale.copy_from_slice(&value.to_le_bytes()),
                _ => scale.copy_from_slice(&value.to_f32().to_le_bytes()),
            }
        }
        let first_group = columns.start / scheme.group_size(k);
        let matrix = StoredMatrix {
            codes,
            zeros: own.then_some(zeros),
            scales,
            scale_dtype,
            first_row: rows.start,
            first_column: columns.start,
            first_group,
        };
        Self { bits, scheme, n: rows.len(), k: columns.len(), matrix, tensors }
    }

    fn integer(&self, tensor: usize, words: StoredWords, row: usize, column: usize) -> u8 {
        let word = self.tensors[tensor].as_chunks::<4>().0[words.grid.element(row, column)];
        words.integer(u32::from_le_bytes(word), row, column)
    }
}

impl StoredBytes for Stored {
    fn read_bytes(&self, tensor: StoredTensor, first: usize, out: &mut [u8]) -> Result<()> {
        let from = &self.tensors[[StoredTensor::Codes, StoredTensor::Zeros, StoredTensor::Scales]
            .iter()
            .position(|t| *t == tensor)
            .unwrap()];
        match from.get(first..first + out.len()) {
            Some(from) => out.copy_from_slice(from),
            None => bail!("{tensor:?} has {} bytes, {first} and {} were asked for", from.len(), out.len()),
        }
        Ok(())
    }
}

impl QuantRows for Stored {
    fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }
    fn scheme(&self) -> QuantScheme {
        self.scheme
    }
    fn perm(&self) -> Option<&[u32]> {
        None
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        *out = LogicalRows::default();
        let (m, groups) = (&self.matrix, self.scheme.groups(self.k));
        for row in rows.map(|row| m.first_row + row) {
            out.q.extend((0..self.k).map(|k| self.integer(0, m.codes, row, m.first_column + k)));
            for group in (0..groups).map(|group| m.first_group + group) {
                let bytes = &self.tensors[2][m.scales.element(row, group) * m.scales.bytes..];
                out.scale.push(scale_of(bytes, m.scales));
                if self.scheme.is_int() {
                    out.zero.push(
                        m.zeros.map_or(1 << (self.bits - 1), |zeros| self.integer(1, zeros, row, group)),
                    );
                }
            }
        }
        Ok(())
    }
    fn stored(&self) -> std::result::Result<Vec<StoredPart<'_>>, String> {
        Ok(vec![StoredPart { rows: self.n, matrix: self.matrix, bytes: self }])
    }
}

fn scale_of(bytes: &[u8], grid: StoredGrid) -> f32 {
    match grid.bytes {
        2 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

fn stack(parts: Vec<Stored>) -> Stack<'static> {
    let part = |rows: Stored| QuantPart { inputs: 0..rows.k, rows: Box::new(rows) };
    Stack::new(parts.into_iter().map(part).collect()).unwrap()
}

/// Integers, scales and zero points of a tile row.
type Row = (Vec<u8>, Vec<f32>, Vec<u8>);

fn by_host(tiles: &Tiles, matrix: &dyn QuantRows, tile: usize) -> Row {
    let groups = tiles.groups * TILE_ROWS;
    let mut row =
        (vec![0; tiles.row_bytes()], vec![0.0; groups], vec![0; if tiles.own_zeros() { groups } else { 0 }]);
    let to = TileRow { q: &mut row.0, scales: &mut row.1, zeros: &mut row.2 };
    tiles.pack((0, tile), matrix, &mut TileScratch::default(), to).unwrap();
    row
}

/// The kernel's view of a batch.
struct Batch<'a> {
    tiles: &'a Tiles,
    form: StoredMatrix,
    column: usize,
    group: usize,
    entries: usize,
    bytes: Vec<u8>,
}

impl Batch<'_> {
    /// The entry that has a row of the batch's matrix `matrix`.
    fn find(&self, matrix: usize, row: usize) -> [i64; ENTRY_WORDS] {
        let table = &self.bytes.as_chunks::<8>().0[matrix * self.entries * ENTRY_WORDS..];
        let entry = |i: usize| std::array::from_fn(|w| i64::from_le_bytes(table[i * ENTRY_WORDS + w]));
        let mut having = (0..self.entries).map(entry).filter(|e| (e[0]..e[1]).contains(&(row as i64)));
        let found = having.next().unwrap();
        assert!(having.next().is_none(), "row {row} is there twice");
        found
    }

    fn integer(&self, words: StoredWords, at: &[i64], stored: i64, column: usize) -> u8 {
        let (rows, columns) = (words.grid.rows as i64, words.grid.columns as i64);
        let at = at[0] + stored / rows * at[1] + column as i64 / columns * at[2];
        let word = u32::from_le_bytes(self.bytes.as_chunks::<4>().0[usize::try_from(at).unwrap()]);
        words.integer(word, stored as usize, column)
    }

    fn zero(&self, entry: &[i64; ENTRY_WORDS], stored: i64, group: usize) -> u8 {
        let zero = |words| self.integer(words, &entry[6..9], stored, self.group + group);
        self.form.zeros.map_or(self.tiles.scheme.middle(), zero)
    }

    fn scale(&self, entry: &[i64; ENTRY_WORDS], stored: i64, group: usize) -> f32 {
        let grid = self.form.scales;
        let at = entry[9] + stored / grid.rows as i64 * entry[10] + (self.group + group) as i64 * entry[11];
        scale_of(&self.bytes[usize::try_from(at).unwrap() * grid.bytes..], grid)
    }

    /// The row of a matrix that is row `r` of a tile row, and the last one of its run.
    fn rows(&self, tile: usize, r: usize) -> (usize, usize) {
        let n = self.tiles.dims[1];
        match self.tiles.gate_up {
            false => (tile * 16 + r, n - 1),
            true => (tile * 8 + r % 8 + r / 8 * (n / 2), n / 2 - 1 + r / 8 * (n / 2)),
        }
    }

    fn code(&self, matrix: usize, tile: usize, r: usize, column: usize) -> u8 {
        let middle = self.tiles.scheme.middle();
        let (row, last) = self.rows(tile, r);
        if row > last {
            return middle;
        }
        let entry = self.find(matrix, row);
        let stored = row as i64 + entry[2];
        if column < self.tiles.dims[2] {
            return self.integer(self.form.codes, &entry[3..6], stored, self.column + column);
        }
        match self.tiles.own_zeros() {
            true => self.zero(&entry, stored, (column / self.tiles.group).min(self.tiles.groups - 1)),
            false => middle,
        }
    }

    fn tile_row(&self, matrix: usize, tile: usize) -> Row {
        let columns = tile_columns(self.tiles.scheme);
        let mut row = Row::default();
        for index in 0..self.tiles.k_packed / columns * 128 {
            let (of_tile, lane, part) = (index / 128 * columns, index % 128 / 4, index % 4);
            let (g, c) = (lane / 4, lane % 4);
            let code = |r: usize, column: usize| u32::from(self.code(matrix, tile, r, of_tile + column));
            let mut word = 0;
            for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let r = g + 8 * half;
                if columns == 64 {
                    let column = part * 16 + 2 * c + odd;
                    word |= (code(r, column) | code(r, column + 8) << 8) << (16 * odd + 4 * half);
                } else {
                    word |= code(r, part / 2 * 16 + part % 2 * 8 + 2 * c + odd) << (16 * odd + 8 * half);
                }
            }
            row.0.extend(word.to_le_bytes());
        }
        for (group, r) in (0..self.tiles.groups).flat_map(|group| (0..16).map(move |r| (group, r))) {
            let (wanted, last) = self.rows(tile, r);
            let entry = self.find(matrix, wanted.min(last));
            let stored = wanted.min(last) as i64 + entry[2];
            row.1.push(self.scale(&entry, stored, group));
            if self.tiles.own_zeros() {
                row.2.push(if wanted > last {
                    self.tiles.scheme.middle()
                } else {
                    self.zero(&entry, stored, group)
                });
            }
        }
        row
    }
}

/// Compares every tile row of the batches with the host's; the number of batches.
fn check(
    what: &str,
    matrices: &[&dyn QuantRows],
    inputs: Range<usize>,
    gate_up: bool,
    buffer: usize,
) -> usize {
    let tiles = Tiles::new(matrices, &inputs, gate_up).unwrap();
    let batches = StoredBatches::choose(matrices, &tiles, buffer).unwrap();
    let (count, mut next) = (tiles.n_tiles(), 0);
    for list in &batches.list {
        assert_eq!(list.start, next, "{what}: {:?}", batches.list);
        next = list.end;
        let mut bytes = vec![0xee; batches.len(list)];
        assert!(bytes.len() <= buffer, "{what}: {} bytes", bytes.len());
        batches.fill(list, &mut Vec::new(), &mut bytes).unwrap();
        let batch = Batch {
            tiles: &tiles,
            form: batches.form,
            column: batches.columns().start,
            group: batches.groups().start,
            entries: batches.entries(),
            bytes,
        };
        for row in list.clone() {
            let (e, tile) = (row / count, row % count);
            assert_eq!(
                batch.tile_row(e - list.start / count, tile),
                by_host(&tiles, matrices[e], tile),
                "{what}: tile row {row}"
            );
        }
    }
    assert_eq!(next, matrices.len() * count, "{what}");
    batches.list.len()
}

fn int(bits: u8, group: usize, zero_point: bool) -> QuantScheme {
    let group = if group == 0 { QuantGroup::Channel } else { QuantGroup::Size(group) };
    QuantScheme::int(bits, group).with_zero_points(zero_point)
}

fn cases() -> Vec<(Kind, QuantScheme)> {
    let mut all = Vec::new();
    for kind in [Kind::Gptq, Kind::Awq, Kind::Rows] {
        for (bits, group, zero) in [(4, 32, true), (4, 64, false), (4, 0, true), (8, 32, true), (8, 0, false)]
        {
            if bits == 4 || kind != Kind::Awq {
                all.push((kind, int(bits, group, zero)));
            }
        }
    }
    let fp8 = [
        QuantGroup::Block { n: 16, k: 32 },
        QuantGroup::Block { n: 24, k: 64 },
        QuantGroup::Channel,
        QuantGroup::Tensor,
    ];
    all.extend(fp8.map(|scales| (Kind::Rows, QuantScheme::fp8(scales))));
    all
}

#[test]
fn batches_hold_what_the_host_packs() {
    for (seed, (kind, scheme)) in cases().into_iter().enumerate() {
        for (n, k) in [(8, 64), (40, 192), (24, 320)] {
            let of = |i: u64| Stored::new(kind, scheme, (n, k), 0..n, 0..k, seed as u64 * 64 + i * 8);
            let experts: Vec<_> = (0..3).map(|e| stack(vec![of(2 * e), of(2 * e + 1)])).collect();
            let matrices: Vec<_> = experts.iter().map(|m| m as &dyn QuantRows).collect();
            for gate_up in [false, true] {
                for buffer in [12 << 10, 1 << 20] {
                    let what = format!("{kind:?} {scheme} [{n}, {k}] gate_up {gate_up} {buffer}");
                    let count = check(&what, &matrices, 0..k, gate_up, buffer);
                    assert!(buffer < 1 << 20 || count == 1, "{what}: {count} batches");
                }
            }
        }
    }
}

#[test]
fn batches_hold_parts_of_matrices() {
    for (seed, (kind, scheme)) in cases().into_iter().enumerate() {
        let (n, k, seed) = (48, 256, seed as u64);
        for (rows, columns) in [(0..48, 64..192), (9..30, 0..256), (17..18, 128..256), (8..40, 192..256)] {
            let part = Stored::new(kind, scheme, (n, k), rows.clone(), columns.clone(), seed);
            // Tensors of an odd number of rows, of which some lie across two tile rows.
            let more = Stored::new(kind, scheme, (n, k), 3..14, columns.clone(), seed ^ 0x55);
            let what = format!("{kind:?} {scheme} {rows:?} {columns:?}");
            let stack = stack(vec![part, more]);
            check(&what, &[&stack], 0..columns.len(), false, 1 << 20);
            check(&what, &[&stack], 0..columns.len(), false, 12 << 10);
            if columns.len() == 128 && scheme.group_size(128) == 64 {
                check(&what, &[&stack], 64..128, false, 1 << 20);
            }
        }
    }
}

#[test]
fn the_host_packs_what_does_not_fit() {
    let scheme = int(4, 32, true);
    let of = |kind, columns: Range<usize>| Stored::new(kind, scheme, (16, 128), 0..16, columns, 5);
    let why = |matrices: &[&dyn QuantRows], buffer| {
        let tiles = Tiles::new(matrices, &(0..64), false).unwrap();
        StoredBatches::choose(matrices, &tiles, buffer).map(|_| ()).unwrap_err()
    };
    let (gptq, rows, other) = (of(Kind::Gptq, 0..64), of(Kind::Rows, 0..64), of(Kind::Gptq, 64..128));
    assert!(why(&[&gptq, &rows], 1 << 20).contains("several ways"));
    assert!(why(&[&gptq, &other], 1 << 20).contains("several ways"));
    assert!(why(&[&gptq], 512).contains("16 of its rows do not fit a buffer of 512 bytes"));
}
