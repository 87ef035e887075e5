//! Compares packs with the definition of their order, place by place.

use candle_core::DType;
use half::{bf16, f16};

use super::*;
use crate::quant::tile_scales::PackedScales;
use crate::scheme::QuantGroup;

/// A matrix of scattered integers.
struct Scattered {
    n: usize,
    k: usize,
    scheme: QuantScheme,
    seed: u64,
    perm: Option<Vec<u32>>,
}

fn hash(seed: u64, i: usize) -> u64 {
    let mut x = (seed ^ (i as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 24
}

impl Scattered {
    fn new(n: usize, k: usize, scheme: QuantScheme, seed: u64) -> Self {
        let perm = scheme.act_order.then(|| {
            let mut order: Vec<u32> = (0..k as u32).collect();
            order.sort_by_key(|i| hash(seed ^ 7, *i as usize));
            order
        });
        Self { n, k, scheme, seed, perm }
    }

    /// The two levels of a scale, where the scheme has them.
    fn levels(&self, row: usize, group: usize) -> (u8, f32) {
        (hash(self.seed ^ 9, row * 1000 + group) as u8 & 0xfe, 0.1 + row as f32 * 1e-3)
    }

    /// The same of Q4_K, whose floats eight groups share, of a scale or a minimum.
    fn q4k(&self, part: u64, row: usize, group: usize) -> (u8, f32) {
        let shared = f16::from_f32(0.1 + (row * 10 + group / 8) as f32 * 1e-3).to_f32();
        (hash(self.seed ^ part, row * 1000 + group) as u8 & 63, shared)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        if self.scheme.is_q4k() {
            let (factor, shared) = self.q4k(13, row, group);
            return f32::from(factor) * shared;
        }
        if self.scheme.levels == Levels::Fp8 {
            let (factor, shared) = self.levels(row, group);
            return e4m3(factor) * shared;
        }
        let row = match self.scheme.group {
            QuantGroup::Block { n, .. } => row / n,
            _ => row,
        };
        f16::from_f32(hash(self.seed ^ 3, row * 1000 + group) as f32 * 1e-12 + 1e-3).to_f32()
    }

    fn coded(&self, row: usize, column: usize) -> u8 {
        let q = hash(self.seed, row * self.k + column) as u8;
        let is_nan = !self.scheme.is_int() && q & 0x7f == 0x7f;
        if is_nan { 1 } else { q & self.scheme.largest_code() }
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        match self.scheme.has_zero_points() {
            true => hash(self.seed ^ 5, row * 100 + group) as u8 & self.scheme.largest_code(),
            false => self.scheme.middle(),
        }
    }

    /// The weight of column `column` in logical order, and the integers from which it is computed. A code of FP4 has
    /// the sign of its scale, too, and is zero where the scale is.
    fn value(&self, row: usize, column: usize) -> (f32, u8, u8) {
        let group = column / self.scheme.group_size(self.k);
        let scale = self.scale(row, group);
        let sign = if self.scheme.codes == Codes::E2m1 && scale.is_sign_negative() { 8 } else { 0 };
        let is_zero = self.scheme.codes == Codes::E2m1 && scale == 0.0;
        let q = (self.coded(row, column) ^ sign) & if is_zero { 8 } else { 255 };
        (scale, q, self.zero(row, group))
    }
}

impl QuantRows for Scattered {
    fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }
    fn scheme(&self) -> QuantScheme {
        self.scheme
    }
    fn perm(&self) -> Option<&[u32]> {
        self.perm.as_deref()
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        let groups = self.scheme.groups(self.k);
        out.q = rows.clone().flat_map(|r| (0..self.k).map(move |c| self.coded(r, c))).collect();
        out.scale = rows.clone().flat_map(|r| (0..groups).map(move |g| self.scale(r, g))).collect();
        out.scale_levels.clear();
        if self.scheme.levels == Levels::Fp8 {
            let levels = |r| (0..groups).map(move |g| self.levels(r, g));
            out.scale_levels.factor.extend(rows.clone().flat_map(levels).map(|(factor, _)| factor));
            out.scale_levels.shared.extend(rows.clone().map(|r| self.levels(r, 0).1));
        }
        for (part, levels) in [(13, &mut out.scale_levels), (17, &mut out.minimum_levels)] {
            if self.scheme.is_q4k() {
                levels.clear();
                let of = |r| (0..groups).map(move |g| self.q4k(part, r, g));
                levels.factor.extend(rows.clone().flat_map(of).map(|(factor, _)| factor));
                let first = |r| (0..groups).step_by(8).map(move |g| self.q4k(part, r, g).1);
                levels.shared.extend(rows.clone().flat_map(first));
            }
        }
        out.minimum.clear();
        if self.scheme.has_minima() {
            let of = |r| (0..groups).map(move |g| self.q4k(17, r, g));
            out.minimum.extend(rows.clone().flat_map(of).map(|(factor, shared)| f32::from(factor) * shared));
        }
        out.zero = match self.scheme.is_int() && !self.scheme.has_minima() {
            false => Vec::new(),
            true => rows.flat_map(|r| (0..groups).map(move |g| self.zero(r, g))).collect(),
        };
        Ok(())
    }
}

/// The code of weight wi in a word: `fp4_code` of cuda/quant/fp4.cuh.
fn fp4_code(word: u32, i: usize) -> u32 {
    // The places of a code's bits in the half of a word, from the lowest; the third pair's sign is in the other half.
    let [a, b, c, sign] = [[0, 1, 2, 9], [4, 5, 6, 13], [10, 11, 12, 19], [14, 7, 8, 15]][i / 2];
    let bit = |at: usize| word >> ((at + 16 * (i % 2)) % 32) & 1;
    bit(a) | bit(b) << 1 | bit(c) << 2 | bit(sign) << 3
}

/// A pack made row by row.
struct Made {
    tiles: Tiles,
    q: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

fn pack(matrices: &[Scattered], inputs: Range<usize>, gate_up: bool) -> Result<Made> {
    let readers: Vec<_> = matrices.iter().map(|m| m as &dyn QuantRows).collect();
    let tiles = Tiles::new(&readers, &inputs, gate_up)?;
    let count = matrices.len() * tiles.n_tiles();
    let scales = tiles.scale_lines() * TILE_ROWS;
    let groups = tiles.groups * TILE_ROWS;
    let mut made = Made {
        q: vec![0xee; count * tiles.row_bytes()],
        scales: vec![-1.0; count * scales],
        zeros: vec![0xee; if tiles.own_zeros() { count * groups } else { 0 }],
        tiles,
    };
    let mut scratch = TileScratch::default();
    for row in 0..count {
        let e = row / made.tiles.n_tiles();
        let tile = row % made.tiles.n_tiles();
        let bytes = made.tiles.row_bytes();
        let zeros = if made.zeros.is_empty() { 0..0 } else { row * groups..(row + 1) * groups };
        let to = TileRow {
            q: &mut made.q[row * bytes..(row + 1) * bytes],
            scales: &mut made.scales[row * scales..(row + 1) * scales],
            zeros: &mut made.zeros[zeros],
        };
        made.tiles.pack((e, tile), readers[e], &mut scratch, to)?;
    }
    Ok(made)
}

impl Made {
    /// The weight at a row of a tile row and a packed column, by the definition of the order.
    fn at(&self, tile_row: usize, row: usize, column: usize) -> (f32, u8, u8) {
        let columns = tile_columns(self.tiles.scheme);
        let tile = tile_row * self.tiles.row_bytes() + column / columns * 512;
        let step = column % columns / 16;
        let inside = column % 16;
        let lane = row % 8 * 4 + inside % 8 / 2;
        // The number of the weight among w0 .. w7 of a lane.
        let i = inside % 2 + row / 8 * 2 + inside / 8 * 4;
        let word = |at: usize| {
            let at = tile + lane * 16 + at * 4;
            u32::from_le_bytes([self.q[at], self.q[at + 1], self.q[at + 2], self.q[at + 3]])
        };
        let q = match columns {
            64 if self.tiles.scheme.codes == Codes::E2m1 => fp4_code(word(step), i),
            64 => word(step) >> (4 * (i / 2) + 16 * (i % 2)) & 15,
            _ => word(step * 2 + i / 4) >> ([0, 16, 8, 24][i % 4]) & 255,
        };
        let group = (column / self.tiles.group).min(self.tiles.groups - 1);
        let at = (tile_row * self.tiles.groups + group) * 16 + row;
        let zero = self.zeros.get(at).copied().unwrap_or(self.tiles.scheme.middle());
        (self.scale(tile_row, row, group), q as u8, zero)
    }

    fn scale(&self, tile_row: usize, row: usize, group: usize) -> f32 {
        let lines = self.tiles.scale_lines();
        let line = |line: usize| self.scales[(tile_row * lines + line) * 16 + row];
        match self.tiles.scheme.levels {
            // The lines of a unit: quant/q4k.rs.
            Levels::Two(_) => line(group / 4 * 10 + group % 4) * line(group / 4 * 10 + 8),
            Levels::Fp8 => e4m3(line(1 + group) as u8) * line(0),
            _ => line(group),
        }
    }

    /// Compares every place with the matrices.
    fn check(&self, matrices: &[Scattered], inputs: &Range<usize>) {
        let tiles = &self.tiles;
        let perm = tiles.perm();
        for (e, matrix) in matrices.iter().enumerate() {
            // The logical column for each column of x.
            let mut logical: Vec<usize> = (0..matrix.k).collect();
            for (j, x) in matrix.perm.iter().flatten().enumerate() {
                logical[*x as usize] = j;
            }
            let mut seen = vec![0; inputs.len()];
            for tile in 0..tiles.n_tiles() {
                for lane in 0..16 {
                    let row = match tiles.gate_up {
                        false => Some(tile * 16 + lane).filter(|row| *row < matrix.n),
                        true => Some(tile * 8 + lane % 8)
                            .filter(|row| *row < matrix.n / 2)
                            .map(|row| row + lane / 8 * (matrix.n / 2)),
                    };
                    for column in 0..tiles.k_packed {
                        let (scale, q, zero) = self.at(e * tiles.n_tiles() + tile, lane, column);
                        let x = perm.as_ref().map_or(column as u32, |perm| perm[e * tiles.k_packed + column]);
                        match row.filter(|_| (x as usize) < inputs.len()) {
                            Some(row) => {
                                let want = matrix.value(row, logical[inputs.start + x as usize]);
                                assert_eq!((scale, q, zero), want, "{tiles:?} {e} {row} {column}");
                                seen[x as usize] += usize::from(row == 0);
                            }
                            None => {
                                assert_eq!(q, zero, "a weight that is not there {e} {tile} {lane} {column}")
                            }
                        }
                    }
                }
            }
            assert!(seen.iter().all(|count| *count == 1), "each column of x once: {seen:?}");
        }
    }
}

fn int(bits: u8, group: usize, zero_point: bool, act_order: bool) -> QuantScheme {
    let group = if group == 0 { QuantGroup::Channel } else { QuantGroup::Size(group) };
    QuantScheme::int(bits, group).with_zero_points(zero_point).with_act_order(act_order)
}

fn fp8(scales: QuantGroup) -> QuantScheme {
    QuantScheme::fp8(scales)
}

fn q4k() -> QuantScheme {
    int(4, 32, false, false).with_minima().with_shared_scales(8)
}

fn nvfp4() -> QuantScheme {
    QuantScheme::fp4(QuantGroup::Size(16)).with_fp8_scales()
}

#[test]
fn every_weight_lies_where_the_order_says() -> Result<()> {
    for (k, schemes) in [
        (
            96,
            vec![
                int(4, 32, true, false),
                int(8, 48, false, false),
                int(4, 24, true, true),
                int(8, 0, true, true),
            ],
        ),
        (
            200,
            vec![fp8(QuantGroup::Block { n: 16, k: 128 }), fp8(QuantGroup::Channel), int(4, 0, true, false)],
        ),
        (160, vec![QuantScheme::fp4(QuantGroup::Size(32)), nvfp4(), q4k()]),
        (512, vec![q4k()]),
        // The last group is shorter.
        (192, vec![int(4, 128, true, false), int(8, 128, false, false), int(4, 128, true, true)]),
        (128, vec![int(4, 128, false, true), int(8, 32, false, true), fp8(QuantGroup::Tensor)]),
    ] {
        for scheme in schemes {
            for (n, gate_up) in [(32, false), (21, false), (32, true), (38, true)] {
                let of = |e: u64| Scattered::new(n, k, scheme, 11 + e);
                let matrices = [of(0), of(1)];
                pack(&matrices, 0..k, gate_up)?.check(&matrices, &(0..k));
            }
        }
    }
    Ok(())
}

#[test]
fn a_rank_packs_its_inputs() -> Result<()> {
    for scheme in [int(4, 64, true, true), int(8, 64, false, true), int(4, 24, true, true)] {
        let matrices = [Scattered::new(20, 192, scheme, 3), Scattered::new(20, 192, scheme, 4)];
        for inputs in [0..96, 96..192, 64..70] {
            pack(&matrices, inputs.clone(), false)?.check(&matrices, &inputs);
        }
    }
    for scheme in [int(4, 32, true, false), QuantScheme::fp4(QuantGroup::Size(32)), nvfp4()] {
        let whole = [Scattered::new(20, 192, scheme, 3)];
        pack(&whole, 64..192, false)?.check(&whole, &(64..192));
    }
    let whole = [Scattered::new(20, 512, q4k(), 3)];
    pack(&whole, 256..512, false)?.check(&whole, &(256..512));
    let whole = [Scattered::new(20, 192, int(4, 32, true, false), 3)];
    let e = pack(&whole, 16..192, false).map(|_| ()).unwrap_err().to_string();
    assert!(e.contains("cut a group of 32 columns"), "{e}");
    Ok(())
}

#[test]
fn the_order_of_columns_is_told() -> Result<()> {
    use ColumnOrder::{Filled, Input, Sorted};
    for (k, scheme, inputs, order) in [
        (192, int(4, 64, true, false), 64..192, Input),
        (192, int(4, 64, true, true), 0..192, Sorted),
        (192, int(8, 0, false, true), 0..192, Sorted),
        // The next cases are a rank's part, a shorter last group, and columns that do not fill whole tiles.
        (192, int(4, 64, true, true), 0..96, Filled),
        (192, int(4, 128, true, true), 0..192, Filled),
        (96, int(4, 32, true, true), 0..96, Filled),
    ] {
        let matrix = Scattered::new(20, k, scheme, 3);
        let got = Tiles::new(&[&matrix], &inputs, false)?.order();
        assert_eq!(got, order, "{scheme} {inputs:?} of {k}");
    }
    Ok(())
}

#[test]
fn scales_take_the_shortest_exact_type() {
    let scheme = int(4, 32, false, false);
    let of = |scheme, scales: Vec<f32>| {
        let (packed, rows) = PackedScales::new(scheme, scales, 1).unwrap();
        let dtype = match packed {
            PackedScales::F16(_) => DType::F16,
            PackedScales::Bf16(_) => DType::BF16,
            PackedScales::F32(_) => DType::F32,
            PackedScales::Fp4(_) | PackedScales::Q4k(_) => DType::U8,
        };
        (dtype, rows)
    };
    assert_eq!(of(scheme, vec![0.5; 16]), (DType::F16, 16));
    assert_eq!(of(scheme, vec![bf16::from_f32(1e-9).to_f32(); 16]), (DType::BF16, 16));
    assert_eq!(of(scheme, vec![1.000_001; 16]), (DType::F32, 16));
    let mut halves = vec![0.3; 8];
    halves.extend(vec![0.7; 8]);
    assert_eq!(of(fp8(QuantGroup::Tensor), halves.clone()), (DType::F32, 2));
    halves[3] = 0.0;
    assert_eq!(of(fp8(QuantGroup::Channel), halves), (DType::F32, 16));
    // Every scale of MXFP4 is a power of two.
    let fp4 = QuantScheme::fp4(QuantGroup::Size(32));
    assert_eq!(of(fp4, (0..240).map(|i| 2f32.powi(i - 126)).collect()), (DType::U8, 16));
}

/// 16 floats of f32, then the bytes of two groups, for each of two tile rows.
#[test]
fn two_levels_of_scales_are_bytes() {
    let line = |first: f32| (0..16).map(move |i| first + i as f32);
    let tile = |first: f32| line(first + 0.5).chain(line(first)).chain(line(first + 16.0));
    let (packed, rows) = PackedScales::new(nvfp4(), tile(8.0).chain(tile(80.0)).collect(), 3).unwrap();
    let PackedScales::Fp4(bytes) = packed else { panic!("{packed:?}") };
    assert_eq!((bytes.len(), rows), (2 * (64 + 32), 16));
    assert_eq!(bytes[96..104], [80.5f32.to_le_bytes(), 81.5f32.to_le_bytes()].concat());
    // The exponents of E4M3 that is normal are 3 less.
    assert_eq!(bytes[96 + 64..], (80 + 24..112 + 24).collect::<Vec<u8>>());
}

#[test]
fn blocks_of_128_rows_are_told_from_others() {
    let groups = 3;
    // The scales, one for each row and group. Blocks of `block` rows share them.
    let scales = |rows: usize, block: usize| -> Vec<f32> {
        let of_tile = |tile: usize| {
            (0..groups * TILE_ROWS).map(move |i| {
                let row = tile * TILE_ROWS + i % TILE_ROWS;
                (row / block * groups + i / TILE_ROWS) as f32 + 1.0
            })
        };
        (0..rows / TILE_ROWS).flat_map(of_tile).collect()
    };
    let in_blocks = |scales| {
        let (packed, of_tile) = PackedScales::new(fp8(QuantGroup::Channel), scales, groups).unwrap();
        packed.in_blocks(groups, of_tile)
    };
    assert!(in_blocks(scales(384, 128)) && in_blocks(scales(384, 384)));
    for other in [scales(384, 64), scales(384, 96), scales(384, 8), scales(384, 1), scales(320, 128)] {
        assert!(!in_blocks(other));
    }
    let integers = PackedScales::new(int(4, 32, false, false), scales(384, 128), groups).unwrap();
    assert!(!integers.0.in_blocks(groups, integers.1));
}
