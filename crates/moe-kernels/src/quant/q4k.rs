//! The scales and minima of Q4_K on a device (`cuda/quant/q4k.cuh`): units of 128 columns of a tile row.

use std::ops::Range;

use candle_core::{Result, bail};
use half::f16;

use super::LogicalRows;
use super::tile_rows::TILE_ROWS;
use crate::scheme::{Levels, QuantScheme};

/// Groups of a unit.
const GROUPS: usize = 4;
/// Lines of 16 numbers that are the scales of a unit: the integers of the groups, of scales and then of minima, and the
/// floats that they share.
const LINES: usize = 2 * GROUPS + 2;
/// The largest integer of a scale or minimum.
const LARGEST: u8 = 127;

/// Lines of 16 numbers that are the scales of a tile row.
pub(super) fn lines(groups: usize) -> usize {
    groups.div_ceil(GROUPS) * LINES
}

/// A row of a reader, and its lane in a tile row.
pub(super) struct Row<'a> {
    pub rows: &'a LogicalRows,
    pub row: usize,
    /// Groups of a row.
    pub groups: usize,
    pub lane: usize,
}

/// Writes the scales of a row to its lane of the lines. `groups` are the groups of the tile row.
///
/// # Errors
/// Integers that are negative; 128 columns that do not share their floats.
pub(super) fn put(scheme: QuantScheme, from: &Row, groups: Range<usize>, lines: &mut [f32]) -> Result<()> {
    let Levels::Two(sharing) = scheme.levels else { bail!("{scheme} has no scales in two levels") };
    let sharing = sharing.max(1);
    let Row { rows, row, groups: of_row, lane } = *from;
    for (part, levels) in [&rows.scale_levels, &rows.minimum_levels].into_iter().enumerate() {
        for (at, group) in groups.clone().enumerate() {
            let group = group.min(of_row.max(1) - 1);
            let factor = levels.factor.get(row * of_row + group).copied().unwrap_or(0);
            if factor > LARGEST {
                let factor = factor.cast_signed();
                bail!(
                    "integer {factor} of a scale or minimum in {scheme}: expected 0 to {LARGEST}, as in Q4_K"
                )
            }
            let shared = row * of_row.div_ceil(sharing) + group / sharing;
            let shared = levels.shared.get(shared).copied().unwrap_or(0.0);
            let unit = at / GROUPS * LINES;
            let to = (unit + 2 * GROUPS + part) * TILE_ROWS + lane;
            if !at.is_multiple_of(GROUPS) && lines[to].to_bits() != shared.to_bits() {
                bail!(
                    "groups {groups:?} of {scheme}: a GPU needs parts that begin at a multiple of 128 columns"
                )
            }
            lines[to] = shared;
            lines[(unit + part * GROUPS + at % GROUPS) * TILE_ROWS + lane] = f32::from(factor);
        }
    }
    Ok(())
}

/// The bytes of units whose lines [`put`] has filled.
pub(super) fn bytes(lines: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(lines.len() / (LINES * TILE_ROWS) * (TILE_ROWS * 2 * (GROUPS + 2)));
    for unit in lines.chunks_exact(LINES * TILE_ROWS) {
        let at = |line: usize, row: usize| unit[line * TILE_ROWS + row];
        for half in 0..2 {
            for row in 0..TILE_ROWS {
                for group in 2 * half..2 * half + 2 {
                    bytes.extend([at(group, row) as u8, at(GROUPS + group, row) as u8]);
                }
            }
        }
        for row in 0..TILE_ROWS {
            for part in 0..2 {
                bytes.extend(f16::from_f32(at(2 * GROUPS + part, row)).to_le_bytes());
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::TwoLevels;
    use crate::scheme::QuantGroup;

    /// 256 columns and the first group of the next 256, of which the rows of a part begin at the group `first`.
    fn rows(scheme: QuantScheme, groups: usize) -> LogicalRows {
        let Levels::Two(sharing) = scheme.levels else { return LogicalRows::default() };
        let levels = |from: usize| TwoLevels {
            factor: (0..2 * groups).map(|i| ((i * 7 + from) % 64) as u8).collect(),
            shared: (0..2 * groups.div_ceil(sharing)).map(|i| 0.25 * (i + from) as f32).collect(),
        };
        LogicalRows { scale_levels: levels(3), minimum_levels: levels(11), ..LogicalRows::default() }
    }

    #[test]
    fn bytes_are_where_kernels_read_them() -> Result<()> {
        let scheme = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
        for (of_row, first, groups) in [(8, 0, 8), (16, 8, 8), (12, 4, 6), (9, 0, 9), (1, 0, 1)] {
            let rows = rows(scheme, of_row);
            let mut all = vec![0.0; lines(groups) * TILE_ROWS];
            for row in 0..2 {
                let from = Row { rows: &rows, row, groups: of_row, lane: 5 + row };
                put(scheme, &from, first..first + groups, &mut all)?;
            }
            let bytes = bytes(&all);
            assert_eq!(bytes.len(), groups.div_ceil(4) * 192);
            for (row, group) in (0..2).flat_map(|row| (0..groups).map(move |group| (row, group))) {
                let unit = &bytes[group / 4 * 192..][..192];
                let lane = 5 + row;
                let integers = &unit[group % 4 / 2 * 64 + lane * 4 + group % 2 * 2..][..2];
                let shared = unit[128 + lane * 4..][..4].as_chunks().0;
                let [scale, minimum] = [0, 1].map(|i| f16::from_le_bytes(shared[i]).to_f32());
                let from = row * of_row + first + group;
                let of = row * of_row.div_ceil(8) + (first + group) / 8;
                assert_eq!(integers[0], rows.scale_levels.factor[from]);
                assert_eq!(integers[1], rows.minimum_levels.factor[from]);
                assert_eq!(scale, rows.scale_levels.shared[of]);
                assert_eq!(minimum, rows.minimum_levels.shared[of]);
            }
            // Rows and groups that do not exist have zeros, which are weights of zero.
            assert!(bytes[..16].iter().all(|byte| *byte == 0));
        }
        Ok(())
    }

    #[test]
    fn units_share_their_floats() {
        let scheme = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
        let mut all = vec![0.0; lines(8) * TILE_ROWS];
        let from = Row { rows: &rows(scheme, 16), row: 0, groups: 16, lane: 0 };
        let error = put(scheme, &from, 6..14, &mut all).unwrap_err().to_string();
        assert!(error.contains("begin at a multiple of 128 columns"), "{error}");
    }

    #[test]
    fn negative_integers_are_refused() {
        let scheme = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
        let mut rows = rows(scheme, 8);
        rows.minimum_levels.factor[3] = 0x80;
        let mut all = vec![0.0; lines(8) * TILE_ROWS];
        let from = Row { rows: &rows, row: 0, groups: 8, lane: 0 };
        let error = put(scheme, &from, 0..8, &mut all).unwrap_err().to_string();
        assert!(error.contains("integer -128") && error.contains("expected 0 to 127"), "{error}");
    }
}
