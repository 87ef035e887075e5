//! Compares batches with the host's packing: the work of `pack_stored.cu`, done here in plain Rust, gives the same
//! bytes.

use super::*;
use crate::quant::QuantPart;
use crate::quant::source::Stack;
use crate::quant::tile_rows::TILE_ROWS;
use crate::quant::tiles::{TileRow, TileScratch, tile_columns};
use crate::scheme::{QuantGroup, QuantScheme};
use stored::{Kind, Stored, scale_of};

#[path = "stored_tests.rs"]
mod stored;

fn stack(parts: Vec<Stored>) -> Stack<'static> {
    let part = |rows: Stored| QuantPart { inputs: 0..rows.k, rows: Box::new(rows) };
    Stack::new(parts.into_iter().map(part).collect())
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
    /// The table entry that contains a row of matrix `matrix` of the batch.
    fn find(&self, matrix: usize, row: usize) -> [i64; ENTRY_WORDS] {
        let table = &self.bytes.as_chunks::<8>().0[matrix * self.entries * ENTRY_WORDS..];
        let entry = |i: usize| std::array::from_fn(|w| i64::from_le_bytes(table[i * ENTRY_WORDS + w]));
        let mut having = (0..self.entries).map(entry).filter(|e| (e[0]..e[1]).contains(&(row as i64)));
        let found = having.next().unwrap();
        assert!(having.next().is_none(), "row {row} is there twice");
        found
    }

    fn integer(&self, words: StoredWords, at: &[i64], stored: i64, column: usize) -> u8 {
        let rows = words.grid.rows as i64;
        let columns = words.grid.columns as i64;
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

    /// The row of a matrix that is row `r` of a tile row, and the last row of its run.
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
            let of_tile = index / 128 * columns;
            let lane = index % 128 / 4;
            let part = index % 4;
            let g = lane / 4;
            let c = lane % 4;
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

/// Compares every tile row of the batches with the host's. Returns the number of batches.
fn check(
    what: &str,
    matrices: &[&dyn QuantRows],
    inputs: Range<usize>,
    gate_up: bool,
    buffer: usize,
) -> usize {
    let tiles = Tiles::new(matrices, &inputs, gate_up).unwrap();
    let batches = StoredBatches::choose(matrices, &tiles, buffer).unwrap();
    let count = tiles.n_tiles();
    let mut next = 0;
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
            let e = row / count;
            let tile = row % count;
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
        let n = 48;
        let k = 256;
        let seed = seed as u64;
        for (rows, columns) in [(0..48, 64..192), (9..30, 0..256), (17..18, 128..256), (8..40, 192..256)] {
            let part = Stored::new(kind, scheme, (n, k), rows.clone(), columns.clone(), seed);
            // These tensors have an odd number of rows, so some of them begin in the middle of a tile row.
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
    let gptq = of(Kind::Gptq, 0..64);
    let rows = of(Kind::Rows, 0..64);
    let other = of(Kind::Gptq, 64..128);
    assert!(why(&[&gptq, &rows], 1 << 20).contains("several ways"));
    assert!(why(&[&gptq, &other], 1 << 20).contains("several ways"));
    assert!(why(&[&gptq], 512).contains("16 of its rows do not fit a buffer of 512 bytes"));
}
